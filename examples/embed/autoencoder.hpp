// SPDX-License-Identifier: Apache-2.0
// examples/embed/autoencoder.hpp - an autoencoder over frozen random features, trained with hoist.
//
//   z = x F^T            features: F is frozen, so it costs 2 bytes per element and has no optimizer state
//   h = tanh(z W^T + a)  encoder:  W and a in two parameter groups, only W decays
//   y = h W + b          decoder:  tied to W, which has one record and one gradient
//   loss = mean (y - z)^2
//
// It runs on the runtime's device, a GPU or the host device. Its mathematics is a few loops on the CPU: weights are
// copied from the device and gradients to it. A program with kernels of its own gives them the same addresses and
// Stream::native() instead.
//
// Threading  One thread.
// Memory     Host memory for copies is registered with the device; device memory comes from the runtime's arena.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <hoist/hoist.hpp>

namespace embed {

struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<float> values = std::vector<float>(static_cast<std::size_t>(rows * columns));
  float& at(std::int64_t r, std::int64_t c) { return values[static_cast<std::size_t>(r * columns + c)]; }
  float at(std::int64_t r, std::int64_t c) const { return values[static_cast<std::size_t>(r * columns + c)]; }
};

// Host memory that the device copies from or to.
class HostBuffer {
 public:
  HostBuffer(hoist::platform::Device& device, std::uint64_t bytes) : device_(device), bytes_(bytes) {
    device.register_host(bytes_);
  }
  ~HostBuffer() { device_.unregister_host(bytes_); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  std::byte* data() { return bytes_.data(); }

 private:
  hoist::platform::Device& device_;
  std::vector<std::byte> bytes_;
};

class Autoencoder {
 public:
  explicit Autoencoder(hoist::Runtime& runtime);

  const hoist::Model& model() const { return model_; }
  // Any piece of any parameter, as a pure function of where it lies.
  hoist::Initializer initial_values() const;
  void attach(hoist::Engine& engine) { engine_ = &engine; }

  // One pass over `inputs` [samples, input width]; the mean loss. After Pass::train the gradients wait in the engine
  // for step(). Errors: std::runtime_error for a sample that is not finite; the pass is dropped.
  double run(hoist::Pass pass, const Matrix& inputs);

 private:
  std::vector<Matrix> load(hoist::UnitId unit, const std::vector<hoist::ParameterId>& parameters);
  void add_gradient(hoist::ParameterId parameter, const std::vector<std::int64_t>& shape, const Matrix& values);

  hoist::Model model_;
  hoist::Engine* engine_ = nullptr;
  hoist::UnitId features_{}, encoder_{}, decoder_{};
  hoist::ParameterId F_{}, W_{}, a_{}, b_{};
  hoist::tiers::DeviceBlock gradient_;  // of one parameter, on its way to the engine
  HostBuffer down_, up_;
  hoist::platform::StreamEvent up_copied_;           // until then the device reads up_
  std::unique_ptr<hoist::platform::Stream> stream_;  // ends before the memory that its copies use
};

struct Outcome {
  double loss_before = 0, loss_after = 0;  // loss on samples that are not trained on
  float weight = 0;                        // the first element of W, in fp32
  std::uint64_t committed_step = 0;
};

// Sixty steps with weights and optimizer states in the store; continues a run that the store holds.
Outcome train(const hoist::RuntimeOptions& options, const std::string& store);

}  // namespace embed
