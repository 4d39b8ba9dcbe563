// SPDX-License-Identifier: Apache-2.0
// One ring, used by the engine's I/O thread alone. Every block is submitted by itself: submitted together, neighbours
// are merged by the kernel into requests that are larger than drives like.
#include <algorithm>
#include <cerrno>
#include <fstream>
#include <mutex>
#include <system_error>

#include <fmt/format.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/aio/detail/backends.hpp>
#include <hoist/aio/detail/registered_files.hpp>
#include <hoist/core/assert.hpp>

namespace hoist::aio::detail {

namespace {

std::string errno_text(int code) { return std::generic_category().message(code); }

bool disabled_by_sysctl() {
  int value = 0;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> value;
  return value > 0;
}

Unavailable unavailable(int code) {
  switch (code) {
    case EPERM:
    case EACCES:
      if (disabled_by_sysctl()) return {code, errno_text(code), "set the sysctl kernel.io_uring_disabled to 0"};
      return {code, errno_text(code),
              "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile"};
    case ENOSYS:
      return {code, errno_text(code),
              "use Linux 5.11 or newer, with io_uring allowed by the container's seccomp profile"};
    case ENOMEM:
      return {code, errno_text(code), "raise the memlock limit (ulimit -l) or lower the queue depth"};
    case EMFILE:
    case ENFILE:
      return {code, errno_text(code), "raise the limit of open files (ulimit -n)"};
    default:
      return {code, errno_text(code), "use Linux 5.11 or newer"};
  }
}

// With these the kernel finishes requests on our thread, when we ask, instead of interrupting it. Linux 6.1.
constexpr unsigned kPreferredFlags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;

// Started disabled, so that the thread that enables it, not the one that makes it, becomes the single issuer.
int set_up(io_uring& ring, unsigned entries, bool& enabled) {
  enabled = false;
  int result = io_uring_queue_init(entries, &ring, kPreferredFlags | IORING_SETUP_R_DISABLED);
  if (result == -EINVAL) {
    enabled = true;
    result = io_uring_queue_init(entries, &ring, 0);
  }
  return -result;
}

bool has_operations(io_uring& ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  if (probe == nullptr) return false;
  bool all = true;
  for (const int code : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED, IORING_OP_FSYNC,
                         IORING_OP_POLL_ADD})
    all = all && io_uring_opcode_supported(probe, code) != 0;
  io_uring_free_probe(probe);
  return all && (ring.features & IORING_FEAT_EXT_ARG) != 0 && (ring.features & IORING_FEAT_NODROP) != 0;
}

void say_unregistered_once(int code, std::uint64_t bytes) {
  static std::once_flag said;
  std::call_once(said, [&] {
    spdlog::warn(
        "the kernel refused to register {} of transfer memory ({}): transfers work without registration, with "
        "a little more CPU time. To have it, raise the memlock limit (ulimit -l, LimitMEMLOCK=, or docker run "
        "--ulimit memlock=-1) above that, or grant CAP_IPC_LOCK.",
        format_bytes(bytes), errno_text(code));
  });
}

class IoUringBackend final : public Backend {
 public:
  explicit IoUringBackend(int event_descriptor) : files_(std::make_shared<RegisteredFiles>(event_descriptor)) {}

  ~IoUringBackend() override {
    if (!made_) return;
    start();  // a ring that is still disabled belongs to nobody; its files could not be let go of
    files_->detach();
    if (buffers_registered_) static_cast<void>(io_uring_unregister_buffers(&ring_));
    io_uring_queue_exit(&ring_);
  }

  // An errno, or 0.
  int make(const EngineOptions& options) {
    if (const int code = set_up(ring_, options.queue_depth + kOwnEntries, enabled_); code != 0) return code;
    made_ = true;
    if (!has_operations(ring_)) return ENOSYS;
    files_code_ = files_->prepare(ring_);
    register_buffers(options.registered_memory);
    return 0;
  }

  std::string description() const override {
    const auto part = [](const char* what, int code) {
      return code == 0 ? fmt::format("registered {}", what)
                       : fmt::format("unregistered {}: {}", what, errno_text(code));
    };
    if (slices_.empty() && buffers_code_ == 0) return fmt::format("io_uring ({})", part("files", files_code_));
    return fmt::format("io_uring ({}, {})", part("buffers", buffers_code_), part("files", files_code_));
  }

  void submit(Block& block) override {
    start();
    prepare(next_entry(), block);
    flush();
  }

  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    start();
    files_->serve();
    listen();
    std::size_t count = collect(done);
    if (count == 0 && !woken_) {
      wait(timeout);
      count = collect(done);
    }
    if (woken_) hear();
    return count;
  }

  void wake_up() override { files_->signal(); }

