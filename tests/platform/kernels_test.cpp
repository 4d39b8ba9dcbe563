// SPDX-License-Identifier: Apache-2.0
// The kernels of a device against the CPU's (optim_cpu), bit by bit: on every implementation of Device, and as launches
// of many threads carried out one after the other, so that what a card runs is tested where there is no card.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include <hoist/core/float_environment.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/accumulate.hpp>
#include <hoist/optim_cpu/norm.hpp>
#include <hoist/optim_cpu/update.hpp>
#include <hoist/platform/detail/host_kernels.hpp>
#include <hoist/platform/detail/kernel_bodies.hpp>

#include "device_fixture.hpp"

namespace hoist::platform {
namespace {

using detail::ThreadPlace;

constexpr std::array kDTypes{DType::bf16, DType::fp16, DType::fp32};

// --- values ----------------------------------------------------------------------------------------------------------

// Bit patterns of every kind: ordinary numbers, denormals, ties of rounding, infinities and NaN.
enum class Values : std::uint8_t { ordinary, any_bits };

std::uint32_t draw_bits(Rng& rng, Values values) {
  constexpr std::array kEdges{0x00000000u, 0x80000000u, 0x00000001u, 0x807FFFFFu, 0x00800000u, 0x3F808000u,
                              0x3F807FFFu, 0x3F818000u, 0xBF808000u, 0x7F7F7FFFu, 0x7F7F8000u, 0x7F7FFFFFu,
                              0x7F800000u, 0xFF800000u, 0x7FC00000u, 0x7F800001u, 0x38800000u, 0x387FE000u,
                              0x33000000u, 0x33000001u, 0x477FEFFFu, 0x477FF000u, 0x00008000u, 0x00007FFFu};
  if (values == Values::ordinary) return std::bit_cast<std::uint32_t>(static_cast<float>(0.2 * (rng.uniform() - 0.5)));
  if (rng.below(4) == 0) return kEdges[rng.below(kEdges.size())];
  return static_cast<std::uint32_t>(rng.bits());
}

void put(DType dtype, std::byte* at, std::uint32_t fp32_bits) {
  const auto value = std::bit_cast<float>(fp32_bits);
  std::uint32_t bits = fp32_bits;
  if (dtype == DType::bf16) bits = to_bf16(value).bits;
  if (dtype == DType::fp16) bits = float_to_fp16(value);
  std::memcpy(at, &bits, dtype_bytes(dtype));
}

std::uint32_t stored_bits(DType dtype, const std::byte* at) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, dtype_bytes(dtype));
  return bits;
}

float value_of(DType dtype, const std::byte* at) {
  const std::uint32_t bits = stored_bits(dtype, at);
  if (dtype == DType::bf16) return to_float(bf16{static_cast<std::uint16_t>(bits)});
  if (dtype == DType::fp16) return fp16_to_float(static_cast<std::uint16_t>(bits));
  return std::bit_cast<float>(bits);
}

// Bytes that begin `offset` bytes after a multiple of 64, between guards.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes = 0, std::size_t offset = 0)
      : bytes_(bytes), offset_(offset), block_(64 + 64 + offset + bytes + 64, kGuard) {}
  Guarded(const Guarded&) = delete;  // the multiple of 64 would move
  Guarded(Guarded&&) = default;
  Guarded& operator=(Guarded&&) = default;

  std::byte* data() { return block_.data() + begin(); }
  const std::byte* data() const { return block_.data() + begin(); }
  std::size_t size() const { return bytes_; }
  bool intact() const {
    return std::all_of(block_.data(), data(), [](std::byte b) { return b == kGuard; }) &&
           std::all_of(data() + bytes_, block_.data() + block_.size(), [](std::byte b) { return b == kGuard; });
  }

 private:
  static constexpr std::byte kGuard{0xC3};
  std::size_t begin() const {
    const auto address = reinterpret_cast<std::uintptr_t>(block_.data());
    return round_up(address + 64, 64) - address + offset_;
  }
  std::size_t bytes_;
  std::size_t offset_;
  Bytes block_;
};

void fill(Guarded& array, DType dtype, Rng& rng, Values values) {
  for (std::size_t i = 0; i < array.size(); i += dtype_bytes(dtype))
    put(dtype, array.data() + i, draw_bits(rng, values));
}

