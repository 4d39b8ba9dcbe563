// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/detail/engine_core.hpp>

namespace hoist {

// --- Lease -----------------------------------------------------------------------------------------------------------

Lease::Lease(Lease&& other) noexcept
    : engine_(std::move(other.engine_)),
      unit_(other.unit_),
      stream_(std::exchange(other.stream_, nullptr)),
      pass_(other.pass_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  const Lease ended(std::move(*this));  // releases what was held
  engine_ = std::move(other.engine_);
  unit_ = other.unit_;
  stream_ = std::exchange(other.stream_, nullptr);
  pass_ = other.pass_;
  return *this;
}

Lease::~Lease() {
  if (stream_ == nullptr) return;
  try {  // in a forked process too: release() refuses before it touches anything
    release(*stream_);
  } catch (...) {  // the engine keeps the error and gives it to the next call
  }
}

TensorView Lease::view(ParameterId parameter) const {
  if (stream_ == nullptr) throw UsageError("the lease was released");
  const auto engine = engine_.lock();
  if (!engine || !engine->pass->is_serial(pass_)) throw UsageError("the lease's pass has ended");
  engine->process.require_this("the engine");
  const detail::EngineCore& e = *engine;
  e.table.require(parameter);
  const detail::Parameter& p = e.table.parameter(parameter);
  const auto& tied = e.table.unit(unit_).tied;
  if (p.unit != unit_ && std::find(tied.begin(), tied.end(), p.unit) == tied.end()) {
    throw UsageError(fmt::format("parameter '{}' neither belongs nor is tied to unit '{}'",
                                 e.table.spec(parameter).name, e.table.unit(unit_).name));
  }
  const detail::Segment& segment = e.table.segment_of(parameter);
  std::byte* data =
      e.gatherer->address(p.unit) + segment.gathered_offset + p.first_element * dtype_bytes(segment.dtype);
  return {data, segment.dtype, e.table.spec(parameter).shape, e.runtime.options().device_ordinal};
}

void Lease::release(StreamRef stream) {
  if (stream_ == nullptr) throw UsageError("a lease was released twice");
  const auto engine = engine_.lock();
  if (engine) engine->process.require_this("the engine");
  const bool is_pinned = engine && engine->pass->is_serial(pass_);
  if (is_pinned) detail::refuse_capture(stream, "release()");  // otherwise the streams may be gone
  platform::Stream* const gathered_on = std::exchange(stream_, nullptr);
  if (!is_pinned) return;
  try {
    engine->gatherer->release(unit_, *gathered_on, stream);
  } catch (...) {
    engine->fail(std::current_exception());
    throw;
  }
}

// --- GradientLease ---------------------------------------------------------------------------------------------------

TensorView GradientLease::view(ParameterId parameter) const {
  const auto engine = engine_.lock();
  if (!engine || !engine->pass->is_serial(pass_) || engine->gradients->finished(unit_)) {
    throw UsageError("the gradients were finished, or their pass has ended");
  }
  engine->process.require_this("the engine");
  const detail::EngineCore& e = *engine;
  e.table.require(parameter);
  const detail::Parameter& p = e.table.parameter(parameter);
  const detail::Segment& segment = e.table.segment_of(parameter);
  if (p.unit != unit_ || !segment.trainable) {
    throw UsageError(fmt::format("parameter '{}' has no gradient in unit '{}'", e.table.spec(parameter).name,
                                 e.table.unit(unit_).name));
  }
  const detail::Gradients::Place place = e.gradients->place(segment);
  std::byte* data = data_ + place.offset_bytes + p.first_element * dtype_bytes(place.dtype);
  return {data, place.dtype, e.table.spec(parameter).shape, e.runtime.options().device_ordinal};
}

// --- PassScope -------------------------------------------------------------------------------------------------------

PassScope::PassScope(std::weak_ptr<detail::EngineCore> engine, std::uint64_t pass)
    : engine_(std::move(engine)), pass_(pass), exceptions_(std::uncaught_exceptions()) {}

PassScope::~PassScope() {
  const auto engine = engine_.lock();
  if (!engine || !engine->process.is_this()) return;  // moved from, or the pass is another process's
  if (!engine->pass->is_serial(pass_)) return;        // discarded
  try {
    engine->end_pass(std::uncaught_exceptions() <= exceptions_ ? detail::PassState::End::complete
                                                               : detail::PassState::End::dropped);
  } catch (...) {
    engine->fail(std::current_exception());
  }
}

}  // namespace hoist
