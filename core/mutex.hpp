// SPDX-License-Identifier: Apache-2.0
// core/mutex.hpp - mutexes and condition variables with annotations that Clang checks.
//
// Threading  Any thread.
#pragma once

#include <condition_variable>
#include <mutex>

// Marks for Clang's -Wthread-safety: a field marked HOIST_GUARDED_BY(mutex) is touched only while the mutex is locked,
// and a function marked HOIST_REQUIRES(mutex) is called only then. Every build with Clang checks it (the preset `tsan`,
// for one), and a breach is an error. Other compilers see nothing.
#ifdef __clang__
#define HOIST_LOCK_RULE(rule) __attribute__((rule))
#else
#define HOIST_LOCK_RULE(rule)
#endif
#define HOIST_GUARDED_BY(mutex) HOIST_LOCK_RULE(guarded_by(mutex))
#define HOIST_REQUIRES(...) HOIST_LOCK_RULE(requires_capability(__VA_ARGS__))
#define HOIST_NO_LOCK_CHECK HOIST_LOCK_RULE(no_thread_safety_analysis)

namespace hoist {

// std::mutex with the marks.
class HOIST_LOCK_RULE(capability("mutex")) Mutex {
 public:
  void lock() HOIST_LOCK_RULE(acquire_capability()) { mutex_.lock(); }
  bool try_lock() HOIST_LOCK_RULE(try_acquire_capability(true)) { return mutex_.try_lock(); }
  void unlock() HOIST_LOCK_RULE(release_capability()) { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// std::unique_lock with the marks: holds a mutex until its end, or between lock() and unlock().
class HOIST_LOCK_RULE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) HOIST_LOCK_RULE(acquire_capability(mutex)) : lock_(mutex.mutex_) {}
  // Takes over what try_lock() has locked.
  MutexLock(Mutex& mutex, std::adopt_lock_t adopt) HOIST_REQUIRES(mutex) : lock_(mutex.mutex_, adopt) {}
  ~MutexLock() HOIST_LOCK_RULE(release_capability()) = default;

  void lock() HOIST_LOCK_RULE(acquire_capability()) { lock_.lock(); }
  void unlock() HOIST_LOCK_RULE(release_capability()) { lock_.unlock(); }

 private:
  friend class ConditionVariable;
  std::unique_lock<std::mutex> lock_;
};

// std::condition_variable over a MutexLock. A condition that reads guarded fields says so:
//
//   changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return stopping_ || !tasks_.empty(); });
class ConditionVariable {
 public:
  void notify_one() noexcept { variable_.notify_one(); }
  void notify_all() noexcept { variable_.notify_all(); }

  void wait(MutexLock& lock) { variable_.wait(lock.lock_); }
  template <typename Condition>
  void wait(MutexLock& lock, Condition condition) HOIST_NO_LOCK_CHECK {
    variable_.wait(lock.lock_, condition);
  }
  template <typename Duration>
  std::cv_status wait_for(MutexLock& lock, Duration timeout) {
    return variable_.wait_for(lock.lock_, timeout);
  }
  template <typename Duration, typename Condition>
  bool wait_for(MutexLock& lock, Duration timeout, Condition condition) HOIST_NO_LOCK_CHECK {
    return variable_.wait_for(lock.lock_, timeout, condition);
  }
  template <typename Time, typename Condition>
  bool wait_until(MutexLock& lock, Time time, Condition condition) HOIST_NO_LOCK_CHECK {
    return variable_.wait_until(lock.lock_, time, condition);
  }

 private:
  std::condition_variable variable_;
};

}  // namespace hoist
