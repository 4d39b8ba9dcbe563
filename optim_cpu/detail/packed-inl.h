// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/packed-inl.h - state of 8 bits: unpacked to fp32 a stretch at a time, updated by the kernels of
// update-inl.h while it is in L1, and packed again. Compiled once per instruction set by update.cpp.
#if defined(HOIST_OPTIM_PACKED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_PACKED_INL_H_
#undef HOIST_OPTIM_PACKED_INL_H_
#else
#define HOIST_OPTIM_PACKED_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <hoist/optim_cpu/block_fp8.hpp>
#include <hoist/optim_cpu/detail/update-inl.h>
#include <hoist/optim_cpu/update.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A block is one vector, or a few narrower ones.
using BlockFloats = hn::CappedTag<float, kMomentBlock>;
using BlockWords = hn::RebindToUnsigned<BlockFloats>;
using BlockInts = hn::RebindToSigned<BlockFloats>;
using BlockBytes = hn::Rebind<std::uint8_t, BlockFloats>;
using BlockWordVector = hn::Vec<BlockWords>;

// Parameters unpacked at a time: three arrays of fp32, 6 KiB of L1.
inline constexpr std::size_t kStretch = 512;
static_assert(kStretch % kMomentBlock == 0);

// What is packed, and the arrays it is unpacked into. Null: nothing.
struct Packed {
  std::uint8_t* moment1 = nullptr;
  std::uint8_t* scale1 = nullptr;
  std::uint8_t* moment2 = nullptr;
  std::uint8_t* scale2 = nullptr;
  bf16* weight = nullptr;
  std::int8_t* remainder = nullptr;
};
struct Unpacked {
  HWY_ALIGN float moment1[kStretch];
  HWY_ALIGN float moment2[kStretch];
  HWY_ALIGN float master[kStretch];
};

// --- one block ------------------------------------------------------------------------------------------------------

// decode_moment of a block.
template <Moment kMoment>
HWY_INLINE void decode_block(const std::uint8_t* codes, std::uint8_t scale, float* values) {
  const BlockFloats d;
  const BlockWords words;
  const auto zero_exponent = hn::Set(words, (scale + fp8::kLeastExponent - fp8::top(kMoment)) << 23);
  const auto least = hn::Set(words, fp8::kLeastNormal);
  const auto one = hn::BitCast(d, hn::Add(hn::ShiftLeft<fp8::kDroppedBits>(least), zero_exponent));
  for (std::size_t j = 0; j < kMomentBlock; j += hn::Lanes(d)) {
    const auto code = hn::PromoteTo(words, hn::LoadU(BlockBytes(), codes + j));
    const auto magnitude = kMoment == Moment::first ? hn::And(code, hn::Set(words, 0x7Fu)) : code;
    const auto is_normal = hn::Gt(hn::BitCast(BlockInts(), magnitude), hn::Set(BlockInts(), fp8::kLeastNormal - 1));
    const auto normal = hn::Add(hn::ShiftLeft<fp8::kDroppedBits>(magnitude), zero_exponent);
    const auto with_one = hn::Add(hn::ShiftLeft<fp8::kDroppedBits>(hn::Add(magnitude, least)), zero_exponent);
    const auto below = hn::BitCast(words, hn::Sub(hn::BitCast(d, with_one), one));
    auto bits = hn::IfThenElse(hn::RebindMask(words, is_normal), normal, below);
    if constexpr (kMoment == Moment::first)
      bits = hn::Or(bits, hn::ShiftLeft<24>(hn::And(code, hn::Set(words, 0x80u))));
    hn::StoreU(hn::BitCast(d, bits), d, values + j);
  }
}

// rounding_word of elements [index, index + Lanes).
HWY_INLINE BlockWordVector rounding_words(const Rounding& rounding, std::size_t i) {
  const BlockWords words;
  const auto index = hn::Iota(words, static_cast<std::uint32_t>(rounding.first + i));
  auto x = hn::Xor(index, hn::Set(words, rounding.key + 0x9E3779B9u));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(words, 0x7FEB352Du));
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(words, 0x846CA68Bu));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

