// SPDX-License-Identifier: Apache-2.0
// tests/python/accelerator/inference.hpp - the device's tensors as the CPU's and as meta tensors, and what an operator
// returns, without running it.
#pragma once

#include <optional>

#include <torch/extension.h>

namespace accelerator {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

inline bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDeviceType; }
// A CPU tensor over the same memory, which it keeps.
at::Tensor on_cpu(const at::Tensor& tensor);
at::Tensor on_meta(const at::Tensor& tensor);
// A new tensor of the device, of the form of a meta tensor.
at::Tensor like_meta(const at::Tensor& meta);

// The same value with `change` done to each of its tensors.
template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDeviceType) return change.device();
  return value;
}

struct ToCpu {
  at::Tensor operator()(const at::Tensor& tensor) const { return on_cpu(tensor); }
  c10::IValue device() const { return c10::Device(at::kCPU); }
};
struct ToMeta {
  at::Tensor operator()(const at::Tensor& tensor) const { return on_meta(tensor); }
  c10::IValue device() const { return c10::Device(at::kMeta); }
};

template <typename Change>
torch::jit::Stack changed(const torch::jit::Stack& arguments, const Change& change) {
  torch::jit::Stack result;
  for (const c10::IValue& value : arguments) result.push_back(with_tensors(value, change));
  return result;
}

// The results as meta tensors; nothing where they depend on data. The answers are kept.
std::optional<torch::jit::Stack> infer_or_recall(const c10::OperatorHandle& op, const torch::jit::Stack& arguments);

}  // namespace accelerator
