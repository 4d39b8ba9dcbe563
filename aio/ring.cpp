// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <mutex>

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <hoist/aio/detail/ring.hpp>
#include <hoist/aio/detail/uring_setup.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::aio::detail {

namespace {

constexpr unsigned kOwnEntries = 1;  // the poll of the wake-up descriptor
constexpr useconds_t kStarvedPauseUs = 100;

void say_unregistered_once(int code, std::uint64_t bytes) {
  static std::once_flag said;
  std::call_once(said, [&] {
    log_warning(
        "the kernel refused to register {} of transfer memory ({}): transfers work without registration, with "
        "a little more CPU time. To have it, raise the memlock limit (ulimit -l, LimitMEMLOCK=, or docker run "
        "--ulimit memlock=-1) above that, or grant CAP_IPC_LOCK.",
        format_bytes(bytes), errno_text(code));
  });
}

// The kernel is short of a resource for the moment; entries that it did not take stay in the ring for the next call.
bool is_transient(int result) { return result == -EAGAIN || result == -EBUSY || result == -EINTR; }

}  // namespace

Ring::~Ring() {
  if (!made_) return;
  start();  // a ring that is still disabled has no owner; its files could not be released
  files_->detach();
  if (!slices_.empty()) static_cast<void>(io_uring_unregister_buffers(&ring_));
  io_uring_queue_exit(&ring_);
}

int Ring::make(const DriveQueueOptions& options) {
  {
    // The kernel may give a trial's memory to the next ring. The thread sanitizer does not see that, and would take
    // uses of both for a race.
    static Mutex one_at_a_time;
    const MutexLock lock(one_at_a_time);
    if (const int code = TrialRing().code(); code != 0) return code;
    if (const int code = set_up_ring(ring_, options.queue_depth + kOwnEntries, flags_); code != 0) return code;
  }
  made_ = true;
  files_code_ = files_->prepare(ring_);
  register_buffers(options.registered_memory);
  return 0;
}

std::string Ring::description() const {
  const auto part = [](const char* what, int code) {
    return code == 0 ? fmt::format("registered {}", what) : fmt::format("unregistered {}: {}", what, errno_text(code));
  };
  if (slices_.empty() && buffers_code_ == 0) return part("files", files_code_);
  return fmt::format("{}, {}", part("buffers", buffers_code_), part("files", files_code_));
}

void Ring::register_buffers(const std::vector<std::span<std::byte>>& memory) {
  if (memory.empty()) return;
  std::vector<std::span<std::byte>> slices = memory;
  std::sort(slices.begin(), slices.end(), [](const auto& a, const auto& b) { return a.data() < b.data(); });
  std::vector<iovec> vectors;
  std::uint64_t bytes = 0;
  for (const auto& slice : slices) {
    vectors.push_back({slice.data(), slice.size()});
    bytes += slice.size();
  }
  const int result = io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(vectors.size()));
  buffers_code_ = -result;
  if (result != 0) return say_unregistered_once(-result, bytes);
  slices_ = std::move(slices);
}

// The registered slice that contains the block; -1: none.
int Ring::slice_of(const Block& block) const {
  const auto after = std::upper_bound(slices_.begin(), slices_.end(), block.data,
                                      [](const std::byte* data, const auto& slice) { return data < slice.data(); });
  if (after == slices_.begin()) return -1;
  const auto slice = after - 1;
  return block.data + block.length_bytes <= slice->data() + slice->size() ? static_cast<int>(slice - slices_.begin())
                                                                          : -1;
}

void Ring::start() {
  if (started_) return;
  started_ = true;
  files_->start();
  if ((flags_ & IORING_SETUP_R_DISABLED) != 0) {
    const int code = enable_ring(ring_);
    HOIST_ASSERT(code == 0, "enabling the ring: {}", errno_text(code));
  }
  static_cast<void>(io_uring_register_ring_fd(&ring_));  // spares a look-up per system call; absent before 5.18
}

io_uring_sqe* Ring::next_entry() {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  HOIST_ASSERT(entry != nullptr, "more blocks in flight than the queue is deep");
  return entry;
}

void Ring::prepare(io_uring_sqe* entry, Block& block) {
  const int slot = files_->slot_of(*block.file);
  const int file = slot >= 0 ? slot : block.file->descriptor();
  const auto length = static_cast<unsigned>(block.length_bytes);
  const int slice = block.operation == Operation::sync ? -1 : slice_of(block);
  switch (block.operation) {
    case Operation::read:
      if (slice >= 0) {
        io_uring_prep_read_fixed(entry, file, block.data, length, block.offset_bytes, slice);
      } else {
        io_uring_prep_read(entry, file, block.data, length, block.offset_bytes);
      }
      break;
    case Operation::write:
      if (slice >= 0) {
        io_uring_prep_write_fixed(entry, file, block.data, length, block.offset_bytes, slice);
      } else {
        io_uring_prep_write(entry, file, block.data, length, block.offset_bytes);
      }
      break;
    case Operation::sync:
      io_uring_prep_fsync(entry, file, IORING_FSYNC_DATASYNC);
      break;
  }
  if (slot >= 0) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  io_uring_sqe_set_data(entry, &block);
}

void Ring::put(Block& block) {
  flush();
  prepare(next_entry(), block);
  unsubmitted_ = true;
}

// A poll, not a read: if the ring is destroyed meanwhile, the kernel writes to no memory of ours.
void Ring::put_poll(int descriptor) {
  io_uring_sqe* entry = next_entry();
  io_uring_prep_poll_add(entry, descriptor, POLLIN);
  io_uring_sqe_set_data(entry, nullptr);
}

void Ring::submit() {
  unsubmitted_ = false;
  const int result = io_uring_submit(&ring_);
  HOIST_ASSERT(result >= 0 || is_transient(result), "io_uring_submit: {}", errno_text(-result));
}

void Ring::wait(Nanoseconds timeout) {
  unsubmitted_ = false;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  __kernel_timespec limit{.tv_sec = seconds.count(), .tv_nsec = (timeout - seconds).count()};
  io_uring_cqe* first = nullptr;
  const int result = io_uring_submit_and_wait_timeout(&ring_, &first, 1, &limit, nullptr);
  HOIST_ASSERT(result >= 0 || result == -ETIME || is_transient(result), "io_uring_enter: {}", errno_text(-result));
  if (result == -EAGAIN || result == -EBUSY) ::usleep(kStarvedPauseUs);
}

Ring::Collected Ring::collect(std::span<Block*> done) {
  Collected collected;
  unsigned seen = 0;
  unsigned head = 0;
  io_uring_cqe* entry = nullptr;
  io_uring_for_each_cqe(&ring_, head, entry) {
    if (collected.block_count == done.size()) break;
    ++seen;
    auto* block = static_cast<Block*>(io_uring_cqe_get_data(entry));
    if (block == nullptr) {
      collected.polled = true;
      continue;
    }
    block->result = entry->res;
    // A limit of threads left the kernel without a worker for the flush, which it has not begun. This thread then makes
    // it, and meanwhile cannot notice that the drive has stopped answering.
    if (block->operation == Operation::sync && entry->res == -ECANCELED)
      block->result = ::fdatasync(block->file->descriptor()) == 0 ? 0 : -errno;
    done[collected.block_count++] = block;
  }
  io_uring_cq_advance(&ring_, seen);
  return collected;
}

}  // namespace hoist::aio::detail
