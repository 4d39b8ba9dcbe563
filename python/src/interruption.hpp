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

// Keeps it, and has it raised: by the call of this thread that ends with an error because of it (raise_interruption()),
// or else by the next Python code of the main thread, be it one of these functions, where it is kept again. A second
// one that comes before is dropped.
void keep_interruption(nanobind::python_error error);

// Makes what this thread keeps Python's exception, once. Returns whether there was any.
bool raise_interruption();

// Calls a Python function that must have its effect and may be called twice: once more if the first call raises, and
// then what it raised is kept. Returns why the second call failed, or "".
template <class Call>
std::string call_in_spite_of_interruption(const Call& call) noexcept {
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
