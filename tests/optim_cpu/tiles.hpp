// SPDX-License-Identifier: Apache-2.0
// tests/optim_cpu/tiles.hpp - tiles that own their memory, at any element offset, between guard bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <gtest/gtest.h>

#include <hoist/core/dtype.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/optim_cpu/update.hpp>
#include <hoist/tests/support/guarded.hpp>

namespace hoist::optim::test {

using hoist::test::Guarded;

// The gradient value `value` in `dtype`, written as element i of `elements`.
inline void put_gradient(std::byte* elements, DType dtype, std::size_t i, float value) {
  if (dtype == DType::fp32) {
    std::memcpy(elements + 4 * i, &value, 4);
    return;
  }
  const std::uint16_t bits = dtype == DType::bf16 ? to_bf16(value).bits : float_to_fp16(value);
  std::memcpy(elements + 2 * i, &bits, 2);
}

inline float get_gradient(const std::byte* elements, DType dtype, std::size_t i) {
  if (dtype == DType::fp32) {
    float value;
    std::memcpy(&value, elements + 4 * i, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, elements + 2 * i, 2);
  return dtype == DType::bf16 ? to_float(bf16{bits}) : fp16_to_float(bits);
}

// A tile of either kind with its arrays. Both kinds expose the same masters.
struct Tile {
  Tile(std::size_t count, DType dtype, std::size_t offset = 0)
      : weight(count, offset),
        remainder(count, offset),
        master_array(count, offset),
        moment1(count, offset),
        moment2(count, offset),
        gradient(count * dtype_bytes(dtype), offset * dtype_bytes(dtype)),
        gradient_dtype(dtype) {}

  std::size_t count() const { return weight.size(); }
  TileState state() { return {moment1.data(), moment2.data(), gradient.data(), gradient_dtype, count()}; }
  SplitTile split() { return {state(), weight.data(), remainder.data()}; }
  WholeTile whole() { return {state(), master_array.data()}; }
  void set_master(std::size_t i, float value) {
    master_array[i] = value;
    const SplitMaster parts = split_master(value);
    weight[i] = parts.weight;
    remainder[i] = parts.remainder;
  }
  float split_value(std::size_t i) const { return join_master(weight[i], remainder[i]); }
  void set_gradient(std::size_t i, float value) { put_gradient(gradient.data(), gradient_dtype, i, value); }
  float gradient_value(std::size_t i) const { return get_gradient(gradient.data(), gradient_dtype, i); }

  bool intact() const {
    return weight.intact() && remainder.intact() && master_array.intact() && moment1.intact() && moment2.intact() &&
           gradient.intact();
  }
  bool same_state(const Tile& other) const {
    return weight.same_bytes(other.weight) && remainder.same_bytes(other.remainder) &&
           master_array.same_bytes(other.master_array) && moment1.same_bytes(other.moment1) &&
           moment2.same_bytes(other.moment2);
  }

  Guarded<bf16> weight;
  Guarded<std::int16_t> remainder;
  Guarded<float> master_array;
  Guarded<float> moment1, moment2;
  Guarded<std::byte> gradient;
  DType gradient_dtype;
};

// A finite float whose exponent is uniform over [low, high]: every scale is as likely, denormals included.
inline float any_scale(Rng& rng, int low = -149, int high = 126) {
  const int exponent = low + static_cast<int>(rng.below(static_cast<std::uint64_t>(high - low + 1)));
  const double value = std::ldexp(1.0 + rng.uniform(), exponent);
  return static_cast<float>((rng.bits() & 1) != 0 ? -value : value);
}

// Training-like state: masters near 0.05, gradients near 1e-3.
inline void fill_ordinary(Tile& tile, Rng& rng) {
  for (std::size_t i = 0; i < tile.count(); ++i) {
    tile.set_master(i, static_cast<float>(0.1 * (rng.uniform() - 0.5)));
    tile.moment1[i] = static_cast<float>(2e-3 * (rng.uniform() - 0.5));
    tile.moment2[i] = static_cast<float>(1e-6 * rng.uniform());
    tile.set_gradient(i, static_cast<float>(2e-3 * (rng.uniform() - 0.5)));
  }
}

// State of every scale, zeros among it; moment2 is never negative.
inline void fill_extreme(Tile& tile, Rng& rng) {
  for (std::size_t i = 0; i < tile.count(); ++i) {
    tile.set_master(i, rng.below(16) == 0 ? 0.0f : any_scale(rng));
    tile.moment1[i] = rng.below(16) == 0 ? 0.0f : any_scale(rng, -149, 60);
    tile.moment2[i] = rng.below(16) == 0 ? 0.0f : std::abs(any_scale(rng, -149, 120));
    tile.set_gradient(i, rng.below(16) == 0 ? 0.0f : any_scale(rng, -149, 60));
  }
}

inline void new_gradients(Tile& tile, Rng& rng) {
  for (std::size_t i = 0; i < tile.count(); ++i) tile.set_gradient(i, static_cast<float>(2e-3 * (rng.uniform() - 0.5)));
}

inline constexpr DType kDTypes[] = {DType::bf16, DType::fp16, DType::fp32};

// Every formula, and each of its branches, with settings that all matter.
struct NamedOptions {
  const char* name;
  OptimizerOptions options;
};
inline std::ostream& operator<<(std::ostream& out, const NamedOptions& named) { return out << named.name; }
inline const std::vector<NamedOptions>& every_optimizer() {
  static const std::vector<NamedOptions> kEvery{
      {"adamw", {.kind = OptimizerKind::adamw, .learning_rate = 3e-4, .weight_decay = 0.1}},
      {"adam", {.kind = OptimizerKind::adam, .learning_rate = 3e-4, .weight_decay = 0.1}},
      {"adagrad",
       {.kind = OptimizerKind::adagrad, .learning_rate = 1e-3, .weight_decay = 0.1, .learning_rate_decay = 0.01}},
      {"lion", {.kind = OptimizerKind::lion, .learning_rate = 1e-4, .beta2 = 0.99, .weight_decay = 0.1}},
      {"momentum",
       {.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.3}},
      {"nesterov",
       {.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true}},
      {"sgd", {.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .weight_decay = 0.1}},
  };
  return kEvery;
}
inline bool keeps_moment1(const OptimizerOptions& options) { return has_moment1(state_of(options)); }
inline bool keeps_moment2(const OptimizerOptions& options) { return has_moment2(state_of(options)); }

// The index at which a tile's random numbers begin: on or beside a multiple of every vector's length, where the upper
// half of the indices (of pairs, too) changes within the tile, or just before the indices wrap.
inline std::uint32_t first_index(std::size_t turn) {
  constexpr std::uint32_t kFirst[] = {0x1FFE0u, 0xFFFFFFF0u, 0xFFFFFFF1u, 0x2FFC0u, 0xFFFFFFF2u, 0xFFFFFFC0u, 0x1FFE2u};
  return kFirst[turn % std::size(kFirst)];
}

// Runs the rest of a scope on one instruction set.
class Forced {
 public:
  explicit Forced(const std::string& name) {
    force_instruction_set(name);
    EXPECT_EQ(active_instruction_set(), name) << "the forced instruction set does not really run";
  }
  ~Forced() { force_instruction_set(""); }
  Forced(const Forced&) = delete;
  Forced& operator=(const Forced&) = delete;
};

#if defined(__x86_64__)

// The float mode that a host program may have set: MXCSR.
inline constexpr unsigned kDefaultMode = 0x1F80;
inline constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRoundUp = 0x4000;
inline constexpr unsigned kHostModes[] = {kDefaultMode | kFlushToZero, kDefaultMode | kDenormalsAreZero,
                                          kDefaultMode | kFlushToZero | kDenormalsAreZero, kDefaultMode | kRoundUp,
                                          0u /* traps on */};

class HostMode {
 public:
  explicit HostMode(unsigned mxcsr) : saved_(_mm_getcsr()) { _mm_setcsr(mxcsr); }
  ~HostMode() { _mm_setcsr(saved_); }
  HostMode(const HostMode&) = delete;
  HostMode& operator=(const HostMode&) = delete;

 private:
  unsigned saved_;
};

#endif

}  // namespace hoist::optim::test
