// SPDX-License-Identifier: Apache-2.0
// The engine's words in Python: what hoist.torch and hoist.optim pass to a UnitManager and get from it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <hoist/zero/types.hpp>

#include "bindings.hpp"
#include "interruption.hpp"

namespace hoist::python {

namespace nb = nanobind;
using namespace nb::literals;

void bind_types(nb::module_& module) {
  nb::enum_<DType>(module, "DType").value("bf16", DType::bf16).value("fp16", DType::fp16).value("fp32", DType::fp32);
  nb::enum_<Pass>(module, "Pass")
      .value("train", Pass::train)
      .value("evaluate", Pass::evaluate)
      .value("generate", Pass::generate);
  nb::enum_<State>(module, "State")
      .value("master", State::master)
      .value("moment1", State::moment1)
      .value("moment2", State::moment2)
      .value("gradient", State::gradient);

  nb::class_<ParameterSpec>(module, "ParameterSpec", "A parameter as it is declared.")
      .def(
          "__init__",
          [](ParameterSpec* self, std::string name, std::vector<std::int64_t> shape, DType dtype, bool trainable,
             std::uint32_t group, bool counts_in_norm) {
            new (self) ParameterSpec{.name = std::move(name),
                                     .shape = std::move(shape),
                                     .dtype = dtype,
                                     .trainable = trainable,
                                     .group = GroupId{group},
                                     .counts_in_norm = counts_in_norm};
          },
          "name"_a, "shape"_a, "dtype"_a = DType::bf16, "trainable"_a = true, "group"_a = 0, "counts_in_norm"_a = true)
      .def_ro("name", &ParameterSpec::name)
      .def_ro("shape", &ParameterSpec::shape)
      .def_ro("dtype", &ParameterSpec::dtype)
      .def_ro("trainable", &ParameterSpec::trainable);

  nb::class_<Completion>(module, "Completion", "Something that can be seen to finish.")
      .def("done", &Completion::done)
      .def("wait", &wait_for, "Blocks, without the GIL; raises what went wrong.");

  nb::class_<StepReport>(module, "StepReport", "What a step did.")
      .def_ro("step", &StepReport::step, "Counted from 1; unchanged when not applied.")
      .def_ro("applied", &StepReport::applied, "False: a gradient was not finite, and the step was skipped.")
      .def_ro("gradient_norm", &StepReport::gradient_norm, "Global, before clipping.")
      .def_ro("clip_factor", &StepReport::clip_factor)
      .def_ro("loss_scale", &StepReport::loss_scale, "What this step's losses were multiplied by.")
      .def_ro("learning_rate", &StepReport::learning_rate)
      .def_ro("committed", &StepReport::committed, "Done when the step is durable.");

  nb::class_<StepBytes>(module, "StepBytes", "Bytes one step moves over each link.")
      .def_ro("nvme_read", &StepBytes::nvme_read)
      .def_ro("nvme_write", &StepBytes::nvme_write)
      .def_ro("host_to_device", &StepBytes::host_to_device)
      .def_ro("device_to_host", &StepBytes::device_to_host)
      .def_ro("wire", &StepBytes::wire);
}

}  // namespace hoist::python
