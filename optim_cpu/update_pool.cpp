// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <pthread.h>
#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>
#include <unistd.h>

#include <hoist/core/blocked_signals.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/processors.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/optim_cpu/update_pool.hpp>

// oneTBB is not built for the thread sanitizer, which therefore cannot see that it hands tasks over in order. This file
// is compiled without the sanitizer and reports the hand-overs to it; `work` stays checked. The library's own memory is
// not checked.
#ifdef HOIST_TSAN
extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);
extern "C" const char* __tsan_default_suppressions() { return "called_from_lib:libtbb.so\n"; }
#endif

namespace hoist::optim {

namespace {

void hand_over([[maybe_unused]] void* address) {
#ifdef HOIST_TSAN
  __tsan_release(address);
#endif
}

void take_over([[maybe_unused]] void* address) {
#ifdef HOIST_TSAN
  __tsan_acquire(address);
#endif
}

// oneTBB's allocator has an exit handler that waits for a lock. If a thread holds that lock during a fork, the lock
// stays held in the child, which does not have the thread, so the child would never end. Processes that are forked from
// now on therefore skip the exit handlers registered before the fork. Handlers that they register themselves do run,
// since the last registered handler runs first.
void end_forked_processes_early() {
  [[maybe_unused]] static const int once = ::pthread_atfork(nullptr, nullptr, [] {
    ::on_exit(
        [](int status, void*) {
          std::fflush(nullptr);
          ::_exit(status);
        },
        nullptr);
  });
}

// Binds workers while they are in the arena; oneTBB shares its workers between arenas. The calling thread stays where
// its program put it.
class WorkerBinding final : public tbb::task_scheduler_observer {
 public:
  WorkerBinding(tbb::task_arena& arena, Processors processors)
      : tbb::task_scheduler_observer(arena), processors_(std::move(processors)) {
    hand_over(this);
    observe(true);
  }
  ~WorkerBinding() override {
    observe(false);  // waits for callbacks in progress
    take_over(this);
  }

  void on_scheduler_entry(bool is_worker) override {
    if (!is_worker) return;
    take_over(this);
    before() = current_processors();
    bind_current_thread(processors_);
    hand_over(this);
  }
  void on_scheduler_exit(bool is_worker) override {
    if (is_worker) bind_current_thread(before());
  }

 private:
  static Processors& before() {
    thread_local Processors processors;
    return processors;
  }
  const Processors processors_;
};

// Tries the binding on a separate thread, so that a refusal is an error here and not ignored in a worker.
void check_processors(const Processors& processors) {
  bool accepted = false;
  start_thread("hoist-binding", [&] { accepted = bind_current_thread(processors); }).join();
  if (accepted) return;
  throw UsageError(fmt::format("this process may use none of the processors {}..{}; widen its cpuset or choose others",
                               processors.front(), processors.back()));
}

// [0, count) cut into one span per thread. A thread takes from its own span first, then from the others'.
class Spans {
 public:
  static constexpr std::size_t kMax = 64;  // wider arenas share spans

  Spans(std::size_t count, std::size_t threads) : used_(std::min({threads, kMax, count})) {
    for (std::size_t k = 0; k < used_; ++k) {
      spans_[k].next.store(begin(count, k), std::memory_order_relaxed);
      spans_[k].end = begin(count, k + 1);
    }
  }

  // The first exception is stored and stops all threads after their current item.
  void work_through(std::size_t own, const std::function<void(std::size_t)>& work) noexcept {
    try {
      for (std::size_t k = 0; k < used_; ++k) take_from(spans_[(own + k) % used_], work);
    } catch (...) {
      if (!stopped_.exchange(true)) error_ = std::current_exception();
    }
  }
  // Call when all threads are done.
  const std::exception_ptr& error() const { return error_; }

 private:
  struct alignas(64) Span {
    std::atomic<std::size_t> next{0};
    std::size_t end = 0;
  };
  void take_from(Span& span, const std::function<void(std::size_t)>& work) {
    while (!stopped_.load(std::memory_order_relaxed)) {
      const std::size_t i = span.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= span.end) return;
      work(i);
    }
  }
  std::size_t begin(std::size_t count, std::size_t k) const { return count / used_ * k + std::min(k, count % used_); }

  std::array<Span, kMax> spans_;
  std::size_t used_;
  std::atomic<bool> stopped_{false};
  std::exception_ptr error_;
};

// oneTBB set its thread limit when it started; a larger arena would not get more workers. The new limit is at least
// 256 threads, because the smallest of all live controls counts.
std::optional<tbb::global_control> allowance_for(unsigned threads) {
  if (static_cast<int>(threads) <= tbb::info::default_concurrency()) return std::nullopt;
  return std::optional<tbb::global_control>(std::in_place, tbb::global_control::max_allowed_parallelism,
                                            std::max<std::size_t>(threads, 256));
}

}  // namespace

struct UpdatePool::Arena {
  Arena(unsigned thread_count, Processors bound_to)
      : threads(thread_count),
        processors(std::move(bound_to)),
        allowance(allowance_for(thread_count)),
        arena(static_cast<int>(thread_count)) {
    arena.initialize();
    if (!processors.empty()) placement.emplace(arena, processors);
  }

  const unsigned threads;
  const Processors processors;
  std::optional<tbb::global_control> allowance;
  tbb::task_arena arena;
  std::optional<WorkerBinding> placement;
};

UpdatePool::UpdatePool(const UpdatePoolOptions& options) {
  end_forked_processes_early();
  Processors processors = options.processors;
  std::ranges::sort(processors);
  if (!processors.empty()) check_processors(processors);
  const std::size_t available = processors.empty() ? current_processors().size() : processors.size();
  const OtherSignalsBlocked blocked;
  arena_ = std::make_unique<Arena>(options.threads != 0 ? options.threads : static_cast<unsigned>(available),
                                   std::move(processors));
}

UpdatePool::~UpdatePool() {
  const OtherSignalsBlocked blocked;
  arena_.reset();
}

unsigned UpdatePool::threads() const { return arena_->threads; }

void UpdatePool::bind_caller() const {
  if (!arena_->processors.empty()) bind_current_thread(arena_->processors);
}

void UpdatePool::run(std::size_t count, const std::function<void(std::size_t)>& work) {
  if (count == 0) return;
  Spans spans(count, arena_->threads);
  const auto take_part = [&](unsigned) {
    take_over(&spans);
    spans.work_through(static_cast<std::size_t>(tbb::this_task_arena::current_thread_index()), work);
    hand_over(&spans);
  };
  hand_over(&spans);
  // A new thread inherits the signal mask of the thread that starts it. oneTBB starts workers from the calling thread
  // or from another worker, in any run, also when its limit of threads changes (above). So signals are blocked for the
  // whole run. An arena of one thread has no workers.
  std::optional<OtherSignalsBlocked> blocked;
  if (arena_->threads > 1) blocked.emplace();
  arena_->arena.execute([&] {
    // Isolated: a caller that waits for its own items must not pick up another caller's, whose locks it may hold.
    tbb::this_task_arena::isolate(
        [&] { tbb::parallel_for(0u, arena_->threads, take_part, tbb::static_partitioner()); });
  });
  take_over(&spans);
  if (spans.error()) std::rethrow_exception(spans.error());
}

}  // namespace hoist::optim
