// SPDX-License-Identifier: Apache-2.0
// libFuzzer: whatever stands in a commit slot, it is refused, or every record it names lies within the data file and no
// two share a byte. The first byte of an input, odd: its checksum is repaired first.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <hoist/core/checksum.hpp>
#include <hoist/tiers/detail/record_table.hpp>
#include <hoist/tiers/store_format.hpp>

namespace {

using namespace hoist;
using namespace hoist::tiers;

constexpr std::uint64_t kChecksumAt = 8, kCoveredFrom = 16, kUsedBytesAt = 40;
constexpr std::uint32_t kExtentsPerRecord = 3;

const std::vector<StoreRecord>& model() {
  static const std::vector<StoreRecord> records{
      {"a", RecordLayout(std::array{RecordSegment{DType::bf16, true, kTileElements + 96}})},
      {"b", RecordLayout(std::array{RecordSegment{DType::bf16, true, kTileElements + 96}})},
      {"nothing", RecordLayout({})},
      {"c", RecordLayout(std::array{RecordSegment{DType::fp32, true, 32}, RecordSegment{DType::bf16, false, 64}})}};
  return records;
}

Superblock superblock() {
  Superblock s;
  s.store_number = 7;
  s.extents_per_record = kExtentsPerRecord;
  s.checkpoints_max = kExtentsPerRecord - 2;
  s.tile_elements = kTileElements;
  s.caller_state_bytes_max = 64;
  s.record_count = static_cast<std::uint32_t>(model().size());
  for (const StoreRecord& record : model()) s.tile_count += record.layout.tiles().size();
  return s;
}

void check_places(const hoist::tiers::detail::RecordTable& table) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;
  for (std::uint32_t record = 0; record < model().size(); ++record) {
    const auto tiles = static_cast<std::uint32_t>(model()[record].layout.tiles().size());
    if (tiles == 0) continue;
    for (const Region region : {Region::weights, Region::state}) {
      const auto run = table.readable_run(RecordId{record}, region, 0, tiles);
      if (run.tile_count != tiles || run.offset_bytes + run.length_bytes > table.data_bytes()) std::abort();
      if (run.length_bytes > 0) runs.emplace_back(run.offset_bytes, run.offset_bytes + run.length_bytes);
    }
  }
  std::sort(runs.begin(), runs.end());
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].first < runs[i - 1].second) std::abort();
  }
}

bool all_written(const SlotImage& image) {
  for (std::uint32_t record = 0; record < model().size(); ++record) {
    if (!model()[record].layout.tiles().empty() && image.record(record).extent == UINT32_MAX) return false;
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  static const Superblock s = superblock();
  if (count == 0) return 0;
  std::vector<std::byte> slot(s.slot_bytes());
  if (count > 1) std::memcpy(slot.data(), data + 1, std::min<std::size_t>(count - 1, slot.size()));
  if ((data[0] & 1) != 0) {
    std::uint64_t used_bytes = 0;
    std::memcpy(&used_bytes, slot.data() + kUsedBytesAt, sizeof(used_bytes));
    if (used_bytes >= kSlotHeaderBytes && used_bytes <= slot.size()) {
      const std::uint64_t sum =
          checksum(std::span<const std::byte>(slot).subspan(kCoveredFrom, used_bytes - kCoveredFrom));
      std::memcpy(slot.data() + kChecksumAt, &sum, sizeof(sum));
    }
  }
  const SlotCheck check = check_slot(slot, s);
  if (check.state == SlotCheck::State::damaged && check.problem.empty()) std::abort();
  if (check.state != SlotCheck::State::valid) return 0;
  if (check.header.caller_state_bytes > s.caller_state_bytes_max || check.header.name.size() > kCheckpointNameBytesMax)
    std::abort();
  hoist::tiers::detail::RecordTable table(model(), Durability::step, kExtentsPerRecord, s.store_number);
  const SlotImage image(slot, s);
  if (const std::string problem = table.load(image); problem.empty() && all_written(image)) check_places(table);
  hoist::tiers::detail::RecordTable keeper(model(), Durability::step, kExtentsPerRecord, s.store_number);
  static_cast<void>(keeper.hold(image.extents()));
  return 0;
}
