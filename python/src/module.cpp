// SPDX-License-Identifier: Apache-2.0
// python/src/module.cpp - the extension module _hoist. The package around it is python/hoist/.
#include "bindings.hpp"

NB_MODULE(_hoist, module) {
  module.doc() = "hoist's engine, configuration, storage and optimizers.";
  module.attr("version") = HOIST_VERSION;
  // PyTorch keeps hooks beyond the interpreter's end, which is no leak of ours.
  nanobind::set_leak_warnings(false);
  hoist::python::bind_errors(module);
  hoist::python::bind_config(module);
  hoist::python::bind_types(module);
  hoist::python::bind_host_stream(module);
  hoist::python::bind_unit_manager(module);
  hoist::python::bind_estimate(module);
  hoist::python::bind_aio(module);
  hoist::python::bind_optim(module);
  hoist::python::bind_stored(module);
  hoist::python::bind_attributes(module);
}
