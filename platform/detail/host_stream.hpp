// SPDX-License-Identifier: Apache-2.0
// platform/detail/host_stream.hpp - a stream of the host device: a queue and one worker thread.
//
// Threading  Any thread enqueues; the worker alone executes, records and fails.
// Memory     Two operation lists alternate, so that a steady program allocates only for its events. The queue has no
//            bound: the budgets of the modules above limit the work in flight.
// Errors     The first exception of executed work is kept; later work is skipped, later events carry it.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include <hoist/core/mutex.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/platform/detail/host_kernels.hpp>
#include <hoist/platform/stream.hpp>
#include <hoist/platform/update_arrays.hpp>

namespace hoist::platform::detail {

struct HostStreamOptions {
  std::string name;
  Ledger* ledger = nullptr;
  std::uint64_t chaos_seed = 0;  // of this stream; 0 is off
  std::uint64_t link_bytes_per_second = 0;
  bool guarded = false;               // the device's memory (guard.hpp)
  std::atomic<int>* alive = nullptr;  // the device's count of its streams
};

class HostStream final : public Stream {
 public:
  explicit HostStream(HostStreamOptions options);
  ~HostStream() override;

  std::string_view name() const override { return options_.name; }
  StreamEvent record() override;
  void wait(const StreamEvent& event, WaitCause cause) override;
  void copy(std::byte* target, const std::byte* source, std::uint64_t bytes, CopyKind kind) override;
  void fill(std::byte* target, std::uint8_t value, std::uint64_t bytes) override;
  void scale_into(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                  std::uint64_t count, float scale, Combine combine) override;
  void sums_of_squares(double* partial, const std::byte* source, DType dtype, std::uint64_t count) override;
  void update(const UpdateFactors& factors, const UpdateArrays& arrays) override;
  void launch(std::string_view what, std::function<void()> work) override;
  void synchronize() override;
  std::function<void(CountIdle)> watch_idle() override;
  void* native() const override { return nullptr; }
  bool capturing() const override { return false; }

 private:
  Nanoseconds idle_time() const;  // all that there was so far
  struct Record {
    Promise passed;
  };
  struct Wait {
    StreamEvent event;
    WaitCause cause;
  };
  struct Copy {
    std::byte* target;
    const std::byte* source;
    std::uint64_t bytes;
    CopyKind kind;
  };
  struct Fill {
    std::byte* target;
    std::uint8_t value;
    std::uint64_t bytes;
  };
  struct Launch {
    std::function<void()> work;
  };
  using Operation =
      std::variant<std::monostate, Record, Wait, Copy, Fill, ScaleArguments, NormArguments, UpdateArguments, Launch>;

  void enqueue(Operation operation);
  void run();
  void execute(Operation& operation);
  void perform(const Wait& wait);
  void perform(const Copy& copy);
  void perform(const Fill& fill);
  void perform(const ScaleArguments& scale) { scale_on_host(scale); }
  void perform(const NormArguments& norm) { sums_of_squares_on_host(norm); }
  void perform(const UpdateArguments& update) { update_on_host(update); }
  void perform(const Launch& launch) { launch.work(); }
  void delay();
  void await_link(TimePoint start, std::uint64_t bytes);

  const HostStreamOptions options_;

  mutable Mutex mutex_;
  std::vector<Operation> queue_ HOIST_GUARDED_BY(mutex_);
  bool closing_ HOIST_GUARDED_BY(mutex_) = false;
  bool idle_ HOIST_GUARDED_BY(mutex_) = false;  // the worker sleeps because the queue is empty
  TimePoint idle_since_ HOIST_GUARDED_BY(mutex_){};
  Nanoseconds idle_total_ HOIST_GUARDED_BY(mutex_){0};

  // The worker's own.
  std::vector<Operation> batch_;
  std::exception_ptr error_;
  bool error_delivered_ = false;
  std::optional<Rng> chaos_;
  TimePoint link_free_at_{};

  // Last: starts after everything above exists. In a forked process neither of them can be destroyed.
  struct Worker {
    ConditionVariable changed;
    std::thread thread;
  };
  InOneProcess<Worker> worker_{std::make_unique<Worker>(), "a stream"};
};

}  // namespace hoist::platform::detail
