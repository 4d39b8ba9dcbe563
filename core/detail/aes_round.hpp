// SPDX-License-Identifier: Apache-2.0
// core/detail/aes_round.hpp - one round of AES in portable code, for processors without the instruction.
//
// SubBytes, ShiftRows, MixColumns, AddRoundKey as in FIPS 197. Byte 4 c + r is row r of column c.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hoist::detail {

using AesState = std::array<std::uint8_t, 16>;

// Times x in GF(2^8), modulo x^8 + x^4 + x^3 + x + 1.
constexpr std::uint8_t times_x(std::uint8_t a) {
  return static_cast<std::uint8_t>(a << 1 ^ ((a & 0x80) != 0 ? 0x1B : 0));
}

constexpr std::uint8_t rotated_left(std::uint8_t a, int bits) {
  return static_cast<std::uint8_t>(a << bits | a >> (8 - bits));
}

// The inverse in GF(2^8), then the affine map. p runs through all powers of the generator 3, q through those of its
// inverse.
constexpr std::array<std::uint8_t, 256> make_aes_sbox() {
  std::array<std::uint8_t, 256> sbox{};
  std::uint8_t p = 1, q = 1;
  do {
    p = static_cast<std::uint8_t>(p ^ times_x(p));
    q = static_cast<std::uint8_t>(q ^ q << 1);
    q = static_cast<std::uint8_t>(q ^ q << 2);
    q = static_cast<std::uint8_t>(q ^ q << 4);
    if ((q & 0x80) != 0) q ^= 0x09;
    sbox[p] = static_cast<std::uint8_t>(q ^ rotated_left(q, 1) ^ rotated_left(q, 2) ^ rotated_left(q, 3) ^
                                        rotated_left(q, 4) ^ 0x63);
  } while (p != 1);
  sbox[0] = 0x63;
  return sbox;
}

inline constexpr std::array<std::uint8_t, 256> kAesSbox = make_aes_sbox();

constexpr AesState aes_round(const AesState& state, const AesState& key) {
  AesState result{};
  for (std::size_t column = 0; column < 4; ++column) {
    std::array<std::uint8_t, 4> a{};  // after SubBytes and ShiftRows
    for (std::size_t row = 0; row < 4; ++row) a[row] = kAesSbox[state[4 * ((column + row) % 4) + row]];
    const auto all = static_cast<std::uint8_t>(a[0] ^ a[1] ^ a[2] ^ a[3]);
    for (std::size_t row = 0; row < 4; ++row) {
      const auto mixed =
          static_cast<std::uint8_t>(a[row] ^ all ^ times_x(static_cast<std::uint8_t>(a[row] ^ a[(row + 1) % 4])));
      result[4 * column + row] = static_cast<std::uint8_t>(mixed ^ key[4 * column + row]);
    }
  }
  return result;
}

}  // namespace hoist::detail
