// SPDX-License-Identifier: Apache-2.0
// The data plane, on every backend: contents, bits, order on streams, bytes on the wire.
#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <thread>

#include <hoist/core/error.hpp>

#include "job.hpp"
#include "reference.hpp"

namespace hoist::comm::conformance::conformance_data_test {

namespace {

constexpr std::array kDTypes{DType::bf16, DType::fp16, DType::fp32};

struct ReduceShape {
  DType dtype;
  std::uint64_t shard_elements;
  float scale;
};

// Unequal, empty, odd and one larger than the smallest scratch; drawn by seed, the same on every rank.
std::vector<ReduceShape> reduce_shapes(std::uint64_t seed) {
  constexpr std::array<std::uint64_t, 7> kElements{0, 1, 3, 31, 1000, 4097, 40000};
  constexpr std::array<float, 5> kScales{1.0f, 0.5f, 1.0f / 3.0f, 1.0f / 65536.0f, -2.0f};
  Rng rng(seed);
  std::vector<ReduceShape> shapes(1 + rng.below(6));
  for (ReduceShape& shape : shapes) {
    shape = {kDTypes[rng.below(3)], kElements[rng.below(kElements.size())], kScales[rng.below(kScales.size())]};
  }
  return shapes;
}

// Enqueues one grouped reduce-scatter of seeded contributions; check() compares once the stream is through.
class SeededReduction {
 public:
  SeededReduction(Rank& rank, std::uint64_t seed) : seed_(seed), shapes_(reduce_shapes(seed)) {
    const auto size = static_cast<std::uint64_t>(rank.size());
    for (std::size_t p = 0; p < shapes_.size(); ++p) {
      const auto [dtype, count, scale] = shapes_[p];
      const auto memory = rank.allocate(size * count * dtype_bytes(dtype));
      for (std::uint64_t i = 0; i < size * count; ++i) {
        store_at(memory.data(), dtype, i, encode(dtype, value_at({seed, rank.rank(), p}, i)));
      }
      pieces_.push_back({memory.data(), dtype, count, scale});
    }
  }

  void enqueue(Communicator& communicator, platform::Stream& stream) { communicator.reduce_scatter(pieces_, stream); }

  // Compares with the reference and returns the number of wrong elements, reporting the first.
  void check(const Rank& rank) const {
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      const auto [dtype, count, scale] = shapes_[p];
      const std::uint64_t first = static_cast<std::uint64_t>(rank.rank()) * count;
      for (std::uint64_t i = first; i < first + count; ++i) {
        const std::uint32_t expected = reduced_at({seed_, 0, p}, rank.size(), dtype, i, scale);
        const std::uint32_t found = stored_at(pieces_[p].data, dtype, i);
        if (same_bits(dtype, expected, found)) continue;
        ADD_FAILURE() << "seed " << seed_ << " rank " << rank.rank() << " piece " << p << " (" << dtype_name(dtype)
                      << ", scale " << scale << ") element " << i << ": expected bits " << std::hex << expected
                      << ", found " << found;
        return;
      }
    }
  }

  std::uint64_t shard_bytes() const {
    std::uint64_t bytes = 0;
    for (const ReduceShape& shape : shapes_) bytes += shape.shard_elements * dtype_bytes(shape.dtype);
    return bytes;
  }

 private:
  std::uint64_t seed_;
  std::vector<ReduceShape> shapes_;
  std::vector<ReducePiece> pieces_;
};

// The same for a grouped all-gather.
class SeededGather {
 public:
  SeededGather(Rank& rank, std::uint64_t seed) : seed_(seed) {
    constexpr std::array<std::uint64_t, 7> kBytes{0, 1, 7, 64, 1000, 4099, 30000};
    Rng rng(seed);
    const std::size_t count = 1 + rng.below(5);
    for (std::size_t p = 0; p < count; ++p) {
      const std::uint64_t bytes = kBytes[rng.below(kBytes.size())];
      const auto memory = rank.allocate(static_cast<std::uint64_t>(rank.size()) * bytes);
      std::fill(memory.begin(), memory.end(), std::byte{0xA5});
      const auto own = memory.subspan(static_cast<std::uint64_t>(rank.rank()) * bytes, bytes);
      for (std::uint64_t i = 0; i < bytes; ++i) own[i] = byte_at({seed, rank.rank(), p}, i);
      pieces_.push_back({memory.data(), bytes});
    }
  }

  void enqueue(Communicator& communicator, platform::Stream& stream) { communicator.all_gather(pieces_, stream); }

  void check(const Rank& rank) const {
    for (std::size_t p = 0; p < pieces_.size(); ++p) {
      for (int r = 0; r < rank.size(); ++r) {
        const std::byte* const shard = pieces_[p].data + static_cast<std::uint64_t>(r) * pieces_[p].shard_bytes;
        for (std::uint64_t i = 0; i < pieces_[p].shard_bytes; ++i) {
          if (shard[i] == byte_at({seed_, r, p}, i)) continue;
          ADD_FAILURE() << "seed " << seed_ << " on rank " << rank.rank() << ": piece " << p << " of rank " << r
                        << " differs at byte " << i;
          return;
        }
      }
    }
  }

