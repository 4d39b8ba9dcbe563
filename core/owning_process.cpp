// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <vector>

#include <fmt/format.h>
#include <pthread.h>

#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/owning_process.hpp>

namespace hoist {

namespace {

std::atomic<unsigned> forks{0};
const int counting_forks = ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

OwningProcess::OwningProcess() noexcept : forks_(forks.load(std::memory_order_relaxed)) {
  static_cast<void>(counting_forks);
}

bool OwningProcess::is_this() const noexcept { return forks_ == forks.load(std::memory_order_relaxed); }

void OwningProcess::require_this(const char* what) const {
  if (is_this()) return;
  throw UsageError(
      fmt::format("this process was forked from the one that made {}, which works only there: its threads are not "
                  "copied; start this process by spawning instead of forking",
                  what));
}

void leave_unfreed(const void* memory) noexcept {
  static Mutex mutex;
  static auto* const left = new std::vector<const void*>;
  const MutexLock lock(mutex);
  left->push_back(memory);
}

}  // namespace hoist
