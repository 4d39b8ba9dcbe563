// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::gpt {
namespace {

constexpr float kInitialDeviation = 0.02f;

Matrix matrix(const TensorView& view) { return {view.data, view.dtype, view.shape[0], view.shape[1]}; }
GradientMatrix gradient_matrix(const TensorView& view) { return {view.data, view.dtype, view.shape[0], view.shape[1]}; }
float* floats(const TensorView& view) { return static_cast<float*>(view.data); }

}  // namespace

struct Model::Block {
  UnitId unit{};
  ParameterId norm1_weight{}, norm1_bias{};
  ParameterId qkv_weight{}, qkv_bias{};  // [3 * width, width]
  ParameterId out_weight{}, out_bias{};  // [width, width]
  ParameterId norm2_weight{}, norm2_bias{};
  ParameterId up_weight{}, up_bias{};      // [4 * width, width]
  ParameterId down_weight{}, down_bias{};  // [width, 4 * width]
};

struct Model::Kept {
  std::vector<float*> inputs;  // [layers + 1][rows, width]: what each block, and the head, was given
  float* gradient = nullptr;   // [rows, width]: of the residual stream
  double loss = 0;             // written by the stream's worker, read after synchronize()
};

// Sizes are in floats per row of activations unless said otherwise.
struct Model::Workspace {
  std::vector<Kept> kept;          // by micro-batch of the pass
  float* normed = nullptr;         // width
  float* qkv = nullptr;            // 3 * width
  float* mixed = nullptr;          // width: attention's output
  float* middle = nullptr;         // width: after attention and its residual
  float* hidden = nullptr;         // 4 * width: before GELU
  float* wide = nullptr;           // 4 * width: after GELU; on the way back its gradient, then that of qkv
  float* gradient_part = nullptr;  // width: of one branch
  float* mean1 = nullptr;          // 1, as are the next three
  float* inverse_dev1 = nullptr;
  float* mean2 = nullptr;
  float* inverse_dev2 = nullptr;
  float* row_loss = nullptr;       // 1
  float* logits = nullptr;         // kVocabulary
  float* probabilities = nullptr;  // [batch, heads, context, context]
  float* attention_scratch = nullptr;
  float* panel = nullptr;  // one weight matrix
};

Model::Model(Runtime& runtime, Engine& engine, const ModelOptions& options, const GroupOptions& defaults)
    : runtime_(runtime), engine_(engine), options_(options), pool_({.threads = options.threads}) {
  if (runtime.device().kind() != platform::DeviceKind::host) {
    throw UsageError(
        "hoist-gpt computes with CPU kernels and needs the host device: set \"hoist\": {\"device\": "
        "\"host\"} in the configuration (its CUDA kernels come later)");
  }
  use_own_threads();
  declare(defaults);
  carve(nullptr, device_bytes_);
  engine.require_device_memory(device_bytes_);
  memory_ = runtime.device_arena().allocate(device_bytes_, "hoist-gpt's activations and work buffers");
  work_ = std::make_unique<Workspace>(carve(memory_.data(), device_bytes_));
  stream_ = runtime.device().create_stream("compute");
}

Model::~Model() = default;

// Collects the parameters of one unit, named after it, and adds it to the engine.
class Model::UnitBuilder {
 public:
  UnitBuilder(const Model& model, std::string unit) : model_(model), unit_(std::move(unit)) {}

  void matrix(const char* name, std::int64_t out, std::int64_t in) {
    specs_.push_back({.name = full(name), .shape = {out, in}, .dtype = model_.options_.matrix_dtype});
  }
  void vector(const char* name, std::int64_t count) {
    specs_.push_back({.name = full(name), .shape = {count}, .dtype = DType::fp32, .group = model_.no_decay_});
  }
  UnitId add() { return model_.engine_.add_unit(unit_, specs_); }
  ParameterId id(const char* name) const { return model_.engine_.parameter(full(name)); }

 private:
  std::string full(const char* name) const { return fmt::format("{}.{}", unit_, name); }
  const Model& model_;
  const std::string unit_;
  std::vector<ParameterSpec> specs_;
};

