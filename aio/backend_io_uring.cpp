// SPDX-License-Identifier: Apache-2.0
// One ring, used only by the queue's I/O thread.
#include <cerrno>

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <hoist/aio/detail/backends.hpp>
#include <hoist/aio/detail/ring.hpp>
#include <hoist/aio/detail/uring_setup.hpp>

namespace hoist::aio::detail {

namespace {

class IoUringBackend final : public Backend {
 public:
  explicit IoUringBackend(int event_descriptor)
      : wake_up_(std::make_shared<const WakeUp>(event_descriptor)), ring_(wake_up_) {}

  // An errno, or 0.
  int make(const DriveQueueOptions& options) {
    const int code = ring_.make(options);
    description_ = fmt::format("io_uring ({})", ring_.description());
    return code;
  }

  std::string description() const override { return description_; }

  void submit(Block& block) override {
    ring_.start();
    ring_.put(block);
  }

  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    ring_.start();
    serve();
    std::size_t count = collect(done);
    if (count > 0) {
      ring_.flush();  // the queue is busy with these for a while: submit everything
    } else if (!wake_up_seen_) {
      ring_.wait(timeout);
      count = collect(done);
    }
    if (wake_up_seen_) clear_wake_up();
    return count;
  }

  void wake_up() override { wake_up_->signal(); }

 private:
  void serve() {
    ring_.serve_closing_files();
    if (poll_armed_) return;
    poll_armed_ = true;
    ring_.put_poll(wake_up_->descriptor());
  }

  std::size_t collect(std::span<Block*> done) {
    const Ring::Collected collected = ring_.collect(done);
    if (collected.polled) {
      wake_up_seen_ = true;
      poll_armed_ = false;
    }
    return collected.block_count;
  }

  void clear_wake_up() {
    wake_up_seen_ = false;
    wake_up_->clear();
    ring_.serve_closing_files();
  }

  const std::shared_ptr<const WakeUp> wake_up_;
  Ring ring_;
  std::string description_;
  // I/O thread only.
  bool poll_armed_ = false;
  bool wake_up_seen_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_io_uring_backend(const DriveQueueOptions& options, Unavailable& why) {
  const int event_descriptor = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_descriptor < 0) {
    why = io_uring_unavailable(errno);
    return nullptr;
  }
  auto backend = std::make_unique<IoUringBackend>(event_descriptor);
  if (const int code = backend->make(options); code != 0) {
    why = io_uring_unavailable(code);
    return nullptr;
  }
  return backend;
}

}  // namespace hoist::aio::detail
