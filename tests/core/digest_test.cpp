// SPDX-License-Identifier: Apache-2.0
#include <string_view>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <xxhash.h>

#include <hoist/core/digest.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::test::digest_test {
namespace {

TEST(Digest, OfNothingIsTheKnownValue) {
  const Digest digest;
  EXPECT_EQ(digest.value(), 0x2D06800538D394C2u);  // XXH3-64 of the empty input, seed 0
  EXPECT_EQ(digest.hex(), "2d06800538d394c2");
}

TEST(Digest, StreamingEqualsOneShotForEveryCut) {
  std::vector<std::byte> data(5000);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(random_bits(8, i));
  const std::span<const std::byte> all(data);
  for (std::size_t count : {1u, 16u, 240u, 241u, 1024u, 5000u}) {
    const std::uint64_t right = XXH3_64bits(data.data(), count);
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      Rng rng(seed);
      Digest digest;
      for (std::size_t at = 0; at < count;) {
        const std::size_t piece = std::min<std::size_t>(count - at, rng.below(600));  // empty pieces among them
        digest.update(all.subspan(at, piece));
        at += piece;
      }
      EXPECT_EQ(digest.value(), right) << count << " bytes, seed " << seed;
    }
  }
}

TEST(Digest, ValueMayBeAskedInBetweenAndAfterAMove) {
  const std::string_view text = "masters, then moments";
  const auto bytes = std::as_bytes(std::span(text));
  Digest digest;
  digest.update(bytes.first(7));
  EXPECT_EQ(digest.value(), XXH3_64bits(text.data(), 7));
  Digest moved = std::move(digest);
  moved.update(bytes.subspan(7));
  EXPECT_EQ(moved.value(), XXH3_64bits(text.data(), text.size()));
  Digest assigned;
  assigned = std::move(moved);
  EXPECT_EQ(assigned.value(), XXH3_64bits(text.data(), text.size()));
}

TEST(Digest, HexHasSixteenDigits) {
  // An input whose digest begins with a zero digit, found by search.
  for (std::uint64_t i = 0; i < 1000; ++i) {
    Digest digest;
    digest.update(std::as_bytes(std::span(&i, 1)));
    ASSERT_EQ(digest.hex().size(), 16u);
    ASSERT_EQ(std::stoull(digest.hex(), nullptr, 16), digest.value());
    if (digest.hex().front() == '0') return;
  }
  FAIL() << "no digest with a leading zero among 1000";
}

}  // namespace
}  // namespace hoist::test::digest_test
