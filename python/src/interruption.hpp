// SPDX-License-Identifier: Apache-2.0
// python/src/interruption.hpp - what a handler of a signal raises (Ctrl-C raises KeyboardInterrupt) while C++ waits, or
// in a Python function that C++ calls where no exception may leave. All functions: pre: the GIL is held.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>

#include <hoist/core/completion.hpp>

namespace hoist::python {

// Waits without the GIL, and lets handlers run a few times a second. Errors: the completion's, or what a handler
// raises; the operation then continues.
void wait_for(const Completion& completion);

// Keeps the exception. A call of this thread that fails because of it raises it (raise_interruption()); without such a
// call, it is raised when the main thread next runs Python code. While one is kept, further ones are dropped.
void keep_interruption(nanobind::python_error error);

// Makes what this thread keeps Python's exception, once. Returns whether there was any.
bool raise_interruption();

// Calls a Python function that must have its effect and may be called twice: once more if the first call raises, and
// then what it raised is kept. Returns why the second call failed, or "".
template <class Call>
std::string call_again_if_interrupted(const Call& call) noexcept {
  try {
    try {
      call();
    } catch (nanobind::python_error& error) {
      call();
      keep_interruption(std::move(error));
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace hoist::python
