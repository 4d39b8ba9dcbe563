// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <set>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/checksum.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::test {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// Bit by bit: ECMA-182's polynomial, reflected, register inverted at both ends.
std::uint64_t crc64_by_definition(std::span<const std::byte> bytes, std::uint64_t seed) {
  std::uint64_t crc = ~seed;
  for (const std::byte byte : bytes) {
    crc ^= static_cast<std::uint64_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xC96C5795D7870F42u : 0);
  }
  return ~crc;
}

TEST(Checksum, KnownVector) {
  // The check value of CRC-64/XZ in the catalogue of parametrised CRC algorithms.
  EXPECT_EQ(checksum(bytes_of("123456789")), 0x995DC9BBDF1939FAu);
  EXPECT_EQ(checksum({}), 0u);
}

TEST(Checksum, AgreesWithTheDefinitionAtEveryLengthAndAlignment) {
  std::vector<std::byte> data(700);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(random_bits(1, i));
  for (std::size_t count = 0; count < 650; ++count) {
    const auto part = std::span<const std::byte>(data).subspan(count % 37, count);
    ASSERT_EQ(checksum(part, count), crc64_by_definition(part, count)) << count;
  }
}

TEST(Checksum, ContinuesFromASeed) {
  const std::string_view text = "one tile after another";
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    const std::uint64_t first = checksum(bytes_of(text.substr(0, cut)));
    EXPECT_EQ(checksum(bytes_of(text.substr(cut)), first), checksum(bytes_of(text))) << cut;
  }
}

TEST(TileChecksum, EveryFlippedBitShows) {
  std::vector<std::byte> tile(512);
  for (std::size_t i = 0; i < tile.size(); ++i) tile[i] = static_cast<std::byte>(random_bits(2, i));
  const TileIdentity identity{1, 2, 3, 1, 5, 6};
  const std::uint64_t right = tile_checksum(identity, tile);
  for (std::size_t bit = 0; bit < 8 * tile.size(); ++bit) {
    tile[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    ASSERT_NE(tile_checksum(identity, tile), right) << "bit " << bit;
    tile[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
  EXPECT_EQ(tile_checksum(identity, tile), right);
}

// The right bytes in the wrong place, or of another step, are wrong bytes: every bit of the identity counts, also on an
// all-zero tile and on an empty one.
TEST(TileChecksum, EveryBitOfTheIdentityCounts) {
  for (const std::size_t count : {0u, 1u, 4096u}) {
    const std::vector<std::byte> tile(count);
    std::set<std::uint64_t> seen{tile_checksum(TileIdentity{}, tile)};
    for (std::size_t bit = 0; bit < 8 * sizeof(TileIdentity); ++bit) {
      std::byte raw[sizeof(TileIdentity)] = {};
      raw[bit / 8] = static_cast<std::byte>(1u << (bit % 8));
      TileIdentity identity;
      std::memcpy(&identity, raw, sizeof identity);
      EXPECT_TRUE(seen.insert(tile_checksum(identity, tile)).second) << "bit " << bit << ", " << count << " bytes";
    }
  }
}

TEST(TileChecksum, FieldsAreNotInterchangeable) {
  const std::vector<std::byte> tile(64);
  const std::uint64_t right = tile_checksum({9, 1, 2, 0, 3, 4}, tile);
  EXPECT_NE(tile_checksum({9, 2, 1, 0, 3, 4}, tile), right);
  EXPECT_NE(tile_checksum({4, 1, 2, 0, 3, 9}, tile), right);
  EXPECT_NE(tile_checksum({9, 1, 2, 3, 0, 4}, tile), right);
}

}  // namespace
}  // namespace hoist::test
