// SPDX-License-Identifier: Apache-2.0
// libFuzzer: a manifest from anywhere is a summary of a store or a StoreError; never anything else. Sizes, offsets and
// the model's description are taken from files only after they were checked.
//
// The first byte of an input says what is repaired before it is read, since no fuzzer guesses a checksum: bit 0 the
// superblock's checksum, bit 1 those of the slots, bit 2 the length of the file.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include <hoist/core/checksum.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace {

using namespace hoist;
using namespace hoist::tiers;

constexpr std::uint64_t kChecksumAt = 8, kCoveredFrom = 16, kUsedBytesAt = 40;
constexpr std::uint64_t kFileBytesMax = kMiB;

void put_checksum(std::span<std::byte> covered_with_head) {
  const std::uint64_t sum = checksum(covered_with_head.subspan(kCoveredFrom));
  std::memcpy(covered_with_head.data() + kChecksumAt, &sum, sizeof(sum));
}

void repair(std::vector<std::byte>& file, unsigned what) {
  std::string problem;
  if ((what & 4) != 0) file.resize(round_up(std::max<std::uint64_t>(file.size(), 1), kBlockAlignment));
  if (file.size() < kBlockAlignment) return;
  const auto length = superblock_length(std::span(file).first(kBlockAlignment), file.size(), problem);
  if (!length) return;
  if ((what & 1) != 0) put_checksum(std::span(file).first(*length));
  const auto superblock = decode_superblock(std::span(file).first(*length), problem);
  if (!superblock || superblock->manifest_bytes() > kFileBytesMax) return;
  if ((what & 4) != 0) file.resize(superblock->manifest_bytes());
  if ((what & 2) == 0 || file.size() < superblock->manifest_bytes()) return;
  for (std::uint32_t slot = 0; slot < superblock->slot_count() && superblock->slot_bytes() > 0; ++slot) {
    const auto bytes = std::span(file).subspan(superblock->slot_offset(slot), superblock->slot_bytes());
    std::uint64_t used_bytes = 0;
    std::memcpy(&used_bytes, bytes.data() + kUsedBytesAt, sizeof(used_bytes));
    if (used_bytes >= kSlotHeaderBytes && used_bytes <= bytes.size()) put_checksum(bytes.first(used_bytes));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  static const hoist::test::TempDirectory directory(hoist::test::scratch_in_memory());
  if (count == 0) return 0;
  std::vector<std::byte> file(count - 1);
  if (count > 1) std::memcpy(file.data(), data + 1, count - 1);
  repair(file, data[0]);
  std::ofstream(directory / "rank-00000.manifest", std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(file.data()), static_cast<std::streamsize>(file.size()));
  try {
    const StoreSummary summary = look_at_store(directory.path().string());
    if (summary.ranks.size() != 1) std::abort();
    for (const StoredParameter& parameter : summary.parameters) {
      if (parameter.name.empty()) std::abort();
    }
  } catch (const StoreError&) {
  }
  return 0;
}
