// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/random-inl.h - the random bits that state is rounded with (rounding_bits and rounding_word of
// update.hpp), a vector at a time. Compiled once per instruction set by update.cpp.
//
// Both functions mix a number n with a key. They begin with x = n ^ key; x ^= x >> 16; x *= a constant. While the upper
// half of n stays the same, the first two operations are n ^ c with a fixed c. If a vector's numbers also begin at a
// multiple of their count, the low bits of n ^ c depend on the lane alone, and the other bits are the same for all
// lanes. The product is then the sum of two products: one for each lane, which a whole tile shares, and a scalar. So
// two instructions replace seven.
#if defined(HOIST_OPTIM_RANDOM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HOIST_OPTIM_RANDOM_INL_H_
#undef HOIST_OPTIM_RANDOM_INL_H_
#else
#define HOIST_OPTIM_RANDOM_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include <hwy/highway.h>

#include <hoist/optim_cpu/update.hpp>

HWY_BEFORE_NAMESPACE();
namespace hoist::optim::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Words = hn::RebindToUnsigned<Floats>;
using WordVector = hn::Vec<Words>;
inline constexpr std::size_t kLanesMax = hn::MaxLanes(Floats());

inline constexpr std::uint32_t kFirstFactor = 0x7FEB352Du, kSecondFactor = 0x846CA68Bu;

// The mixer after its first product.
HWY_INLINE WordVector mixed_product(WordVector x) {
  const Words words;
  x = hn::Mul(hn::Xor(x, hn::ShiftRight<15>(x)), hn::Set(words, kSecondFactor));
  return hn::Xor(x, hn::ShiftRight<16>(x));
}

// The whole mixer, for any numbers.
HWY_INLINE WordVector mixed(std::uint32_t key, WordVector number) {
  const Words words;
  const auto x = hn::Xor(number, hn::Set(words, key));
  return mixed_product(hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(words, kFirstFactor)));
}

// 0, kStride, 2 kStride ... The sequence starts at a constant: GCC 12 makes one that starts anywhere else lane by lane,
// through memory, which takes longer than the rest of the update.
template <std::uint32_t kStride>
HWY_INLINE WordVector lane_numbers() {
  const Words words;
  return kStride == 1 ? hn::Iota(words, 0u) : hn::Mul(hn::Iota(words, 0u), hn::Set(words, kStride));
}

// The first products of `kCount` numbers that begin at a multiple of kCount and have one upper half.
template <std::uint32_t kCount>
class FirstProducts {
 public:
  FirstProducts() = default;
  FirstProducts(std::uint32_t key, std::uint32_t first) : xored_(key ^ key >> 16 ^ first >> 16) {}
  // The part of the product that depends on the lane, whose number is in [0, kCount).
  HWY_INLINE WordVector of_lanes(WordVector number) const {
    const Words words;
    return hn::Mul(hn::Xor(number, hn::Set(words, xored_ & (kCount - 1))), hn::Set(words, kFirstFactor));
  }
  // The part that is the same for all lanes; the sum of both parts is the product.
  HWY_INLINE WordVector of_all(std::uint32_t first) const {
    return hn::Set(Words(), ((first ^ xored_) & ~(kCount - 1)) * kFirstFactor);
  }

 private:
  std::uint32_t xored_ = 0;
};

struct WordPair {
  HWY_INLINE WordPair() {}  // NOLINT(modernize-use-equals-default): see Numbers
  HWY_INLINE WordPair(WordVector even_words, WordVector odd_words) : even(even_words), odd(odd_words) {}
  WordVector even, odd;
};

// Random bits of elements, by number: rounding_word, or rounding_bits where kShift is 1: two neighbours have the halves
// of one word.
template <int kShift>
HWY_INLINE WordVector random_bits(std::uint32_t key, WordVector number) {
  const auto word = mixed(key, hn::ShiftRight<kShift>(number));
  if constexpr (kShift == 0) return word;
  const Words words;
  const auto is_odd = hn::TestBit(number, hn::Set(words, 1u));
  return hn::IfThenElse(is_odd, hn::ShiftRight<16>(word), hn::And(word, hn::Set(words, 0xFFFFu)));
}

// rounding_bits of a vector's worth of elements from `first` on.
HWY_INLINE WordVector rounding_halves(std::uint32_t key, std::uint32_t first) {
  return random_bits<1>(key, hn::Add(hn::Set(Words(), first), lane_numbers<1>()));
}

// random_bits of two vectors' worth of elements from element i of a tile on.
template <int kShift>
class RandomBits {
 public:
  HWY_INLINE explicit RandomBits(const Rounding& rounding)
      : key_(rounding.key + (kShift == 0 ? 0x9E3779B9u : 0)),
        first_(rounding.first),
        low_bits_(first_ % (2 * kLanesMax) == 0 ? (0x10000u << kShift) - 1 : 0) {
    begin(first_);
  }
  // The even elements and the odd ones.
  HWY_INLINE WordPair at(std::size_t i) {
    const Words words;
    const auto first = static_cast<std::uint32_t>(first_ + i);
    if (HWY_UNLIKELY((first & low_bits_) == 0)) {
      if (low_bits_ == 0) {
        const auto even = hn::Add(hn::Set(words, first), lane_numbers<2>());
        return {random_bits<kShift>(key_, even), random_bits<kShift>(key_, hn::Add(even, hn::Set(words, 1u)))};
      }
      begin(first);
    }
    const auto even = word_of(lanes_.even, first);
    if constexpr (kShift == 0) return {even, word_of(lanes_.odd, first)};
    return {hn::And(even, hn::Set(words, 0xFFFFu)), hn::ShiftRight<16>(even)};
  }
  // The first vector's and the second's.
  HWY_INLINE WordPair in_order(std::size_t i) {
    static_assert(kShift == 1);
    const auto first = static_cast<std::uint32_t>(first_ + i);
#if HWY_TARGET != HWY_SCALAR
    if (HWY_LIKELY(low_bits_ != 0)) {
      if (HWY_UNLIKELY((first & low_bits_) == 0)) begin(first);
      const Words words;
      const hn::Rebind<std::uint16_t, Words> some;
      const auto halves = hn::BitCast(hn::Repartition<std::uint16_t, Words>(), word_of(lanes_.even, first));
      return {hn::PromoteTo(words, hn::LowerHalf(some, halves)), hn::PromoteTo(words, hn::UpperHalf(some, halves))};
    }
#endif
    return {rounding_halves(key_, first),
            rounding_halves(key_, first + static_cast<std::uint32_t>(hn::Lanes(Words())))};
  }

 private:
  HWY_INLINE void begin(std::uint32_t first) {
    const auto even = lane_numbers<2>(), odd = hn::Add(even, hn::Set(Words(), 1u));
    products_ = decltype(products_)(key_, first >> kShift);
    lanes_ = {products_.of_lanes(hn::ShiftRight<kShift>(even)), products_.of_lanes(hn::ShiftRight<kShift>(odd))};
  }
  HWY_INLINE WordVector word_of(WordVector lanes, std::uint32_t first) const {
    return mixed_product(hn::Add(lanes, products_.of_all(first >> kShift)));
  }

  std::uint32_t key_, first_;
  std::uint32_t low_bits_;  // products begin anew at an index without these bits; 0: no products, the whole mixer
  FirstProducts<(2 * kLanesMax >> kShift)> products_;
  WordPair lanes_;
};
using RoundingWords = RandomBits<0>;
using RoundingHalves = RandomBits<1>;

}  // namespace hoist::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // HOIST_OPTIM_RANDOM_INL_H_
