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

void* HostStream::record(void* stream) {
  return new platform::StreamEvent(static_cast<platform::Stream*>(stream)->record());
}

void HostStream::wait(void* stream, const void* event) {
  static_cast<platform::Stream*>(stream)->wait(*static_cast<const platform::StreamEvent*>(event), WaitCause::none);
}

bool HostStream::reached(const void* event) { return static_cast<const platform::StreamEvent*>(event)->reached(); }

void HostStream::forget(void* event) { delete static_cast<platform::StreamEvent*>(event); }

void bind_host_stream(nanobind::module_& module) {
  namespace nb = nanobind;
  nb::class_<HostStream>(module, "HostStream",
                         "A stream of the host device, for PyTorch backends that compute in CPU memory (tests).")
      .def(nb::init<>())
      .def_prop_ro("address", [](HostStream& self) { return reinterpret_cast<std::uintptr_t>(&self.stream()); })
      .def_static(
          "functions",
          [] {
            return nb::make_tuple(reinterpret_cast<std::uintptr_t>(&HostStream::launch),
                                  reinterpret_cast<std::uintptr_t>(&HostStream::synchronize),
                                  reinterpret_cast<std::uintptr_t>(&HostStream::record),
                                  reinterpret_cast<std::uintptr_t>(&HostStream::wait),
                                  reinterpret_cast<std::uintptr_t>(&HostStream::reached),
                                  reinterpret_cast<std::uintptr_t>(&HostStream::forget));
          },
          "Addresses: launch(stream, run, work), synchronize(stream), record(stream) -> event, wait(stream, event), "
          "reached(event) and forget(event).");
}

}  // namespace hoist::python
