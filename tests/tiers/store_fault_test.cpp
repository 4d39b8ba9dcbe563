// SPDX-License-Identifier: Apache-2.0
// Wrong bytes are reported and never handed out; a commit that fails leaves the one before it.
#include <array>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/tiers/store_harness.hpp>
#include <hoist/tiers/detail/transfers.hpp>

namespace hoist::tiers::test::store_fault_test {
namespace {

using hoist::test::Fault;
using hoist::test::Faults;
using hoist::test::TempDirectory;
using testing::HasSubstr;

class StoreFaultTest : public ::testing::Test {
 protected:
  StoreFaultTest() : options_(small_model(directory_ / "store")) {
    store_ = create_store(options_, *queue_);
    run_step(*store_, options_, 0, all_records(options_));
  }
  Writers writers(std::uint64_t step) const { return Writers(options_.records.size(), step); }
  const RecordLayout& layout(std::uint32_t record) const { return options_.records[record].layout; }
  // The offset of a record's region in the first set of extents, where steps 0, 2, 4 put it when all records are
  // rewritten.
  std::uint64_t first_offset(std::uint32_t record, Region region) const {
    std::uint64_t offset = 0;
    for (std::uint32_t before = 0; before < record; ++before) offset += layout(before).bytes();
    return offset + (region == Region::state ? layout(record).region_bytes(Region::weights) : 0);
  }
  CorruptionError::Where corruption() {
    try {
      (void)difference(*store_, options_, writers(0));
    } catch (const CorruptionError& error) {
      return error.where;
    }
    ADD_FAILURE() << "nothing was noticed";
    return {};
  }

