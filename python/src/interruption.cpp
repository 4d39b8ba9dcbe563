// SPDX-License-Identifier: Apache-2.0
#include "interruption.hpp"

#include <optional>
#include <utility>

namespace hoist::python {

namespace {

// Guarded by the GIL; lives as long as the process.
std::optional<nanobind::python_error>& kept() {
  static auto* const held = new std::optional<nanobind::python_error>();
  return *held;
}

}  // namespace

void keep_interruption(nanobind::python_error error) {
  kept().emplace(std::move(error));
  Py_AddPendingCall([](void*) { return raise_interruption() ? -1 : 0; }, nullptr);
}

bool raise_interruption() {
  if (!kept()) return false;
  kept()->restore();
  kept().reset();
  return true;
}

}  // namespace hoist::python
