// SPDX-License-Identifier: Apache-2.0
// The kernels of a device that every gradient passes, against the CPU's (optim_cpu), bit by bit: on every
// implementation of Device, and as launches of many threads carried out one after the other, so that what a GPU runs
// is tested where there is no GPU. update_kernels_test.cpp does the same with updates.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

#include <hoist/optim_cpu/accumulate.hpp>
#include <hoist/optim_cpu/norm.hpp>
#include <hoist/platform/detail/host_kernels.hpp>

#include "kernel_launches.hpp"

namespace hoist::platform::kernels_test {
namespace {

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

void emulate_scale(const detail::ScaleArguments& a, const Launch& launch) {
  const PackSpan span = detail::pack_span(a);
  detail::with_scale_types(a, [&](auto target, auto source, auto add) {
    emulate(launch, [&](const ThreadPlace& place) {
      detail::scale_thread<decltype(target), decltype(source), decltype(add)::value>(a, span, place);
    });
  });
}

TEST(ScaleLaunch, GivesTheHostDevicesBitsWhateverThreadsAndStarts) {
  constexpr std::uint64_t kSeed = 31;
  Rng rng(kSeed);
  for (const DType target : kDTypes) {
    for (const DType source : kDTypes) {
      for (const bool add : {false, true}) {
        for (const std::size_t count :
             {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{61}, std::size_t{5003}}) {
          for (const std::size_t offset : {0u, 1u, 3u, 8u}) {
            GuardedBytes from(count * dtype_bytes(source), offset * dtype_bytes(source));
            GuardedBytes before(count * dtype_bytes(target), offset * dtype_bytes(target));
            fill(from, source, rng, Values::any_bits);
            fill(before, target, rng, Values::any_bits);
            GuardedBytes expected(before.size(), offset * dtype_bytes(target));
            const float scale = add ? 0.3f : 1.0f;
            std::memcpy(expected.data(), before.data(), before.size());
            detail::scale_on_host({expected.data(), target, from.data(), source, count, scale, add});
            for (const Launch& launch : kLaunches) {
              GuardedBytes found(count * dtype_bytes(target), offset * dtype_bytes(target));
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

using DeviceKernels = DeviceTest;
INSTANTIATE_TEST_SUITE_P(Every, DeviceKernels, all_implementations(), implementation_name);

// Sums over micro-batches: the first overwrites (a cast), later ones add.
TEST_P(DeviceKernels, ScaleByOneIsTheAccumulationOfGradients) {
  constexpr std::size_t kCount = 10'001;
  constexpr std::uint64_t kSeed = 5;
  Rng rng(kSeed);
  const auto stream = device_->create_stream("sums");
  for (const DType dtype : kDTypes) {
    std::vector<float> expected(kCount, std::numeric_limits<float>::quiet_NaN()), found(kCount);
    stream->fill(at(0), 0xFF, 4 * kCount);  // what a step before left
    for (const auto how : {optim::Accumulate::overwrite, optim::Accumulate::add, optim::Accumulate::add}) {
      GuardedBytes gradient(kCount * dtype_bytes(dtype));
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
        GuardedBytes gradient(count * dtype_bytes(dtype), 3 * dtype_bytes(dtype));
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
  GuardedBytes gradient(kCount * 2);
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
        GuardedBytes gradient(count * dtype_bytes(dtype));
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
}  // namespace
}  // namespace hoist::platform::kernels_test