// --- launches --------------------------------------------------------------------------------------------------------

// How many threads a launch has, and whether the last one goes first.
struct Launch {
  std::uint64_t threads;
  bool backwards;
};
constexpr std::array kLaunches{Launch{1, false}, Launch{3, true}, Launch{256, false}, Launch{4096, true}};

template <typename Body>
void emulate(const Launch& launch, const Body& body) {
  const FloatEnvironment environment;
  for (std::uint64_t t = 0; t < launch.threads; ++t)
    body(ThreadPlace{launch.backwards ? launch.threads - 1 - t : t, launch.threads});
}

void emulate_scale(const detail::ScaleArguments& a, const Launch& launch) {
  const PackSpan span = detail::pack_span(a);
  detail::with_scale_types(a, [&](auto target, auto source, auto add) {
    emulate(launch, [&](const ThreadPlace& place) {
      detail::scale_thread<decltype(target), decltype(source), decltype(add)::value>(a, span, place);
    });
  });
}

void emulate_update(const UpdateFactors& factors, const UpdateArrays& arrays, const Launch& launch) {
  const PackSpan span = detail::pack_span(arrays);
  detail::with_update_types(arrays, [&](auto masters, auto moments, auto gradient) {
    emulate(launch, [&](const ThreadPlace& place) {
      detail::update_thread<decltype(masters), decltype(moments), decltype(gradient)>(factors, arrays, span, place);
    });
  });
}

// Blocks of a norm launch, the last one first, with threads in either order on both sides of the barrier.
void emulate_norm(const detail::NormArguments& a, std::uint64_t blocks) {
  const FloatEnvironment environment;
  const std::uint64_t chunks = divide_up(a.count, kNormChunkElements);
  detail::with_elements(a.dtype, [&](auto source) {
    for (std::uint64_t block = blocks; block-- > 0;) {
      std::array<double, detail::kNormThreads> lanes{};
      for (std::uint64_t first = detail::kNormChunksPerBlock * block; first < chunks;
           first += detail::kNormChunksPerBlock * blocks) {
        for (unsigned t = detail::kNormThreads; t-- > 0;)
          lanes[t] = detail::lane_of_chunk<decltype(source)>(a, first, t);
        for (unsigned t = 0; t < detail::kNormThreads; ++t) detail::finish_chunk(a, first, t, lanes.data());
      }
    }
  });
}

// --- packs -----------------------------------------------------------------------------------------------------------

