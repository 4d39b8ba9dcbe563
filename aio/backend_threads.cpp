// SPDX-License-Identifier: Apache-2.0
// A pool of threads that call pread and pwrite: the same results where io_uring is not available.
#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <hoist/aio/detail/backends.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>

namespace hoist::aio::detail {

namespace {

constexpr const char* kThreadName = "hoist-aio-w";

// A file that has blocks here, with a descriptor of its own: when a drive is given up, the file is closed while blocks
// still wait, and a later one may get its number. It also keeps the file's lock until the last of them is done.
struct OpenFile {
  std::uint64_t id = 0;
  int descriptor = -1;
  unsigned blocks = 0;
};

struct Queued {
  Block* block = nullptr;
  int descriptor = -1;
};

// First in, first out; has space for every block that can be in flight, so pushing never allocates.
class BlockRing {
 public:
  explicit BlockRing(std::size_t capacity) : slots_(capacity) {}
  bool empty() const { return count_ == 0; }
  void push(Queued queued) { slots_[(first_ + count_++) % slots_.size()] = queued; }
  Queued pop() {
    const Queued queued = slots_[first_];
    first_ = (first_ + 1) % slots_.size();
    --count_;
    return queued;
  }

 private:
  std::vector<Queued> slots_;
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

std::int64_t transfer(const Block& block, int descriptor) {
  const auto offset = static_cast<off_t>(block.offset_bytes);
  ssize_t result = -1;
  switch (block.operation) {
    case Operation::read:
      result = ::pread(descriptor, block.data, block.length_bytes, offset);
      break;
    case Operation::write:
      result = ::pwrite(descriptor, block.data, block.length_bytes, offset);
      break;
    case Operation::sync:
      result = ::fdatasync(descriptor);
      break;
  }
  return result < 0 ? -errno : result;
}

class ThreadsBackend final : public Backend {
 public:
  ThreadsBackend(const DriveQueueOptions& options, const std::string& note)
      : description_(note.empty() ? fmt::format("threads ({})", options.thread_count)
                                  : fmt::format("threads ({})", note)),
        waiting_(options.queue_depth),
        finished_(options.queue_depth) {
    workers_.reserve(options.thread_count);
    try {
      for (unsigned i = 0; i < options.thread_count; ++i)
        workers_.push_back(start_thread(kThreadName, [this, options] { work(options); }));
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ThreadsBackend() override { stop(); }

  std::string description() const override { return description_; }

  void submit(Block& block) override {
    const MutexLock lock(mutex_);
    const Queued queued{&block, acquire(*block.file)};
    if (queued.descriptor < 0) {
      block.result = -errno;
      finished_.push(queued);
      return something_finished_.notify_one();
    }
    waiting_.push(queued);
    work_arrived_.notify_one();
  }

  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    MutexLock lock(mutex_);
    something_finished_.wait_for(lock, timeout, [&]() HOIST_REQUIRES(mutex_) { return !finished_.empty() || woken_; });
    woken_ = false;
    std::size_t count = 0;
    while (count < done.size() && !finished_.empty()) done[count++] = finished_.pop().block;
    return count;
  }

  void wake_up() override {
    const MutexLock lock(mutex_);
    woken_ = true;
    something_finished_.notify_one();
  }

 private:
  void work(const DriveQueueOptions& options) {
    enter_io_thread(kThreadName, options);
    MutexLock lock(mutex_);
    for (;;) {
      work_arrived_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Queued queued = waiting_.pop();
      lock.unlock();
      queued.block->result = transfer(*queued.block, queued.descriptor);
      lock.lock();
      release(queued.descriptor);
      finished_.push(queued);
      something_finished_.notify_one();
    }
  }

  // Descriptors are few (ulimit -n): one for each file, not one for each block. -1 with errno if there is none left.
  int acquire(const File& file) HOIST_REQUIRES(mutex_) {
    auto open = std::ranges::find(files_, file.id(), &OpenFile::id);
    if (open == files_.end()) {
      const int descriptor = ::fcntl(file.descriptor(), F_DUPFD_CLOEXEC, 0);
      if (descriptor < 0) return -1;
      open = files_.insert(files_.end(), {file.id(), descriptor, 0});
    }
    ++open->blocks;
    return open->descriptor;
  }
  void release(int descriptor) HOIST_REQUIRES(mutex_) {
    const auto open = std::ranges::find(files_, descriptor, &OpenFile::descriptor);
    if (--open->blocks > 0) return;
    ::close(descriptor);
    files_.erase(open);
  }

  void stop() noexcept {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
      work_arrived_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
  }

  const std::string description_;
  Mutex mutex_;
  ConditionVariable work_arrived_;
  ConditionVariable something_finished_;
  BlockRing waiting_ HOIST_GUARDED_BY(mutex_);
  BlockRing finished_ HOIST_GUARDED_BY(mutex_);
  std::vector<OpenFile> files_ HOIST_GUARDED_BY(mutex_);
  bool woken_ HOIST_GUARDED_BY(mutex_) = false;
  bool stopping_ HOIST_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(const DriveQueueOptions& options, const std::string& note) {
  return std::make_unique<ThreadsBackend>(options, note);
}

}  // namespace hoist::aio::detail
