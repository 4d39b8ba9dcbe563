// SPDX-License-Identifier: Apache-2.0
#include "host_stream.hpp"

#include <memory>
#include <utility>

#include <nanobind/nanobind.h>

#include <hoist/core/units.hpp>

#include "bindings.hpp"

namespace hoist::python {

namespace {

// Like a GPU's stream, it goes on when the work that it waits for has failed: operators compute with whatever is in
// memory, and the engine's next call reports the error. (A stream of the host device would do nothing more.)
class TorchStream final : public platform::Stream {
 public:
  TorchStream(std::unique_ptr<platform::Stream> stream, StreamTimes& times)
      : times_(&times), stream_(std::move(stream)) {}

  void wait(const platform::StreamEvent& event, WaitCause cause) override {
    stream_->launch("wait", [event, cause, times = times_] {
      const TimePoint begin = Clock::now();
      try {
        event.wait();
      } catch (...) {
      }
      times->waits.waited(cause, Clock::now() - begin);
    });
  }

  std::string_view name() const override { return stream_->name(); }
  platform::StreamEvent record() override { return stream_->record(); }
  void copy(std::byte* target, const std::byte* source, std::uint64_t bytes, platform::CopyKind kind) override {
    timed([&] { stream_->copy(target, source, bytes, kind); });
  }
  void fill(std::byte* target, std::uint8_t value, std::uint64_t bytes) override {
    timed([&] { stream_->fill(target, value, bytes); });
  }
  void scale_into(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                  std::uint64_t count, float scale, Combine combine) override {
    timed([&] { stream_->scale_into(target, target_dtype, source, source_dtype, count, scale, combine); });
  }
  void sums_of_squares(double* partial, const std::byte* source, DType dtype, std::uint64_t count) override {
    timed([&] { stream_->sums_of_squares(partial, source, dtype, count); });
  }
  void update(const UpdateFactors& factors, const platform::UpdateArrays& arrays) override {
    timed([&] { stream_->update(factors, arrays); });
  }
  void launch(std::string_view what, std::function<void()> work) override { stream_->launch(what, std::move(work)); }
  void synchronize() override { stream_->synchronize(); }
  std::function<void(CountIdle)> watch_idle() override { return stream_->watch_idle(); }
  void* native() const override { return nullptr; }
  bool capturing() const override { return false; }

 private:
  // Counts how long the stream takes for the engine's work.
  template <typename Enqueue>
  void timed(const Enqueue& enqueue) {
    stream_->launch("begin", [times = times_] { times->begin = Clock::now(); });
    enqueue();
    stream_->launch("end", [times = times_] { times->kernels_ns += (Clock::now() - times->begin).count(); });
  }

  StreamTimes* const times_;
  const std::unique_ptr<platform::Stream> stream_;
};

}  // namespace

TorchHostStream::TorchHostStream()
    : times_(std::make_unique<StreamTimes>()),
      device_(platform::Device::create({.kind = platform::DeviceKind::host, .memory_bytes = kBlockAlignment}),
              "a stream"),
      stream_(std::make_unique<TorchStream>(device_->create_stream("torch"), *times_), "a stream") {}

void TorchHostStream::launch(void* stream, void (*run)(void*), void* work) {
  static_cast<platform::Stream*>(stream)->launch("operator", [run, work] { run(work); });
}

void TorchHostStream::synchronize(void* stream) { static_cast<platform::Stream*>(stream)->synchronize(); }

void* TorchHostStream::record(void* stream) {
  return new platform::StreamEvent(static_cast<platform::Stream*>(stream)->record());
}

void TorchHostStream::wait(void* stream, const void* event) {
  static_cast<platform::Stream*>(stream)->wait(*static_cast<const platform::StreamEvent*>(event), WaitCause::none);
}

bool TorchHostStream::reached(const void* event) { return static_cast<const platform::StreamEvent*>(event)->reached(); }

void TorchHostStream::forget(void* event) { delete static_cast<platform::StreamEvent*>(event); }

void bind_host_stream(nanobind::module_& module) {
  namespace nb = nanobind;
  nb::class_<TorchHostStream>(module, "HostStream",
                              "A stream of the host device, for PyTorch backends that compute in CPU memory (tests).")
      .def(nb::init<>())
      .def_prop_ro("address", [](TorchHostStream& self) { return reinterpret_cast<std::uintptr_t>(&self.stream()); })
      .def(
          "waits",
          [](const TorchHostStream& self) {
            nb::dict waits;
            for (std::size_t cause = 0; cause < kWaitCauseCount; ++cause) {
              const auto which = static_cast<WaitCause>(cause);
              waits[wait_cause_name(which)] = to_seconds(self.times().waits.waited(which));
            }
            return waits;
          },
          "Seconds that the stream has waited for the engine, by cause.")
      .def_prop_ro(
          "kernel_seconds",
          [](const TorchHostStream& self) { return 1e-9 * static_cast<double>(self.times().kernels_ns); },
          "What the engine's copies and kernels on the stream have taken.")
      .def(
          "watch_idle",
          [](TorchHostStream& self) {
            return nb::cpp_function([tell = self.stream().watch_idle()] {
              double seconds = 0;
              tell([&](Nanoseconds idle) { seconds = to_seconds(idle); });
              return seconds;
            });
          },
          "A function that returns, once, how many seconds the stream has had nothing to do since.")
      .def_static(
          "functions",
          [] {
            return nb::make_tuple(reinterpret_cast<std::uintptr_t>(&TorchHostStream::launch),
                                  reinterpret_cast<std::uintptr_t>(&TorchHostStream::synchronize),
                                  reinterpret_cast<std::uintptr_t>(&TorchHostStream::record),
                                  reinterpret_cast<std::uintptr_t>(&TorchHostStream::wait),
                                  reinterpret_cast<std::uintptr_t>(&TorchHostStream::reached),
                                  reinterpret_cast<std::uintptr_t>(&TorchHostStream::forget));
          },
          "Addresses: launch(stream, run, work), synchronize(stream), record(stream) -> event, wait(stream, event), "
          "reached(event) and forget(event).");
}

}  // namespace hoist::python
