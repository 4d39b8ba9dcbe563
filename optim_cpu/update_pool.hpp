// SPDX-License-Identifier: Apache-2.0
// optim_cpu/update_pool.hpp - the threads that update tiles: a oneTBB arena of fixed width.
//
// Threading  run() blocks its caller, who takes part in the work. Several threads may call run() at once.
//            The program's signals are not delivered to a thread that a run() starts, nor to the caller until run()
//            ends. oneTBB's workers belong to the whole process: those that the program's own use of oneTBB starts keep
//            its signals, and those of a run() have them blocked in the program's tasks, too.
// Memory     Threads are created at the first run(), not per run.
// Errors     run() rethrows an exception of `work`; items that have not begun are then skipped.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace hoist::optim {

struct UpdatePoolOptions {
  // 0: one for each of the processors below. A larger number works too, even where oneTBB sees fewer processors (in a
  // program that binds its main thread, as OMP_PROC_BIND does), unless the program set a lower tbb::global_control.
  unsigned threads = 0;
  // The processors of the workers, OS numbers; empty: those of the constructing thread.
  std::vector<int> processors;
};

class UpdatePool {
 public:
  // Errors: UsageError if the workers may not run on the requested processors.
  explicit UpdatePool(const UpdatePoolOptions& options = {});
  ~UpdatePool();
  UpdatePool(const UpdatePool&) = delete;
  UpdatePool& operator=(const UpdatePool&) = delete;

  unsigned threads() const;
  // Binds the calling thread to the processors of the workers. For threads that only call run(); a refusal changes
  // nothing.
  void bind_caller() const;
  // work(i) for every i in [0, count), in any order, in parallel. Each thread begins with its own contiguous span,
  // always the same for the same count, so that tiles tend to stay in its caches; then it helps the others.
  void run(std::size_t count, const std::function<void(std::size_t)>& work);

 private:
  struct Arena;
  std::unique_ptr<Arena> arena_;
};

}  // namespace hoist::optim