  TempDirectory directory_;
  StoreOptions options_;
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>(7);
  std::unique_ptr<aio::DriveQueue> queue_ =
      std::make_unique<aio::DriveQueue>(queue_options(), hoist::test::make_faulty_backend(queue_options(), faults_));
  std::unique_ptr<Store> store_;
};

TEST_F(StoreFaultTest, AFlippedBitIsReportedWithItsPlace) {
  const std::string path = store_->data_paths().front();
  const auto whole = read_file(path);
  for (std::uint32_t record = 0; record < options_.records.size(); ++record) {
    for (const Region region : {Region::weights, Region::state}) {
      for (std::uint32_t tile = 0; tile < layout(record).tiles().size(); ++tile) {
        const std::uint64_t bytes = layout(record).tiles()[tile].bytes(region);
        if (bytes == 0) continue;
        const std::uint64_t offset = first_offset(record, region) + layout(record).tiles()[tile].offset(region);
        const std::uint64_t at = offset + (tile == 0 ? 0 : bytes - 1);  // the first byte, or the last of the padding
        poke(path, at, std::array{whole[at] ^ std::byte{0x40}});
        const auto where = corruption();
        EXPECT_EQ(where.unit, options_.records[record].unit);
        EXPECT_EQ(where.region, region == Region::weights ? "weights" : "optimizer state");
        EXPECT_EQ(where.path, path);
        EXPECT_EQ(where.offset_bytes, offset);
        EXPECT_NE(where.expected, where.found);
        poke(path, at, std::array{whole[at]});
      }
    }
  }
  EXPECT_EQ(difference(*store_, options_, writers(0)), "");
}

TEST_F(StoreFaultTest, AFlippedBitIsReportedAfterResumption) {
  const std::string path = store_->data_paths().front();
  store_.reset();
  poke(path, first_offset(1, Region::state), std::array{std::byte{0}, std::byte{0}, std::byte{0}});
  store_ = open_store(options_, *queue_);
  store_->adopt(store_->commits().front());
  EXPECT_EQ(corruption().unit, "layer 0");
}

TEST_F(StoreFaultTest, AStaleTileIsReported) {
  auto old = read_file(store_->data_paths().front());
  old.resize(layout(0).tiles()[0].w_bytes);
  run_step(*store_, options_, 1, all_records(options_));
  run_step(*store_, options_, 2, all_records(options_));
  EXPECT_EQ(difference(*store_, options_, writers(2)), "");
  poke(store_->data_paths().front(), 0, old);
  EXPECT_EQ(corruption().offset_bytes, 0u);
}

// The same bytes at another place, in another writing, are other tiles: the identity is part of the checksum.
TEST_F(StoreFaultTest, EqualBytesElsewhereHaveAnotherChecksum) {
  const Buffer zeros(kBlockAlignment);
  std::fill(zeros.span().begin(), zeros.span().end(), std::byte{0});
  store_->begin_step(1);
  const auto of = [&](std::uint32_t record, Region region) {
    return store_->checksum(RecordId{record}, region, 0, zeros.span().first(layout(record).tiles()[0].bytes(region)));
  };
  const std::set<std::uint64_t> checksums{of(1, Region::weights), of(1, Region::state), of(2, Region::weights),
                                          of(2, Region::state)};
  EXPECT_EQ(checksums.size(), 4u);
}

TEST_F(StoreFaultTest, SwappedTilesAreReported) {
  const auto whole = read_file(store_->data_paths().front());
  const auto a = first_offset(1, Region::weights), b = first_offset(2, Region::weights);
  poke(store_->data_paths().front(), a, std::span(whole).subspan(b, 4096));
  poke(store_->data_paths().front(), b, std::span(whole).subspan(a, 4096));
  EXPECT_EQ(corruption().offset_bytes, a);
}

TEST_F(StoreFaultTest, WritesThatLieAreReported) {
  constexpr std::uint64_t kWrites = 11;  // of 64 KiB at most, in a step that rewrites everything
  for (const Fault::Kind kind : {Fault::Kind::misdirected_write, Fault::Kind::dropped_write, Fault::Kind::torn_write}) {
    std::uint64_t reported = 0;
    for (std::uint64_t write = 0; write < kWrites; ++write) {
      SCOPED_TRACE(testing::Message() << "kind " << static_cast<int>(kind) << ", write " << write);
      const std::uint64_t step = 1 + write + kWrites * static_cast<std::uint64_t>(kind);
      // After every lie, everything is written anew.
      faults_->clear();
      faults_->add({.kind = kind, .path_contains = ".data", .first = write});
      const auto before = faults_->hits(kind);
      run_step(*store_, options_, step, all_records(options_));
      ASSERT_EQ(faults_->hits(kind), before + 1);
      try {
        EXPECT_EQ(difference(*store_, options_, writers(step)), "");
      } catch (const CorruptionError&) {
        ++reported;
      }
    }
    // A write that hits an extent which holds nothing current, and is itself lost, is still missing where it belongs.
    EXPECT_EQ(reported, kWrites) << "kind " << static_cast<int>(kind);
  }
}

TEST_F(StoreFaultTest, AReadThatFlipsABitIsReported) {
  for (std::uint64_t read = 0; read < 8; ++read) {
    faults_->clear();
    faults_->add({.kind = Fault::Kind::bit_flip, .path_contains = ".data", .first = read});
    EXPECT_THROW((void)difference(*store_, options_, writers(0)), CorruptionError) << "read " << read;
  }
  faults_->clear();
  EXPECT_EQ(difference(*store_, options_, writers(0)), "");
}

TEST_F(StoreFaultTest, AFailedReadIsAnError) {
  faults_->add({.kind = Fault::Kind::error, .operation = aio::Operation::read, .path_contains = ".data"});
  EXPECT_THROW((void)difference(*store_, options_, writers(0)), IoError);
}

// Whatever fails on the way to a commit, the commit fails with it, the store takes no more steps, and the commit before
// is what a reopening finds.
TEST_F(StoreFaultTest, AFailedCommitIsFinal) {
  struct Case {
    Fault fault;
    std::string operation;
    std::uint64_t syncs;  // that the commit gets to; a failed one is never tried again
  };
  const std::vector<Case> cases{
      {{.kind = Fault::Kind::error, .operation = aio::Operation::write, .path_contains = ".data", .code = EIO},
       "write",
       0},
      {{.kind = Fault::Kind::error, .operation = aio::Operation::write, .path_contains = ".data", .code = ENOSPC},
       "write",
       0},
      {{.kind = Fault::Kind::error, .operation = aio::Operation::sync, .path_contains = ".data"}, "fdatasync", 1},
      {{.kind = Fault::Kind::error, .operation = aio::Operation::write, .path_contains = ".manifest"}, "write", 1},
      {{.kind = Fault::Kind::error, .operation = aio::Operation::sync, .path_contains = ".manifest"}, "fdatasync", 2}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "case " << i);
    const std::uint64_t step = 2 * i + 1;
    faults_->clear();
    faults_->add(cases[i].fault);
    const auto syncs_before = faults_->blocks(aio::Operation::sync);
    store_->begin_step(step);
    const Buffer buffer(4096);
    std::fill(buffer.span().begin(), buffer.span().end(), std::byte{1});
    for (const Region region : {Region::weights, Region::state}) {
      const std::array checksum{store_->checksum(RecordId{1}, region, 0, buffer.span())};
      (void)store_->write(RecordId{1}, region, 0, 1, buffer.span(), checksum, aio::Priority::background);
    }
    std::vector<bool> told;
    const Completion committed =
        store_->commit({}, [&](const std::exception_ptr& problem) { told.push_back(problem != nullptr); });
    try {
      committed.wait();
      FAIL() << "committed in spite of the fault";
    } catch (const IoError& error) {
      EXPECT_EQ(error.where.operation, cases[i].operation);
      EXPECT_EQ(error.where.code, cases[i].fault.code);
    }
    EXPECT_EQ(told, std::vector{true}) << "the other ranks are told, once";
    EXPECT_EQ(faults_->blocks(aio::Operation::sync) - syncs_before, cases[i].syncs);
    EXPECT_THROW(store_->begin_step(step + 1), IoError);
    EXPECT_THROW(store_->commit({}), IoError);
    faults_->clear();
    store_.reset();
    store_ = open_store(options_, *queue_);
    // After a failed flush of the manifest the new commit may be there or not; here it is.
    const std::uint64_t found = store_->commits().front().step;
    EXPECT_EQ(found, cases[i].syncs == 2 ? step : 2 * i);
    store_->adopt(store_->commits().front());
    run_step(*store_, options_, step + 1, all_records(options_));
  }
}

TEST_F(StoreFaultTest, DisagreementFailsTheCommit) {
  store_->begin_step(1);
  const Completion committed = store_->commit({}, [](const std::exception_ptr&) { throw CommError("rank 3 is gone"); });
  EXPECT_THROW(committed.wait(), CommError);
  EXPECT_THROW(store_->begin_step(2), CommError);
}

TEST_F(StoreFaultTest, AFailedAdoptionIsFinal) {
  run_step(*store_, options_, 1, all_records(options_));
  for (const aio::Operation operation : {aio::Operation::sync, aio::Operation::write}) {
    store_.reset();
    store_ = open_store(options_, *queue_);
    faults_->add({.kind = Fault::Kind::error, .operation = operation, .path_contains = ".manifest"});
    EXPECT_THROW(store_->adopt(store_->commits().front()), IoError);
    EXPECT_THROW(store_->adopt(store_->commits().front()), IoError);
    EXPECT_THROW(store_->begin_step(2), IoError);
    faults_->clear();
  }
  store_.reset();
  EXPECT_EQ(reopen_and_compare(options_, {{1, writers(1)}}), 1u);
}

TEST_F(StoreFaultTest, AFlippedBitInACommitTakesTheOneBefore) {
  run_step(*store_, options_, 1, {1});
  store_.reset();
  const std::string path = options_.directory + "/rank-00000.manifest";
  const auto whole = read_file(path);
  const std::uint64_t slot_bytes = (whole.size() - 4096) / 2;
  for (const std::uint64_t offset : {std::uint64_t{33}, std::uint64_t{128 + 40}, std::uint64_t{128 + 5 * 40 + 8}}) {
    const std::uint64_t at = 4096 + slot_bytes + offset;
    poke(path, at, std::array{whole[at] ^ std::byte{1}});
    store_ = open_store(options_, *queue_);
    ASSERT_EQ(store_->commits().size(), 1u);
    EXPECT_EQ(store_->commits()[0].step, 0u);
    ASSERT_EQ(store_->damage().size(), 1u);
    EXPECT_THAT(store_->damage()[0].text, HasSubstr("commit slot 1"));
    EXPECT_THROW(store_->adopt({1, 1}), StoreError);
    store_.reset();
    poke(path, at, std::array{whole[at]});
  }
}

// A drive that works, but takes longer for all that is queued than it may be silent.
TEST(Transfers, AreWaitedForAsLongAsSomeEnd) {
  detail::Transfers transfers;
  std::vector<Promise> promises(4);
  for (Promise& promise : promises) (void)transfers.write([&] { return promise.completion(); });
  std::thread drive([&] {
    for (Promise& promise : promises) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      promise.complete();
    }
  });
  EXPECT_TRUE(transfers.drain(std::chrono::seconds(1)));
  drive.join();
  Promise silent;
  (void)transfers.read([&] { return silent.completion(); });
  EXPECT_FALSE(transfers.drain(std::chrono::milliseconds(10)));
  silent.complete();
}