template <Moment kMoment>
HWY_INLINE BlockWordVector added_to_moment(BlockWordVector word) {
  const BlockWords words;
  if constexpr (kMoment == Moment::first) {
    return hn::Or(hn::ShiftLeft<11>(hn::ShiftRight<24>(word)), hn::Set(words, 1u << 10));
  } else {
    return hn::Or(hn::ShiftLeft<3>(hn::And(word, hn::Set(words, 0xFFFFu))), hn::Set(words, 1u << 2));
  }
}

// encode_block of a whole block of which `random` are the rounding words.
template <Moment kMoment>
HWY_INLINE bool encode_block(const float* values, const std::uint32_t* random, std::uint8_t* codes,
                             std::uint8_t& scale) {
  const BlockWords words;
  const BlockInts ints;
  const std::size_t lanes = hn::Lanes(words);
  const auto magnitude_of = [&](std::size_t j) HWY_ATTR {
    return hn::And(hn::BitCast(words, hn::LoadU(BlockFloats(), values + j)), hn::Set(words, 0x7FFFFFFFu));
  };
  const auto rounded_of = [&](BlockWordVector magnitude, std::size_t j) HWY_ATTR {
    const auto added = added_to_moment<kMoment>(hn::LoadU(words, random + j));
    return hn::ShiftRight<fp8::kDroppedBits>(hn::Add(magnitude, added));
  };
  auto largest = hn::Zero(ints);
  for (std::size_t j = 0; j < kMomentBlock; j += lanes)
    largest = hn::Max(largest, hn::BitCast(ints, rounded_of(magnitude_of(j), j)));
  const auto most = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(ints, largest)));
  const std::uint32_t exponent = std::max(most >> fp8::kFractionBits, fp8::kLeastExponent);
  const std::uint32_t zero_exponent = exponent - fp8::top(kMoment);
  scale = static_cast<std::uint8_t>(exponent - fp8::kLeastExponent);

  const auto offset = hn::Set(words, zero_exponent << fp8::kFractionBits);
  // Takes the exponent of a small element's value in steps, 16 bits behind them, from its own; the result is below
  // 2^20.
  const auto in_steps = hn::Set(ints, static_cast<std::int32_t>(zero_exponent - 146) * (1 << 23));
  for (std::size_t j = 0; j < kMomentBlock; j += lanes) {
    const auto magnitude = magnitude_of(j);
    const auto normal = hn::Sub(rounded_of(magnitude, j), offset);
    const auto is_normal = hn::Gt(hn::BitCast(ints, normal), hn::Set(ints, fp8::kLeastNormal - 1));
    const auto small = hn::Min(hn::Max(hn::Sub(hn::BitCast(ints, magnitude), in_steps), hn::Set(ints, 0x00800000)),
                               hn::Set(ints, 0x4A000000));
    const auto fixed = hn::BitCast(words, hn::ConvertTo(ints, hn::BitCast(BlockFloats(), small)));
    const auto random_part =
        hn::ShiftRight<fp8::kDroppedBits - 16>(added_to_moment<kMoment>(hn::LoadU(words, random + j)));
    auto below = hn::ShiftRight<16>(hn::Add(fixed, random_part));
    if constexpr (kMoment == Moment::second)
      below = hn::BitCast(words, hn::Max(hn::BitCast(ints, below), hn::Set(ints, 1)));
    auto code = hn::IfThenElse(hn::RebindMask(words, is_normal), normal, below);
    code = hn::IfThenZeroElse(hn::Eq(magnitude, hn::Zero(words)), code);
    if constexpr (kMoment == Moment::first) {
      const auto bits = hn::BitCast(words, hn::LoadU(BlockFloats(), values + j));
      code = hn::Or(code, hn::And(hn::ShiftRight<24>(bits), hn::Set(words, 0x80u)));
    }
    hn::StoreU(hn::TruncateTo(BlockBytes(), code), BlockBytes(), codes + j);
  }
  return exponent < fp8::kInfiniteExponent;
}

