// SPDX-License-Identifier: Apache-2.0
// A small program that embeds hoist: an autoencoder over frozen random features, with weights and optimizer states in
// a store on disk.
//
//   z = x F^T            features: F is frozen, so it costs 2 bytes per element and has no optimizer state
//   h = tanh(z W^T + a)  encoder:  W and a in two parameter groups, only W decays
//   y = h W + b          decoder:  tied to W, which has one record and one gradient
//   loss = mean (y - z)^2
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <vector>

#include <hoist/hoist.hpp>

namespace {

using namespace hoist;

constexpr std::int64_t kInput = 8, kFeatures = 64, kHidden = 32, kSamples = 128;
constexpr std::uint64_t kSteps = 60;

struct Matrix {
  std::int64_t rows = 0, columns = 0;
  std::vector<float> values = std::vector<float>(static_cast<std::size_t>(rows * columns));
  float& at(std::int64_t r, std::int64_t c) { return values[static_cast<std::size_t>(r * columns + c)]; }
  float at(std::int64_t r, std::int64_t c) const { return values[static_cast<std::size_t>(r * columns + c)]; }
};

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

// Gathered weights as floats; on a GPU this would be a kernel.
Matrix load(const TensorView& view) {
  Matrix m{view.shape.size() == 2 ? view.shape[0] : 1, view.shape.back()};
  for (std::size_t i = 0; i < m.values.size(); ++i) {
    m.values[i] = view.dtype == DType::bf16 ? to_float(static_cast<const bf16*>(view.data)[i])
                                            : static_cast<const float*>(view.data)[i];
  }
  return m;
}

class Autoencoder {
 public:
  explicit Autoencoder(Runtime& runtime) : stream_(runtime.device().create_stream("compute")) {
    const GroupId biases = model_.add_group(GroupOptions{.learning_rate = 1e-2, .weight_decay = 0});
    features_ = model_.add_unit("features", {{.name = "F", .shape = {kFeatures, kInput}, .trainable = false}});
    encoder_ = model_.add_unit("encoder", {{.name = "W", .shape = {kHidden, kFeatures}},
                                           {.name = "a", .shape = {kHidden}, .dtype = DType::fp32, .group = biases}});
    decoder_ = model_.add_unit("decoder", {{.name = "b", .shape = {kFeatures}, .dtype = DType::fp32, .group = biases}});
    F_ = model_.parameter("F"), W_ = model_.parameter("W"), a_ = model_.parameter("a"), b_ = model_.parameter("b");
    model_.tie(decoder_, W_);
    // Memory of the program's own comes from the same arena and budget, before the engine takes the rest.
    scratch_ = runtime.device_arena().allocate(kHidden * kFeatures * sizeof(float), "gradients");
  }

  const Model& model() const { return model_; }
  void attach(Engine& engine) { engine_ = &engine; }

  // Any piece of any parameter, as a pure function of where it lies.
  Initializer initial_values() const {
    return [this](ParameterId parameter, std::uint64_t first, std::span<float> out) {
      const double deviation = parameter == F_ ? 0.35 : parameter == W_ ? 0.1 : 0.0;
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] = static_cast<float>(deviation * random_normal(parameter.index, first + i));
    };
  }

  // One pass over `inputs` [samples, kInput]. After Pass::train the gradients wait in the engine for step().
  double run(Pass pass, const Matrix& inputs) {
    const PassScope scope = engine_->begin(pass);
    Lease features = engine_->gather(features_, *stream_);
    stream_->launch("features", [this, &inputs, F = features.view(F_)] { z_ = inputs * transposed(load(F)); });
    features.release(*stream_);  // as of this point of the stream; the host does not wait
    if (!std::all_of(inputs.values.begin(), inputs.values.end(), [](float x) { return std::isfinite(x); })) {
      stream_->synchronize();                              // `inputs` is still being read
      throw std::runtime_error("a sample is not finite");  // halfway through a pass, which is dropped
    }
    Lease encoder = engine_->gather(encoder_, *stream_);
    stream_->launch("encoder", [this, W = encoder.view(W_), a = encoder.view(a_)] {
      h_ = z_ * transposed(load(W));
      const Matrix bias = load(a);
      for (std::size_t i = 0; i < h_.values.size(); ++i)
        h_.values[i] = std::tanh(h_.values[i] + bias.values[i % kHidden]);
    });
    encoder.release(*stream_);
    decode(pass);
    if (pass == Pass::train) {
      gradient(W_, {kHidden, kFeatures}, [this] { return transposed(dh_) * z_; });
      gradient(a_, {kHidden}, [this] { return ones_ * dh_; });
      engine_->finish(encoder_, *stream_);
    }
    stream_->synchronize();
    return loss_;
  }