// Delays and bursts of refusals change the order of everything, and nothing else.
TEST_F(StoreFaultTest, DelaysAndRetriesChangeNothing) {
  faults_->add({.kind = Fault::Kind::delay,
                .count = Faults::kForever,
                .probability = 0.3,
                .delay = std::chrono::milliseconds(2)});
  faults_->add({.kind = Fault::Kind::error,
                .operation = aio::Operation::write,
                .count = Faults::kForever,
                .probability = 0.1,
                .code = EAGAIN});
  faults_->add({.kind = Fault::Kind::short_transfer, .count = Faults::kForever, .probability = 0.1});
  for (std::uint64_t step = 1; step < 6; ++step) {
    run_step(*store_, options_, step, all_records(options_));
    ASSERT_EQ(difference(*store_, options_, writers(step)), "");
  }
}

// Damage to the medium, one tile at a time, in a store of three steps: every reading of the tile must notice.
class StoreDamageTest : public ::testing::Test {
 protected:
  enum class Damage : std::uint8_t { bit_flip, stale, other_generation, misdirected, swapped };
  static constexpr std::uint64_t kDamageKinds = 5;

  struct Place {  // of a tile, in the extents of steps 0 and 2
    std::uint32_t record = 0;
    Region region = Region::weights;
    std::uint32_t tile = 0;
    std::uint64_t offset = 0, length = 0;
  };

