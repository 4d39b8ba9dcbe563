// SPDX-License-Identifier: Apache-2.0
// python/src/module.cpp - the extension module _hoist. The package around it is python/hoist/.
#include <cstdio>
#include <cstdlib>

#include <pthread.h>
#include <unistd.h>

#include "bindings.hpp"

namespace {
// A process that the program forked ends without the handlers of libraries that wait for threads it does not have:
// TBB's allocator waits for ever if one of its threads was allocating when the process was forked. Python has run its
// own handlers by then. on_exit()'s last function runs first.
void end_forked_processes_early() {
  ::pthread_atfork(nullptr, nullptr, [] {
    ::on_exit(
        [](int status, void*) {
          std::fflush(nullptr);
          ::_exit(status);
        },
        nullptr);
  });
}
}  // namespace

NB_MODULE(_hoist, module) {
  module.doc() = "hoist's engine, configuration, storage and optimizers.";
  module.attr("version") = HOIST_VERSION;
  // PyTorch keeps hooks beyond the interpreter's end, which is no leak of ours.
  nanobind::set_leak_warnings(false);
  end_forked_processes_early();
  hoist::python::bind_errors(module);
  hoist::python::bind_config(module);
  hoist::python::bind_engine(module);
  hoist::python::bind_host_stream(module);
  hoist::python::bind_unit_manager(module);
  hoist::python::bind_estimate(module);
  hoist::python::bind_aio(module);
  hoist::python::bind_optim(module);
  hoist::python::bind_stored(module);
}