HWY_INLINE void join_masters24(const bf16* weight, const std::int8_t* remainder, float* masters) {
  const BlockFloats d;
  const BlockWords words;
  const BlockInts ints;
  const hn::Rebind<std::uint16_t, BlockFloats> halves;
  const hn::Rebind<std::int8_t, BlockFloats> bytes;
  for (std::size_t j = 0; j < kMomentBlock; j += hn::Lanes(d)) {
    const auto high = hn::ShiftLeft<16>(hn::PromoteTo(words, hn::LoadU(halves, &weight[j].bits)));
    const auto low = hn::ShiftLeft<8>(hn::PromoteTo(ints, hn::LoadU(bytes, remainder + j)));
    hn::StoreU(hn::BitCast(d, hn::Add(high, hn::BitCast(words, low))), d, masters + j);
  }
}

// False when one came out that may not be committed.
HWY_INLINE bool split_masters24(const float* masters, const std::uint32_t* random, bf16* weight,
                                std::int8_t* remainder) {
  const BlockWords words;
  const BlockInts ints;
  const hn::Rebind<std::uint16_t, BlockFloats> halves;
  const hn::Rebind<std::uint8_t, BlockFloats> bytes;
  auto refused = hn::Zero(words);
  for (std::size_t j = 0; j < kMomentBlock; j += hn::Lanes(words)) {
    const auto exact = hn::BitCast(words, hn::LoadU(BlockFloats(), masters + j));
    const auto added = hn::And(hn::ShiftRight<16>(hn::LoadU(words, random + j)), hn::Set(words, 0xFFu));
    const auto rounded = hn::Add(exact, added);  // its last 8 bits count no more
    const auto kept = hn::And(rounded, hn::Set(words, 0xFFFFFF00u));
    const auto high = hn::ShiftRight<16>(hn::Add(kept, hn::Set(words, 0x8000u)));
    hn::StoreU(hn::TruncateTo(halves, high), halves, &weight[j].bits);
    hn::StoreU(hn::TruncateTo(bytes, hn::And(hn::ShiftRight<8>(kept), hn::Set(words, 0xFFu))), bytes,
               reinterpret_cast<std::uint8_t*>(remainder + j));
    const auto magnitude = hn::And(kept, hn::Set(words, 0x7FFFFFFFu));
    refused = hn::Or(refused, hn::Add(magnitude, hn::Set(words, 0x80000000u - kMasterLimitBits)));
  }
  return hn::AllFalse(ints, hn::Lt(hn::BitCast(ints, refused), hn::Zero(ints)));
}

// --- a stretch -------------------------------------------------------------------------------------------------------

// The block at element i of `packed` is that at element k of `values`.
HWY_INLINE void unpack_block(const Packed& packed, std::size_t i, Unpacked& values, std::size_t k) {
  const std::size_t block = i / kMomentBlock;
  if (packed.moment1 != nullptr)
    decode_block<Moment::first>(packed.moment1 + i, packed.scale1[block], values.moment1 + k);
  if (packed.moment2 != nullptr)
    decode_block<Moment::second>(packed.moment2 + i, packed.scale2[block], values.moment2 + k);
  if (packed.remainder != nullptr) join_masters24(packed.weight + i, packed.remainder + i, values.master + k);
}

HWY_INLINE bool pack_block(const Unpacked& values, std::size_t k, const Rounding& rounding, const Packed& packed,
                           std::size_t i) {
  HWY_ALIGN std::uint32_t random[kMomentBlock];
  for (std::size_t j = 0; j < kMomentBlock; j += hn::Lanes(BlockWords()))
    hn::StoreU(rounding_words(rounding, k + j), BlockWords(), random + j);
  const std::size_t block = i / kMomentBlock;
  bool sound = true;
  if (packed.moment1 != nullptr)
    sound &= encode_block<Moment::first>(values.moment1 + k, random, packed.moment1 + i, packed.scale1[block]);
  if (packed.moment2 != nullptr)
    sound &= encode_block<Moment::second>(values.moment2 + k, random, packed.moment2 + i, packed.scale2[block]);
  if (packed.remainder != nullptr)
    sound &= split_masters24(values.master + k, random, packed.weight + i, packed.remainder + i);
  return sound;
}

// A block of its own memory for the elements behind a tile's last whole block: zeros fill it up.
struct LastBlock {
  std::uint8_t moment1[kMomentBlock] = {};
  std::uint8_t moment2[kMomentBlock] = {};
  bf16 weight[kMomentBlock] = {};
  std::int8_t remainder[kMomentBlock] = {};

