// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/error.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/scheduler/executor.hpp>

namespace hoist::scheduler {

Executor::Executor(const std::string& name) : thread_(start_thread(name, [this] { run(); })) {}

Executor::~Executor() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Completion Executor::enqueue(std::function<void()> task) {
  Promise promise;
  const Completion completion = promise.completion();
  {
    MutexLock lock(mutex_);
    tasks_.push_back({std::move(task), std::move(promise)});
  }
  changed_.notify_all();
  return completion;
}

void Executor::drain() {
  MutexLock lock(mutex_);
  changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return tasks_.empty() && !busy_; });
  if (error_) std::rethrow_exception(error_);
}

void Executor::run() {
  const FloatEnvironment environment;  // of what tasks compute; threads inherit that of their makers
  MutexLock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    std::exception_ptr error = error_;
    lock.unlock();
    try {
      if (!error) task.work();
    } catch (...) {
      error = current_failure();
    }
    lock.lock();
    error_ = error;
    lock.unlock();
    task.promise.settle(error);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace hoist::scheduler
