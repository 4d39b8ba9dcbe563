// SPDX-License-Identifier: Apache-2.0
// Completes every block at once without touching data or disk, so that only the queue's own overhead remains.
#include <algorithm>
#include <vector>

#include <hoist/aio/detail/backends.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::aio::detail {

namespace {

class NullBackend final : public Backend {
 public:
  explicit NullBackend(unsigned queue_depth) { finished_.reserve(queue_depth); }

  std::string description() const override { return "null (no data is moved)"; }

  void submit(Block& block) override {
    block.result = static_cast<std::int64_t>(block.length_bytes);
    finished_.push_back(&block);
  }

  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    if (finished_.empty()) wait(timeout);
    const std::size_t count = std::min(done.size(), finished_.size());
    std::copy_n(finished_.begin(), count, done.begin());
    finished_.erase(finished_.begin(), finished_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  void wake_up() override {
    const MutexLock lock(mutex_);
    woken_ = true;
    changed_.notify_one();
  }

 private:
  void wait(Nanoseconds timeout) {
    MutexLock lock(mutex_);
    changed_.wait_for(lock, timeout, [&]() HOIST_REQUIRES(mutex_) { return woken_; });
    woken_ = false;
  }

  std::vector<Block*> finished_;  // I/O thread only
  Mutex mutex_;
  ConditionVariable changed_;
  bool woken_ HOIST_GUARDED_BY(mutex_) = false;
};

}  // namespace

std::unique_ptr<Backend> make_null_backend(const DriveQueueOptions& options) {
  return std::make_unique<NullBackend>(options.queue_depth);
}

}  // namespace hoist::aio::detail
