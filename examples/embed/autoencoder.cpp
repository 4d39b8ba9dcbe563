// SPDX-License-Identifier: Apache-2.0
#include "autoencoder.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

using namespace hoist;

namespace embed {
namespace {

constexpr std::int64_t kInput = 8, kFeatures = 64, kHidden = 32, kSamples = 128;
constexpr std::uint64_t kLargestBytes = kFeatures * kHidden * sizeof(float);  // of a parameter
constexpr std::uint64_t kSteps = 60;

Matrix operator*(const Matrix& a, const Matrix& b) {
  Matrix product{a.rows, b.columns};
  for (std::int64_t r = 0; r < a.rows; ++r)
    for (std::int64_t k = 0; k < a.columns; ++k)
      for (std::int64_t c = 0; c < b.columns; ++c) product.at(r, c) += a.at(r, k) * b.at(k, c);
  return product;
}

Matrix transposed(const Matrix& m) {
  Matrix result{m.columns, m.rows};
  for (std::int64_t r = 0; r < m.rows; ++r)
    for (std::int64_t c = 0; c < m.columns; ++c) result.at(c, r) = m.at(r, c);
  return result;
}

// Their seeds are not those of initial_values().
Matrix samples(std::uint64_t number) {
  constexpr std::uint64_t kFirstSeed = 1000;
  Matrix m{kSamples, kInput};
  for (std::size_t i = 0; i < m.values.size(); ++i)
    m.values[i] = static_cast<float>(random_normal(kFirstSeed + number, i));
  return m;
}

bool is_finite(const Matrix& m) {
  return std::all_of(m.values.begin(), m.values.end(), [](float x) { return std::isfinite(x); });
}

}  // namespace

Autoencoder::Autoencoder(Runtime& runtime)
    // The program's own device memory is of the same arena and budget as the engine's, so it is taken first.
    : gradient_(runtime.device_arena().allocate(kLargestBytes, "gradients")),
      down_(runtime.device(), 2 * kLargestBytes),
      up_(runtime.device(), kLargestBytes),
      stream_(runtime.device().create_stream("compute")) {
  const GroupId biases = model_.add_group(GroupOptions{.learning_rate = 1e-2, .weight_decay = 0});
  features_ = model_.add_unit("features", {{.name = "F", .shape = {kFeatures, kInput}, .trainable = false}});
  encoder_ = model_.add_unit("encoder", {{.name = "W", .shape = {kHidden, kFeatures}},
                                         {.name = "a", .shape = {kHidden}, .dtype = DType::fp32, .group = biases}});
  decoder_ = model_.add_unit("decoder", {{.name = "b", .shape = {kFeatures}, .dtype = DType::fp32, .group = biases}});
  F_ = model_.parameter("F"), W_ = model_.parameter("W"), a_ = model_.parameter("a"), b_ = model_.parameter("b");
  model_.tie(decoder_, W_);
}

Initializer Autoencoder::initial_values() const {
  return [this](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    const double deviation = parameter == F_ ? 0.35 : parameter == W_ ? 0.1 : 0.0;
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<float>(deviation * random_normal(parameter.index, first + i));
  };
}

// Gathers the unit and copies its parameters to the host, as floats.
std::vector<Matrix> Autoencoder::load(UnitId unit, const std::vector<ParameterId>& parameters) {
  Lease lease = engine_->gather(unit, *stream_);  // the stream waits for the weights; the host does not
  std::vector<TensorView> on_host;
  std::byte* to = down_.data();
  for (const ParameterId parameter : parameters) {
    TensorView view = lease.view(parameter);
    const std::uint64_t bytes = view.element_count() * dtype_bytes(view.dtype);
    stream_->copy(to, static_cast<const std::byte*>(view.data), bytes, platform::CopyKind::device_to_host);
    view.data = to;
    on_host.push_back(view);
    to += bytes;
  }
  lease.release(*stream_);  // as of this point of the stream: the copies before it may still read the weights
  stream_->synchronize();   // now the copies are done
  std::vector<Matrix> loaded;
  for (const TensorView& view : on_host) {
    Matrix m{view.shape.size() == 2 ? view.shape[0] : 1, view.shape.back()};
    for (std::size_t i = 0; i < m.values.size(); ++i) {
      m.values[i] = view.dtype == DType::bf16 ? to_float(static_cast<const bf16*>(view.data)[i])
                                              : static_cast<const float*>(view.data)[i];
    }
    loaded.push_back(std::move(m));
  }
  return loaded;
}

// Copies `values` to the device and adds them to the parameter's gradient, all in stream order.
void Autoencoder::add_gradient(ParameterId parameter, const std::vector<std::int64_t>& shape, const Matrix& values) {
  const std::uint64_t bytes = values.values.size() * sizeof(float);
  up_copied_.wait();
  std::memcpy(up_.data(), values.values.data(), bytes);
  stream_->copy(gradient_.data(), up_.data(), bytes, platform::CopyKind::host_to_device);
  up_copied_ = stream_->record();
  engine_->accumulate(parameter, {.data = gradient_.data(), .dtype = DType::fp32, .shape = shape}, *stream_);
}

double Autoencoder::run(Pass pass, const Matrix& inputs) {
  const PassScope scope = engine_->begin(pass);
  const Matrix z = inputs * transposed(load(features_, {F_})[0]);
  if (!is_finite(inputs))
    throw std::runtime_error("a sample is not finite");  // halfway through a pass, which is dropped

  const std::vector<Matrix> encoder = load(encoder_, {W_, a_});
  Matrix h = z * transposed(encoder[0]);
  for (std::size_t i = 0; i < h.values.size(); ++i)
    h.values[i] = std::tanh(h.values[i] + encoder[1].values[i % kHidden]);

  const std::vector<Matrix> decoder = load(decoder_, {W_, b_});  // with the tied W
  Matrix dy = h * decoder[0];
  double sum = 0;
  for (std::size_t i = 0; i < dy.values.size(); ++i) {
    const float error = dy.values[i] + decoder[1].values[i % kFeatures] - z.values[i];
    sum += static_cast<double>(error) * static_cast<double>(error);
    dy.values[i] = 2 * error / static_cast<float>(dy.values.size());
  }
  const double loss = sum / static_cast<double>(dy.values.size());
  if (pass != Pass::train) return loss;

  const Matrix ones{1, inputs.rows, std::vector<float>(static_cast<std::size_t>(inputs.rows), 1.0f)};
  add_gradient(W_, {kHidden, kFeatures}, transposed(h) * dy);  // the first part of the tied parameter's
  add_gradient(b_, {kFeatures}, ones * dy);
  engine_->finish(decoder_, *stream_);

  Matrix dh = dy * transposed(decoder[0]);
  for (std::size_t i = 0; i < dh.values.size(); ++i) dh.values[i] *= 1 - h.values[i] * h.values[i];
  add_gradient(W_, {kHidden, kFeatures}, transposed(dh) * z);
  add_gradient(a_, {kHidden}, ones * dh);
  engine_->finish(encoder_, *stream_);
  return loss;
}

Outcome train(const RuntimeOptions& runtime_options, const std::string& store) {
  Runtime runtime(runtime_options);
  const EngineOptions options{.parameters = Placement::nvme,
                              .optimizer = Placement::nvme,
                              .store_directory = store,
                              .optimizer_defaults = {.learning_rate = 1e-2, .weight_decay = 0.01}};
  Autoencoder model(runtime);
  Engine engine = Engine::find_commit(runtime, options)
                      ? Engine::restore(runtime, options, model.model())
                      : Engine::create(runtime, options, model.model(), model.initial_values());
  std::printf("on %s\n", runtime.device().description().c_str());
  if (engine.restored() != nullptr)
    std::printf("continuing at step %llu\n", static_cast<unsigned long long>(engine.restored()->step));
  model.attach(engine);

  Outcome outcome;
  const Matrix held_out = samples(0);
  outcome.loss_before = model.run(Pass::evaluate, held_out);
  for (std::uint64_t i = 1; i <= kSteps; ++i) {
    const Matrix batch = samples(engine.step_count() + 1);
    if (i == kSteps / 2) try {
        model.run(Pass::train, {kSamples, kInput, std::vector<float>(kSamples * kInput, NAN)});
      } catch (const std::runtime_error& error) {
        engine.discard();  // leaving the pass has done it already; nothing of the batch is left either way
        std::printf("step %3d  skipped a batch: %s\n", static_cast<int>(i), error.what());
      }
    const double loss = model.run(Pass::train, batch);
    const StepReport report = engine.step();
    if (i % 10 == 0) {
      std::printf("step %3d  train %.4f  held out %.4f  gradient norm %.4f\n", static_cast<int>(report.step), loss,
                  model.run(Pass::evaluate, held_out), report.gradient_norm);
    }
  }
  engine.settle();
  engine.read(engine.parameter("W"), State::master, 0, {&outcome.weight, 1});  // from the store, as fp32
  outcome.loss_after = model.run(Pass::evaluate, held_out);
  outcome.committed_step = engine.committed_step().value_or(0);
  return outcome;
}

}  // namespace embed
