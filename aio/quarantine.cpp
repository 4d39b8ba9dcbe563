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

std::atomic<unsigned> given_up{0};

}  // namespace

void note_given_up() noexcept { given_up.fetch_add(1, std::memory_order_relaxed); }
unsigned drives_given_up() noexcept { return given_up.load(std::memory_order_relaxed); }

}  // namespace hoist::aio