void Model::declare(const GroupOptions& defaults) {
  GroupOptions without_decay = defaults;
  without_decay.weight_decay = 0;
  no_decay_ = engine_.add_group(without_decay);

  UnitBuilder first(*this, "embed");
  first.matrix("token", kVocabulary, options_.width);
  first.matrix("position", options_.context, options_.width);
  embed_ = first.add();
  token_embedding_ = first.id("token");
  position_embedding_ = first.id("position");

  for (int layer = 0; layer < options_.layers; ++layer) blocks_.push_back(declare_block(layer));

  UnitBuilder last(*this, "head");
  last.vector("norm.weight", options_.width);
  last.vector("norm.bias", options_.width);
  head_ = last.add();
  norm_weight_ = last.id("norm.weight");
  norm_bias_ = last.id("norm.bias");
  engine_.tie(head_, token_embedding_);
}

Model::Block Model::declare_block(int layer) {
  const std::int64_t d = options_.width;
  UnitBuilder unit(*this, fmt::format("block.{}", layer));
  unit.vector("norm1.weight", d);
  unit.vector("norm1.bias", d);
  unit.matrix("qkv.weight", 3 * d, d);
  unit.vector("qkv.bias", 3 * d);
  unit.matrix("out.weight", d, d);
  unit.vector("out.bias", d);
  unit.vector("norm2.weight", d);
  unit.vector("norm2.bias", d);
  unit.matrix("up.weight", 4 * d, d);
  unit.vector("up.bias", 4 * d);
  unit.matrix("down.weight", d, 4 * d);
  unit.vector("down.bias", d);
  return {.unit = unit.add(),
          .norm1_weight = unit.id("norm1.weight"),
          .norm1_bias = unit.id("norm1.bias"),
          .qkv_weight = unit.id("qkv.weight"),
          .qkv_bias = unit.id("qkv.bias"),
          .out_weight = unit.id("out.weight"),
          .out_bias = unit.id("out.bias"),
          .norm2_weight = unit.id("norm2.weight"),
          .norm2_bias = unit.id("norm2.bias"),
          .up_weight = unit.id("up.weight"),
          .up_bias = unit.id("up.bias"),
          .down_weight = unit.id("down.weight"),
          .down_bias = unit.id("down.bias")};
}

// Called once with a null base to learn the bytes, and once to place the buffers.
Model::Workspace Model::carve(std::byte* base, std::uint64_t& bytes) const {
  bytes = 0;
  const auto take = [&](Index count) {
    std::byte* at = base == nullptr ? nullptr : base + bytes;
    bytes += (static_cast<std::uint64_t>(count) * sizeof(float) + 63) / 64 * 64;
    return reinterpret_cast<float*>(at);
  };
  const Index n = rows();
  const Index d = options_.width;
  Workspace w;
  w.kept.resize(static_cast<std::size_t>(options_.held_micro_batches));
  for (Kept& kept : w.kept) {
    for (int layer = 0; layer <= options_.layers; ++layer) kept.inputs.push_back(take(n * d));
    kept.gradient = take(n * d);
  }
  w.normed = take(n * d);
  w.qkv = take(n * 3 * d);
  w.mixed = take(n * d);
  w.middle = take(n * d);
  w.hidden = take(n * 4 * d);
  w.wide = take(n * 4 * d);
  w.gradient_part = take(n * d);
  for (float** vector : {&w.mean1, &w.inverse_dev1, &w.mean2, &w.inverse_dev2, &w.row_loss}) *vector = take(n);
  w.logits = take(n * kVocabulary);
  w.probabilities = take(attention_shape().probability_count());
  w.attention_scratch = take(attention_shape().probability_count());
  w.panel = take(std::max({4 * d * d, kVocabulary * d, options_.context * d}));
  return w;
}

AttentionShape Model::attention_shape() const {
  return {.batch = options_.batch,
          .context = options_.context,
          .heads = options_.heads,
          .head_width = options_.width / options_.heads};
}

