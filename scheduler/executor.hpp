// SPDX-License-Identifier: Apache-2.0
// scheduler/executor.hpp - a thread that runs tasks in the order in which they were enqueued.
//
// Threading  One thread at a time enqueues; anyone may wait on the completions. A task may block on the disk.
// Errors     A task that throws fails its completion and every later one with the same error, which is no UsageError
//            or BudgetError (current_failure()); drain() rethrows it.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <thread>

#include <hoist/core/completion.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::scheduler {

class Executor {
 public:
  explicit Executor(const std::string& name);
  ~Executor();  // runs what was enqueued, then stops
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Done when the task has returned: its work is then submitted, but the device may not have done it yet.
  Completion enqueue(std::function<void()> task);
  void drain();

 private:
  struct Task {
    std::function<void()> work;
    Promise promise;
  };
  void run();

  Mutex mutex_;
  ConditionVariable changed_;
  std::deque<Task> tasks_ HOIST_GUARDED_BY(mutex_);
  std::exception_ptr error_ HOIST_GUARDED_BY(mutex_);
  bool stopping_ HOIST_GUARDED_BY(mutex_) = false;
  bool busy_ HOIST_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace hoist::scheduler