  Packed arrays(const Packed& packed, std::size_t block) {
    return {.moment1 = packed.moment1 != nullptr ? moment1 : nullptr,
            .scale1 = packed.moment1 != nullptr ? packed.scale1 + block : nullptr,
            .moment2 = packed.moment2 != nullptr ? moment2 : nullptr,
            .scale2 = packed.moment2 != nullptr ? packed.scale2 + block : nullptr,
            .weight = packed.remainder != nullptr ? weight : nullptr,
            .remainder = packed.remainder != nullptr ? remainder : nullptr};
  }
};
template <typename T>
HWY_INLINE void copy_some(const T* from, std::size_t count, T* to) {
  if (from != nullptr && to != nullptr) std::copy_n(from, count, to);
}
HWY_INLINE Packed beyond(Packed packed, std::size_t i) {
  const auto advance = [i](auto*& array, std::size_t elements) {
    if (array != nullptr) array += i / elements;
  };
  advance(packed.moment1, 1);
  advance(packed.moment2, 1);
  advance(packed.weight, 1);
  advance(packed.remainder, 1);
  advance(packed.scale1, kMomentBlock);
  advance(packed.scale2, kMomentBlock);
  return packed;
}
HWY_INLINE void copy_packed(const Packed& from, std::size_t count, const Packed& to) {
  copy_some(from.moment1, count, to.moment1);
  copy_some(from.moment2, count, to.moment2);
  copy_some(from.weight, count, to.weight);
  copy_some(from.remainder, count, to.remainder);
}

HWY_INLINE void unpack(const Packed& packed, std::size_t count, Unpacked& values) {
  std::size_t i = 0;
  for (; i + kMomentBlock <= count; i += kMomentBlock) unpack_block(packed, i, values, i);
  if (i == count) return;
  LastBlock last;
  const Packed arrays = last.arrays(packed, i / kMomentBlock);
  copy_packed(beyond(packed, i), count - i, arrays);
  unpack_block(arrays, 0, values, i);
}

HWY_INLINE bool pack(Unpacked& values, const Rounding& rounding, std::size_t count, const Packed& packed) {
  bool sound = true;
  std::size_t i = 0;
  for (; i + kMomentBlock <= count; i += kMomentBlock) sound &= pack_block(values, i, rounding, packed, i);
  if (i == count) return sound;
  for (float* const array : {values.moment1, values.moment2, values.master})
    std::fill(array + count, array + i + kMomentBlock, 0.0f);
  LastBlock last;
  const Packed arrays = last.arrays(packed, i / kMomentBlock);
  sound &= pack_block(values, i, rounding, arrays, 0);
  copy_packed(arrays, count - i, beyond(packed, i));
  return sound;
}

// --- a tile ----------------------------------------------------------------------------------------------------------

HWY_INLINE const std::int8_t* remainder8_of(const SplitTile& tile) { return tile.remainder8; }
template <class Tile>
HWY_INLINE const std::int8_t* remainder8_of(const Tile&) {
  return nullptr;
}
template <class Tile>
HWY_INLINE bool is_packed(const Tile& tile) {
  return tile.moment_type == MomentType::fp8 || remainder8_of(tile) != nullptr;
}

HWY_INLINE void advance_master(SplitTile& tile, std::size_t i) {
  tile.weight += i;
  if (tile.remainder != nullptr) tile.remainder += i;
  if (tile.remainder8 != nullptr) tile.remainder8 += i;
}
HWY_INLINE void advance_master(WholeTile& tile, std::size_t i) { tile.weight += i; }
HWY_INLINE void advance_master(Fp16Tile& tile, std::size_t i) {
  tile.weight += i;
  tile.master += i;
}

HWY_INLINE void* advanced(void* array, std::size_t bytes) {
  return array == nullptr ? nullptr : static_cast<std::byte*>(array) + bytes;
}

