// SPDX-License-Identifier: Apache-2.0
// One ring, used only by the queue's I/O thread. Completion polling needs a second ring, because a polled ring accepts
// only reads and writes of direct files; flushes and wake-ups stay on the first.
#include <cerrno>
#include <mutex>
#include <optional>

#include <fmt/format.h>
#include <sys/eventfd.h>

#include <hoist/aio/detail/backends.hpp>
#include <hoist/aio/detail/polling_probe.hpp>
#include <hoist/aio/detail/ring.hpp>
#include <hoist/aio/detail/uring_setup.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>

namespace hoist::aio::detail {

namespace {

const char* polling_name(Polling polling) {
  return polling == Polling::submission ? "submission polling" : "completion polling";
}

void say_not_polled_once(Polling polling, const Unavailable& why) {
  static std::once_flag said;
  std::call_once(said, [&] {
    log_warning("{} is not available ({}): transfers work without it. To have it, {}.", polling_name(polling),
                why.reason, why.remedy);
  });
}

class IoUringBackend final : public Backend {
 public:
  explicit IoUringBackend(int event_descriptor)
      : wake_up_(std::make_shared<const WakeUp>(event_descriptor)), ring_(wake_up_) {}

  // An errno, or 0.
  int make(const DriveQueueOptions& options) {
    const Polling polling = choose_polling(options);
    const Polling of_first = polling == Polling::completion ? Polling::none : polling;
    if (const int code = ring_.make(options, of_first); code != 0) return code;
    description_ = fmt::format("io_uring ({}{})", ring_.description(), note_);
    if (polling != Polling::completion) return 0;
    polled_.emplace(wake_up_);
    return polled_->make(options, polling);
  }

  std::string description() const override { return description_; }

  void submit(Block& block) override {
    start();
    const bool polled = polled_ && block.operation != Operation::sync && block.file->is_direct();
    if (polled) ++polled_in_flight_;
    (polled ? *polled_ : ring_).put(block);
  }

  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    start();
    serve();
    std::size_t count = collect(done);
    if (count > 0) {
      flush();  // the queue is busy with these for a while: submit everything
    } else if (!woken_) {
      wait(timeout);
      count = collect(done);
    }
    if (woken_) hear();
    return count;
  }

  void wake_up() override { wake_up_->signal(); }

 private:
  Polling choose_polling(const DriveQueueOptions& options) {
    if (options.polling == Polling::none) return Polling::none;
    const auto why = probe_polling({options.polling, options.directory, options.block_bytes});
    note_ = fmt::format(", {}{}", why ? "no " : "", polling_name(options.polling));
    if (!why) return options.polling;
    if (options.backend == BackendKind::io_uring)
      throw Error(fmt::format("{} is not available ({}); {}, or leave polling out", polling_name(options.polling),
                              why->reason, why->remedy));
    note_ += ": " + why->reason;
    say_not_polled_once(options.polling, *why);
    return Polling::none;
  }

  void start() {
    if (started_) return;
    started_ = true;
    ring_.start();
    if (polled_) polled_->start();
  }

  void serve() {
    ring_.serve_closing_files();
    if (polled_) polled_->serve_closing_files();
    if (listening_) return;
    listening_ = true;
    ring_.put_poll(wake_up_->descriptor());
  }

  void flush() {
    ring_.flush();
    if (polled_) polled_->flush();
  }

  void wait(Nanoseconds timeout) {
    if (polled_in_flight_ == 0) return ring_.wait(timeout);
    const TimePoint start = Clock::now();
    do {
      polled_->poll();
      ring_.poll();
    } while (!polled_->has_finished() && !ring_.has_finished() && Clock::now() - start < timeout);
  }

  std::size_t collect(std::span<Block*> done) {
    const Ring::Collected collected = ring_.collect(done);
    if (collected.polled) {
      woken_ = true;
      listening_ = false;
    }
    if (!polled_) return collected.block_count;
    const std::size_t polled = polled_->collect(done.subspan(collected.block_count)).block_count;
    polled_in_flight_ -= polled;
    return collected.block_count + polled;
  }

  void hear() {
    woken_ = false;
    wake_up_->clear();
    ring_.serve_closing_files();
    if (polled_) polled_->serve_closing_files();
  }

  const std::shared_ptr<const WakeUp> wake_up_;
  Ring ring_;
  std::optional<Ring> polled_;
  std::string note_;
  std::string description_;
  // I/O thread only.
  std::size_t polled_in_flight_ = 0;
  bool started_ = false;
  bool listening_ = false;
  bool woken_ = false;
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