  std::uint64_t shard_bytes() const {
    std::uint64_t bytes = 0;
    for (const GatherPiece& piece : pieces_) bytes += piece.shard_bytes;
    return bytes;
  }

 private:
  std::uint64_t seed_;
  std::vector<GatherPiece> pieces_;
};

// One after another, by the seeds from `first` to before `end`.
template <typename Seeded>
void check_each(Rank& rank, std::uint64_t first, std::uint64_t end) {
  for (std::uint64_t seed = first; seed < end; ++seed) {
    Seeded one(rank, seed);
    one.enqueue(rank.communicator, rank.stream);
    rank.stream.synchronize();
    one.check(rank);
  }
}

}  // namespace

TEST_P(Conformance, KnowsItself) {
  run([&](Rank& rank) {
    EXPECT_EQ(rank.size(), GetParam().size);
    EXPECT_GE(rank.rank(), 0);
    EXPECT_LT(rank.rank(), rank.size());
    EXPECT_EQ(rank.communicator.name(), GetParam().name);
  });
}

TEST_P(Conformance, GathersPiecesOfAnyShape) {
  run([](Rank& rank) { check_each<SeededGather>(rank, 100, 112); });
}

TEST_P(Conformance, ReducesInRankOrderWithOneRounding) {
  run([](Rank& rank) { check_each<SeededReduction>(rank, 200, 212); });
}

// What loss scaling rests on: the mean of large finite numbers is finite, though their sum is beyond fp16, and an
// infinity or NaN of any one rank is never averaged away.
TEST_P(Conformance, AnOverflowOfAnyRankIsOneOfTheMeanAndNothingElseIs) {
  run([](Rank& rank) {
    for (const DType dtype : kDTypes) {
      constexpr std::uint64_t kShard = 64;
      const auto size = static_cast<std::uint64_t>(rank.size());
      const auto memory = rank.allocate(size * kShard * dtype_bytes(dtype));
      // Element i overflows on rank i % 4, where there is one: an infinity, or every eighth a NaN.
      const auto overflows = [&](std::uint64_t i, std::uint64_t r) { return i % 4 == r && r < size; };
      for (std::uint64_t i = 0; i < size * kShard; ++i) {
        float value = 60000.0f;
        if (overflows(i, static_cast<std::uint64_t>(rank.rank())))
          value = i % 8 == 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
        store_at(memory.data(), dtype, i, encode(dtype, value));
      }
      const ReducePiece piece{
          .data = memory.data(), .dtype = dtype, .shard_elements = kShard, .scale = 1.0f / static_cast<float>(size)};
      rank.communicator.reduce_scatter({&piece, 1}, rank.stream);
      rank.stream.synchronize();
      for (std::uint64_t i = 0; i < kShard; ++i) {
        const std::uint64_t index = static_cast<std::uint64_t>(rank.rank()) * kShard + i;
        const float mean = decode(dtype, stored_at(memory.data(), dtype, index));
        EXPECT_EQ(std::isfinite(mean), index % 4 >= size) << dtype_name(dtype) << " element " << index;
        if (std::isfinite(mean)) {
          EXPECT_NEAR(mean, 60000.0f, 60000.0f / 128) << dtype_name(dtype) << " element " << index;
        }
      }
    }
  });
}

// The reference has no scratch: equal to it in both sizes is equal to each other.
TEST_P(Conformance, ScratchSizeChangesNoBit) {
  for (const std::uint64_t scratch : {64 * kKiB, 64 * kKiB + 24, 4 * kMiB}) {
    JobOptions options;
    options.scratch_bytes = scratch;
    options.chaos_seed = 0;
    run(options, [](Rank& rank) { check_each<SeededReduction>(rank, 300, 306); });
  }
}

TEST_P(Conformance, KeepsManyOperationsInFlight) {
  run([](Rank& rank) {
    std::deque<SeededGather> gathers;
    std::deque<SeededReduction> reductions;
    for (std::uint64_t seed = 400; seed < 424; ++seed) {
      gathers.emplace_back(rank, seed).enqueue(rank.communicator, rank.stream);
      if (seed % 3 == 0) reductions.emplace_back(rank, seed).enqueue(rank.communicator, rank.stream);
    }
    rank.stream.synchronize();
    for (const auto& gather : gathers) gather.check(rank);
    for (const auto& reduction : reductions) reduction.check(rank);
  });
}