Fill Model::initial_values() const {
  struct Rule {
    float constant = 0;
    float deviation = 0;
  };
  std::vector<Rule> rules;
  const float residual = kInitialDeviation / std::sqrt(2.0f * static_cast<float>(options_.layers));
  for (const ParameterSpec& spec : engine_.parameters()) {
    if (spec.shape.size() == 1) {
      rules.push_back({.constant = spec.name.ends_with(".weight") ? 1.0f : 0.0f});  // a norm's scale, else a bias
    } else {
      const bool into_residual = spec.name.ends_with("out.weight") || spec.name.ends_with("down.weight");
      rules.push_back({.deviation = into_residual ? residual : kInitialDeviation});
    }
  }
  return [rules, seed = options_.seed](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    const Rule& rule = rules[parameter.index];
    const std::uint64_t stream = random_bits(seed, parameter.index);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = rule.constant;
      if (rule.deviation != 0) out[i] += rule.deviation * static_cast<float>(random_normal(stream, first + i));
    }
  };
}

void Model::set_learning_rate(double learning_rate) {
  engine_.set_learning_rate(GroupId{0}, learning_rate);
  engine_.set_learning_rate(no_decay_, learning_rate);
}

// --- a pass --------------------------------------------------------------------------------------------------------

double Model::train(const Batch& batch, PassOptions options) { return run({&batch, 1}, Pass::train, options); }
double Model::train(std::span<const Batch> micro_batches) {
  return run(micro_batches, Pass::train, {.micro_batches = static_cast<int>(micro_batches.size())});
}
double Model::evaluate(const Batch& batch) { return run({&batch, 1}, Pass::evaluate, {}); }

double Model::run(std::span<const Batch> micro_batches, Pass pass, PassOptions options) {
  if (micro_batches.empty() || micro_batches.size() > work_->kept.size()) {
    throw UsageError(fmt::format("{} micro-batches in one pass of a model made to hold 1 to {}", micro_batches.size(),
                                 work_->kept.size()));
  }
  for (const Batch& batch : micro_batches) check(batch);
  const PassScope scope = engine_.begin(pass, options);
  // The batches are read by enqueued work, so they must not go before the stream has caught up, also when this throws.
  struct CatchUp {
    platform::Stream& stream;
    ~CatchUp() {
      try {
        stream.synchronize();
      } catch (...) {  // the error that ended the pass is already on its way
      }
    }
  } const catch_up{*stream_};

  embed(micro_batches);
  for (int layer = 0; layer < options_.layers; ++layer) block_forward(layer, micro_batches.size());
  head(micro_batches, pass);
  if (pass == Pass::train) {
    for (int layer = options_.layers - 1; layer >= 0; --layer) block_backward(layer, micro_batches.size());
    embed_backward(micro_batches);
  }
  stream_->synchronize();
  double loss = 0;
  for (std::size_t m = 0; m < micro_batches.size(); ++m)
    loss += work_->kept[m].loss / static_cast<double>(micro_batches.size());
  return loss;
}

void Model::check(const Batch& batch) const {
  const auto count = static_cast<std::size_t>(rows());
  if (batch.inputs.size() != count || batch.targets.size() != count) {
    throw UsageError(fmt::format("a batch of {} and {} bytes was given to a model of {} sequences of {} bytes",
                                 batch.inputs.size(), batch.targets.size(), options_.batch, options_.context));
  }
}

void Model::enqueue(const char* what, std::function<void()> work) {
  stream_->launch(what, [this, work = std::move(work)] {
    const TimePoint begin = Clock::now();
    work();
    compute_time_ += Clock::now() - begin;
  });
}

void Model::embed(std::span<const Batch> micro_batches) {
  Lease lease = engine_.gather(embed_, *stream_);
  const Matrix token_weight = matrix(lease.view(token_embedding_));
  const Matrix position_weight = matrix(lease.view(position_embedding_));
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    enqueue("embed", [this, m, tokens = micro_batches[m].inputs.data(), token_weight, position_weight] {
      embedding_forward(pool_, embedding_shape(), tokens, token_weight, position_weight, work_->kept[m].inputs[0]);
    });
  }
  lease.release(*stream_);
}

