// SPDX-License-Identifier: Apache-2.0
// tests/tiers/store_harness.hpp - a small model, what its records hold after every step, and how to compare.
//
// The bytes of a record are a pure function of (record, region, tile, step that wrote it), so a test only remembers
// which step wrote each record last.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <hoist/tests/support/faults.hpp>
#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/tiers/store.hpp>

namespace hoist::tiers::test {

// Memory for direct transfers.
class Buffer {
 public:
  explicit Buffer(std::uint64_t bytes);
  std::span<std::byte> span() const { return {bytes_.get(), count_}; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  std::uint64_t count_;
};

// By record: the step that wrote it last.
using Writers = std::vector<std::uint64_t>;

StoreOptions small_model(const std::string& directory);
// The same on `drives` drives below `directory`, in stripe units so small that every record is on all of them.
StoreOptions small_model_on(const std::string& directory, unsigned drives);
// With one queue for all drives, so that faults and power cuts are counted in one order.
std::unique_ptr<Store> create_store(const StoreOptions& options, aio::DriveQueue& queue);
std::unique_ptr<Store> open_store(const StoreOptions& options, aio::DriveQueue& queue);
std::vector<std::uint32_t> all_records(const StoreOptions& options);
aio::DriveQueueOptions queue_options();
std::unique_ptr<aio::DriveQueue> clean_queue();

void fill_tile(std::uint32_t record, Region region, std::uint32_t tile, std::uint64_t writer,
               std::span<std::byte> bytes);

// Writes tiles [first, first + count) as step `writer` has them, and waits.
void write_tiles(Store& store, const StoreOptions& options, std::uint32_t record, Region region, std::uint32_t first,
                 std::uint32_t count, std::uint64_t writer);
void write_record(Store& store, const StoreOptions& options, std::uint32_t record, std::uint64_t writer);
// One whole step: begins, writes `records`, commits and waits. The caller state is the step in text.
void run_step(Store& store, const StoreOptions& options, std::uint64_t step, const std::vector<std::uint32_t>& records);
std::span<const std::byte> as_state(const std::string& text);
std::string state_of(const Store& store);

// Reads, verifies and compares everything; throws CorruptionError, or returns where the bytes differ, or nothing.
std::string difference(Store& store, const StoreOptions& options, const Writers& writers);

// Opens with a clean queue, adopts the newest commit and compares; returns the step.
std::uint64_t reopen_and_compare(const StoreOptions& options, const std::map<std::uint64_t, Writers>& history);

// A file's bytes, past the queue.
std::vector<std::byte> read_file(const std::string& path);
void write_file(const std::string& path, std::span<const std::byte> bytes);
void poke(const std::string& path, std::uint64_t offset, std::span<const std::byte> bytes);

}  // namespace hoist::tiers::test