// Elements [first, first + count) of a tile. Pre: first is a multiple of kStretch.
template <class Tile>
HWY_INLINE Tile part(Tile tile, std::size_t first, std::size_t count) {
  advance_master(tile, first);
  const std::size_t width = tile.moment_type == MomentType::fp32 ? 4 : tile.moment_type == MomentType::bf16 ? 2 : 1;
  tile.moment1 = advanced(tile.moment1, width * first);
  tile.moment2 = advanced(tile.moment2, width * first);
  if (tile.scale1 != nullptr) tile.scale1 += first / kMomentBlock;
  if (tile.scale2 != nullptr) tile.scale2 += first / kMomentBlock;
  tile.gradient = static_cast<const std::byte*>(tile.gradient) + first * dtype_bytes(tile.gradient_dtype);
  tile.rounding.first += static_cast<std::uint32_t>(first);
  tile.count = count;
  return tile;
}

template <class Tile>
HWY_INLINE Packed packed_arrays(const Tile& tile, Formula formula) {
  Packed packed;
  if (tile.moment_type == MomentType::fp8 && has_moment1(formula)) {
    packed.moment1 = static_cast<std::uint8_t*>(tile.moment1);
    packed.scale1 = tile.scale1;
  }
  if (tile.moment_type == MomentType::fp8 && has_moment2(formula)) {
    packed.moment2 = static_cast<std::uint8_t*>(tile.moment2);
    packed.scale2 = tile.scale2;
  }
  if constexpr (std::is_same_v<Tile, SplitTile>) {
    if (tile.remainder8 != nullptr) {
      packed.weight = tile.weight;
      packed.remainder = tile.remainder8;
    }
  }
  return packed;
}

// The next stretch of every packed array; gradients, and what is not packed, are fetched by the kernels themselves.
HWY_INLINE void prefetch_packed(const Packed& packed) {
  for (std::size_t line = 0; line < kStretch; line += 64) {
    if (packed.moment1 != nullptr) hwy::Prefetch(packed.moment1 + kStretch + line);
    if (packed.moment2 != nullptr) hwy::Prefetch(packed.moment2 + kStretch + line);
    if (packed.remainder != nullptr) {
      hwy::Prefetch(packed.remainder + kStretch + line);
      hwy::Prefetch(packed.weight + kStretch + line);
      hwy::Prefetch(packed.weight + kStretch + line + 32);
    }
  }
  if (packed.scale1 != nullptr) hwy::Prefetch(packed.scale1 + kStretch / kMomentBlock);
  if (packed.scale2 != nullptr) hwy::Prefetch(packed.scale2 + kStretch / kMomentBlock);
}

template <class Tile>
bool update_stretch(const UpdateCoefficients& c, Tile tile, Unpacked& values) {
  const Packed packed = packed_arrays(tile, c.formula);
  prefetch_packed(packed);
  unpack(packed, tile.count, values);
  if (tile.moment_type == MomentType::fp8) {
    tile.moment_type = MomentType::fp32;
    tile.moment1 = values.moment1;
    tile.moment2 = values.moment2;
  }
  bool sound = true;
  if (packed.remainder != nullptr) {
    const WholeTile whole{.weight = values.master,
                          .moment1 = tile.moment1,
                          .moment2 = tile.moment2,
                          .gradient = tile.gradient,
                          .gradient_dtype = tile.gradient_dtype,
                          .count = tile.count,
                          .moment_type = tile.moment_type,
                          .rounding = tile.rounding};
    sound = update_by_formula(c, whole);
  } else {
    sound = update_by_formula(c, tile);
  }
  return pack(values, tile.rounding, tile.count, packed) && sound;
}

template <class Tile>
bool update_any(const UpdateCoefficients& c, const Tile& tile) {
  if (!is_packed(tile)) return update_by_formula(c, tile);
  Unpacked values;
  bool sound = true;
  for (std::size_t first = 0; first < tile.count; first += kStretch)
    sound &= update_stretch(c, part(tile, first, std::min(kStretch, tile.count - first)), values);
  return sound;
}

inline bool update_split(const UpdateCoefficients& c, const SplitTile& tile) { return update_any(c, tile); }
inline bool update_whole(const UpdateCoefficients& c, const WholeTile& tile) { return update_any(c, tile); }
inline bool update_fp16(const UpdateCoefficients& c, const Fp16Tile& tile) { return update_any(c, tile); }

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_PACKED_INL_H_
