// SPDX-License-Identifier: Apache-2.0
// optim_cpu/update_pool.hpp - the threads that update tiles: a oneTBB arena of fixed width.
//
// Threading  run() blocks its caller, who takes part in the work. Several threads may call run() at once.
// Errors     An exception thrown by `work` is rethrown by run().
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace hoist::optim {

struct UpdatePoolOptions {
  unsigned threads = 0;  // 0: as many as the process may use
  int numa_node = -1;    // negative: anywhere
};

class UpdatePool {
 public:
  explicit UpdatePool(const UpdatePoolOptions& options = {});
  ~UpdatePool();
  unsigned threads() const;
  // work(i) for every i in [0, count), in any order, in parallel.
  void run(std::size_t count, const std::function<void(std::size_t)>& work);

 private:
  struct Arena;
  std::unique_ptr<Arena> arena_;
};

}  // namespace hoist::optim
