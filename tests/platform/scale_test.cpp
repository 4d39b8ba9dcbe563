// SPDX-License-Identifier: Apache-2.0
// Stream::scale_into against core/dtype's scalar rules, bit for bit, for every pair of types.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include <hoist/core/dtype.hpp>
#include <hoist/core/rng.hpp>

#include "device_fixture.hpp"

namespace hoist::platform::scale_test {
namespace {

float load(DType dtype, const std::byte* at) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, at, dtype_bytes(dtype));
  switch (dtype) {
    case DType::bf16:
      return to_float(bf16{static_cast<std::uint16_t>(bits)});
    case DType::fp16:
      return fp16_to_float(static_cast<std::uint16_t>(bits));
    case DType::fp32:
      break;
  }
  return std::bit_cast<float>(bits);
}

void store(DType dtype, std::byte* at, float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (dtype == DType::bf16) bits = to_bf16(value).bits;
  if (dtype == DType::fp16) bits = float_to_fp16(value);
  std::memcpy(at, &bits, dtype_bytes(dtype));
}

// Values at every edge of the three types, then random bit patterns.
std::vector<float> interesting_values(std::size_t count, std::uint64_t seed) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values{0.0f,
                            -0.0f,
                            1.0f,
                            -1.0f,
                            65504.0f,
                            65519.0f,
                            65520.0f,
                            -65536.0f,
                            6e-8f,
                            3e-8f,
                            2.9e-8f,
                            infinity,
                            -infinity,
                            std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max()};
  for (const std::uint32_t bits : {0x3F808000u, 0x3F807FFFu, 0x3F818000u, 0xBF808000u, 0x7F7F7FFFu, 0x7F7F8000u,
                                   0x7F800001u, 0xFF800001u, 0x7FC0FFFFu, 0x00008000u, 0x00007FFFu, 0x38800000u}) {
    values.push_back(std::bit_cast<float>(bits));
  }
  Rng rng(seed);
  while (values.size() < count) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(rng.bits())));
  return values;
}

Bytes encode(DType dtype, const std::vector<float>& values) {
  Bytes bytes(values.size() * dtype_bytes(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) store(dtype, bytes.data() + i * dtype_bytes(dtype), values[i]);
  return bytes;
}

using ScaleInto = DeviceTest;
INSTANTIATE_TEST_SUITE_P(Every, ScaleInto, all_implementations(), implementation_name);

struct ScaleCase {
  DType target;
  DType source;
  float scale;
  Stream::Combine combine;
};

void expect_scaled(const ScaleCase& c, const Bytes& before, const Bytes& source, const Bytes& after) {
  const std::uint64_t target_bytes = dtype_bytes(c.target);
  for (std::size_t i = 0; i < before.size() / target_bytes; ++i) {
    const float product = c.scale * load(c.source, source.data() + i * dtype_bytes(c.source));
    const float old = load(c.target, before.data() + i * target_bytes);
    const float exact = c.combine == Stream::Combine::add ? old + product : product;
    Bytes expected(target_bytes);
    store(c.target, expected.data(), exact);
    const std::byte* found = after.data() + i * target_bytes;
    const std::string where = "element " + std::to_string(i) + ", " + std::string(dtype_name(c.source)) + " to " +
                              std::string(dtype_name(c.target)) + ", scale " + std::to_string(c.scale);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(load(c.target, found))) << where;
    } else {
      ASSERT_EQ(std::memcmp(found, expected.data(), target_bytes), 0)
          << where << ": expected " << load(c.target, expected.data()) << ", found " << load(c.target, found);
    }
  }
}

TEST_P(ScaleInto, EveryPairOfTypes) {
  constexpr std::uint64_t kSeed = 11;
  constexpr std::size_t kCount = 5003;
  const auto stream = device_->create_stream("scale");
  for (const DType target : {DType::bf16, DType::fp16, DType::fp32}) {
    for (const DType source : {DType::bf16, DType::fp16, DType::fp32}) {
      for (const float scale : {1.0f, 0.3f, -1024.0f, 0.0f}) {
        for (const auto combine : {Stream::Combine::overwrite, Stream::Combine::add}) {
          const Bytes source_bytes = encode(source, interesting_values(kCount, kSeed));
          const Bytes before = encode(target, interesting_values(kCount, kSeed + 1));
          Bytes after(before.size());
          stream->copy(at(0), source_bytes.data(), source_bytes.size(), CopyKind::host_to_device);
          stream->copy(at(100'000), before.data(), before.size(), CopyKind::host_to_device);
          stream->scale_into(at(100'000), target, at(0), source, kCount, scale, combine);
          stream->copy(after.data(), at(100'000), after.size(), CopyKind::device_to_host);
          stream->synchronize();
          ASSERT_NO_FATAL_FAILURE(expect_scaled({target, source, scale, combine}, before, source_bytes, after))
              << "seed " << kSeed;
        }
      }
    }
  }
}

// The product is rounded before the sum: a fused multiply-add would keep its low bits.
TEST_P(ScaleInto, NeverFuses) {
  const float scale = 1.0f + 0x1p-12f;
  const float source = 1.0f + 0x1p-12f;  // exact product 1 + 2^-11 + 2^-24, rounded to 1 + 2^-11
  float target = -(1.0f + 0x1p-11f);
  const auto stream = device_->create_stream("fuse");
  stream->copy(at(0), reinterpret_cast<const std::byte*>(&source), 4, CopyKind::host_to_device);
  stream->copy(at(256), reinterpret_cast<const std::byte*>(&target), 4, CopyKind::host_to_device);
  stream->scale_into(at(256), DType::fp32, at(0), DType::fp32, 1, scale, Stream::Combine::add);
  stream->copy(reinterpret_cast<std::byte*>(&target), at(256), 4, CopyKind::device_to_host);
  stream->synchronize();
  EXPECT_EQ(target, 0.0f);
}

TEST_P(ScaleInto, ScalesInPlaceAndKeepsTheSignOfZero) {
  std::vector<float> values{-0.0f, 2.0f, -3.0f};
  const auto stream = device_->create_stream("in place");
  const Bytes before = encode(DType::fp32, values);
  Bytes after(before.size());
  stream->copy(at(0), before.data(), before.size(), CopyKind::host_to_device);
  stream->scale_into(at(0), DType::fp32, at(0), DType::fp32, values.size(), 2.0f, Stream::Combine::overwrite);
  stream->copy(after.data(), at(0), after.size(), CopyKind::device_to_host);
  stream->synchronize();
  EXPECT_EQ(after, encode(DType::fp32, {-0.0f, 4.0f, -6.0f}));
}

}  // namespace
}  // namespace hoist::platform::scale_test
