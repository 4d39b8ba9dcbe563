// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <functional>
#include <tuple>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>

namespace hoist::tiers::detail {

namespace {

std::vector<std::byte> read_at(const Descriptor& file, const std::string& path, std::uint64_t offset,
                               std::uint64_t length) {
  std::vector<std::byte> bytes(length);
  std::uint64_t done = 0;
  while (done < length) {
    const ssize_t got = ::pread(file.number, bytes.data() + done, length - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw IoError({"read", path, offset + done, length - done, errno});
    if (got == 0) break;
    done += static_cast<std::uint64_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

// A manifest is at most as long as the first number plus this many times its bytes on disk.
constexpr std::uint64_t kSparseBytesMax = 256 * kMiB, kSparseFactorMax = 64;

enum class Slots : std::uint8_t { left_out, read };

ManifestView view_of(const std::string& path, Slots slots) {
  ManifestView view;
  const Descriptor file(open_regular_file(path, O_RDONLY | O_NOFOLLOW));
  if (file.number < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return view;
    const int code = errno;
    throw IoError({"open", path, 0, 0, code},
                  code == ELOOP ? "a store's files may not be symbolic links" : open_file_remedy(code));
  }
  view.exists = true;
  struct stat status {};
  if (::fstat(file.number, &status) != 0) throw IoError({"fstat", path, 0, 0, errno});
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  // Before memory is taken for it: a length costs nothing, what is on disk does. hoist reserves all of a manifest; a
  // copy may have left out what is blank.
  const auto stored_bytes = static_cast<std::uint64_t>(status.st_blocks) * 512;
  if (file_bytes > kSparseBytesMax + kSparseFactorMax * stored_bytes) {
    view.damage = fmt::format("it is {} bytes long, and {} of them are on disk", file_bytes, stored_bytes);
    return view;
  }
  const auto head = read_at(file, path, 0, kBlockAlignment);
  const auto length = superblock_length(head, file_bytes, view.damage);
  if (!length) return view;
  const auto bytes = read_at(file, path, 0, *length);
  if (bytes.size() == *length) view.superblock = decode_superblock(bytes, view.damage);
  if (!view.superblock) return view;
  if (view.superblock->manifest_bytes() != file_bytes) {
    view.damage = fmt::format("it is {} bytes long and should be {}", file_bytes, view.superblock->manifest_bytes());
    view.superblock.reset();
    return view;
  }
  if (slots == Slots::left_out) return view;
  const auto read_slot = [&](std::uint32_t slot) {
    auto image = read_at(file, path, view.superblock->slot_offset(slot), view.superblock->slot_bytes());
    image.resize(view.superblock->slot_bytes());
    return check_slot(image, *view.superblock);
  };
  for (std::uint32_t slot = 0; slot < view.superblock->slot_count(); ++slot) view.slots.push_back(read_slot(slot));
  // A training may have committed between the readings of its two slots, and be writing over the commit in the second:
  // then only one that is long over would be seen. A slot that has not changed since before the other was read shows
  // that both were there at one time.
  constexpr std::uint32_t kReadingsMax = 100;
  for (std::uint32_t reading = 0; reading < kReadingsMax && !view.slots.empty(); ++reading) {
    SlotCheck& before = view.slots[reading % kSlotCount];
    SlotCheck now = read_slot(reading % kSlotCount);
    if (now == before) break;
    before = std::move(now);
  }
  return view;
}

}  // namespace

ManifestView view_manifest(const std::string& path) { return view_of(path, Slots::read); }
ManifestView view_superblock(const std::string& path) { return view_of(path, Slots::left_out); }

Store::Commits commits_in(std::span<const SlotCheck> slots) {
  Store::Commits found;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].state != SlotCheck::State::valid) continue;
    found.ever_committed = true;
    const CommitHeader& commit = slots[slot].header;
    if (slot < kSlotCount && commit.checkpoint_serial == 0) found.commits.push_back(commit);
    if (slot >= kSlotCount && commit.checkpoint_serial != 0) found.checkpoints.push_back(commit);
  }
  if (!slots.empty() && slots[0].state != SlotCheck::State::blank) found.ever_committed = true;
  std::ranges::sort(found.checkpoints, {}, &CommitHeader::checkpoint_serial);
  std::ranges::sort(found.commits, std::greater{}, [](const CommitHeader& commit) {
    return std::tuple(commit.incarnation, commit.step, commit.revision);
  });
  auto& commits = found.commits;
  commits.erase(std::unique(commits.begin(), commits.end()), commits.end());  // the first one is in both slots
  if (commits.size() < 2 || commits[1].incarnation == commits[0].incarnation ||
      std::tie(commits[1].step, commits[1].revision) <= std::tie(commits[0].step, commits[0].revision))
    return found;
  found.abandoned.push_back(commits[1]);
  commits.pop_back();
  return found;
}

std::vector<ManifestDamage> damaged_slots(std::span<const SlotCheck> slots, const std::string& path) {
  std::vector<ManifestDamage> damage;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (slots[slot].state != SlotCheck::State::damaged) continue;
    const bool is_of_checkpoint = slot >= kSlotCount;
    damage.push_back({fmt::format("{} slot {} of {} cannot be used: {} (an interrupted commit leaves this, and "
                                  "so does a failing drive)",
                                  is_of_checkpoint ? "named checkpoint" : "commit", slot, path, slots[slot].problem),
                      is_of_checkpoint});
  }
  return damage;
}

}  // namespace hoist::tiers::detail
