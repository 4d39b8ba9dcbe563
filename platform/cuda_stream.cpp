// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/platform/detail/cuda_kernels.hpp>
#include <hoist/platform/detail/cuda_stream.hpp>

namespace hoist::platform::detail {

namespace {

cudaMemcpyKind cuda_kind(CopyKind kind) {
  switch (kind) {
    case CopyKind::host_to_device:
      return cudaMemcpyHostToDevice;
    case CopyKind::device_to_host:
      return cudaMemcpyDeviceToHost;
    case CopyKind::local:
      return cudaMemcpyDeviceToDevice;
  }
  return cudaMemcpyDefault;
}

}  // namespace

CudaEvent::CudaEvent(std::shared_ptr<CudaCore> core)
    : core_(std::move(core)), event_(core_, PooledEvent::Timing::off) {}

bool CudaEvent::reached() const {
  const CurrentGpu gpu(core_->ordinal());
  const cudaError_t code = cudaEventQuery(event_.get());
  if (code != cudaSuccess) static_cast<void>(cudaGetLastError());
  return code != cudaErrorNotReady;  // an error counts as reached: wait() and completion() deliver it
}

void CudaEvent::wait() const {
  const CurrentGpu gpu(core_->ordinal());
  cuda_check(cudaEventSynchronize(event_.get()), "cudaEventSynchronize");
  if (core_->ledger() != nullptr) core_->collect();
}

Completion CudaEvent::completion() const { return core_->completion(event_.get(), shared_from_this()); }

CudaStream::CudaStream(CudaStreamOptions options) : options_(std::move(options)) { options_.alive->fetch_add(1); }

CudaStream::~CudaStream() {
  if (!process_.is_this()) return;
  with_gpu(options_.core->ordinal(), [&] {
    if (options_.owner == CudaStreamOptions::Owner::hoist) drain_and_destroy();
    if (options_.core->ledger() != nullptr) options_.core->collect();
  });
  options_.alive->fetch_sub(1);
}

// Drained, like a host stream: buffers of work in flight may be freed right after.
void CudaStream::drain_and_destroy() {
  const cudaError_t drained = cudaStreamSynchronize(options_.stream);
  const cudaError_t destroyed = cudaStreamDestroy(options_.stream);
  for (const cudaError_t code : {drained, destroyed}) {
    if (code == cudaSuccess) continue;
    log_error("stream {} ended with an error: {}", options_.name, cudaGetErrorString(code));
    static_cast<void>(cudaGetLastError());  // or the embedding program would find it after a call of its own
  }
}

StreamEvent CudaStream::record() {
  auto event = std::make_shared<CudaEvent>(options_.core);
  const CurrentGpu gpu(options_.core->ordinal());
  cuda_check(cudaEventRecord(event->get(), options_.stream), "cudaEventRecord");
  return StreamEvent(std::move(event));
}

PooledEvent CudaStream::mark(PooledEvent::Timing timing) {
  PooledEvent event(options_.core, timing);
  cuda_check(cudaEventRecord(event.get(), options_.stream), "cudaEventRecord");
  return event;
}

template <typename Enqueue>
void CudaStream::measured(Measure::Meaning meaning, Enqueue enqueue) {
  const CurrentGpu gpu(options_.core->ordinal());
  if (options_.core->ledger() == nullptr) return enqueue();
  PooledEvent start = mark(PooledEvent::Timing::on);
  enqueue();
  options_.core->measure(options_.stream, {std::move(start), mark(PooledEvent::Timing::on), std::move(meaning)});
}

// An event is reached when the work before it is done: the time between two that follow each other is the time in which
// there was none.
std::function<void(Stream::CountIdle)> CudaStream::watch_idle() {
  if (options_.core->ledger() == nullptr) return [](const CountIdle&) {};
  const CurrentGpu gpu(options_.core->ordinal());
  return [this, start = std::make_shared<PooledEvent>(mark(PooledEvent::Timing::on))](CountIdle count) {
    const CurrentGpu current(options_.core->ordinal());
    options_.core->measure(options_.stream, {std::move(*start), mark(PooledEvent::Timing::on), std::move(count)});
  };
}

void CudaStream::wait(const StreamEvent& event, WaitCause cause) {
  const auto* point = dynamic_cast<const CudaEvent*>(event.state().get());
  if (point == nullptr) {
    if (event.reached() && !event.completion().error()) return;
    throw UsageError(
        fmt::format("CUDA stream '{}' cannot wait for an event of a host stream; let the host wait for it "
                    "(event.completion()) and enqueue afterwards",
                    options_.name));
  }
  if (point->reached()) return;
  const auto enqueue = [&] {
    cuda_check(cudaStreamWaitEvent(options_.stream, point->get(), 0), "cudaStreamWaitEvent");
  };
  if (cause == WaitCause::none) {
    const CurrentGpu gpu(options_.core->ordinal());
    return enqueue();
  }
  measured(cause, enqueue);
}

void CudaStream::copy(std::byte* target, const std::byte* source, std::uint64_t bytes, CopyKind kind) {
  if (bytes == 0) return;
  const auto enqueue = [&] {
    cuda_check(cudaMemcpyAsync(target, source, bytes, cuda_kind(kind), options_.stream), "cudaMemcpyAsync");
  };
  if (kind == CopyKind::local) {
    const CurrentGpu gpu(options_.core->ordinal());
    return enqueue();
  }
  const Link link = kind == CopyKind::host_to_device ? Link::host_to_device : Link::device_to_host;
  measured(Measure::Transfer{link, bytes}, enqueue);
}

void CudaStream::fill(std::byte* target, std::uint8_t value, std::uint64_t bytes) {
  if (bytes == 0) return;
  const CurrentGpu gpu(options_.core->ordinal());
  cuda_check(cudaMemsetAsync(target, value, bytes, options_.stream), "cudaMemsetAsync");
}

template <typename Arguments>
void CudaStream::run_kernel(const Arguments& arguments, const char* name) {
  check_arguments(arguments);
  const CurrentGpu gpu(options_.core->ordinal());
  cuda_check(launch_kernel(arguments, options_.stream), name);
}

void CudaStream::scale_into(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                            std::uint64_t count, float scale, Combine combine) {
  if (count == 0) return;
  run_kernel(ScaleArguments{target, target_dtype, source, source_dtype, count, scale, combine == Combine::add},
             "the scale_into kernel");
}

void CudaStream::sums_of_squares(double* partial, const std::byte* source, DType dtype, std::uint64_t count) {
  if (count == 0) return;
  run_kernel(NormArguments{partial, source, dtype, count}, "the sums_of_squares kernel");
}

void CudaStream::update(const UpdateFactors& factors, const UpdateArrays& arrays) {
  if (arrays.count == 0) return;
  run_kernel(UpdateArguments{factors, arrays}, "the update kernel");
}

bool CudaStream::capturing() const {
  const CurrentGpu gpu(options_.core->ordinal());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t code = cudaStreamIsCapturing(options_.stream, &status);
  if (code == cudaErrorStreamCaptureImplicit) {  // the default stream, while another one is captured in global mode
    static_cast<void>(cudaGetLastError());
    return true;
  }
  cuda_check(code, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void CudaStream::launch(std::string_view what, std::function<void()>) {
  throw UsageError(
      fmt::format("'{}' cannot be launched on CUDA stream '{}': a host function cannot run in the order of a GPU's "
                  "stream without stalling the GPU; enqueue a kernel on native(), or use the host device",
                  what, options_.name));
}

void CudaStream::synchronize() { record().wait(); }

}  // namespace hoist::platform::detail
