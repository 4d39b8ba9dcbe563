// SPDX-License-Identifier: Apache-2.0
#include "cuda_card.hpp"

#include <deque>
#include <utility>
#include <vector>

#include <hoist/platform/cuda_check.hpp>
#include <hoist/zero/runtime.hpp>

#include "../card/card_operations.hpp"
#include "kernels.hpp"
#include "products.hpp"

namespace hoist::gpt {
namespace card {
namespace {

using platform::cuda_check;
using platform::CurrentCard;

// An event that knows when it was reached.
class TimedEvent {
 public:
  TimedEvent() { cuda_check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~TimedEvent() {
    if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));  // fails only after the context is lost
  }
  TimedEvent(TimedEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  TimedEvent& operator=(TimedEvent&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  bool reached() const {
    const cudaError_t code = cudaEventQuery(event_);
    if (code == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    cuda_check(code, "cudaEventQuery");
    return true;
  }
  Nanoseconds since(const TimedEvent& begin) const {
    float milliseconds = 0;
    cuda_check(cudaEventElapsedTime(&milliseconds, begin.event_, event_), "cudaEventElapsedTime");
    return Nanoseconds(static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6));
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaCard final : public Card {
 public:
  CudaCard(int ordinal, platform::Stream& stream, DType activations)
      : ordinal_(ordinal),
        stream_(stream),
        native_(static_cast<cudaStream_t>(stream.native())),
        activations_(activations),
        products_(on_card(ordinal)) {}

  // Nothing of this waits: `work` enqueues.
  void run(const char*, std::function<void()> work) override {
    const CurrentCard card(ordinal_);
    book_reached();
    Section section = take_section();
    section.begin.record(native_);
    work();
    section.end.record(native_);
    under_way_.push_back(std::move(section));
  }

  Nanoseconds compute_time() override {
    const CurrentCard card(ordinal_);
    book_reached();
    return compute_time_;
  }

  void launch(const Kernel& kernel) override {
    if (const auto* forward = std::get_if<ForwardAttention>(&kernel)) {
      cuda_check(launch_attention(*forward, activations_, native_), "the attention kernel");
    } else if (const auto* backward = std::get_if<BackwardAttention>(&kernel)) {
      cuda_check(launch_attention_delta(backward->attention, activations_, native_), "the attention delta kernel");
      cuda_check(launch_attention(*backward, activations_, native_), "the attention backward kernels");
    } else {
      cuda_check(launch_rows(kernel, activations_, native_), "a kernel of rows");
    }
  }

  void multiply(const Product& product) override { products_.multiply(product, native_); }
  void zero(void* target, std::uint64_t bytes) override { stream_.fill(static_cast<std::byte*>(target), 0, bytes); }
  std::uint64_t workspace_bytes() const override { return Products::kWorkspaceBytes; }
  void use_workspace(std::span<std::byte> workspace) override { products_.use_workspace(workspace); }

 private:
  struct Section {
    TimedEvent begin, end;
  };

  // The handle belongs to the card that is current when it is made.
  static Products on_card(int ordinal) {
    const CurrentCard card(ordinal);
    return Products();
  }

  Section take_section() {
    if (spare_.empty()) return {};
    Section section = std::move(spare_.back());
    spare_.pop_back();
    return section;
  }
  void book_reached() {
    while (!under_way_.empty() && under_way_.front().end.reached()) {
      compute_time_ += under_way_.front().end.since(under_way_.front().begin);
      spare_.push_back(std::move(under_way_.front()));
      under_way_.pop_front();
    }
  }

  const int ordinal_;
  platform::Stream& stream_;
  const cudaStream_t native_;
  const DType activations_;
  Products products_;
  std::deque<Section> under_way_;
  std::vector<Section> spare_;
  Nanoseconds compute_time_{0};
};

}  // namespace
}  // namespace card

std::unique_ptr<Operations> make_cuda_operations(Runtime& runtime, platform::Stream& stream,
                                                 const OperationsOptions& options) {
  const DType activations = card::CardOperations::activations_beside(options.matrix_dtype);
  auto cuda = std::make_unique<card::CudaCard>(runtime.options().device_ordinal, stream, activations);
  return std::make_unique<card::CardOperations>(runtime, stream, std::move(cuda), options);
}

}  // namespace hoist::gpt