void Model::embed_backward(std::span<const Batch> micro_batches) {
  const GradientLease gradients = engine_.gradients(embed_, *stream_);
  const GradientMatrix token_gradient = gradient_matrix(gradients.view(token_embedding_));
  const GradientMatrix position_gradient = gradient_matrix(gradients.view(position_embedding_));
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    enqueue("embed backward", [this, m, tokens = micro_batches[m].inputs.data(), token_gradient, position_gradient] {
      embedding_backward(pool_, embedding_shape(), tokens, work_->kept[m].gradient, token_gradient, position_gradient,
                         work_->panel);
    });
  }
  engine_.finish(embed_, *stream_);
}

// --- a block -------------------------------------------------------------------------------------------------------

struct Model::BlockWeights {
  BlockWeights(const Block& block, const Lease& lease)
      : norm1_weight(floats(lease.view(block.norm1_weight))),
        norm1_bias(floats(lease.view(block.norm1_bias))),
        norm2_weight(floats(lease.view(block.norm2_weight))),
        norm2_bias(floats(lease.view(block.norm2_bias))),
        qkv(matrix(lease.view(block.qkv_weight))),
        out(matrix(lease.view(block.out_weight))),
        up(matrix(lease.view(block.up_weight))),
        down(matrix(lease.view(block.down_weight))),
        qkv_bias(floats(lease.view(block.qkv_bias))),
        out_bias(floats(lease.view(block.out_bias))),
        up_bias(floats(lease.view(block.up_bias))),
        down_bias(floats(lease.view(block.down_bias))) {}

  const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
  Matrix qkv, out, up, down;
  const float *qkv_bias, *out_bias, *up_bias, *down_bias;
};

struct Model::BlockGradients {
  BlockGradients(const Block& block, const GradientLease& lease)
      : norm1_weight(floats(lease.view(block.norm1_weight))),
        norm1_bias(floats(lease.view(block.norm1_bias))),
        norm2_weight(floats(lease.view(block.norm2_weight))),
        norm2_bias(floats(lease.view(block.norm2_bias))),
        qkv(gradient_matrix(lease.view(block.qkv_weight))),
        out(gradient_matrix(lease.view(block.out_weight))),
        up(gradient_matrix(lease.view(block.up_weight))),
        down(gradient_matrix(lease.view(block.down_weight))),
        qkv_bias(floats(lease.view(block.qkv_bias))),
        out_bias(floats(lease.view(block.out_bias))),
        up_bias(floats(lease.view(block.up_bias))),
        down_bias(floats(lease.view(block.down_bias))) {}

  float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
  GradientMatrix qkv, out, up, down;
  float *qkv_bias, *out_bias, *up_bias, *down_bias;
};

void Model::block_forward(int layer, std::size_t count) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  const auto index = static_cast<std::size_t>(layer);
  Lease lease = engine_.gather(block.unit, *stream_);
  const BlockWeights weights(block, lease);
  for (std::size_t m = 0; m < count; ++m) {
    enqueue("block", [this, index, m, weights] {
      const Workspace& w = *work_;
      compute_to_hidden(w.kept[m].inputs[index], weights);
      gelu_forward(pool_, w.hidden, rows() * weights.up.rows, w.wide);
      linear_forward(pool_, {.rows = rows(),
                             .x = w.wide,
                             .weight = weights.down,
                             .bias = weights.down_bias,
                             .residual = w.middle,
                             .panel = w.panel,
                             .y = w.kept[m].inputs[index + 1]});
    });
  }
  lease.release(*stream_);
}

void Model::block_backward(int layer, std::size_t count) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  Lease lease = engine_.gather(block.unit, *stream_);
  const BlockWeights weights(block, lease);
  const BlockGradients gradients(block, engine_.gradients(block.unit, *stream_));
  for (std::size_t m = 0; m < count; ++m) {
    enqueue("block backward", [this, index = static_cast<std::size_t>(layer), m, weights, gradients] {
      const Kept& kept = work_->kept[m];
      compute_to_hidden(kept.inputs[index], weights);
      feed_forward_backward(kept.gradient, weights, gradients);
      attention_branch_backward(kept.inputs[index], kept.gradient, weights, gradients);
    });
  }
  lease.release(*stream_);
  engine_.finish(block.unit, *stream_);
}

