// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/error.hpp>
#include <hoist/zero/detail/engine_impl.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace hoist {

// --- Lease -----------------------------------------------------------------------------------------------------------

Lease::Lease(Lease&& other) noexcept
    : engine_(std::exchange(other.engine_, nullptr)), unit_(other.unit_), stream_(other.stream_), pass_(other.pass_) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this == &other) return *this;
  const Lease ended(std::move(*this));  // releases what was held
  engine_ = std::exchange(other.engine_, nullptr);
  unit_ = other.unit_;
  stream_ = other.stream_;
  pass_ = other.pass_;
  return *this;
}

Lease::~Lease() {
  if (engine_ == nullptr) return;
  try {
    release(*stream_);
  } catch (...) {  // the engine keeps the error and gives it to the next call
  }
}

TensorView Lease::view(ParameterId parameter) const {
  if (engine_ == nullptr) throw UsageError("the lease was released");
  const Engine::Impl& e = *engine_->impl_;
  if (pass_ != e.pass_serial || !e.pass) throw UsageError("the lease's pass has ended");
  if (parameter.index >= e.table.specs().size()) throw UsageError(fmt::format("there is no parameter {}", parameter.index));
  const detail::Parameter& p = e.table.parameter(parameter);
  const auto& tied = e.table.unit(unit_).tied;
  if (p.unit != unit_ && std::find(tied.begin(), tied.end(), p.unit) == tied.end()) {
    throw UsageError(fmt::format("parameter '{}' neither belongs nor is tied to unit '{}'", e.table.spec(parameter).name,
                                 e.table.unit(unit_).name));
  }
  const detail::Segment& segment = e.table.segment_of(parameter);
  std::byte* data = e.live.gatherer->address(p.unit) + segment.gathered_offset + p.first_element * dtype_bytes(segment.dtype);
  return {.data = data, .dtype = segment.dtype, .shape = e.table.spec(parameter).shape, .device = e.runtime.options().device_ordinal};
}

void Lease::release(StreamRef stream) {
  if (engine_ == nullptr) throw UsageError("a lease was released twice");
  Engine::Impl& e = *std::exchange(engine_, nullptr)->impl_;
  if (pass_ != e.pass_serial || !e.pass) return;
  try {
    e.live.gatherer->release(unit_, stream);
  } catch (...) {
    if (!e.failure) e.failure = std::current_exception();
    throw;
  }
}

// --- GradientLease ---------------------------------------------------------------------------------------------------

TensorView GradientLease::view(ParameterId parameter) const {
  const Engine::Impl& e = *engine_->impl_;
  if (parameter.index >= e.table.specs().size()) throw UsageError(fmt::format("there is no parameter {}", parameter.index));
  const detail::Parameter& p = e.table.parameter(parameter);
  const detail::Segment& segment = e.table.segment_of(parameter);
  if (p.unit != unit_ || !segment.trainable) {
    throw UsageError(fmt::format("parameter '{}' has no gradient in unit '{}'", e.table.spec(parameter).name, e.table.unit(unit_).name));
  }
  return {.data = data_ + segment.gradient_offset + p.first_element * dtype_bytes(segment.dtype),
          .dtype = segment.dtype,
          .shape = e.table.spec(parameter).shape,
          .device = e.runtime.options().device_ordinal};
}

// --- PassScope -------------------------------------------------------------------------------------------------------

PassScope::PassScope(Engine& engine) : engine_(&engine), exceptions_(std::uncaught_exceptions()) {}

PassScope::PassScope(PassScope&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)), exceptions_(other.exceptions_) {}

PassScope::~PassScope() {
  if (engine_ == nullptr) return;
  if (std::uncaught_exceptions() > exceptions_) {
    engine_->discard();
    return;
  }
  try {
    engine_->impl_->end_pass(/*complete=*/true);
  } catch (...) {
    engine_->impl_->failure = std::current_exception();
  }
}

}  // namespace hoist
