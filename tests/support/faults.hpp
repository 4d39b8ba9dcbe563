// SPDX-License-Identifier: Apache-2.0
// tests/support/faults.hpp - which blocks shall fail and how, which have failed, and what a power cut would lose.
//
// Shared by a test and by the FaultyBackends it hands to queues; it outlives them, so a power cut can come after the
// queue has gone. Whether the n-th block that a fault matches is hit is a pure function of (seed, fault, n).
//
// Threading  Any thread, but for power_cut: no queue may be using the files.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <hoist/aio/backend.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/open_file.hpp>

namespace hoist::test {

struct Fault {
  enum class Kind : std::uint8_t {
    error,              // fails with `code`, nothing is moved
    short_transfer,     // moves about half, and says so
    delay,              // starts `delay` later; combines with the others
    bit_flip,           // a read delivers one bit wrong
    misdirected_write,  // lands some multiple of 4 KiB away, and says it went well
    dropped_write,      // says it went well, and writes nothing
    torn_write,         // writes only the first part, and says it went well
  };
  static constexpr std::size_t kKindCount = 7;

  Kind kind = Kind::error;
  std::optional<aio::Operation> operation{};  // nothing: any that the kind makes sense for
  std::string path_contains{};
  std::uint64_t first = 0;   // matching blocks that pass untouched before
  std::uint64_t count = 1;   // then so many are candidates (a burst)
  double probability = 1.0;  // of each candidate
  int code = EIO;            // of Kind::error: EIO, EAGAIN, ENOSPC, ...
  Nanoseconds delay{0};      // of Kind::delay
};

// The effect of a power cut on the writes that no successful flush had covered.
struct PowerCut {
  std::uint64_t writes_kept = 0;
  std::uint64_t writes_lost = 0;
  std::uint64_t writes_torn = 0;
};

class Faults {
 public:
  static constexpr std::uint64_t kForever = ~std::uint64_t{0};
  static constexpr std::uint64_t kSectorBytes = 4096;

  explicit Faults(std::uint64_t seed) : seed_(seed) {}

  std::uint64_t seed() const { return seed_; }
  void add(Fault fault);
  void clear();
  std::uint64_t hits(Fault::Kind kind) const { return hits_[static_cast<std::size_t>(kind)].load(); }
  std::uint64_t blocks(aio::Operation operation) const { return blocks_[static_cast<std::size_t>(operation)].load(); }

  // Remembers what every write overwrites until a flush of its file that began after the write had finished succeeds.
  void track_unflushed();
  std::uint64_t unflushed_count() const;
  // Every write that is not flushed is, by `seed`, kept, lost, or torn at sectors; what is lost is put back as it was.
  // A file is known by its inode: renaming it changes nothing. Names are not undone; see lost_names.hpp.
  PowerCut power_cut(std::uint64_t seed);

  // For FaultyBackend.
  struct Decision {
    std::optional<Fault::Kind> kind{};  // never delay
    int code = 0;
    Nanoseconds delay{0};
    std::uint64_t random = 0;  // for the fault's own choices
  };
  Decision decide(const aio::Block& block);
  // 0 when nothing is tracked.
  std::uint64_t write_begins(const aio::Block& block);
  void write_ended(std::uint64_t write_id);
  std::uint64_t sync_begins(const aio::Block& block);
  void sync_succeeded(std::uint64_t sync_id);

 private:
  struct Rule {
    Fault fault;
    std::uint64_t matched = 0;
  };
  using FileKey = std::pair<std::uint64_t, std::uint64_t>;  // device, inode
  struct Unflushed {
    std::uint64_t id = 0;
    FileKey file;
    std::uint64_t offset_bytes = 0;
    std::vector<std::byte> before;
    bool ended = false;
    std::uint64_t covered_by_sync = 0;  // the newest that covers it
  };

  const std::uint64_t seed_;
  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  bool tracking_ = false;
  std::uint64_t next_id_ = 1;
  std::vector<Unflushed> unflushed_;  // in the order in which they began
  std::map<FileKey, Descriptor> written_files_;
  std::array<std::atomic<std::uint64_t>, Fault::kKindCount> hits_{};
  std::array<std::atomic<std::uint64_t>, 3> blocks_{};
};

}  // namespace hoist::test