// The block up to GELU: everything its backward pass needs, and all but one of the products of its forward pass.
void Model::compute_to_hidden(const float* input, const BlockWeights& weights) {
  const Workspace& w = *work_;
  first_norm(input, weights);
  linear_forward(
      pool_,
      {.rows = rows(), .x = w.normed, .weight = weights.qkv, .bias = weights.qkv_bias, .panel = w.panel, .y = w.qkv});
  attention_forward(pool_, attention_shape(), w.qkv, w.probabilities, w.mixed);
  linear_forward(pool_, {.rows = rows(),
                         .x = w.mixed,
                         .weight = weights.out,
                         .bias = weights.out_bias,
                         .residual = input,
                         .panel = w.panel,
                         .y = w.middle});
  layer_norm_forward(pool_, {.rows = rows(),
                             .width = options_.width,
                             .x = w.middle,
                             .weight = weights.norm2_weight,
                             .bias = weights.norm2_bias,
                             .mean = w.mean2,
                             .inverse_dev = w.inverse_dev2,
                             .y = w.normed});
  linear_forward(
      pool_,
      {.rows = rows(), .x = w.normed, .weight = weights.up, .bias = weights.up_bias, .panel = w.panel, .y = w.hidden});
}

void Model::first_norm(const float* input, const BlockWeights& weights) {
  const Workspace& w = *work_;
  layer_norm_forward(pool_, {.rows = rows(),
                             .width = options_.width,
                             .x = input,
                             .weight = weights.norm1_weight,
                             .bias = weights.norm1_bias,
                             .mean = w.mean1,
                             .inverse_dev = w.inverse_dev1,
                             .y = w.normed});
}

// Takes the gradient from the block's output to the stream between attention and feed-forward.
void Model::feed_forward_backward(float* gradient, const BlockWeights& weights, const BlockGradients& gradients) {
  const Workspace& w = *work_;
  const Index hidden_count = rows() * weights.up.rows;
  gelu_forward(pool_, w.hidden, hidden_count, w.wide);
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = gradient,
                                 .x = w.wide,
                                 .gradient = gradients.down,
                                 .bias_gradient = gradients.down_bias,
                                 .panel = w.panel});
  linear_backward_input(pool_,
                        {.rows = rows(), .dy = gradient, .weight = weights.down, .panel = w.panel, .dx = w.wide});
  gelu_backward(pool_, w.hidden, w.wide, hidden_count, w.wide);
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = w.wide,
                                 .x = w.normed,
                                 .gradient = gradients.up,
                                 .bias_gradient = gradients.up_bias,
                                 .panel = w.panel});
  linear_backward_input(pool_,
                        {.rows = rows(), .dy = w.wide, .weight = weights.up, .panel = w.panel, .dx = w.gradient_part});
  layer_norm_backward(pool_, {.rows = rows(),
                              .width = options_.width,
                              .dy = w.gradient_part,
                              .x = w.middle,
                              .weight = weights.norm2_weight,
                              .mean = w.mean2,
                              .inverse_dev = w.inverse_dev2,
                              .dx = gradient,
                              .weight_gradient = gradients.norm2_weight,
                              .bias_gradient = gradients.norm2_bias});
}