 private:
  // Adds what `compute` returns to a parameter's gradient, all in stream order.
  template <typename Compute>
  void gradient(ParameterId parameter, const std::vector<std::int64_t>& shape, Compute compute) {
    auto* target = reinterpret_cast<float*>(scratch_.data());
    stream_->launch("gradient", [compute, target] {
      const Matrix values = compute();
      std::copy(values.values.begin(), values.values.end(), target);
    });
    engine_->accumulate(parameter, {.data = target, .dtype = DType::fp32, .shape = shape}, *stream_);
  }

  void decode(Pass pass) {
    Lease decoder = engine_->gather(decoder_, *stream_);  // and with it the tied W
    stream_->launch("decoder", [this, W = decoder.view(W_), b = decoder.view(b_)] {
      const Matrix weights = load(W), bias = load(b);
      dy_ = h_ * weights;
      double sum = 0;
      for (std::size_t i = 0; i < dy_.values.size(); ++i) {
        const float error = dy_.values[i] + bias.values[i % kFeatures] - z_.values[i];
        sum += static_cast<double>(error) * static_cast<double>(error);
        dy_.values[i] = 2 * error / static_cast<float>(dy_.values.size());
      }
      loss_ = sum / static_cast<double>(dy_.values.size());
      dh_ = dy_ * transposed(weights);
      for (std::size_t i = 0; i < dh_.values.size(); ++i) dh_.values[i] *= 1 - h_.values[i] * h_.values[i];
    });
    decoder.release(*stream_);
    if (pass != Pass::train) return;
    gradient(W_, {kHidden, kFeatures}, [this] { return transposed(h_) * dy_; });  // the tied parameter's first part
    gradient(b_, {kFeatures}, [this] { return ones_ * dy_; });
    engine_->finish(decoder_, *stream_);
  }

  Model model_;
  Engine* engine_ = nullptr;
  UnitId features_{}, encoder_{}, decoder_{};
  ParameterId F_{}, W_{}, a_{}, b_{};
  const Matrix ones_{1, kSamples, std::vector<float>(kSamples, 1.0f)};
  Matrix z_, h_, dy_, dh_;  // a GPU's would come from the arena too
  double loss_ = 0;
  tiers::DeviceBlock scratch_;
  std::unique_ptr<platform::Stream> stream_;
};

Matrix samples(std::uint64_t seed) {
  Matrix m{kSamples, kInput};
  for (std::size_t i = 0; i < m.values.size(); ++i) m.values[i] = static_cast<float>(random_normal(seed, i));
  return m;
}

int train(const std::string& store) {
  Runtime runtime({.device = platform::DeviceKind::host,  // this program computes on the CPU
                   .device_memory_bytes = 4 * kMiB,
                   .pinned_memory_bytes = 32 * kMiB});
  const EngineOptions options{.parameters = Placement::nvme,
                              .optimizer = Placement::nvme,
                              .store_directory = store,
                              .optimizer_defaults = {.learning_rate = 1e-2, .weight_decay = 0.01}};
  Autoencoder model(runtime);
  Engine engine = Engine::find_commit(runtime, options)
                      ? Engine::restore(runtime, options, model.model())
                      : Engine::create(runtime, options, model.model(), model.initial_values());
  if (engine.restored() != nullptr)
    std::printf("continuing at step %llu\n", static_cast<unsigned long long>(engine.restored()->step));
  model.attach(engine);

  const Matrix held_out = samples(0);
  const double before = model.run(Pass::evaluate, held_out);
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
  std::vector<float> row(kFeatures);
  engine.read(engine.parameter("W"), State::master, 0, row);  // from the store, as fp32
  const double after = model.run(Pass::evaluate, held_out);
  std::printf("W[0][0] = %.6f, held-out loss %.4f -> %.4f, committed step %d\n", static_cast<double>(row[0]), before,
              after, static_cast<int>(engine.committed_step().value_or(0)));
  return after < before ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc == 2) return train(argv[1]);
  std::fputs("usage: embed STORE_DIRECTORY\n", stderr);
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "embed: %s\n", error.what());
  return 1;
}