TEST(PackSpan, CoversEveryElementOnceWhereverArraysBegin) {
  alignas(64) static std::array<std::byte, 64> memory{};
  for (const std::uint64_t a_bytes : {2u, 4u}) {
    for (const std::uint64_t b_bytes : {2u, 4u}) {
      for (std::uint64_t a = 0; a < 16; ++a) {
        for (std::uint64_t b = 0; b < 16; ++b) {
          for (std::uint64_t count = 0; count < 40; ++count) {
            const detail::ArrayStart first{memory.data() + a * a_bytes, a_bytes};
            const detail::ArrayStart second{memory.data() + b * b_bytes, b_bytes};
            const PackSpan span = detail::pack_span({first, second, {}}, count);
            std::vector<int> covered(count);
            for (std::uint64_t p = 0; p < span.packs * kPackElements; ++p) ++covered[span.head + p];
            for (std::uint64_t k = 0; k < rest_of(span, count); ++k) ++covered[rest_element(span, k)];
            ASSERT_EQ(std::count(covered.begin(), covered.end(), 1), static_cast<std::ptrdiff_t>(count))
                << a << " x " << a_bytes << ", " << b << " x " << b_bytes << ", " << count << " elements";
            if (span.packs == 0) continue;
            for (const auto& array : {first, second}) {
              EXPECT_EQ((reinterpret_cast<std::uintptr_t>(array.data) + span.head * array.element_bytes) % 16, 0u);
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(detail::pack_span({{memory.data(), 2}, {memory.data(), 4}}, 800).packs, 100u);
  EXPECT_EQ(detail::pack_span({{memory.data() + 2, 2}, {memory.data() + 2, 2}}, 807).packs, 100u);
  EXPECT_EQ(detail::pack_span({{memory.data(), 2}, {memory.data() + 2, 2}}, 800).packs, 0u) << "never both aligned";
}

// --- scale_into ------------------------------------------------------------------------------------------------------

TEST(ScaleLaunch, GivesTheHostDevicesBitsWhateverThreadsAndStarts) {
  constexpr std::uint64_t kSeed = 31;
  Rng rng(kSeed);
  for (const DType target : kDTypes) {
    for (const DType source : kDTypes) {
      for (const bool add : {false, true}) {
        for (const std::size_t count :
             {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{61}, std::size_t{5003}}) {
          for (const std::size_t offset : {0u, 1u, 3u, 8u}) {
            Guarded from(count * dtype_bytes(source), offset * dtype_bytes(source));
            Guarded before(count * dtype_bytes(target), offset * dtype_bytes(target));
            fill(from, source, rng, Values::any_bits);
            fill(before, target, rng, Values::any_bits);
            Guarded expected(before.size(), offset * dtype_bytes(target));
            const float scale = add ? 0.3f : 1.0f;
            std::memcpy(expected.data(), before.data(), before.size());
            detail::scale_on_host({expected.data(), target, from.data(), source, count, scale, add});
            for (const Launch& launch : kLaunches) {
              Guarded found(count * dtype_bytes(target), offset * dtype_bytes(target));
              std::memcpy(found.data(), before.data(), before.size());
              emulate_scale({found.data(), target, from.data(), source, count, scale, add}, launch);
              ASSERT_TRUE(found.intact() && from.intact());
              for (std::size_t i = 0; i < count; ++i) {
                const std::byte* e = expected.data() + i * dtype_bytes(target);
                const std::byte* f = found.data() + i * dtype_bytes(target);
                if (std::isnan(value_of(target, e)) && std::isnan(value_of(target, f))) continue;
                ASSERT_EQ(stored_bits(target, e), stored_bits(target, f))
                    << dtype_name(source) << " to " << dtype_name(target) << ", add " << add << ", element " << i
                    << " of " << count << ", offset " << offset << ", threads " << launch.threads << ", seed " << kSeed;
              }
            }
          }
        }
      }
    }
  }
}

// What the sum over micro-batches is made of, and what a cast is.
using DeviceKernels = DeviceTest;
INSTANTIATE_TEST_SUITE_P(Every, DeviceKernels, all_implementations(), implementation_name);

TEST_P(DeviceKernels, ScaleByOneIsTheAccumulationOfGradients) {
  constexpr std::size_t kCount = 10'001;
  constexpr std::uint64_t kSeed = 5;
  Rng rng(kSeed);
  const auto stream = device_->create_stream("sums");
  for (const DType dtype : kDTypes) {
    std::vector<float> expected(kCount, std::numeric_limits<float>::quiet_NaN()), found(kCount);
    stream->fill(at(0), 0xFF, 4 * kCount);  // what a step before left
    for (const auto how : {optim::Accumulate::overwrite, optim::Accumulate::add, optim::Accumulate::add}) {
      Guarded gradient(kCount * dtype_bytes(dtype));
      fill(gradient, dtype, rng, Values::any_bits);
      optim::accumulate_gradient(expected.data(), gradient.data(), dtype, kCount, how);
      stream->copy(at(100'000), gradient.data(), gradient.size(), CopyKind::host_to_device);
      stream->scale_into(at(0), DType::fp32, at(100'000), dtype, kCount, 1.0f,
                         how == optim::Accumulate::add ? Stream::Combine::add : Stream::Combine::overwrite);
      stream->synchronize();
    }
    stream->copy(reinterpret_cast<std::byte*>(found.data()), at(0), 4 * kCount, CopyKind::device_to_host);
    stream->synchronize();
    for (std::size_t i = 0; i < kCount; ++i) {
      if (std::isnan(expected[i]) && std::isnan(found[i])) continue;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(expected[i]), std::bit_cast<std::uint32_t>(found[i]))
          << dtype_name(dtype) << ", element " << i << ", seed " << kSeed;
    }
  }
}

// --- norms -----------------------------------------------------------------------------------------------------------

void expect_same_sums(std::span<const double> expected, std::span<const double> found) {
  for (std::size_t c = 0; c < expected.size(); ++c) {
    if (std::isnan(expected[c]) && std::isnan(found[c])) continue;
    ASSERT_EQ(std::bit_cast<std::uint64_t>(expected[c]), std::bit_cast<std::uint64_t>(found[c])) << "chunk " << c;
  }
}

constexpr std::size_t kNormCounts[] = {1, 15, 16, 17, 65535, 65536, 65537, 65536 + 16 * 7 + 3, 3 * 65536 - 1};

TEST(NormLaunch, GivesTheCpusBitsWhateverBlocks) {
  Rng rng(8);
  for (const DType dtype : kDTypes) {
    for (const Values values : {Values::ordinary, Values::any_bits}) {
      for (const std::size_t count : kNormCounts) {
        Guarded gradient(count * dtype_bytes(dtype), 3 * dtype_bytes(dtype));
        fill(gradient, dtype, rng, values);
        std::vector<double> expected(divide_up(count, kNormChunkElements)), found(expected.size());
        optim::sums_of_squares(gradient.data(), dtype, count, expected);
        for (const std::uint64_t blocks : {1u, 2u}) {
          std::fill(found.begin(), found.end(), -1);
          emulate_norm({found.data(), gradient.data(), dtype, count}, blocks);
          SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(count) + " elements");
          ASSERT_NO_FATAL_FAILURE(expect_same_sums(expected, found));
        }
      }
    }
  }
}

// More chunks than a block has, so that several blocks have work and one of them in two rounds.
TEST(NormLaunch, ManyChunksInTwoBlocks) {
  constexpr std::size_t kCount = 35 * kNormChunkElements + 12345;
  Rng rng(9);
  Guarded gradient(kCount * 2);
  fill(gradient, DType::bf16, rng, Values::ordinary);
  std::vector<double> expected(divide_up(kCount, kNormChunkElements)), found(expected.size(), -1);
  optim::sums_of_squares(gradient.data(), DType::bf16, kCount, expected);
  emulate_norm({found.data(), gradient.data(), DType::bf16, kCount}, 2);
  ASSERT_NO_FATAL_FAILURE(expect_same_sums(expected, found));
}

TEST_P(DeviceKernels, SumsOfSquaresAreTheCpus) {
  Rng rng(10);
  const auto stream = device_->create_stream("norm");
  auto* const partial = reinterpret_cast<double*>(at(900'000));
  for (const DType dtype : kDTypes) {
    for (const Values values : {Values::ordinary, Values::any_bits}) {
      for (const std::size_t count : kNormCounts) {
        Guarded gradient(count * dtype_bytes(dtype));
        fill(gradient, dtype, rng, values);
        std::vector<double> expected(divide_up(count, kNormChunkElements)), found(expected.size(), -1);
        optim::sums_of_squares(gradient.data(), dtype, count, expected);
        stream->copy(at(64), gradient.data(), gradient.size(), CopyKind::host_to_device);
        stream->sums_of_squares(partial, at(64), dtype, count);
        stream->copy(reinterpret_cast<std::byte*>(found.data()), reinterpret_cast<std::byte*>(partial),
                     8 * found.size(), CopyKind::device_to_host);
        stream->synchronize();
        SCOPED_TRACE(std::string(dtype_name(dtype)) + ", " + std::to_string(count) + " elements");
        ASSERT_NO_FATAL_FAILURE(expect_same_sums(expected, found));
      }
    }
  }
}

// --- updates ---------------------------------------------------------------------------------------------------------

struct NamedOptions {
  const char* name;
  optim::OptimizerOptions options;
};
const std::vector<NamedOptions>& every_optimizer() {
  using enum optim::OptimizerKind;
  static const std::vector<NamedOptions> kEvery{
      {"adamw", {.kind = adamw, .learning_rate = 3e-4, .weight_decay = 0.1}},
      {"adam", {.kind = adam, .learning_rate = 3e-4, .weight_decay = 0.1}},
      {"adagrad", {.kind = adagrad, .learning_rate = 1e-3, .weight_decay = 0.1, .learning_rate_decay = 0.01}},
      {"lion", {.kind = lion, .learning_rate = 1e-4, .beta2 = 0.99, .weight_decay = 0.1}},
      {"momentum", {.kind = sgd, .learning_rate = 1e-2, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.3}},
      {"nesterov", {.kind = sgd, .learning_rate = 1e-2, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true}},
      {"sgd", {.kind = sgd, .learning_rate = 1e-2, .weight_decay = 0.1}}};
  return kEvery;
}

struct Shape {
  DType weights = DType::bf16;
  DType moments = DType::fp32;
  DType gradient = DType::bf16;
  std::size_t count = 0;
  std::size_t offset = 0;         // of every array, in elements, from a multiple of 64 bytes
  std::size_t tile_elements = 0;  // 0: state is contiguous
};

std::uint64_t master_bytes(DType weights) { return weights == DType::bf16 ? 2 : weights == DType::fp16 ? 4 : 0; }

// Weights, gradient and state of `shape.count` parameters; the state in tiles [master | moment1 | moment2], each with
// some bytes that belong to nobody behind it, where the shape says so.
class State {
 public:
  State(const Shape& shape, std::uint64_t seed, Values values)
      : shape_(shape),
        weights_(shape.count * dtype_bytes(shape.weights), shape.offset * dtype_bytes(shape.weights)),
        gradient_(shape.count * dtype_bytes(shape.gradient), shape.offset * dtype_bytes(shape.gradient)) {
    const std::uint64_t per_element = master_bytes(shape.weights) + 2 * dtype_bytes(shape.moments);
    tile_ = shape.tile_elements == 0 ? shape.count : shape.tile_elements;
    pitch_ = shape.tile_elements == 0 ? round_up(tile_, 32) : tile_;
    stride_ = round_up(pitch_ * per_element + 32, 64);
    state_ = Guarded(divide_up(shape.count, tile_) * stride_, shape.offset * 4);
    std::memset(state_.data(), 0x5A, state_.size());
    Rng rng(seed);
    fill(gradient_, shape.gradient, rng, values);
    for (std::size_t i = 0; i < shape.count; ++i) set_element(i, rng, values);
  }

  UpdateArrays arrays(Rounding rounding, std::uint32_t* refused) {
    return {.weights = weights_.data(),
            .weights_dtype = shape_.weights,
            .master = shape_.weights == DType::fp32 ? nullptr : state_.data(),
            .moment1 = moment1(0),
            .moment2 = moment2(0),
            .moment_dtype = shape_.moments,
            .gradient = gradient_.data(),
            .gradient_dtype = shape_.gradient,
            .count = shape_.count,
            .tile_elements = shape_.tile_elements,
            .tile_stride_bytes = shape_.tile_elements == 0 ? 0 : stride_,
            .rounding = rounding,
            .refused = refused};
  }

  // The CPU's kernel, tile by tile.
  bool update_on_cpu(const optim::UpdateCoefficients& c, Rounding rounding) {
    bool committable = true;
    for (std::size_t first = 0; first < shape_.count; first += tile_) {
      const auto update = [&](auto tile) {
        tile.moment1 = moment1(first);
        tile.moment2 = moment2(first);
        tile.gradient = gradient_.data() + first * dtype_bytes(shape_.gradient);
        tile.gradient_dtype = shape_.gradient;
        tile.count = std::min<std::size_t>(tile_, shape_.count - first);
        tile.moment_type = shape_.moments == DType::bf16 ? MomentType::bf16 : MomentType::fp32;
        tile.rounding = {rounding.key, static_cast<std::uint32_t>(rounding.first + first)};
        committable &= optim::update_tile(c, tile);
      };
      std::byte* const weights = weights_.data() + first * dtype_bytes(shape_.weights);
      std::byte* const master = tile_of(first);
      if (shape_.weights == DType::bf16) {
        update(optim::SplitTile{.weight = reinterpret_cast<bf16*>(weights),
                                .remainder = reinterpret_cast<std::int16_t*>(master)});
      } else if (shape_.weights == DType::fp16) {
        update(optim::Fp16Tile{.weight = reinterpret_cast<std::uint16_t*>(weights),
                               .master = reinterpret_cast<float*>(master)});
      } else {
        update(optim::WholeTile{.weight = reinterpret_cast<float*>(weights)});
      }
    }
    return committable;
  }

  float master(std::size_t i) const {
    const std::byte* weight = weights_.data() + i * dtype_bytes(shape_.weights);
    if (shape_.weights == DType::fp32) return value_of(DType::fp32, weight);
    const std::byte* at = tile_of(i) + i % tile_ * master_bytes(shape_.weights);
    if (shape_.weights == DType::fp16) return value_of(DType::fp32, at);
    return join_master(bf16{static_cast<std::uint16_t>(stored_bits(DType::bf16, weight))},
                       static_cast<std::int16_t>(stored_bits(DType::bf16, at)));
  }
  float gradient(std::size_t i) const {
    return value_of(shape_.gradient, gradient_.data() + i * dtype_bytes(shape_.gradient));
  }
  std::byte* moment1(std::size_t i) { return moment(i, 0); }
  std::byte* moment2(std::size_t i) { return moment(i, 1); }
  std::uint32_t weight_bits(std::size_t i) const {
    return stored_bits(shape_.weights, weights_.data() + i * dtype_bytes(shape_.weights));
  }

  bool intact() const { return weights_.intact() && gradient_.intact() && state_.intact(); }
  Guarded& weights() { return weights_; }
  Guarded& state() { return state_; }
  Guarded& gradients() { return gradient_; }

 private:
  std::byte* tile_of(std::size_t i) { return state_.data() + i / tile_ * stride_; }
  const std::byte* tile_of(std::size_t i) const { return state_.data() + i / tile_ * stride_; }
  // Within a tile of full length, whatever the last one's.
  std::byte* moment(std::size_t i, std::uint64_t which) {
    return tile_of(i) + pitch_ * (master_bytes(shape_.weights) + which * dtype_bytes(shape_.moments)) +
           i % tile_ * dtype_bytes(shape_.moments);
  }
  void set_element(std::size_t i, Rng& rng, Values values) {
    const auto master = std::bit_cast<float>(draw_bits(rng, values));
    std::byte* const weight = weights_.data() + i * dtype_bytes(shape_.weights);
    if (shape_.weights == DType::fp32) put(DType::fp32, weight, std::bit_cast<std::uint32_t>(master));
    if (shape_.weights == DType::fp16) {
      put(DType::fp16, weight, std::bit_cast<std::uint32_t>(master));
      put(DType::fp32, tile_of(i) + i % tile_ * 4, std::bit_cast<std::uint32_t>(master));
    }
    if (shape_.weights == DType::bf16) {
      const SplitMaster parts = split_master(master);
      std::memcpy(weight, &parts.weight, 2);
      std::memcpy(tile_of(i) + i % tile_ * 2, &parts.remainder, 2);
    }
    put(shape_.moments, moment1(i), draw_bits(rng, values));
    // Second moments are sums of squares: never negative.
    put(shape_.moments, moment2(i), draw_bits(rng, values) & 0x7FFFFFFFu);
  }

  Shape shape_;
  std::size_t tile_ = 0;    // elements of a tile, the last one's aside
  std::size_t pitch_ = 0;   // elements from one array of a tile to the next
  std::size_t stride_ = 0;  // bytes from one tile to the next
  Guarded weights_, gradient_, state_;
};

// The elements whose update, in fp32, makes a NaN somewhere: their bits are left open.
std::vector<bool> open_elements(State& before, const Shape& shape, const optim::UpdateCoefficients& c) {
  std::vector<bool> open(shape.count);
  for (std::size_t i = 0; i < shape.count; ++i) {
    float weight = before.master(i);
    float moment1 = value_of(shape.moments, before.moment1(i)), moment2 = value_of(shape.moments, before.moment2(i));
    const float gradient = before.gradient(i);
    (void)optim::update_tile(c, optim::WholeTile{.weight = &weight,
                                                 .moment1 = &moment1,
                                                 .moment2 = &moment2,
                                                 .gradient = &gradient,
                                                 .gradient_dtype = DType::fp32,
                                                 .count = 1});
    open[i] = std::isnan(weight) || std::isnan(moment1) || std::isnan(moment2) || std::isnan(gradient);
  }
  return open;
}

void expect_same_state(State& expected, State& found, const Shape& shape, const std::vector<bool>& open) {
  for (std::size_t i = 0; i < shape.count; ++i) {
    if (open[i]) continue;
    ASSERT_EQ(std::bit_cast<std::uint32_t>(expected.master(i)), std::bit_cast<std::uint32_t>(found.master(i)))
        << "master " << i << " of " << shape.count << ": " << expected.master(i) << " and " << found.master(i);
    ASSERT_EQ(expected.weight_bits(i), found.weight_bits(i)) << "weight " << i;
    ASSERT_EQ(stored_bits(shape.moments, expected.moment1(i)), stored_bits(shape.moments, found.moment1(i)))
        << "first moment " << i;
    ASSERT_EQ(stored_bits(shape.moments, expected.moment2(i)), stored_bits(shape.moments, found.moment2(i)))
        << "second moment " << i;
  }
}

std::string describe(const NamedOptions& optimizer, const Shape& shape) {
  return std::string(optimizer.name) + ", weights " + std::string(dtype_name(shape.weights)) + ", moments " +
         std::string(dtype_name(shape.moments)) + ", gradient " + std::string(dtype_name(shape.gradient)) + ", " +
         std::to_string(shape.count) + " elements at " + std::to_string(shape.offset) + ", tiles of " +
         std::to_string(shape.tile_elements);
}

constexpr Rounding kRounding{0x12345678u, 0xFFFFFF00u};  // whose index wraps within a tile

void expect_launches_match(const NamedOptions& optimizer, const Shape& shape, Values values, std::uint64_t seed) {
  SCOPED_TRACE(describe(optimizer, shape) + ", seed " + std::to_string(seed));
  const optim::UpdateCoefficients c(optimizer.options, 3, 0.37);
  State before(shape, seed, values), expected(shape, seed, values);
  const std::vector<bool> open = open_elements(before, shape, c);
  const bool committable = expected.update_on_cpu(c, kRounding);
  for (const Launch& launch : kLaunches) {
    if (launch.threads > 2 * shape.count && launch.threads != 256) continue;
    State found(shape, seed, values);
    std::uint32_t refused = 0;
    emulate_update(c, found.arrays(kRounding, &refused), launch);
    ASSERT_NO_FATAL_FAILURE(expect_same_state(expected, found, shape, open)) << launch.threads << " threads";
    ASSERT_TRUE(found.intact());
    ASSERT_EQ(refused == 0, committable);
  }
}

class UpdateLaunch : public testing::TestWithParam<NamedOptions> {};
INSTANTIATE_TEST_SUITE_P(Every, UpdateLaunch, testing::ValuesIn(every_optimizer()),
                         [](const auto& optimizer) { return std::string(optimizer.param.name); });

TEST_P(UpdateLaunch, GivesTheCpusBits) {
  for (const DType weights : kDTypes) {
    for (const DType moments : {DType::fp32, DType::bf16}) {
      for (const DType gradient : kDTypes) {
        for (const std::size_t tile : {std::size_t{0}, std::size_t{64}}) {
          const Shape shape{weights, moments, gradient, 4099, 0, tile};
          ASSERT_NO_FATAL_FAILURE(expect_launches_match(GetParam(), shape, Values::ordinary, 1));
          ASSERT_NO_FATAL_FAILURE(expect_launches_match(GetParam(), shape, Values::any_bits, 2));
        }
      }
    }
  }
}

TEST_P(UpdateLaunch, CountsAndStartsChangeNothing) {
  for (const DType weights : kDTypes) {
    for (const DType moments : {DType::fp32, DType::bf16}) {
      for (std::size_t count = 1; count < 40; ++count) {
        for (const std::size_t offset : {0u, 1u, 4u, 8u}) {
          for (const std::size_t tile : {std::size_t{0}, std::size_t{8}, std::size_t{12}}) {
            const Shape shape{weights, moments, weights, count, offset, tile};
            ASSERT_NO_FATAL_FAILURE(expect_launches_match(GetParam(), shape, Values::ordinary, count));
          }
        }
      }
    }
  }
}

TEST_P(DeviceKernels, UpdatesAreTheCpus) {
  const auto stream = device_->create_stream("update");
  for (const NamedOptions& optimizer : every_optimizer()) {
    for (const DType weights : kDTypes) {
      for (const DType moments : {DType::fp32, DType::bf16}) {
        for (const DType gradient : {weights, DType::fp32}) {
          for (const Values values : {Values::ordinary, Values::any_bits}) {
            const Shape shape{weights, moments, gradient, 20'011, 0, 16'384};
            SCOPED_TRACE(describe(optimizer, shape));
            const optim::UpdateCoefficients c(optimizer.options, 3, 0.37);
            State before(shape, 7, values), expected(shape, 7, values), found(shape, 7, values);
            const std::vector<bool> open = open_elements(before, shape, c);
            const bool committable = expected.update_on_cpu(c, kRounding);
            constexpr std::uint64_t kWeights = 64, kGradient = 100'096, kState = 200'064;
            UpdateArrays arrays = found.arrays(kRounding, reinterpret_cast<std::uint32_t*>(at(0)));
            arrays.weights = at(kWeights);
            arrays.gradient = at(kGradient);
            for (std::byte** array : {&arrays.master, &arrays.moment1, &arrays.moment2}) {
              if (*array != nullptr) *array = at(kState) + (*array - found.state().data());
            }
            ASSERT_LE(kState + found.state().size(), kMemoryBytes);
            std::uint32_t refused = 0;
            const auto there_and_back = [&](CopyKind kind) {
              const auto copy = [&](std::uint64_t offset, Guarded& host) {
                kind == CopyKind::host_to_device ? stream->copy(at(offset), host.data(), host.size(), kind)
                                                 : stream->copy(host.data(), at(offset), host.size(), kind);
              };
              copy(kWeights, found.weights());
              copy(kGradient, found.gradients());
              copy(kState, found.state());
            };
            there_and_back(CopyKind::host_to_device);
            stream->fill(at(0), 0, sizeof refused);
            stream->update(c, arrays);
            there_and_back(CopyKind::device_to_host);
            stream->copy(reinterpret_cast<std::byte*>(&refused), at(0), sizeof refused, CopyKind::device_to_host);
            stream->synchronize();
            ASSERT_NO_FATAL_FAILURE(expect_same_state(expected, found, shape, open));
            ASSERT_EQ(refused == 0, committable);
          }
        }
      }
    }
  }
}

TEST_P(DeviceKernels, SmallestRefusalIsNoticed) {
  const optim::UpdateCoefficients c({.kind = optim::OptimizerKind::sgd, .learning_rate = 0}, 1, 1.0);
  const auto stream = device_->create_stream("refuse");
  for (const std::uint32_t bits : {0x7F7F7FFFu, 0x7F7F8000u, 0xFF7F8000u, 0x7F800000u}) {
    std::vector<float> masters(1000, 1.0f);
    masters[777] = std::bit_cast<float>(bits);
    stream->copy(at(64), reinterpret_cast<const std::byte*>(masters.data()), 4000, CopyKind::host_to_device);
    stream->fill(at(8192), 0, 4000);
    stream->fill(at(0), 0, 4);
    stream->update(c, {.weights = at(64),
                       .weights_dtype = DType::fp32,
                       .gradient = at(8192),
                       .gradient_dtype = DType::fp32,
                       .count = masters.size(),
                       .refused = reinterpret_cast<std::uint32_t*>(at(0)),
                       .refused_value = 42});
    std::uint32_t refused = 0;
    stream->copy(reinterpret_cast<std::byte*>(&refused), at(0), 4, CopyKind::device_to_host);
    stream->synchronize();
    EXPECT_EQ(refused, bits == 0x7F7F7FFFu ? 0u : 42u);
  }
}

TEST_P(DeviceKernels, NothingToDoIsNothing) {
  const auto stream = device_->create_stream("nothing");
  stream->sums_of_squares(nullptr, nullptr, DType::bf16, 0);
  stream->update(optim::UpdateCoefficients({}, 1, 1.0), {});
  EXPECT_FALSE(stream->capturing());
  stream->synchronize();
}

}  // namespace
}  // namespace hoist::platform
