// SPDX-License-Identifier: Apache-2.0
// core/rng.hpp - counter-based random numbers: value i of a seed is a pure function of (seed, i).
//
// Any rank or thread can compute its own slice, so results do not depend on world size or thread count. The mixer is
// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
#pragma once

#include <cmath>
#include <cstdint>

namespace hoist {

constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// In [0, 1), 53 bits.
constexpr double random_uniform(std::uint64_t seed, std::uint64_t index) {
  return static_cast<double>(random_bits(seed, index) >> 11) * 0x1.0p-53;
}

// Standard normal (Box-Muller on values 2*index and 2*index + 1).
inline double random_normal(std::uint64_t seed, std::uint64_t index) {
  const double u = 1.0 - random_uniform(seed, 2 * index);
  const double v = random_uniform(seed, 2 * index + 1);
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
}

// A sequential view of one seed, for tests and chaos.
class Rng {
 public:
  explicit constexpr Rng(std::uint64_t seed) : seed_(seed) {}
  constexpr std::uint64_t bits() { return random_bits(seed_, next_++); }
  constexpr double uniform() { return random_uniform(seed_, next_++); }
  constexpr std::uint64_t below(std::uint64_t bound) { return bits() % bound; }

 private:
  std::uint64_t seed_;
  std::uint64_t next_ = 0;
};

}  // namespace hoist
