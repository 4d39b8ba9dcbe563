// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include <unistd.h>

#include <hoist/aio/detail/nameless_file.hpp>
#include <hoist/aio/detail/polling_probe.hpp>
#include <hoist/aio/detail/quarantine.hpp>
#include <hoist/aio/detail/uring_setup.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/thread.hpp>

namespace hoist::aio::detail {

namespace {

constexpr useconds_t kLookIntervalUs = 50;

const char* remedy_of(Polling polling) {
  return polling == Polling::submission
             ? "allow SQPOLL rings (Linux 5.11 or newer)"
             : "give the drive poll queues (nvme.poll_queues=N on the kernel's command line), use blocks no larger "
               "than "
               "one request of it (max_sectors_kb below /sys/block), and a file system with direct transfers";
}

// Everything that the kernel may use during a transfer. Made, used and destroyed on one thread.
class Probe {
 public:
  explicit Probe(const PollingQuestion& question) : question_(question) {}
  ~Probe() {
    if (ring_made_) io_uring_queue_exit(&ring_);
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // An errno, or 0.
  int run() {
    if (const int code = set_up(); code != 0) return code;
    if (question_.polling == Polling::completion) {
      if (const int code = prepare_file(); code != 0) return code;
    }
    start();
    for (const TimePoint deadline = Clock::now() + kProbeTimeout; Clock::now() < deadline; ::usleep(kLookIntervalUs)) {
      if (const auto code = look()) return *code;
    }
    return ETIMEDOUT;
  }

 private:
  int set_up() {
    unsigned flags = 0;
    if (const int code = set_up_ring(ring_, 1, question_.polling, flags); code != 0) return code;
    ring_made_ = true;
    if ((flags & IORING_SETUP_R_DISABLED) != 0) enable_ring(ring_);
    return 0;
  }

  // A block to read, really written before. Its pages are touched from the last to the first, so that they are as
  // scattered in memory as those of a block may be.
  int prepare_file() {
    file_.emplace(nameless_file(question_.directory, question_.block_bytes));
    if (!file_->is_direct()) return EOPNOTSUPP;
    buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(File::kAlignment, question_.block_bytes)));
    if (buffer_ == nullptr) return ENOMEM;
    for (std::uint64_t at = question_.block_bytes; at > 0; at -= File::kAlignment)
      std::fill_n(buffer_.get() + at - File::kAlignment, File::kAlignment, std::byte{1});
    return ::pwrite(file_->descriptor(), buffer_.get(), question_.block_bytes, 0) < 0 ? errno : 0;
  }

  void start() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (file_) {
      io_uring_prep_read(entry, file_->descriptor(), buffer_.get(), static_cast<unsigned>(question_.block_bytes), 0);
    } else {
      io_uring_prep_nop(entry);
    }
    static_cast<void>(io_uring_submit(&ring_));
  }

  // An errno, 0, or nullopt while it has not ended.
  std::optional<int> look() {
    static_cast<void>(io_uring_get_events(&ring_));  // never waits: it asks for no event
    io_uring_cqe* entry = nullptr;
    if (io_uring_peek_cqe(&ring_, &entry) != 0) return std::nullopt;
    return entry->res < 0 ? -entry->res : 0;
  }

  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };

  const PollingQuestion question_;
  io_uring ring_{};
  bool ring_made_ = false;
  std::unique_ptr<std::byte, Free> buffer_;
  std::optional<File> file_;
};

// Runs on its own thread, because the kernel state of a transfer that never ends belongs to its thread.
void run_probe(const PollingQuestion& question, std::promise<int> answer) {
  auto probe = std::make_unique<Probe>(question);
  int code = EIO;
  try {
    code = probe->run();
  } catch (const IoError& error) {
    code = error.where.code;
  }
  if (code == ETIMEDOUT) {
    quarantine(probe.release());
  } else {
    probe.reset();
  }
  answer.set_value(code);
}

}  // namespace

std::optional<Unavailable> probe_polling(const PollingQuestion& question) {
  std::promise<int> answer;
  std::future<int> code = answer.get_future();
  start_thread("hoist-probe", [question, answer = std::make_shared<std::promise<int>>(std::move(answer))] {
    run_probe(question, std::move(*answer));
  }).detach();
  // The probe gives up by itself; the second limit is for a thread that the kernel holds.
  const bool answered = code.wait_for(kProbeTimeout + kProbeTimeout / 4) == std::future_status::ready;
  const int result = answered ? code.get() : ETIMEDOUT;
  if (result == 0) return std::nullopt;
  return Unavailable{result, result == ETIMEDOUT ? "a probe never ended" : errno_text(result),
                     remedy_of(question.polling)};
}

}  // namespace hoist::aio::detail
