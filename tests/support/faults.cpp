// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/aio/file.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tests/support/faults.hpp>

namespace hoist::test {

using aio::Block;
using aio::Operation;

namespace {

bool makes_sense(Fault::Kind kind, Operation operation) {
  switch (kind) {
    case Fault::Kind::error:
    case Fault::Kind::delay:
      return true;
    case Fault::Kind::short_transfer:
      return operation != Operation::sync;
    case Fault::Kind::bit_flip:
      return operation == Operation::read;
    case Fault::Kind::misdirected_write:
    case Fault::Kind::dropped_write:
    case Fault::Kind::torn_write:
      return operation == Operation::write;
  }
  return false;
}

bool matches(const Fault& fault, const Block& block) {
  return makes_sense(fault.kind, block.operation) && (!fault.operation || *fault.operation == block.operation) &&
         block.file->path().find(fault.path_contains) != std::string::npos;
}

// The bytes now at a place of a file; zeros beyond its end.
std::vector<std::byte> bytes_at(int descriptor, std::uint64_t offset_bytes, std::uint64_t length_bytes) {
  const std::unique_ptr<void, decltype(&std::free)> buffer(std::aligned_alloc(aio::File::kAlignment, length_bytes),
                                                           &std::free);
  auto* bytes = static_cast<std::byte*>(buffer.get());
  std::fill_n(bytes, length_bytes, std::byte{0});
  const ssize_t had = ::pread(descriptor, bytes, length_bytes, static_cast<off_t>(offset_bytes));
  HOIST_ASSERT(had >= 0, "errno {}", errno);
  return {bytes, bytes + length_bytes};
}

std::pair<std::uint64_t, std::uint64_t> key_of(const Block& block) {
  struct stat status {};
  HOIST_ASSERT(::fstat(block.file->descriptor(), &status) == 0, "errno {}", errno);
  return {status.st_dev, status.st_ino};
}

// A descriptor of the same file that shares no lock with `descriptor`.
int reopened(int descriptor) {
  const int number = ::open(fmt::format("/proc/self/fd/{}", descriptor).c_str(), O_WRONLY | O_CLOEXEC);
  HOIST_ASSERT(number >= 0, "errno {}", errno);
  return number;
}

enum class Fate : std::uint8_t { kept, lost, torn };

Fate fate_of(std::uint64_t seed, std::uint64_t write_index) {
  return static_cast<Fate>(random_bits(seed, write_index) % 3);
}

// Whether this sector of a torn write reached the medium.
bool sector_kept(std::uint64_t seed, std::uint64_t write_index, std::uint64_t sector) {
  return (random_bits(random_bits(seed, write_index), sector) & 1) != 0;
}

}  // namespace

void Faults::add(Fault fault) {
  const std::lock_guard lock(mutex_);
  rules_.push_back({std::move(fault), 0});
}

void Faults::clear() {
  const std::lock_guard lock(mutex_);
  rules_.clear();
}

Faults::Decision Faults::decide(const Block& block) {
  blocks_[static_cast<std::size_t>(block.operation)].fetch_add(1);
  const std::lock_guard lock(mutex_);
  Decision decision;
  for (std::size_t i = 0; i < rules_.size(); ++i) {
    Rule& rule = rules_[i];
    if (!matches(rule.fault, block)) continue;
    const std::uint64_t index = rule.matched++;
    if (index < rule.fault.first || index - rule.fault.first >= rule.fault.count) continue;
    const std::uint64_t stream = random_bits(seed_, i);
    if (random_uniform(stream, 2 * index) >= rule.fault.probability) continue;
    if (rule.fault.kind == Fault::Kind::delay) {
      decision.delay += rule.fault.delay;
    } else if (decision.kind) {
      continue;
    } else {
      decision.kind = rule.fault.kind;
      decision.code = rule.fault.code;
      decision.random = random_bits(stream, 2 * index + 1);
    }
    hits_[static_cast<std::size_t>(rule.fault.kind)].fetch_add(1);
  }
  return decision;
}

void Faults::track_unflushed() {
  const std::lock_guard lock(mutex_);
  tracking_ = true;
}

std::uint64_t Faults::unflushed_count() const {
  const std::lock_guard lock(mutex_);
  return unflushed_.size();
}

std::uint64_t Faults::write_begins(const Block& block) {
  const std::lock_guard lock(mutex_);
  if (!tracking_) return 0;
  const FileKey file = key_of(block);
  if (!written_files_.contains(file)) written_files_.try_emplace(file, reopened(block.file->descriptor()));
  unflushed_.push_back({.id = next_id_++,
                        .file = file,
                        .offset_bytes = block.offset_bytes,
                        .before = bytes_at(block.file->descriptor(), block.offset_bytes, block.length_bytes)});
  return unflushed_.back().id;
}

void Faults::write_ended(std::uint64_t write_id) {
  const std::lock_guard lock(mutex_);
  for (Unflushed& write : unflushed_) {
    if (write.id == write_id) write.ended = true;
  }
}

std::uint64_t Faults::sync_begins(const Block& block) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t sync_id = next_id_++;
  if (!tracking_) return sync_id;
  const FileKey file = key_of(block);
  for (Unflushed& write : unflushed_) {
    if (write.ended && write.file == file && write.covered_by_sync == 0) write.covered_by_sync = sync_id;
  }
  return sync_id;
}

void Faults::sync_succeeded(std::uint64_t sync_id) {
  const std::lock_guard lock(mutex_);
  // A flush covers what earlier, failed flushes of the same file would have covered only if the system says so; it
  // does not (dirty pages may have been dropped), hence the comparison for equality.
  std::erase_if(unflushed_, [&](const Unflushed& write) { return write.covered_by_sync == sync_id; });
}

PowerCut Faults::power_cut(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  PowerCut cut;
  std::set<std::pair<FileKey, std::uint64_t>> settled;  // sectors whose last surviving write has been found
  for (std::size_t i = unflushed_.size(); i-- > 0;) {   // newest first: an older write shows only below lost ones
    const Unflushed& write = unflushed_[i];
    const Fate fate = fate_of(seed, i);
    ++(fate == Fate::kept ? cut.writes_kept : fate == Fate::lost ? cut.writes_lost : cut.writes_torn);
    const int descriptor = written_files_.at(write.file).number;
    for (std::uint64_t at = 0; at < write.before.size(); at += kSectorBytes) {
      const std::uint64_t sector = (write.offset_bytes + at) / kSectorBytes;
      if (settled.contains({write.file, sector})) continue;
      if (fate == Fate::kept || (fate == Fate::torn && sector_kept(seed, i, sector))) {
        settled.insert({write.file, sector});
        continue;
      }
      const auto bytes = std::min<std::uint64_t>(kSectorBytes, write.before.size() - at);
      const ssize_t put =
          ::pwrite(descriptor, write.before.data() + at, bytes, static_cast<off_t>(write.offset_bytes + at));
      HOIST_ASSERT(put == static_cast<ssize_t>(bytes), "errno {}", errno);
    }
  }
  unflushed_.clear();
  written_files_.clear();
  return cut;
}

}  // namespace hoist::test
