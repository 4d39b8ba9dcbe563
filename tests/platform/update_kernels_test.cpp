// SPDX-License-Identifier: Apache-2.0
// Updates by a device's kernels against the CPU's (optim_cpu), bit by bit: on every implementation of Device, and as
// launches of many threads carried out one after the other.
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/optim_cpu/update.hpp>
#include <hoist/platform/update_arrays.hpp>

#include "kernel_launches.hpp"

namespace hoist::platform::update_kernels_test {
namespace {

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
      {"undecayed", {.kind = sgd, .learning_rate = 1e-2, .weight_decay = 0, .momentum = 0.9}},
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
    state_ = GuardedBytes(divide_up(shape.count, tile_) * stride_, shape.offset * 4);
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
      const optim::TileState state{.moment1 = moment1(first),
                                   .moment2 = moment2(first),
                                   .gradient = gradient_.data() + first * dtype_bytes(shape_.gradient),
                                   .gradient_dtype = shape_.gradient,
                                   .count = std::min<std::size_t>(tile_, shape_.count - first),
                                   .moment_type = shape_.moments == DType::bf16 ? MomentType::bf16 : MomentType::fp32,
                                   .rounding = {rounding.key, static_cast<std::uint32_t>(rounding.first + first)}};
      std::byte* const weights = weights_.data() + first * dtype_bytes(shape_.weights);
      std::byte* const master = tile_of(first);
      if (shape_.weights == DType::bf16) {
        committable &= optim::update_tile(
            c, optim::SplitTile{state, reinterpret_cast<bf16*>(weights), reinterpret_cast<std::int16_t*>(master)});
      } else if (shape_.weights == DType::fp16) {
        committable &= optim::update_tile(
            c, optim::Fp16Tile{state, reinterpret_cast<std::uint16_t*>(weights), reinterpret_cast<float*>(master)});
      } else {
        committable &= optim::update_tile(c, optim::WholeTile{state, reinterpret_cast<float*>(weights)});
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
  GuardedBytes& weights() { return weights_; }
  GuardedBytes& state() { return state_; }
  GuardedBytes& gradients() { return gradient_; }

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
  GuardedBytes weights_, gradient_, state_;
};

// The elements whose update, in fp32, makes a NaN somewhere: their bits are left open.
std::vector<bool> open_elements(State& before, const Shape& shape, const optim::UpdateCoefficients& c) {
  std::vector<bool> open(shape.count);
  for (std::size_t i = 0; i < shape.count; ++i) {
    float weight = before.master(i);
    float moment1 = value_of(shape.moments, before.moment1(i)), moment2 = value_of(shape.moments, before.moment2(i));
    const float gradient = before.gradient(i);
    const optim::TileState state{.moment1 = &moment1, .moment2 = &moment2, .gradient = &gradient, .count = 1};
    (void)optim::update_tile(c, optim::WholeTile{state, &weight});
    open[i] = std::isnan(weight) || std::isnan(moment1) || std::isnan(moment2) || std::isnan(gradient);
  }
  return open;
}

void expect_same_state(State& expected, State& found, const Shape& shape, const std::vector<bool>& open) {
  for (std::size_t i = 0; i < shape.count; ++i) {
    ASSERT_EQ(std::isnan(expected.master(i)), std::isnan(found.master(i))) << "master " << i;
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

void emulate_update(const UpdateFactors& factors, const UpdateArrays& arrays, const Launch& launch) {
  const PackSpan span = detail::pack_span(arrays);
  detail::with_update_types(arrays, [&](auto masters, auto moments, auto gradient) {
    emulate(launch, [&](const ThreadPlace& place) {
      detail::update_thread<decltype(masters), decltype(moments), decltype(gradient)>(factors, arrays, span, place);
    });
  });
}

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

using DeviceUpdates = DeviceTest;
INSTANTIATE_TEST_SUITE_P(Every, DeviceUpdates, all_implementations(), implementation_name);

TEST_P(DeviceUpdates, AreTheCpus) {
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
              const auto copy = [&](std::uint64_t offset, GuardedBytes& host) {
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

TEST_P(DeviceUpdates, SmallestRefusalIsNoticed) {
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

TEST_P(DeviceUpdates, NothingToDoIsNothing) {
  const auto stream = device_->create_stream("nothing");
  stream->sums_of_squares(nullptr, nullptr, DType::bf16, 0);
  stream->update(optim::UpdateCoefficients({}, 1, 1.0), {});
  EXPECT_FALSE(stream->capturing());
  stream->synchronize();
}

}  // namespace
}  // namespace hoist::platform::update_kernels_test
