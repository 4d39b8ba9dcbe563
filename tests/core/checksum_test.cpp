// SPDX-License-Identifier: Apache-2.0
// The checksum: its definition, the same on every instruction set, and the damage it must show.
#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <hoist/core/checksum.hpp>
#include <hoist/core/detail/aes_round.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::test::checksum_test {
namespace {

using detail::aes_round;
using detail::AesState;
using Bytes = std::vector<std::byte>;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

Bytes random_bytes(std::size_t count, std::uint64_t seed) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; i += 8) {
    const std::uint64_t bits = random_bits(seed, i);
    std::memcpy(bytes.data() + i, &bits, std::min<std::size_t>(8, count - i));
  }
  return bytes;
}

AesState state_of(std::string_view hex) {
  AesState state{};
  for (std::size_t i = 0; i < state.size(); ++i)
    state[i] = static_cast<std::uint8_t>(std::stoul(std::string(hex.substr(2 * i, 2)), nullptr, 16));
  return state;
}

// FIPS 197, appendix B: the state at the start of rounds 1 and 2, and the key of round 1.
TEST(AesRound, IsTheStandards) {
  EXPECT_EQ(aes_round(state_of("193de3bea0f4e22b9ac68d2ae9f84808"), state_of("a0fafe1788542cb123a339392a6c7605")),
            state_of("a49c7ff2689f352b6b5bea43026a5049"));
}

// docs/format.md, word by word.
std::uint64_t by_definition(const TileIdentity& identity, std::span<const std::byte> bytes) {
  const std::string_view pi =
      "243f6a8885a308d313198a2e03707344a4093822299f31d0082efa98ec4e6c89452821e638d01377be5466cf34e90c6c"
      "c0ac29b7c97c50dd3f84d5b5b54709179216d5d98979fb1bd1310ba698dfb5ac2ffd72dbd01adfb7b8e1afed6a267e96"
      "ba7c9045f12c7f9924a19947b3916cf70801f2e2858efc16636920d871574e69";
  std::array<AesState, 8> start, lanes;
  for (std::size_t i = 0; i < 8; ++i) start[i] = state_of(pi.substr(32 * i, 32));
  lanes = start;
  Bytes padded(bytes.begin(), bytes.end());
  padded.resize((bytes.size() + 127) / 128 * 128);
  for (std::size_t at = 0; at < padded.size(); at += 16) {
    AesState word;
    std::memcpy(word.data(), padded.data() + at, 16);
    lanes[at / 16 % 8] = aes_round(lanes[at / 16 % 8], word);
  }
  AesState sum{}, length{}, who1, who2;
  for (std::size_t i = 0; i < 8; ++i) {
    for (int repeat = 0; repeat < 4; ++repeat) lanes[i] = aes_round(lanes[i], start[i]);
    for (std::size_t j = 0; j < 16; ++j) sum[j] ^= lanes[i][j];
  }
  const std::uint64_t count = bytes.size();
  std::memcpy(length.data(), &count, 8);
  std::memcpy(length.data() + 8, &count, 8);
  std::memcpy(who1.data(), &identity, 16);
  std::memcpy(who2.data(), reinterpret_cast<const std::byte*>(&identity) + 16, 16);
  for (const AesState& key : {length, who1, who2, start[0], start[1], start[2], start[3]}) sum = aes_round(sum, key);
  std::uint64_t result = 0;
  std::memcpy(&result, sum.data(), 8);
  return result;
}

class EachInstructionSet : public ::testing::TestWithParam<std::int64_t> {
 protected:
  EachInstructionSet() { hwy::SetSupportedTargetsForTest(GetParam()); }
  ~EachInstructionSet() override { hwy::SetSupportedTargetsForTest(0); }
};

TEST_P(EachInstructionSet, AgreesWithTheDefinitionAtEveryLengthAndAlignment) {
  const Bytes data = random_bytes(700, 1);
  for (std::size_t count = 0; count < 650; ++count) {
    const TileIdentity identity{count, 2, 3, 1, 5, ~count};
    const auto part = std::span<const std::byte>(data).subspan(count % 37, count);
    ASSERT_EQ(tile_checksum(identity, part), by_definition(identity, part)) << count;
  }
}

// Values that stores hold. No change of the code may change them.
TEST_P(EachInstructionSet, KnownValues) {
  EXPECT_EQ(checksum({}), 15138315778658510787u);
  EXPECT_EQ(checksum(bytes_of("123456789")), 15392487668146224711u);
  EXPECT_EQ(checksum(Bytes(4096)), 2091967194348385434u);
  EXPECT_EQ(tile_checksum({1, 2, 3, 1, 5, 6}, random_bytes(163840, 7)), 13326220502334118968u);
}

