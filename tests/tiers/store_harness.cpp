// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>
#include <fstream>
#include <new>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/tiers/store_harness.hpp>

namespace hoist::tiers::test {

Buffer::Buffer(std::uint64_t bytes)
    : bytes_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kBlockAlignment}))), count_(bytes) {}

void Buffer::Free::operator()(std::byte* bytes) const { ::operator delete (bytes, std::align_val_t{kBlockAlignment}); }

StoreOptions small_model(const std::string& directory) {
  StoreOptions options;
  options.directory = directory;
  options.identity.layout = "tok 64x32 bf16\nnorm 32 fp32\nbase 32 bf16 frozen\n";
  options.records.push_back({"embedding", RecordLayout(std::array{RecordSegment{DType::bf16, true, kTileElements + 96},
                                                                  RecordSegment{DType::fp32, true, 64}})});
  options.records.push_back({"layer 0", RecordLayout(std::array{RecordSegment{DType::bf16, true, 32}})});
  options.records.push_back({"layer 1", RecordLayout(std::array{RecordSegment{DType::bf16, true, 32},
                                                                RecordSegment{DType::bf16, false, 64}})});
  options.records.push_back({"nothing here", RecordLayout({})});
  options.records.push_back({"frozen base", RecordLayout(std::array{RecordSegment{DType::bf16, false, 320}})});
  options.caller_state_bytes_max = 5000;
  options.lock_timeout = std::chrono::milliseconds(200);
  return options;
}

StoreOptions small_model_on(const std::string& directory, unsigned drives) {
  StoreOptions options = small_model(directory);
  for (unsigned d = 1; d < drives; ++d) {
    options.stripe_directories.push_back(fmt::format("{}-drive{}", directory, d));
    options.stripe_weights.assign(drives, 1);
    options.stripe_weights.front() = 2;
  }
  options.stripe_unit_bytes = 4 * kKiB;
  return options;
}

std::unique_ptr<Store> create_store(const StoreOptions& options, aio::DriveQueue& queue) {
  const std::vector<aio::DriveQueue*> queues(options.stripe_directories.size() + 1, &queue);
  return Store::create(options, queues);
}

std::unique_ptr<Store> open_store(const StoreOptions& options, aio::DriveQueue& queue) {
  const std::vector<aio::DriveQueue*> queues(options.stripe_directories.size() + 1, &queue);
  return Store::open(options, queues);
}

std::vector<std::uint32_t> all_records(const StoreOptions& options) {
  std::vector<std::uint32_t> records(options.records.size());
  std::iota(records.begin(), records.end(), 0u);
  return records;
}

aio::DriveQueueOptions queue_options() {
  aio::DriveQueueOptions options;
  options.backend = aio::BackendKind::threads;  // everywhere the same, and cheap to start hundreds of times
  options.thread_count = 2;
  options.block_bytes = 64 * kKiB;
  return options;
}

std::unique_ptr<aio::DriveQueue> clean_queue() { return std::make_unique<aio::DriveQueue>(queue_options()); }

void fill_tile(std::uint32_t record, Region region, std::uint32_t tile, std::uint64_t writer,
               std::span<std::byte> bytes) {
  const std::uint64_t stream = random_bits(
      writer, (std::uint64_t{record} << 33) | (std::uint64_t{tile} << 1) | static_cast<std::uint64_t>(region));
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t word = random_bits(stream, at);
    std::memcpy(bytes.data() + at, &word, 8);
  }
}

void write_tiles(Store& store, const StoreOptions& options, std::uint32_t record, Region region, std::uint32_t first,
                 std::uint32_t count, std::uint64_t writer) {
  const RecordLayout& layout = options.records[record].layout;
  std::uint64_t bytes = 0;
  for (std::uint32_t tile = first; tile < first + count; ++tile) bytes += layout.tiles()[tile].bytes(region);
  const Buffer buffer(bytes);
  std::vector<std::uint64_t> checksums;
  auto rest = buffer.span();
  for (std::uint32_t tile = first; tile < first + count; ++tile) {
    const auto part = rest.first(layout.tiles()[tile].bytes(region));
    rest = rest.subspan(part.size());
    fill_tile(record, region, tile, writer, part);
    checksums.push_back(store.checksum(RecordId{record}, region, tile, part));
  }
  store.write(RecordId{record}, region, first, count, buffer.span(), checksums, aio::Priority::background).wait();
}

void write_record(Store& store, const StoreOptions& options, std::uint32_t record, std::uint64_t writer) {
  const auto tiles = static_cast<std::uint32_t>(options.records[record].layout.tiles().size());
  // In pieces, as an update does it.
  for (std::uint32_t first = 0; first < tiles; first += 2) {
    const std::uint32_t count = std::min(2u, tiles - first);
    write_tiles(store, options, record, Region::weights, first, count, writer);
    write_tiles(store, options, record, Region::state, first, count, writer);
  }
}

std::span<const std::byte> as_state(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string state_of(const Store& store) {
  const auto state = store.caller_state();
  return {reinterpret_cast<const char*>(state.data()), state.size()};
}

void run_step(Store& store, const StoreOptions& options, std::uint64_t step,
              const std::vector<std::uint32_t>& records) {
  store.begin_step(step);
  for (const std::uint32_t record : records) write_record(store, options, record, step);
  store.commit(as_state(std::to_string(step))).wait();
}

std::string difference(Store& store, const StoreOptions& options, const Writers& writers) {
  for (std::uint32_t record = 0; record < options.records.size(); ++record) {
    const RecordLayout& layout = options.records[record].layout;
    const auto tiles = static_cast<std::uint32_t>(layout.tiles().size());
    for (const Region region : {Region::weights, Region::state}) {
      const Buffer buffer(layout.region_bytes(region));
      store.read(RecordId{record}, region, 0, tiles, buffer.span(), aio::Priority::foreground).wait();
      store.verify(RecordId{record}, region, 0, tiles, buffer.span());
      for (std::uint32_t tile = 0; tile < tiles; ++tile) {
        std::vector<std::byte> expected(layout.tiles()[tile].bytes(region));
        fill_tile(record, region, tile, writers[record], expected);
        const std::byte* const found = buffer.span().data() + layout.tiles()[tile].offset(region);
        if (!expected.empty() && std::memcmp(expected.data(), found, expected.size()) != 0)
          return fmt::format("unit '{}', region {}, tile {} is not what step {} wrote", options.records[record].unit,
                             static_cast<int>(region), tile, writers[record]);
      }
    }
  }
  return {};
}

std::uint64_t reopen_and_compare(const StoreOptions& options, const std::map<std::uint64_t, Writers>& history) {
  const auto queue = clean_queue();
  const auto store = open_store(options, *queue);
  if (store->commits().empty()) throw StoreError("no commit");
  const CommitHeader newest = store->commits().front();
  store->adopt(newest);
  EXPECT_EQ(state_of(*store), std::to_string(newest.step));
  EXPECT_EQ(difference(*store, options, history.at(newest.step)), "");
  return newest.step;
}

std::vector<std::byte> read_file(const std::string& path) {
  EXPECT_TRUE(std::filesystem::exists(path)) << path;
  const std::string bytes = hoist::test::contents_of(path);
  std::vector<std::byte> result(bytes.size());
  if (!bytes.empty()) std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

void write_file(const std::string& path, std::span<const std::byte> bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  EXPECT_TRUE(file.good()) << path;
}

void poke(const std::string& path, std::uint64_t offset, std::span<const std::byte> bytes) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  EXPECT_TRUE(file.good()) << path;
}

}  // namespace hoist::tiers::test
