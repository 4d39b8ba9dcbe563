// SPDX-License-Identifier: Apache-2.0
#include <mutex>
#include <vector>

#include <hoist/aio/detail/quarantine.hpp>

namespace hoist::aio::detail {

void quarantine(const void* lost) {
  static std::mutex mutex;
  static auto* kept = new std::vector<const void*>;  // never destroyed: reachable to the end
  const std::lock_guard lock(mutex);
  kept->push_back(lost);
}

}  // namespace hoist::aio::detail
