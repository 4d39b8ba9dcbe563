// SPDX-License-Identifier: Apache-2.0
#include "inference.hpp"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace accelerator {

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [keep = tensor](void*) {}, options);
}

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

at::Tensor like_meta(const at::Tensor& meta) {
  return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(c10::Device(kDeviceType, 0)));
}

namespace {

// PyTorch infers the form of results in Python, slowly. The answers are kept, under everything that they depend on.
class Question {
 public:
  Question(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
    // The shape of results does not depend on a fraction among the arguments.
    with_fractions_ =
        std::ranges::none_of(arguments, [](const c10::IValue& a) { return a.isTensor() || a.isTensorList(); });
    add(&op.schema());
    add(at::get_default_dtype_as_scalartype());
    for (const c10::IValue& argument : arguments) add_value(argument);
  }
  bool is_known() const { return known_; }  // all that the answer depends on
  const std::string& key() const { return key_; }

 private:
  template <typename T>
  void add(const T& value) {
    key_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void add_tensor(const at::Tensor& tensor) {
    add(tensor.defined());
    if (!tensor.defined()) return;
    add(tensor.scalar_type());
    add(tensor.device().type());
    add(tensor.dim());
    for (const std::int64_t extent : tensor.sizes()) add(extent);
    for (const std::int64_t stride : tensor.strides()) add(stride);
    add(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  }
  void add_value(const c10::IValue& value) {
    const auto add_list = [&](const auto& list, const auto& add_each) {
      add(list.size());
      for (const auto& each : list) add_each(each);
    };
    if (value.isNone()) return add('0');
    if (value.isTensor()) return add('t'), add_tensor(value.toTensor());
    if (value.isInt()) return add('i'), add(value.toInt());
    if (value.isBool()) return add('b'), add(value.toBool());
    if (value.isDouble()) return add('d'), add(with_fractions_ ? value.toDouble() : 0.0);
    if (value.isDevice()) return add('D'), add(value.toDevice().type());
    if (value.isString()) return add('s'), add(value.toStringRef().size()), void(key_ += value.toStringRef());
    if (value.isIntList()) return add('I'), add_list(value.toIntVector(), [&](std::int64_t each) { add(each); });
    if (value.isTensorList())
      return add('T'), add_list(value.toTensorVector(), [&](const at::Tensor& t) { add_tensor(t); });
    if (value.isOptionalTensorList()) {
      return add('O'), add_list(value.toOptionalTensorVector(),
                                [&](const std::optional<at::Tensor>& t) { add_tensor(t.value_or(at::Tensor())); });
    }
    known_ = false;
  }

  std::string key_;
  bool with_fractions_ = true;
  bool known_ = true;
};
std::mutex answers_mutex;
std::unordered_map<std::string, std::optional<torch::jit::Stack>> answers;

std::optional<torch::jit::Stack> infer(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  torch::jit::Stack stack = changed(arguments, ToMeta{});
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {  // PyTorch's, or Python's
    return std::nullopt;
  }
  for (const c10::IValue& value : stack)
    if (!value.isTensor() && !value.isTensorList()) return std::nullopt;
  return stack;
}

}  // namespace

std::optional<torch::jit::Stack> infer_or_recall(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const Question question(op, arguments);
  if (!question.is_known()) return infer(op, arguments);
  {
    const std::lock_guard lock(answers_mutex);
    if (const auto found = answers.find(question.key()); found != answers.end()) return found->second;
  }
  std::optional<torch::jit::Stack> answer = infer(op, arguments);
  const std::lock_guard lock(answers_mutex);
  return answers.emplace(question.key(), std::move(answer)).first->second;
}

}  // namespace accelerator
