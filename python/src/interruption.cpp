// SPDX-License-Identifier: Apache-2.0
#include "interruption.hpp"

#include <chrono>
#include <optional>
#include <utility>

namespace hoist::python {

namespace {

struct Kept {
  nanobind::python_error error;
  unsigned long thread;
};

// Guarded by the GIL; lives as long as the process.
std::optional<Kept>& kept() {
  static auto* const held = new std::optional<Kept>();
  return *held;
}

int raise_kept(void*) {
  if (!kept()) return 0;
  kept()->error.restore();
  kept().reset();
  return -1;
}

}  // namespace

void wait_for(const Completion& completion) {
  while (true) {
    {
      const nanobind::gil_scoped_release release;
      if (completion.wait_for(std::chrono::milliseconds(200))) return;  // or throws the completion's error
    }
    if (PyErr_CheckSignals() != 0) nanobind::raise_python_error();
  }
}

void keep_interruption(nanobind::python_error error) {
  if (kept()) return;  // the first one ends the call as well
  kept().emplace(std::move(error), PyThread_get_thread_ident());
  Py_AddPendingCall(raise_kept, nullptr);
}

bool raise_interruption() {
  return kept() && kept()->thread == PyThread_get_thread_ident() && raise_kept(nullptr) != 0;
}

}  // namespace hoist::python
