// SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <utility>
#include <vector>

#include <torch/extension.h>

namespace {

class Done final : public c10d::Work {
 public:
  explicit Done(std::vector<at::Tensor> tensors)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(std::move(tensors)));
    finish();
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Staged final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  explicit Staged(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "staged"; }
  WorkPtr allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return staged(tensors, [&](auto& copies) { return gloo_->allreduce(copies, options); });
  }
  WorkPtr broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return staged(tensors, [&](auto& copies) { return gloo_->broadcast(copies, options); });
  }
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions& options) override {
    std::vector<at::Tensor> sent = on_host(inputs);
    return staged(outputs.at(0), [&](auto& copies) {
      std::vector<std::vector<at::Tensor>> received{copies};
      return gloo_->allgather(received, sent, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<at::Tensor> outputs{output};
    at::Tensor sent = input.to(at::kCPU);
    return staged(outputs, [&](auto& copies) { return gloo_->all_gather_single(copies.at(0), sent, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    c10d::BarrierOptions of_cpu = options;
    of_cpu.device.reset();
    return gloo_->barrier(of_cpu);
  }

 private:
  static std::vector<at::Tensor> on_host(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : tensors) copies.push_back(tensor.to(at::kCPU));
    return copies;
  }
  template <typename Call>
  static WorkPtr staged(std::vector<at::Tensor>& tensors, const Call& call) {
    std::vector<at::Tensor> copies = on_host(tensors);
    const WorkPtr work = call(copies);
    work->wait();
    for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(copies[i]);
    return c10::make_intrusive<Done>(tensors);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> staged_by(const c10::intrusive_ptr<c10d::Backend>& gloo) {
  return c10::make_intrusive<Staged>(gloo);
}
