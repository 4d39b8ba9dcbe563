// SPDX-License-Identifier: Apache-2.0
// Parts that the tests of aio share: aligned memory with recognisable contents, and a backend that does only what it is
// told.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/aio/striped_file.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

#include "../support/log_capture.hpp"
#include "../support/temp_directory.hpp"

namespace hoist::aio {

class AlignedBuffer {
 public:
  explicit AlignedBuffer(std::size_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(File::kAlignment, bytes)), &std::free), bytes_(bytes) {
    std::fill_n(data_.get(), bytes, std::byte{0});
  }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }
  std::span<std::byte> part(std::size_t offset, std::size_t bytes) const { return span().subspan(offset, bytes); }
  std::byte* data() const { return data_.get(); }

 private:
  std::unique_ptr<std::byte, decltype(&std::free)> data_;
  std::size_t bytes_;
};

// Every eight bytes differ from all others of this seed, so that a swapped or stale sector shows.
inline void fill_pattern(std::span<std::byte> bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const std::uint64_t value = random_bits(seed, i / 8);
    std::memcpy(bytes.data() + i, &value, 8);
  }
}

inline bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

using DriveQueues = std::vector<std::unique_ptr<DriveQueue>>;

inline std::string path_of_drive(const test::TempDirectory& directory, unsigned drive) {
  return directory / ("drive" + std::to_string(drive));
}

// A new file with a part for each of the layout's drives in `directory`. Pre: there are as many queues.
inline std::unique_ptr<StripedFile> make_striped_file(const test::TempDirectory& directory, const DriveQueues& queues,
                                                      const StripeLayout& layout, std::uint64_t bytes) {
  std::vector<StripeDrive> drives;
  for (unsigned d = 0; d < layout.drive_count(); ++d)
    drives.push_back(
        {queues[d].get(),
         File(path_of_drive(directory, d), {.mode = OpenMode::create, .reserve_bytes = layout.drive_bytes(d, bytes)})});
  return std::make_unique<StripedFile>(layout, std::move(drives));
}

template <typename Work>
std::optional<IoError::Where> io_error_thrown_by(const Work& work) {
  try {
    work();
  } catch (const IoError& error) {
    return error.where;
  }
  return std::nullopt;
}

// The IoError that a completion ends with; nothing after success.
inline std::optional<IoError::Where> io_error_of(const Completion& completion) {
  return io_error_thrown_by([&] { completion.wait(); });
}

using test::LogCapture;

// Ends a death test's process: prints the log, and exits with 0 if `holds`, else with 1.
[[noreturn]] inline void exit_if(bool holds, const LogCapture& log) {
  std::fprintf(stderr, "%s\n", log.text().c_str());
  std::_Exit(holds ? 0 : 1);
}

// Holds every block until the test says how it ends, and remembers the order in which blocks came.
class Gate {
 public:
  struct Seen {
    Operation operation;
    std::uint64_t offset_bytes;
    std::uint64_t length_bytes;
  };

  // Blocks that were submitted so far; waits until there are at least `count`.
  std::vector<Seen> wait_for_blocks(std::size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return seen_.size() >= count; });
    return seen_;
  }
  std::size_t seen_count() {
    const std::lock_guard lock(mutex_);
    return seen_.size();
  }
  std::size_t held_count() {
    const std::lock_guard lock(mutex_);
    return held_.size();
  }
  std::size_t held_count_max() {
    const std::lock_guard lock(mutex_);
    return held_count_max_;
  }
  // The block that has been held longest is a write.
  bool held_is_write() {
    const std::lock_guard lock(mutex_);
    return !held_.empty() && held_.front()->operation == Operation::write;
  }
  // Ends the block that has been held longest; fully when no result is given.
  void finish_oldest(std::optional<std::int64_t> result = std::nullopt) {
    const std::lock_guard lock(mutex_);
    Block* block = held_.front();
    held_.pop_front();
    block->result = result.value_or(static_cast<std::int64_t>(block->length_bytes));
    finished_.push_back(block);
    changed_.notify_all();
  }
  // From now on every block ends at once.
  void open() {
    {
      const std::lock_guard lock(mutex_);
      open_ = true;
    }
    while (held_count() > 0) finish_oldest();
  }

 private:
  friend class GateBackend;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Seen> seen_;
  std::deque<Block*> held_;
  std::deque<Block*> finished_;
  std::size_t held_count_max_ = 0;
  bool open_ = false;
  bool woken_ = false;
};

class GateBackend final : public Backend {
 public:
  explicit GateBackend(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}
  std::string description() const override { return "gate"; }
  void submit(Block& block) override {
    const std::lock_guard lock(gate_->mutex_);
    gate_->seen_.push_back({block.operation, block.offset_bytes, block.length_bytes});
    if (gate_->open_) {
      block.result = static_cast<std::int64_t>(block.length_bytes);
      gate_->finished_.push_back(&block);
    } else {
      gate_->held_.push_back(&block);
      gate_->held_count_max_ = std::max(gate_->held_count_max_, gate_->held_.size());
    }
    gate_->changed_.notify_all();
  }
  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    std::unique_lock lock(gate_->mutex_);
    gate_->changed_.wait_for(lock, timeout, [&] { return gate_->woken_ || !gate_->finished_.empty(); });
    gate_->woken_ = false;
    std::size_t count = 0;
    for (; count < done.size() && !gate_->finished_.empty(); gate_->finished_.pop_front())
      done[count++] = gate_->finished_.front();
    return count;
  }
  void wake_up() override {
    const std::lock_guard lock(gate_->mutex_);
    gate_->woken_ = true;
    gate_->changed_.notify_all();
  }

 private:
  const std::shared_ptr<Gate> gate_;
};

}  // namespace hoist::aio