  StoreDamageTest() {
    options_.records.clear();
    for (const char* unit : {"layer 0", "layer 1", "layer 2"}) {
      options_.records.push_back(
          {unit, RecordLayout(std::array{RecordSegment{DType::bf16, true, 2 * kTileElements + 32},
                                         RecordSegment{DType::fp32, true, kTileElements},
                                         RecordSegment{DType::bf16, false, kTileElements}})});
    }
    store_ = create_store(options_, *queue_);
    run_step(*store_, options_, 0, all_records(options_));
    path_ = store_->data_paths().front();
    first_ = read_file(path_);
    run_step(*store_, options_, 1, all_records(options_));
    run_step(*store_, options_, 2, all_records(options_));
    now_ = read_file(path_);
    find_places();
  }

  void find_places() {
    std::uint64_t record_begin = 0;
    for (std::uint32_t record = 0; record < options_.records.size(); ++record) {
      const RecordLayout& layout = options_.records[record].layout;
      for (const Region region : {Region::weights, Region::state}) {
        const std::uint64_t begin = record_begin + (region == Region::state ? layout.region_bytes(Region::weights) : 0);
        for (std::uint32_t tile = 0; tile < layout.tiles().size(); ++tile) {
          const std::uint64_t length = layout.tiles()[tile].bytes(region);
          if (length > 0)
            places_.push_back({record, region, tile, begin + layout.tiles()[tile].offset(region), length});
        }
      }
      record_begin += layout.bytes();
    }
    generation_bytes_ = record_begin;  // from a tile to the same tile in the extent of step 1
  }

