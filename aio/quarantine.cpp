// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <vector>

#include <hoist/aio/quarantine.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::aio {

void quarantine(const void* lost) {
  static Mutex mutex;
  static auto* kept = new std::vector<const void*>;  // never destroyed: reachable to the end
  const MutexLock lock(mutex);
  kept->push_back(lost);
}

namespace {

std::atomic<bool> given_up{false};

}  // namespace

void note_given_up() noexcept { given_up.store(true, std::memory_order_relaxed); }
bool a_drive_was_given_up() noexcept { return given_up.load(std::memory_order_relaxed); }

}  // namespace hoist::aio