 private:
  static constexpr unsigned kOwnEntries = 1;  // the poll of the event descriptor

  void start() {
    if (started_) return;
    started_ = true;
    files_->start();
    if (!enabled_) {
      // liburing 2.3 declares io_uring_enable_rings but does not export it.
      const long result = ::syscall(__NR_io_uring_register, ring_.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
      HOIST_ASSERT(result == 0, "enabling the ring: {}", errno_text(errno));
    }
    static_cast<void>(io_uring_register_ring_fd(&ring_));  // spares a look-up per system call; absent before 5.18
  }

  void register_buffers(const std::vector<std::span<std::byte>>& memory) {
    if (memory.empty()) return;
    std::vector<iovec> vectors;
    std::uint64_t bytes = 0;
    for (const auto& slice : memory) {
      vectors.push_back({slice.data(), slice.size()});
      bytes += slice.size();
    }
    const int result = io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(vectors.size()));
    buffers_code_ = -result;
    if (result != 0) return say_unregistered_once(-result, bytes);
    buffers_registered_ = true;
    slices_ = memory;
  }

  // The registered slice that holds the block; -1: none does.
  int slice_of(const Block& block) const {
    for (std::size_t i = 0; i < slices_.size(); ++i) {
      const std::byte* begin = slices_[i].data();
      if (block.data >= begin && block.data + block.length_bytes <= begin + slices_[i].size())
        return static_cast<int>(i);
    }
    return -1;
  }

  void prepare(io_uring_sqe* entry, Block& block) {
    const int slot = files_->slot_of(*block.file, files_);
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

  io_uring_sqe* next_entry() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    HOIST_ASSERT(entry != nullptr, "more blocks in flight than the queue is deep");
    return entry;
  }

  // What the kernel cannot take now (it is short of memory) stays in the ring and goes with the next call.
  void flush() {
    const int result = io_uring_submit(&ring_);
    HOIST_ASSERT(result >= 0 || result == -EAGAIN || result == -EBUSY || result == -EINTR, "io_uring_submit: {}",
                 errno_text(-result));
  }

  // Asks to be told of the next wake-up; submitted with whatever is submitted next. A poll, not a read: nothing of
  // ours would be written to should the ring be taken apart meanwhile.
  void listen() {
    if (listening_) return;
    listening_ = true;
    io_uring_sqe* entry = next_entry();
    io_uring_prep_poll_add(entry, files_->event_descriptor(), POLLIN);
    io_uring_sqe_set_data(entry, nullptr);
  }

  void hear() {
    woken_ = false;
    eventfd_t value = 0;
    static_cast<void>(::eventfd_read(files_->event_descriptor(), &value));
    files_->serve();
  }

  void wait(Nanoseconds timeout) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    __kernel_timespec limit{.tv_sec = seconds.count(), .tv_nsec = (timeout - seconds).count()};
    io_uring_cqe* first = nullptr;
    const int result =
        io_uring_submit_and_wait_timeout(&ring_, &first, 1, timeout == kForever ? nullptr : &limit, nullptr);
    const bool expected = result >= 0 || result == -ETIME || result == -EINTR || result == -EAGAIN || result == -EBUSY;
    HOIST_ASSERT(expected, "io_uring_enter: {}", errno_text(-result));
    if (result == -EAGAIN || result == -EBUSY) ::usleep(kStarvedPauseUs);
  }

  std::size_t collect(std::span<Block*> done) {
    std::size_t count = 0;
    unsigned seen = 0;
    unsigned head = 0;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      if (count == done.size()) break;
      ++seen;
      auto* block = static_cast<Block*>(io_uring_cqe_get_data(entry));
      if (block == nullptr) {
        woken_ = true;
        listening_ = false;
        continue;
      }
      block->result = entry->res;
      done[count++] = block;
    }
    io_uring_cq_advance(&ring_, seen);
    return count;
  }

  static constexpr useconds_t kStarvedPauseUs = 100;

  io_uring ring_{};
  std::shared_ptr<RegisteredFiles> files_;
  std::vector<std::span<std::byte>> slices_;  // registered, in the kernel's order
  int buffers_code_ = 0;
  int files_code_ = 0;
  bool made_ = false;
  bool enabled_ = false;
  bool buffers_registered_ = false;
  // I/O thread only.
  bool started_ = false;
  bool listening_ = false;
  bool woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_io_uring_backend(const EngineOptions& options, Unavailable& why) {
  const int event_descriptor = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_descriptor < 0) {
    why = unavailable(errno);
    return nullptr;
  }
  auto backend = std::make_unique<IoUringBackend>(event_descriptor);
  if (const int code = backend->make(options); code != 0) {
    why = unavailable(code);
    return nullptr;
  }
  return backend;
}

}  // namespace hoist::aio::detail
