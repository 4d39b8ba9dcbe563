// SPDX-License-Identifier: Apache-2.0
// python/src/bindings.hpp - the parts of the module _hoist, one function for each.
#pragma once

#include <nanobind/nanobind.h>

namespace hoist::python {

void bind_errors(nanobind::module_& module);
void bind_config(nanobind::module_& module);
void bind_types(nanobind::module_& module);  // of the engine, as Python passes and gets them
void bind_host_stream(nanobind::module_& module);
void bind_unit_manager(nanobind::module_& module);  // what hoist.torch is built on
void bind_estimate(nanobind::module_& module);
void bind_aio(nanobind::module_& module);
void bind_optim(nanobind::module_& module);
void bind_stored(nanobind::module_& module);
void bind_attributes(nanobind::module_& module);

}  // namespace hoist::python
