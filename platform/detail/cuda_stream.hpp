// SPDX-License-Identifier: Apache-2.0
// platform/detail/cuda_stream.hpp - a CUDA stream of hoist or of the embedding program.
//
// With a ledger, every copy and every wait is between two timing events, which the core's thread counts later.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include <hoist/core/owning_process.hpp>
#include <hoist/platform/detail/cuda_core.hpp>
#include <hoist/platform/stream.hpp>
#include <hoist/platform/update_arrays.hpp>

namespace hoist::platform::detail {

class CudaEvent final : public StreamEvent::State, public std::enable_shared_from_this<CudaEvent> {
 public:
  explicit CudaEvent(std::shared_ptr<CudaCore> core);

  bool reached() const override;
  void wait() const override;
  Completion completion() const override;
  cudaEvent_t get() const { return event_.get(); }

 private:
  const std::shared_ptr<CudaCore> core_;
  PooledEvent event_;
};

struct CudaStreamOptions {
  std::string name;
  std::shared_ptr<CudaCore> core;
  cudaStream_t stream = nullptr;
  enum class Owner : std::uint8_t { hoist, embedder } owner = Owner::hoist;
  std::atomic<int>* alive = nullptr;  // the device's count of its streams
};

class CudaStream final : public Stream {
 public:
  explicit CudaStream(CudaStreamOptions options);
  ~CudaStream() override;

  std::string_view name() const override { return options_.name; }
  StreamEvent record() override;
  void wait(const StreamEvent& event, WaitCause cause) override;
  void copy(std::byte* target, const std::byte* source, std::uint64_t bytes, CopyKind kind) override;
  void fill(std::byte* target, std::uint8_t value, std::uint64_t bytes) override;
  void scale_into(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                  std::uint64_t count, float scale, Combine combine) override;
  void sums_of_squares(double* partial, const std::byte* source, DType dtype, std::uint64_t count) override;
  void update(const UpdateFactors& factors, const UpdateArrays& arrays) override;
  void launch(std::string_view what, std::function<void()> work) override;
  void synchronize() override;
  std::function<void(CountIdle)> watch_idle() override;
  void* native() const override { return options_.stream; }
  bool capturing() const override;

 private:
  void drain_and_destroy();
  PooledEvent mark(PooledEvent::Timing timing);
  template <typename Arguments>
  void run_kernel(const Arguments& arguments, const char* name);
  // Runs `enqueue` between two timing events, whose distance the core then counts.
  template <typename Enqueue>
  void measured(Measure::Meaning meaning, Enqueue enqueue);

  const OwningProcess process_;
  const CudaStreamOptions options_;
};

}  // namespace hoist::platform::detail
