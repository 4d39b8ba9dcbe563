// SPDX-License-Identifier: Apache-2.0
// The control plane and agree(), on every backend.
#include <algorithm>
#include <numeric>

#include <gmock/gmock.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/error.hpp>

#include "job.hpp"
#include "reference.hpp"

namespace hoist::comm::conformance {

TEST_P(Conformance, ExchangesBetweenHosts) {
  run([](Rank& rank) {
    for (const std::uint64_t bytes : {0u, 1u, 8u, 1000u, 70000u}) {
      std::vector<std::byte> mine(bytes);
      std::vector<std::byte> all(bytes * static_cast<std::uint64_t>(rank.size()));
      for (std::uint64_t i = 0; i < bytes; ++i) mine[i] = byte_at({bytes, rank.rank(), 0}, i);
      rank.communicator.exchange(mine, all);
      for (std::uint64_t i = 0; i < all.size(); ++i) {
        ASSERT_EQ(all[i], byte_at({bytes, static_cast<int>(i / bytes), 0}, i % bytes));
      }
    }
  });
}

TEST_P(Conformance, BroadcastsBetweenHosts) {
  run([](Rank& rank) {
    for (int root = 0; root < rank.size(); ++root) {
      std::vector<int> values(100, -1);
      if (rank.rank() == root) std::iota(values.begin(), values.end(), root);
      rank.communicator.broadcast_host(std::as_writable_bytes(std::span(values)), root);
      for (int i = 0; i < 100; ++i) ASSERT_EQ(values[static_cast<std::size_t>(i)], root + i);
    }
    rank.communicator.broadcast_host({}, 0);
  });
}

// Control calls must pass while the data plane is busy, in any interleaving of the two.
TEST_P(Conformance, PlanesAreIndependent) {
  run([](Rank& rank) {
    const auto memory = rank.allocate(1000 * static_cast<std::uint64_t>(rank.size()));
    const GatherPiece piece{memory.data(), 1000};
    for (int k = 0; k < 30; ++k) {
      // Ranks enqueue at different times relative to their control calls, but in one order within each plane.
      if ((k + rank.rank()) % 2 == 0) rank.communicator.all_gather({&piece, 1}, rank.stream);
      rank.communicator.barrier();
      if ((k + rank.rank()) % 2 == 1) rank.communicator.all_gather({&piece, 1}, rank.stream);
    }
    rank.stream.synchronize();
  });
}

TEST_P(Conformance, AgreesWhenHashesAreEqual) {
  run([](Rank& rank) {
    agree(rank.communicator, 42, "pass 1");
    agree(rank.communicator, 43, "texts may differ: rank " + std::to_string(rank.rank()));
    agree(rank.communicator, 44, std::string(1000, 'x'));
    agree(rank.communicator, 45, "");
  });
}

TEST_P(Conformance, NamesTheFirstRankThatDiverged) {
  run([](Rank& rank) {
    if (rank.size() == 1) return agree(rank.communicator, 1, "alone");
    const bool odd = rank.rank() == rank.size() - 1;
    try {
      agree(rank.communicator, odd ? 7u : 8u, odd ? "layer 3 forward" : "layer 4 forward",
            [&] { return odd ? std::string("a\nb\nc\n") : std::string("a\nB and more\nc\n"); });
      ADD_FAILURE() << "the ranks did not notice";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("rank " + std::to_string(rank.size() - 1) + " is at 'layer 3 forward'"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 0 at 'layer 4 forward'"));
      EXPECT_THAT(error.what(), ::testing::HasSubstr("line 2: rank " + std::to_string(rank.size() - 1) +
                                                     ": 'b' / rank 0: 'B and more'"));
    }
    const std::function<std::string()> lines = [] { return std::string("of rank 0 alone"); };
    EXPECT_THROW(agree(rank.communicator, odd ? 7u : 8u, "no lines", odd ? std::function<std::string()>() : lines),
                 CommError);
    rank.communicator.barrier();  // a disagreement is no failure of the communicator
  });
}

TEST_P(Conformance, TellsEveryRankTheFirstProblem) {
  run([](Rank& rank) {
    EXPECT_FALSE(first_problem(rank.communicator, std::nullopt));
    for (int bad = 0; bad < rank.size(); ++bad) {
      const std::string mine = "rank " + std::to_string(rank.rank()) + " has no room";
      const bool has_one = rank.rank() >= bad;
      const auto problem =
          first_problem(rank.communicator, has_one ? std::optional<std::string_view>(mine) : std::nullopt);
      ASSERT_TRUE(problem);
      EXPECT_EQ(problem->rank, bad);
      EXPECT_EQ(problem->text, "rank " + std::to_string(bad) + " has no room");
    }
    const std::string endless(3 * kProblemTextBytes, 'x');
    const auto cut = first_problem(rank.communicator, endless);
    ASSERT_TRUE(cut);
    EXPECT_EQ(cut->text, endless.substr(0, kProblemTextBytes));
    const auto wordless = first_problem(rank.communicator, "");
    ASSERT_TRUE(wordless);
    EXPECT_EQ(wordless->text, "");
    EXPECT_FALSE(first_problem(rank.communicator, std::nullopt));  // the communicator is whole
  });
}

// Every divisor; groups work at the same time, and each counts what is its own.
TEST_P(Conformance, SplitsIntoGroupsOfConsecutiveRanks) {
  run([](Rank& rank) {
    for (int ranks = 1; ranks <= rank.size(); ++ranks) {
      if (rank.size() % ranks != 0) {
        EXPECT_THROW(rank.communicator.split(ranks), UsageError);
        continue;
      }
      const auto group = rank.communicator.split(ranks);
      ASSERT_EQ(group->size(), ranks);
      ASSERT_EQ(group->rank(), rank.rank() % ranks);
      const std::uint64_t before = rank.ledger.totals(Link::wire).bytes;
      const auto count = static_cast<std::uint64_t>(ranks);
      const auto memory = rank.allocate(count * 1000);
      std::fill_n(memory.begin() + group->rank() * 1000, 1000, static_cast<std::byte>(rank.rank() + 1));
      const GatherPiece piece{memory.data(), 1000};
      group->all_gather({&piece, 1}, rank.stream);
      std::vector<int> all(count);
      const int mine = rank.rank();
      group->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
      rank.stream.synchronize();
      for (int peer = 0; peer < ranks; ++peer) {
        const int in_all = rank.rank() - group->rank() + peer;
        EXPECT_EQ(all[static_cast<std::size_t>(peer)], in_all);
        EXPECT_EQ(memory[static_cast<std::size_t>(peer) * 1000 + 999], static_cast<std::byte>(in_all + 1));
      }
      EXPECT_EQ(group->sent_bytes(), (count - 1) * 1000);
      EXPECT_EQ(rank.ledger.totals(Link::wire).bytes - before, (count - 1) * 1000);
    }
    EXPECT_EQ(rank.communicator.sent_bytes(), 0u);
    EXPECT_THROW(rank.communicator.split(0), UsageError);
    rank.communicator.barrier();
  });
}

}  // namespace hoist::comm::conformance