  std::span<const std::byte> part(const std::vector<std::byte>& file, std::uint64_t offset,
                                  std::uint64_t length) const {
    return std::span(file).subspan(offset, length);
  }
  void put(std::uint64_t offset, std::span<const std::byte> bytes) { poke(path_, offset, bytes); }
  void heal(const Place& place) { put(place.offset, part(now_, place.offset, place.length)); }

  // Another tile of the same length.
  const Place& twin(const Place& place, Rng& rng) const {
    for (;;) {
      const Place& other = places_[rng.below(places_.size())];
      if (other.offset != place.offset && other.length == place.length) return other;
    }
  }

  // Damages `place`; returns what else has to be healed.
  const Place* damage(const Place& place, Damage kind, Rng& rng) {
    switch (kind) {
      case Damage::bit_flip: {
        const std::uint64_t bit = rng.below(place.length * 8);
        const std::uint64_t at = place.offset + bit / 8;
        put(at, std::array{now_[at] ^ static_cast<std::byte>(1u << (bit % 8))});
        return nullptr;
      }
      case Damage::stale:  // as if the last write had never come
        put(place.offset, part(first_, place.offset, place.length));
        return nullptr;
      case Damage::other_generation:
        put(place.offset, part(now_, place.offset + generation_bytes_, place.length));
        return nullptr;
      case Damage::misdirected:  // another tile's write came down here
        put(place.offset, part(now_, twin(place, rng).offset, place.length));
        return nullptr;
      case Damage::swapped: {
        const Place& other = twin(place, rng);
        put(place.offset, part(now_, other.offset, place.length));
        put(other.offset, part(now_, place.offset, place.length));
        return &other;
      }
    }
    return nullptr;
  }

  // Reads the tile and hands out nothing unless it is what was written.
  bool is_noticed(const Place& place) {
    const Buffer buffer(place.length);
    store_->read(RecordId{place.record}, place.region, place.tile, 1, buffer.span(), aio::Priority::foreground).wait();
    try {
      store_->verify(RecordId{place.record}, place.region, place.tile, 1, buffer.span());
    } catch (const CorruptionError& error) {
      EXPECT_EQ(error.where.unit, options_.records[place.record].unit);
      EXPECT_EQ(error.where.path, path_);
      EXPECT_EQ(error.where.offset_bytes, place.offset);
      EXPECT_NE(error.where.expected, error.where.found);
      return true;
    }
    return false;
  }

  TempDirectory directory_;
  StoreOptions options_ = small_model(directory_ / "store");
  std::unique_ptr<aio::DriveQueue> queue_ = clean_queue();
  std::unique_ptr<Store> store_;
  std::string path_;
  std::vector<std::byte> first_, now_;  // the data file after steps 0 and 2
  std::vector<Place> places_;
  std::uint64_t generation_bytes_ = 0;
};

TEST_F(StoreDamageTest, TenThousandTimesNoticed) {
  constexpr std::uint64_t kInjections = 10'000, kSeed = 8;
  Rng rng(kSeed);
  std::array<std::uint64_t, kDamageKinds> noticed{};
  for (std::uint64_t i = 0; i < kInjections; ++i) {
    const Place& place = places_[rng.below(places_.size())];
    const auto kind = static_cast<Damage>(i % kDamageKinds);
    const Place* const other = damage(place, kind, rng);
    ASSERT_TRUE(is_noticed(place)) << "seed " << kSeed << ", injection " << i << ", kind " << i % kDamageKinds;
    if (other != nullptr) {
      ASSERT_TRUE(is_noticed(*other)) << "seed " << kSeed << ", injection " << i;
    }
    ++noticed[static_cast<std::size_t>(kind)];
    heal(place);
    if (other != nullptr) heal(*other);
  }
  for (const std::uint64_t count : noticed) EXPECT_EQ(count, kInjections / kDamageKinds);
  EXPECT_EQ(difference(*store_, options_, Writers(options_.records.size(), 2)), "");  // healed: nothing is noticed
}

}  // namespace
}  // namespace hoist::tiers::test::store_fault_test