// Copies before and after share buffers from round to round, so anything that leaves the stream's order shows.
TEST_P(Conformance, RunsInStreamOrder) {
  run([](Rank& rank) {
    constexpr std::uint64_t kRounds = 12;
    constexpr std::uint64_t kBytes = 2000;
    const auto size = static_cast<std::uint64_t>(rank.size());
    const auto device = rank.allocate(size * kBytes);
    std::vector<std::vector<std::byte>> sources(kRounds, std::vector<std::byte>(kBytes));
    std::vector<std::vector<std::byte>> results(kRounds, std::vector<std::byte>(size * kBytes));
    for (std::uint64_t k = 0; k < kRounds; ++k) {
      for (std::uint64_t i = 0; i < kBytes; ++i) sources[k][i] = byte_at({k, rank.rank(), 0}, i);
      rank.stream.copy(device.data() + static_cast<std::uint64_t>(rank.rank()) * kBytes, sources[k].data(), kBytes,
                       platform::CopyKind::host_to_device);
      const GatherPiece piece{device.data(), kBytes};
      rank.communicator.all_gather({&piece, 1}, rank.stream);
      rank.stream.copy(results[k].data(), device.data(), size * kBytes, platform::CopyKind::device_to_host);
    }
    rank.stream.synchronize();
    for (std::uint64_t k = 0; k < kRounds; ++k) {
      for (std::uint64_t i = 0; i < size * kBytes; ++i) {
        ASSERT_EQ(results[k][i], byte_at({k, static_cast<int>(i / kBytes), 0}, i % kBytes)) << "round " << k;
      }
    }
  });
}

TEST_P(Conformance, KeepsItsOrderAcrossStreams) {
  run([](Rank& rank) {
    const auto other = rank.device.create_stream("second");
    std::deque<SeededGather> gathers;
    std::deque<SeededReduction> reductions;
    for (std::uint64_t seed = 500; seed < 516; ++seed) {
      gathers.emplace_back(rank, seed).enqueue(rank.communicator, seed % 2 == 0 ? rank.stream : *other);
      if (seed % 4 == 1) reductions.emplace_back(rank, seed).enqueue(rank.communicator, rank.stream);
    }
    rank.stream.synchronize();
    other->synchronize();
    for (const auto& gather : gathers) gather.check(rank);
    for (const auto& reduction : reductions) reduction.check(rank);
  });
}

TEST_P(Conformance, CountsTheBytesItSends) {
  run([](Rank& rank) {
    const auto peers = static_cast<std::uint64_t>(rank.size() - 1);
    SeededGather gather(rank, 601);
    SeededReduction reduction(rank, 602);
    gather.enqueue(rank.communicator, rank.stream);
    reduction.enqueue(rank.communicator, rank.stream);
    rank.stream.synchronize();
    const std::uint64_t expected = peers * (gather.shard_bytes() + reduction.shard_bytes());
    EXPECT_EQ(rank.ledger.totals(Link::wire).bytes, expected);
    EXPECT_EQ(rank.ledger.totals(Link::wire, Ledger::Account::outside_steps).bytes, 0u);
    EXPECT_EQ(rank.ledger.totals(Link::wire).busy.count() > 0, rank.size() > 1);
  });
}

TEST_P(Conformance, DuplicateWorksBesideItsOriginal) {
  run([](Rank& rank) {
    const auto copy = rank.communicator.duplicate();
    EXPECT_EQ(copy->rank(), rank.rank());
    EXPECT_EQ(copy->size(), rank.size());
    std::deque<SeededReduction> ours;
    for (std::uint64_t seed = 720; seed < 726; ++seed) ours.emplace_back(rank, seed);
    std::jthread other([&] {
      for (int k = 0; k < 20; ++k) {
        std::vector<int> all(static_cast<std::size_t>(rank.size()));
        const int mine = rank.rank() * 1000 + k;
        copy->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
        for (int r = 0; r < rank.size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], r * 1000 + k);
      }
    });
    for (auto& reduction : ours) {
      reduction.enqueue(rank.communicator, rank.stream);
      rank.communicator.barrier();
    }
    other.join();
    rank.stream.synchronize();
    for (const auto& reduction : ours) reduction.check(rank);
  });
}

TEST_P(Conformance, RefusesWhatItCannotDo) {
  run([](Rank& rank) {
    const GatherPiece nowhere{nullptr, 8};
    EXPECT_THROW(rank.communicator.all_gather({&nowhere, 1}, rank.stream), UsageError);
    const ReducePiece nothing{nullptr, DType::bf16, 8, 1.0f};
    EXPECT_THROW(rank.communicator.reduce_scatter({&nothing, 1}, rank.stream), UsageError);
    EXPECT_THROW(rank.communicator.broadcast_host({}, -1), UsageError);
    const std::array<std::byte, 3> mine{};
    std::vector<std::byte> wrong(3 * static_cast<std::size_t>(rank.size()) + 1);
    EXPECT_THROW(rank.communicator.exchange(mine, wrong), UsageError);
    if (rank.size() == 1) return;
    EXPECT_THROW(rank.communicator.duplicate()->reduce_scatter({}, rank.stream), UsageError);
  });
}

}  // namespace hoist::comm::conformance::conformance_data_test