std::vector<std::int64_t> instruction_sets() {
  std::vector<std::int64_t> sets;
  for (std::int64_t left = hwy::SupportedTargets() & HWY_TARGETS; left != 0; left &= left - 1)
    sets.push_back(left & -left);
  return sets;
}
INSTANTIATE_TEST_SUITE_P(Checksum, EachInstructionSet, ::testing::ValuesIn(instruction_sets()),
                         [](const auto& instance) { return std::string(hwy::TargetName(instance.param)); });

// --- damage ----------------------------------------------------------------------------------------------------------

constexpr TileIdentity kIdentity{1, 2, 3, 1, 5, 6};

// How tiles look: random numbers, the zeros of moments before the first step, and one value everywhere.
std::vector<Bytes> contents(std::size_t count) {
  return {random_bytes(count, 2), Bytes(count), Bytes(count, std::byte{0x3F})};
}

// Applies `damage` to the bytes and counts the checksums that do not show it.
class Damage {
 public:
  explicit Damage(Bytes bytes) : bytes_(std::move(bytes)), right_(tile_checksum(kIdentity, bytes_)) {}

  void flip(std::size_t bit) { bytes_[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8)); }
  Bytes& bytes() { return bytes_; }
  bool shows() const { return tile_checksum(kIdentity, bytes_) != right_; }

 private:
  Bytes bytes_;
  std::uint64_t right_;
};

TEST(TileChecksum, EveryFlippedBitShows) {
  for (Bytes& content : contents(16384)) {
    Damage tile(std::move(content));
    for (std::size_t bit = 0; bit < 8 * tile.bytes().size(); ++bit) {
      tile.flip(bit);
      ASSERT_TRUE(tile.shows()) << "bit " << bit;
      tile.flip(bit);
    }
    ASSERT_FALSE(tile.shows());
  }
}

// All pairs within stripes of one lane and of two, which is where two changes could cancel.
TEST(TileChecksum, EveryPairOfFlippedBitsShows) {
  for (Bytes& content : contents(384)) {
    Damage tile(std::move(content));
    for (std::size_t a = 0; a < 8 * tile.bytes().size(); ++a) {
      tile.flip(a);
      for (std::size_t b = a + 1; b < 8 * tile.bytes().size(); ++b) {
        tile.flip(b);
        ASSERT_TRUE(tile.shows()) << "bits " << a << " and " << b;
        tile.flip(b);
      }
      tile.flip(a);
    }
  }
}

TEST(TileChecksum, EveryBurstShows) {
  for (Bytes& content : contents(4096)) {
    Damage tile(std::move(content));
    const Bytes right = tile.bytes();
    for (std::size_t length = 1; length <= 2048; length = length * 3 / 2 + 1) {
      for (std::size_t first = 0; first + length <= right.size(); first += 5) {
        const Bytes noise = random_bytes(length, first * 4096 + length);
        for (std::size_t i = 0; i < length; ++i) tile.bytes()[first + i] = right[first + i] ^ noise[i] ^ std::byte{1};
        ASSERT_TRUE(tile.bytes() == right || tile.shows()) << length << " bytes at " << first;
        tile.bytes() = right;
      }
    }
  }
}

// Errors of up to four bytes cannot cancel within a lane, whatever they are: a round spreads one byte to four.
TEST(TileChecksum, EveryErrorOfFourBytesInALaneShows) {
  for (Bytes& content : contents(1024)) {
    Damage tile(std::move(content));
    const Bytes right = tile.bytes();
    for (std::uint64_t i = 0; i < 300'000; ++i) {
      const std::uint64_t bits = random_bits(5, i), values = random_bits(6, i);
      for (unsigned k = 0; k < 4; ++k) {  // in one lane and any stripe
        const std::size_t stripe = bits >> (8 * k) & 7, byte = bits >> (8 * k + 3) & 15;
        tile.bytes()[128 * stripe + byte] ^= static_cast<std::byte>(values >> (8 * k));
      }
      ASSERT_TRUE(tile.bytes() == right || tile.shows()) << i;
      tile.bytes() = right;
    }
  }
}