// Takes the gradient the rest of the way to the block's input.
void Model::attention_branch_backward(const float* input, float* gradient, const BlockWeights& weights,
                                      const BlockGradients& gradients) {
  const Workspace& w = *work_;
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = gradient,
                                 .x = w.mixed,
                                 .gradient = gradients.out,
                                 .bias_gradient = gradients.out_bias,
                                 .panel = w.panel});
  linear_backward_input(
      pool_, {.rows = rows(), .dy = gradient, .weight = weights.out, .panel = w.panel, .dx = w.gradient_part});
  attention_backward(pool_, attention_shape(),
                     {.qkv = w.qkv,
                      .probabilities = w.probabilities,
                      .dy = w.gradient_part,
                      .scratch = w.attention_scratch,
                      .dqkv = w.wide});
  first_norm(input, weights);  // its output made room for the second norm's
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = w.wide,
                                 .x = w.normed,
                                 .gradient = gradients.qkv,
                                 .bias_gradient = gradients.qkv_bias,
                                 .panel = w.panel});
  linear_backward_input(pool_,
                        {.rows = rows(), .dy = w.wide, .weight = weights.qkv, .panel = w.panel, .dx = w.gradient_part});
  layer_norm_backward(pool_, {.rows = rows(),
                              .width = options_.width,
                              .dy = w.gradient_part,
                              .x = input,
                              .weight = weights.norm1_weight,
                              .mean = w.mean1,
                              .inverse_dev = w.inverse_dev1,
                              .dx = gradient,
                              .weight_gradient = gradients.norm1_weight,
                              .bias_gradient = gradients.norm1_bias});
}

// --- the head ------------------------------------------------------------------------------------------------------

struct Model::HeadWeights {
  const float* norm_weight;
  const float* norm_bias;
  Matrix tokens;  // tied: the embedding's
};

struct Model::HeadGradients {
  float* norm_weight;
  float* norm_bias;
  GradientMatrix tokens;
};

void Model::head(std::span<const Batch> micro_batches, Pass pass) {
  Lease lease = engine_.gather(head_, *stream_);
  const HeadWeights weights{floats(lease.view(norm_weight_)), floats(lease.view(norm_bias_)),
                            matrix(lease.view(token_embedding_))};
  const float loss_scale = engine_.loss_scale();
  HeadGradients gradients{};
  if (pass == Pass::train) {
    const GradientLease own = engine_.gradients(head_, *stream_);
    const GradientLease tied = engine_.gradients(embed_, *stream_);
    gradients = {floats(own.view(norm_weight_)), floats(own.view(norm_bias_)),
                 gradient_matrix(tied.view(token_embedding_))};
  }
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    enqueue("head", [this, m, targets = micro_batches[m].targets.data(), weights, loss_scale] {
      head_forward(work_->kept[m], targets, weights, loss_scale);
    });
    if (pass != Pass::train) continue;
    enqueue("head backward", [this, m, weights, gradients] { head_backward(work_->kept[m], weights, gradients); });
  }
  lease.release(*stream_);
  if (pass == Pass::train) engine_.finish(head_, *stream_);
}

void Model::head_forward(Kept& kept, const std::uint8_t* targets, const HeadWeights& weights, float loss_scale) {
  const Workspace& w = *work_;
  layer_norm_forward(pool_, {.rows = rows(),
                             .width = options_.width,
                             .x = kept.inputs.back(),
                             .weight = weights.norm_weight,
                             .bias = weights.norm_bias,
                             .mean = w.mean1,
                             .inverse_dev = w.inverse_dev1,
                             .y = w.normed});
  linear_forward(pool_, {.rows = rows(), .x = w.normed, .weight = weights.tokens, .panel = w.panel, .y = w.logits});
  kept.loss = cross_entropy(pool_, rows(), kVocabulary, targets, w.logits, w.row_loss, loss_scale);
}

void Model::head_backward(const Kept& kept, const HeadWeights& weights, const HeadGradients& gradients) {
  const Workspace& w = *work_;
  linear_backward_weight(
      pool_, {.rows = rows(), .dy = w.logits, .x = w.normed, .gradient = gradients.tokens, .panel = w.panel});
  linear_backward_input(
      pool_, {.rows = rows(), .dy = w.logits, .weight = weights.tokens, .panel = w.panel, .dx = w.gradient_part});
  std::fill_n(kept.gradient, rows() * options_.width, 0.0f);  // nothing flows past the head
  layer_norm_backward(pool_, {.rows = rows(),
                              .width = options_.width,
                              .dy = w.gradient_part,
                              .x = kept.inputs.back(),
                              .weight = weights.norm_weight,
                              .mean = w.mean1,
                              .inverse_dev = w.inverse_dev1,
                              .dx = kept.gradient,
                              .weight_gradient = gradients.norm_weight,
                              .bias_gradient = gradients.norm_bias});
}

}  // namespace hoist::gpt
