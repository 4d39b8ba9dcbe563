// SPDX-License-Identifier: Apache-2.0
#include "host_stream.hpp"

#include <nanobind/nanobind.h>

#include <hoist/core/units.hpp>

#include "bindings.hpp"

namespace hoist::python {

HostStream::HostStream()
    : device_(platform::Device::create({.kind = platform::DeviceKind::host, .memory_bytes = kBlockAlignment})),
      stream_(device_->create_stream("torch")) {}

void HostStream::launch(void* stream, void (*run)(void*), void* work) {
  static_cast<platform::Stream*>(stream)->launch("operator", [run, work] { run(work); });
}

void HostStream::synchronize(void* stream) { static_cast<platform::Stream*>(stream)->synchronize(); }

void bind_host_stream(nanobind::module_& module) {
  namespace nb = nanobind;
  nb::class_<HostStream>(module, "HostStream",
                         "A stream of the host device, for PyTorch backends that compute in CPU memory (tests).")
      .def(nb::init<>())
      .def(
          "functions",
          [](HostStream& self) {
            return nb::make_tuple(reinterpret_cast<std::uintptr_t>(&self.stream()),
                                  reinterpret_cast<std::uintptr_t>(&HostStream::launch),
                                  reinterpret_cast<std::uintptr_t>(&HostStream::synchronize));
          },
          "Addresses: the stream, launch(stream, run, work) and synchronize(stream).");
}

}  // namespace hoist::python
