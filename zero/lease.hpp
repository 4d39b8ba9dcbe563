// SPDX-License-Identifier: Apache-2.0
// zero/lease.hpp - pins on gathered weights, and on gradient memory.
#pragma once

#include <memory>

#include <hoist/zero/types.hpp>

namespace hoist {

class Engine;
namespace detail {
class EngineCore;
}

// The gathered weights of a unit (and of the parameters tied to it), valid on the stream given to gather() from that
// call on. Shared: gathering a unit that is already gathered yields another lease on the same memory, so recomputation
// nests. Destroying a lease that was not released releases it on the stream it was gathered on. A lease may outlive its
// pass and its engine: it then no longer pins anything, as if it had been released on that stream when they ended. The
// stream therefore outlives the lease, or the pass: declare it before the engine.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  UnitId unit() const { return unit_; }
  // The whole parameter, in device memory. Pre: it belongs to the unit or is tied to it. Errors: UsageError.
  // Use it in the order of the stream: in a kernel on Stream::native(); on the host device, work that
  // Stream::launch() runs, or the program's own thread after Stream::synchronize().
  TensorView view(ParameterId parameter) const;
  // Ends the lease; work enqueued on `stream` before this call may still read the weights. Every rank ends its leases,
  // by this or by destroying them, at the same place among the calls marked [C]: what is gathered next depends on them.
  // Errors: UsageError when released twice.
  void release(StreamRef stream);

 private:
  friend class Engine;
  Lease(std::weak_ptr<detail::EngineCore> engine, UnitId unit, StreamRef stream, std::uint64_t pass)
      : engine_(std::move(engine)), unit_(unit), stream_(&*stream), pass_(pass) {}
  std::weak_ptr<detail::EngineCore> engine_;
  UnitId unit_{};
  platform::Stream* stream_ = nullptr;  // gathered on; null when there is nothing to release
  std::uint64_t pass_ = 0;
};

// The gradient memory of a unit in the pass under way: zeroed, on the stream, at the first request of a micro-batch,
// then accumulated into in the stream's order, until finish(). One element type per parameter: the parameter's own, or
// fp32 in a pass that holds several micro-batches (vertical order). The stream given to gradients() lives until
// finish() or the end of the pass.
class GradientLease {
 public:
  // Errors: UsageError for a parameter of another unit or a frozen one, and after finish() or the pass.
  TensorView view(ParameterId parameter) const;

 private:
  friend class Engine;
  GradientLease(std::weak_ptr<detail::EngineCore> engine, UnitId unit, std::byte* data, std::uint64_t pass)
      : engine_(std::move(engine)), unit_(unit), data_(data), pass_(pass) {}
  std::weak_ptr<detail::EngineCore> engine_;
  UnitId unit_{};
  std::byte* data_ = nullptr;
  std::uint64_t pass_ = 0;
};

// A pass under way. Ends when destroyed; left by an exception, the pass's gradients are dropped (Engine::discard).
class PassScope {
 public:
  PassScope(PassScope&& other) noexcept = default;
  PassScope& operator=(PassScope&&) = delete;
  ~PassScope();

 private:
  friend class Engine;
  PassScope(std::weak_ptr<detail::EngineCore> engine, std::uint64_t pass);
  std::weak_ptr<detail::EngineCore> engine_;
  std::uint64_t pass_ = 0;
  int exceptions_ = 0;
};

}  // namespace hoist