// A drive writes sectors of 512 bytes or 4 KiB: lost (zeros, or what was there before), swapped, or shifted.
TEST(TileChecksum, MisplacedAndLostSectorsShow) {
  constexpr std::size_t kCount = 65536;
  for (const std::size_t sector : {16u, 64u, 128u, 512u, 4096u}) {
    Bytes content = random_bytes(kCount, 3);
    // Sparse sectors, too: what differs is in one place only.
    for (std::size_t i = 0; i < kCount; ++i)
      if (i / sector % 2 == 1) content[i] = i % sector == i / sector % sector ? std::byte{1} : std::byte{0};
    Damage tile(std::move(content));
    const Bytes right = tile.bytes();
    const auto expect_shown = [&](const char* what, std::size_t a, std::size_t b) {
      ASSERT_TRUE(tile.bytes() == right || tile.shows()) << what << ' ' << a << ' ' << b << " of " << sector;
      tile.bytes() = right;
    };
    const std::size_t sectors = kCount / sector, step = std::max<std::size_t>(1, sectors / 64);
    for (std::size_t a = 0; a < sectors; a += step) {
      const auto at = tile.bytes().begin() + static_cast<std::ptrdiff_t>(a * sector);
      std::fill_n(at, sector, std::byte{0});
      expect_shown("zeros", a, a);
      std::rotate(at, at + 1, tile.bytes().end());
      expect_shown("a shift by one byte", a, a);
      if (a + 1 < sectors) std::rotate(at, at + static_cast<std::ptrdiff_t>(sector), tile.bytes().end());
      expect_shown("a shift by one sector", a, a);
      for (std::size_t b = a + 1; b < sectors; b += step) {
        std::swap_ranges(at, at + static_cast<std::ptrdiff_t>(sector),
                         tile.bytes().begin() + static_cast<std::ptrdiff_t>(b * sector));
        expect_shown("swapped", a, b);
      }
    }
  }
}

// Among n values of 32 random bits, n^2 / 2^33 pairs are equal: as many as that, and not more, in either half of the
// checksums of bytes that differ little. Then a random error is missed once in 2^64.
TEST(TileChecksum, TheChecksumsOfSimilarTilesAreAsGoodAsRandom) {
  constexpr std::uint64_t kTiles = 1u << 20;
  constexpr double kExpected = 1.0 * kTiles * kTiles / 8589934592.0;  // 128
  const auto expect_random = [&](const char* what, const auto& tile) {
    std::array<std::vector<std::uint32_t>, 2> halves;
    for (std::uint64_t i = 0; i < kTiles; ++i) {
      const std::uint64_t sum = tile(i);
      halves[0].push_back(static_cast<std::uint32_t>(sum));
      halves[1].push_back(static_cast<std::uint32_t>(sum >> 32));
    }
    for (auto& half : halves) {
      std::ranges::sort(half);
      int equal = 0;
      for (std::size_t i = 1; i < half.size(); ++i) equal += half[i] == half[i - 1];
      EXPECT_NEAR(equal, kExpected, 6 * 11.3) << what;  // six standard deviations
    }
  };
  Bytes tile(256);
  expect_random("a counter in each place of a lane", [&](std::uint64_t i) {
    std::memcpy(tile.data() + 16 * (i % 16), &i, 8);
    return tile_checksum(kIdentity, tile);
  });
  Bytes zeros(4096);
  expect_random("two bits among zeros", [&](std::uint64_t i) {
    const std::size_t a = i % 1024, b = 1024 + i / 1024;  // 1024 places each
    for (const std::size_t bit : {a, b}) zeros[bit / 8 * 17 % 4096] ^= static_cast<std::byte>(1u << (bit % 8));
    const std::uint64_t sum = tile_checksum(kIdentity, zeros);
    for (const std::size_t bit : {a, b}) zeros[bit / 8 * 17 % 4096] ^= static_cast<std::byte>(1u << (bit % 8));
    return sum;
  });
  expect_random("lengths", [&](std::uint64_t i) {
    return tile_checksum({i / 4096, 0, 0, 0, 0, 0}, std::span<const std::byte>(zeros).first(i % 4096));
  });
  expect_random("identities", [&](std::uint64_t i) {
    return tile_checksum(
        {7, static_cast<std::uint32_t>(i % 64), static_cast<std::uint32_t>(i / 64 % 64),
         static_cast<std::uint32_t>(i / 4096 % 2), static_cast<std::uint32_t>(i / 8192 % 4), i / 32768},
        {});
  });
}

// The right bytes in the wrong place, or of another step, are wrong bytes: every bit of the identity counts, also on an
// all-zero tile and on an empty one.
TEST(TileChecksum, EveryBitOfTheIdentityCounts) {
  for (const std::size_t count : {0u, 1u, 4096u}) {
    const Bytes tile(count);
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
  const Bytes tile(64);
  const std::uint64_t right = tile_checksum({9, 1, 2, 0, 3, 4}, tile);
  EXPECT_NE(tile_checksum({9, 2, 1, 0, 3, 4}, tile), right);
  EXPECT_NE(tile_checksum({4, 1, 2, 0, 3, 9}, tile), right);
  EXPECT_NE(tile_checksum({9, 1, 2, 3, 0, 4}, tile), right);
}

// As many zeros more are other bytes.
TEST(TileChecksum, LengthsCount) {
  std::set<std::uint64_t> seen;
  const Bytes zeros(1024);
  for (std::size_t count = 0; count <= zeros.size(); ++count)
    EXPECT_TRUE(seen.insert(checksum(std::span<const std::byte>(zeros).first(count))).second) << count;
}

}  // namespace
}  // namespace hoist::test::checksum_test
