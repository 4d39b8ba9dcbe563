// SPDX-License-Identifier: Apache-2.0
// core/detail/checksum-inl.h - the checksum's loop. Compiled once per instruction set by checksum.cpp.
#if defined(HOIST_CORE_CHECKSUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_CORE_CHECKSUM_INL_H_
#undef HOIST_CORE_CHECKSUM_INL_H_
#else
#define HOIST_CORE_CHECKSUM_INL_H_
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include <hwy/highway.h>

#include <hoist/core/checksum.hpp>
#include <hoist/core/detail/aes_round.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t kLaneBytes = 16;
inline constexpr std::size_t kLaneCount = 8;  // a round's latency times the rounds that a core starts at once
inline constexpr std::size_t kStripeBytes = kLaneCount * kLaneBytes;

// Where the lanes begin: the first 128 bytes of the fraction of pi.
inline constexpr std::uint8_t kStart[kStripeBytes] = {
    0x24, 0x3f, 0x6a, 0x88, 0x85, 0xa3, 0x08, 0xd3, 0x13, 0x19, 0x8a, 0x2e, 0x03, 0x70, 0x73, 0x44,  //
    0xa4, 0x09, 0x38, 0x22, 0x29, 0x9f, 0x31, 0xd0, 0x08, 0x2e, 0xfa, 0x98, 0xec, 0x4e, 0x6c, 0x89,  //
    0x45, 0x28, 0x21, 0xe6, 0x38, 0xd0, 0x13, 0x77, 0xbe, 0x54, 0x66, 0xcf, 0x34, 0xe9, 0x0c, 0x6c,  //
    0xc0, 0xac, 0x29, 0xb7, 0xc9, 0x7c, 0x50, 0xdd, 0x3f, 0x84, 0xd5, 0xb5, 0xb5, 0x47, 0x09, 0x17,  //
    0x92, 0x16, 0xd5, 0xd9, 0x89, 0x79, 0xfb, 0x1b, 0xd1, 0x31, 0x0b, 0xa6, 0x98, 0xdf, 0xb5, 0xac,  //
    0x2f, 0xfd, 0x72, 0xdb, 0xd0, 0x1a, 0xdf, 0xb7, 0xb8, 0xe1, 0xaf, 0xed, 0x6a, 0x26, 0x7e, 0x96,  //
    0xba, 0x7c, 0x90, 0x45, 0xf1, 0x2c, 0x7f, 0x99, 0x24, 0xa1, 0x99, 0x47, 0xb3, 0x91, 0x6c, 0xf7,  //
    0x08, 0x01, 0xf2, 0xe2, 0x85, 0x8e, 0xfc, 0x16, 0x63, 0x69, 0x20, 0xd8, 0x71, 0x57, 0x4e, 0x69};

#if HWY_TARGET == HWY_SCALAR

using Lane = hoist::detail::AesState;
inline Lane load(const void* bytes) {
  Lane lane;
  std::memcpy(lane.data(), bytes, kLaneBytes);
  return lane;
}
inline Lane round(const Lane& lane, const Lane& key) { return hoist::detail::aes_round(lane, key); }
inline Lane exclusive_or(Lane a, const Lane& b) {
  for (std::size_t i = 0; i < kLaneBytes; ++i) a[i] ^= b[i];
  return a;
}
inline std::uint64_t first_eight_bytes(const Lane& lane) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, lane.data(), sizeof bits);
  return bits;
}

#else

using Bytes = hn::FixedTag<std::uint8_t, kLaneBytes>;
using Lane = hn::Vec<Bytes>;
HWY_INLINE Lane load(const void* bytes) { return hn::LoadU(Bytes(), static_cast<const std::uint8_t*>(bytes)); }
HWY_INLINE Lane round(Lane lane, Lane key) { return hn::AESRound(lane, key); }
HWY_INLINE Lane exclusive_or(Lane a, Lane b) { return hn::Xor(a, b); }
HWY_INLINE std::uint64_t first_eight_bytes(Lane lane) {
  return hn::GetLane(hn::BitCast(hn::FixedTag<std::uint64_t, 2>(), lane));
}

#endif

// Written out, as GCC 12 keeps an array that a loop goes over in memory.
struct Lanes {
  Lane a, b, c, d, e, f, g, h;
};

HWY_INLINE void absorb_stripe(Lanes& lanes, const void* stripe) {
  const auto* const bytes = static_cast<const std::byte*>(stripe);
  lanes.a = round(lanes.a, load(bytes));
  lanes.b = round(lanes.b, load(bytes + 16));
  lanes.c = round(lanes.c, load(bytes + 32));
  lanes.d = round(lanes.d, load(bytes + 48));
  lanes.e = round(lanes.e, load(bytes + 64));
  lanes.f = round(lanes.f, load(bytes + 80));
  lanes.g = round(lanes.g, load(bytes + 96));
  lanes.h = round(lanes.h, load(bytes + 112));
}

inline std::uint64_t checksum_of(std::span<const std::byte> bytes, const TileIdentity& identity) {
  static_assert(sizeof(TileIdentity) == 2 * kLaneBytes, "the identity has no padding: every byte of it counts");
  Lanes lanes{load(kStart),      load(kStart + 16), load(kStart + 32), load(kStart + 48),
              load(kStart + 64), load(kStart + 80), load(kStart + 96), load(kStart + 112)};
  std::size_t at = 0;
  for (; at + kStripeBytes <= bytes.size(); at += kStripeBytes) absorb_stripe(lanes, bytes.data() + at);
  if (at < bytes.size()) {  // the last stripe is filled up with zeros
    std::array<std::byte, kStripeBytes> stripe{};
    std::memcpy(stripe.data(), bytes.data() + at, bytes.size() - at);
    absorb_stripe(lanes, stripe.data());
  }
  // Changes in two lanes must not cancel: each spreads over its whole lane first.
  for (int repeat = 0; repeat < 4; ++repeat) absorb_stripe(lanes, kStart);
  Lane sum = exclusive_or(exclusive_or(exclusive_or(lanes.a, lanes.b), exclusive_or(lanes.c, lanes.d)),
                          exclusive_or(exclusive_or(lanes.e, lanes.f), exclusive_or(lanes.g, lanes.h)));
  const std::array<std::uint64_t, 2> length{bytes.size(), bytes.size()};
  sum = round(sum, load(length.data()));
  std::array<std::byte, sizeof identity> who{};
  std::memcpy(who.data(), &identity, sizeof identity);
  sum = round(sum, load(who.data()));
  sum = round(sum, load(who.data() + kLaneBytes));
  for (std::size_t i = 0; i < 4; ++i) sum = round(sum, load(kStart + i * kLaneBytes));
  return first_eight_bytes(sum);
}

}  // namespace hoist::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_CORE_CHECKSUM_INL_H_
