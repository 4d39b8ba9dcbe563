// SPDX-License-Identifier: Apache-2.0
// python/src/unit_values.hpp - values of parameters in Python's memory, one unit after the other.
//
// Threading  Any thread, without the GIL; the pieces of a unit are filled before the next unit is asked for.
// Memory     Borrowed: `unit_values(unit)` keeps its tensors alive until it is called for the next unit.
// Errors     UsageError for a parameter without values, or with too few. An exception of `unit_values` becomes an
//            Error, which an engine may keep and throw again. raising() then throws the exception itself, once.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <nanobind/nanobind.h>

#include <hoist/zero/model.hpp>
#include <hoist/zero/types.hpp>

#include "tensor.hpp"

namespace hoist::python {

// A dense CPU tensor's memory.
struct Values {
  const void* data = nullptr;
  DType dtype = DType::fp32;
  std::uint64_t count = 0;
};

class UnitValues {
 public:
  // `unit_values(unit)` returns {parameter index: (address, type, count)}. Pre: the GIL is held.
  UnitValues(const Model& model, nanobind::callable unit_values)
      : model_(model), unit_values_(std::move(unit_values)) {}

  // Elements [first, first + out.size()), as fp32.
  void fill(ParameterId parameter, std::uint64_t first, std::span<float> out);
  // Throws what `unit_values` raised, if it has.
  void rethrow() {
    if (raised_) throw std::move(*raised_);
  }

 private:
  void load(std::uint32_t unit);

  const Model& model_;
  nanobind::callable unit_values_;
  std::mutex mutex_;
  std::optional<std::uint32_t> unit_;
  std::map<std::uint32_t, Values> values_;
  std::optional<nanobind::python_error> raised_;
};

// Changes of parameters whose values are in Python's memory, for Engine::write(). Used by one thread.
class UnitWrites {
 public:
  // `changes(unit)` returns [(parameter index, state, fp32 array, None or an array of bytes that says which values are
  // written)]. Pre: the GIL is held, also when this object is destroyed.
  explicit UnitWrites(nanobind::callable changes) : changes_(std::move(changes)) {}

  std::vector<StateChange> of(UnitId unit);  // without the GIL
  void rethrow() {
    if (raised_) throw std::move(*raised_);
  }

 private:
  using Choice = nb::ndarray<nb::ro, std::uint8_t, nb::shape<-1>, nb::device::cpu, nb::c_contig>;
  struct Arrays {
    ConstFloatArray values;
    std::optional<Choice> chosen;
  };

  nanobind::callable changes_;
  std::vector<Arrays> arrays_;  // of the last call's changes
  std::optional<nanobind::python_error> raised_;
};

// Carries out `call`, which uses `values`. If one of their callables has raised, Python gets that exception, not the
// Error that the engine made of it.
template <typename Call, typename... Each>
void raising(const Call& call, Each&... values) {
  try {
    call();
  } catch (...) {
    (values.rethrow(), ...);
    throw;
  }
}

}  // namespace hoist::python
