// SPDX-License-Identifier: Apache-2.0
#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>

namespace hoist::gpt {
namespace {

constexpr float kInitialDeviation = 0.02f;
constexpr std::uint64_t kBufferAlignment = 256;  // what products on a card like best

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

struct Model::BlockActivations {
  void* qkv = nullptr;        // [rows, 3 * width]
  void* attention = nullptr;  // what attention keeps
  void* mixed = nullptr;      // [rows, width]: attention's output
  void* middle = nullptr;     // [rows, width]: after attention and its residual
  void* hidden = nullptr;     // [rows, 4 * width]: before GELU
  float* mean1 = nullptr;     // [rows], as are the next three
  float* inverse_dev1 = nullptr;
  float* mean2 = nullptr;
  float* inverse_dev2 = nullptr;
};

struct Model::Kept {
  std::vector<BlockActivations> blocks;  // [layers]; computed again: every layer's are the same memory
  void* gradient = nullptr;              // [rows, width]: of the residual stream
  const std::uint8_t* tokens = nullptr;  // that the pass under way begins with
};

// Sizes are in values per row of activations unless said otherwise.
struct Model::Workspace {
  std::vector<Kept> kept;          // by micro-batch of the pass
  std::vector<std::byte*> inputs;  // width each: what BlockInputs divides
  void* normed = nullptr;          // width
  void* wide = nullptr;            // 4 * width: after GELU; on the way back its gradient, then that of qkv
  void* gradient_part = nullptr;   // width: of one branch
  float* mean = nullptr;           // 1: of the head's norm, as the next one
  float* inverse_dev = nullptr;
  float* row_loss = nullptr;          // 1
  float* logits = nullptr;            // kVocabulary
  void* logits_gradient = nullptr;    // kVocabulary; the logits' memory where activations are fp32
  void* attention_scratch = nullptr;  // bytes as the operations say
  std::byte* operations = nullptr;    // theirs
};

Model::Model(Runtime& runtime, Engine& engine, const ModelOptions& options, const GroupOptions& defaults)
    : runtime_(runtime), engine_(engine), options_(options) {
  stream_ = runtime.device().create_stream("compute");
  operations_ = options.make_operations ? options.make_operations(runtime, *stream_, operations_options())
                                        : Operations::create(runtime, *stream_, operations_options());
  declare(defaults);
  carve(nullptr, device_bytes_);
  engine.require_device_memory(device_bytes_);
  memory_ = runtime.device_arena().allocate(device_bytes_, "hoist-gpt's activations and work buffers");
  work_ = std::make_unique<Workspace>(carve(memory_.data(), device_bytes_));
  operations_->use_workspace(work_->operations);
  inputs_ = std::make_unique<BlockInputs>(runtime, input_options());
  inputs_->use_buffers(work_->inputs);
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
  const auto take_bytes = [&](std::uint64_t count) {
    std::byte* at = base == nullptr ? nullptr : base + bytes;
    bytes += round_up(count, kBufferAlignment);
    return at;
  };
  const auto take = [&](Index values) -> void* { return take_bytes(activation_bytes_of(values)); };
  const auto floats = [&](Index values) {
    return reinterpret_cast<float*>(take_bytes(static_cast<std::uint64_t>(rows() * values) * sizeof(float)));
  };
  const Index d = options_.width;
  const auto take_block = [&] {
    return BlockActivations{.qkv = take(3 * d),
                            .attention = take_bytes(operations_->attention_kept_bytes()),
                            .mixed = take(d),
                            .middle = take(d),
                            .hidden = take(4 * d),
                            .mean1 = floats(1),
                            .inverse_dev1 = floats(1),
                            .mean2 = floats(1),
                            .inverse_dev2 = floats(1)};
  };
  Workspace w;
  for (std::size_t i = 0; i < BlockInputs::buffer_count(input_options()); ++i)
    w.inputs.push_back(static_cast<std::byte*>(take(d)));
  w.kept.resize(static_cast<std::size_t>(options_.held_micro_batches));
  const auto layers = static_cast<std::size_t>(options_.layers);
  const bool keep = options_.activations == ActivationPolicy::keep;
  const BlockActivations shared = keep ? BlockActivations() : take_block();
  for (Kept& kept : w.kept) {
    kept.gradient = take(d);
    kept.blocks.assign(layers, shared);
    if (keep) std::generate(kept.blocks.begin(), kept.blocks.end(), take_block);
  }
  w.normed = take(d);
  w.wide = take(4 * d);
  w.gradient_part = take(d);
  for (float** vector : {&w.mean, &w.inverse_dev, &w.row_loss}) *vector = floats(1);
  w.logits = floats(kVocabulary);
  w.logits_gradient = operations_->activation_dtype() == DType::fp32 ? w.logits : take(kVocabulary);
  w.attention_scratch = take_bytes(operations_->attention_scratch_bytes());
  w.operations = take_bytes(operations_->workspace_bytes());
  return w;
}

std::uint64_t Model::activation_bytes_of(Index values_per_row) const {
  return static_cast<std::uint64_t>(rows() * values_per_row) * dtype_bytes(operations_->activation_dtype());
}

OperationsOptions Model::operations_options() const {
  return {.attention = {.batch = options_.batch,
                        .context = options_.context,
                        .heads = options_.heads,
                        .head_width = options_.width / options_.heads},
          .hidden = 4 * options_.width,
          .vocabulary = kVocabulary,
          .held_micro_batches = static_cast<std::size_t>(options_.held_micro_batches),
          .matrix_dtype = options_.matrix_dtype,
          .threads = options_.threads};
}

BlockInputsOptions Model::input_options() const {
  return {.layers = static_cast<std::size_t>(options_.layers),
          .held_micro_batches = static_cast<std::size_t>(options_.held_micro_batches),
          .item_bytes = activation_bytes_of(options_.width),
          .stash = options_.activations == ActivationPolicy::stash};
}

// A parameter of a matrix is in one product forward and in two backward, each a multiplication and an addition; the
// embedding's rows are looked up, but the tied head multiplies by the tokens'. Attention: two products of context *
// width forward, half of each below the diagonal, and twice that backward.
double Model::flops_per_token() const {
  const double d = options_.width, layers = options_.layers, context = options_.context;
  return 6 * (layers * 12 * d * d + kVocabulary * d) + 3 * layers * 2 * context * d;
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

  const std::size_t count = micro_batches.size();
  const bool returns = pass == Pass::train;
  inputs_->begin(count, returns ? BlockInputs::Return::comes_back : BlockInputs::Return::never);
  embed(micro_batches);
  for (int layer = 0; layer < options_.layers; ++layer) block_forward(layer, count);
  head(micro_batches, pass);
  if (returns) {
    for (int layer = options_.layers - 1; layer >= 0; --layer) block_backward(layer, count);
    embed_backward(count);
    stashed_bytes_ += inputs_->stashed_bytes(count);
  }
  stream_->synchronize();
  double loss = 0;
  for (std::size_t m = 0; m < count; ++m) loss += operations_->loss(m) / static_cast<double>(count);
  return loss;
}

void Model::check(const Batch& batch) const {
  const auto count = static_cast<std::size_t>(rows());
  if (batch.inputs.size() != count || batch.targets.size() != count) {
    throw UsageError(fmt::format("a batch of {} and {} bytes was given to a model of {} sequences of {} bytes",
                                 batch.inputs.size(), batch.targets.size(), options_.batch, options_.context));
  }
}

void Model::embed(std::span<const Batch> micro_batches) {
  Lease lease = engine_.gather(embed_, *stream_);
  const Matrix token_weight = matrix(lease.view(token_embedding_));
  const Matrix position_weight = matrix(lease.view(position_embedding_));
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    const std::uint8_t* tokens = operations_->tokens_on_device(Operations::Tokens::inputs, m, micro_batches[m].inputs);
    work_->kept[m].tokens = tokens;
    void* const x = inputs_->output_for(0, m, *stream_);
    operations_->run("embed", [this, tokens, token_weight, position_weight, x] {
      operations_->embedding_forward(
          {.tokens = tokens, .token_weight = token_weight, .position_weight = position_weight, .x = x});
    });
  }
  lease.release(*stream_);
}

void Model::embed_backward(std::size_t count) {
  const GradientLease gradients = engine_.gradients(embed_, *stream_);
  const GradientMatrix token_gradient = gradient_matrix(gradients.view(token_embedding_));
  const GradientMatrix position_gradient = gradient_matrix(gradients.view(position_embedding_));
  for (std::size_t m = 0; m < count; ++m) {
    operations_->run("embed backward", [this, m, token_gradient, position_gradient] {
      operations_->embedding_backward({.tokens = work_->kept[m].tokens,
                                       .dx = work_->kept[m].gradient,
                                       .token_gradient = token_gradient,
                                       .position_gradient = position_gradient});
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
    const void* const input = inputs_->forward_input(index, m);
    void* const output = inputs_->output_for(index + 1, m, *stream_);
    operations_->run("block", [this, index, m, weights, input, output] {
      const BlockActivations& kept = work_->kept[m].blocks[index];
      compute_to_wide(input, kept, weights);
      operations_->linear_forward(
          {.x = work_->wide, .weight = weights.down, .bias = weights.down_bias, .residual = kept.middle, .y = output});
    });
    inputs_->leave(index, m, *stream_);
  }
  lease.release(*stream_);
}

void Model::block_backward(int layer, std::size_t count) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  const auto index = static_cast<std::size_t>(layer);
  Lease lease = engine_.gather(block.unit, *stream_);
  const BlockWeights weights(block, lease);
  const BlockGradients gradients(block, engine_.gradients(block.unit, *stream_));
  for (std::size_t m = 0; m < count; ++m) {
    const void* const input = inputs_->bring(index, m, *stream_);
    operations_->run("block backward", [this, index, m, weights, gradients, input] {
      const Kept& kept = work_->kept[m];
      const BlockActivations& activations = kept.blocks[index];
      if (options_.activations == ActivationPolicy::keep) {
        second_norm(activations, weights);
        operations_->gelu_forward(activations.hidden, work_->wide);
      } else {
        compute_to_wide(input, activations, weights);
      }
      feed_forward_backward(kept.gradient, activations, weights, gradients);
      attention_branch_backward(input, kept.gradient, activations, weights, gradients);
    });
  }
  lease.release(*stream_);
  engine_.finish(block.unit, *stream_);
}

// The block up to GELU: everything its backward pass needs, and all but one of the products of its forward pass.
void Model::compute_to_wide(const void* input, const BlockActivations& block, const BlockWeights& weights) {
  const Workspace& w = *work_;
  first_norm(input, block, weights);
  operations_->linear_forward({.x = w.normed, .weight = weights.qkv, .bias = weights.qkv_bias, .y = block.qkv});
  operations_->attention_forward(block.qkv, block.attention, block.mixed);
  operations_->linear_forward(
      {.x = block.mixed, .weight = weights.out, .bias = weights.out_bias, .residual = input, .y = block.middle});
  second_norm(block, weights);
  operations_->linear_forward(
      {.x = w.normed, .weight = weights.up, .bias = weights.up_bias, .y = block.hidden, .gelu = w.wide});
}

void Model::first_norm(const void* input, const BlockActivations& block, const BlockWeights& weights) {
  operations_->layer_norm_forward({.x = input,
                                   .weight = weights.norm1_weight,
                                   .bias = weights.norm1_bias,
                                   .mean = block.mean1,
                                   .inverse_dev = block.inverse_dev1,
                                   .y = work_->normed});
}

void Model::second_norm(const BlockActivations& block, const BlockWeights& weights) {
  operations_->layer_norm_forward({.x = block.middle,
                                   .weight = weights.norm2_weight,
                                   .bias = weights.norm2_bias,
                                   .mean = block.mean2,
                                   .inverse_dev = block.inverse_dev2,
                                   .y = work_->normed});
}

// Takes the gradient from the block's output to the stream between attention and feed-forward.
void Model::feed_forward_backward(void* gradient, const BlockActivations& block, const BlockWeights& weights,
                                  const BlockGradients& gradients) {
  const Workspace& w = *work_;
  operations_->linear_backward_weight(
      {.dy = gradient, .x = w.wide, .gradient = gradients.down, .bias_gradient = gradients.down_bias});
  operations_->linear_backward_input(gradient, weights.down, w.wide);
  operations_->gelu_backward(block.hidden, w.wide, w.wide);
  operations_->linear_backward_weight(
      {.dy = w.wide, .x = w.normed, .gradient = gradients.up, .bias_gradient = gradients.up_bias});
  operations_->linear_backward_input(w.wide, weights.up, w.gradient_part);
  operations_->layer_norm_backward({.dy = w.gradient_part,
                                    .x = block.middle,
                                    .weight = weights.norm2_weight,
                                    .mean = block.mean2,
                                    .inverse_dev = block.inverse_dev2,
                                    .dx = gradient,
                                    .weight_gradient = gradients.norm2_weight,
                                    .bias_gradient = gradients.norm2_bias});
}

// Takes the gradient the rest of the way to the block's input.
void Model::attention_branch_backward(const void* input, void* gradient, const BlockActivations& block,
                                      const BlockWeights& weights, const BlockGradients& gradients) {
  const Workspace& w = *work_;
  operations_->linear_backward_weight(
      {.dy = gradient, .x = block.mixed, .gradient = gradients.out, .bias_gradient = gradients.out_bias});
  operations_->linear_backward_input(gradient, weights.out, w.gradient_part);
  operations_->attention_backward({.qkv = block.qkv,
                                   .kept = block.attention,
                                   .y = block.mixed,
                                   .dy = w.gradient_part,
                                   .scratch = w.attention_scratch,
                                   .dqkv = w.wide});
  first_norm(input, block, weights);  // its output made room for the second norm's
  operations_->linear_backward_weight(
      {.dy = w.wide, .x = w.normed, .gradient = gradients.qkv, .bias_gradient = gradients.qkv_bias});
  operations_->linear_backward_input(w.wide, weights.qkv, w.gradient_part);
  operations_->layer_norm_backward({.dy = w.gradient_part,
                                    .x = input,
                                    .weight = weights.norm1_weight,
                                    .mean = block.mean1,
                                    .inverse_dev = block.inverse_dev1,
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
    const std::uint8_t* targets =
        operations_->tokens_on_device(Operations::Tokens::targets, m, micro_batches[m].targets);
    const void* const input = inputs_->forward_input(static_cast<std::size_t>(options_.layers), m);
    operations_->run("head", [this, m, targets, input, weights, loss_scale] {
      const Workspace& w = *work_;
      head_norm(input, weights);
      operations_->logits_forward(w.normed, weights.tokens, w.logits);
      operations_->cross_entropy({.micro_batch = m,
                                  .targets = targets,
                                  .logits = w.logits,
                                  .gradient = w.logits_gradient,
                                  .row_loss = w.row_loss,
                                  .loss_scale = loss_scale});
    });
    if (pass != Pass::train) continue;
    operations_->run("head backward", [this, m, input, weights, gradients] {
      head_backward(input, work_->kept[m].gradient, weights, gradients);
    });
  }
  operations_->fetch_losses();
  lease.release(*stream_);
  if (pass == Pass::train) engine_.finish(head_, *stream_);
}

void Model::head_norm(const void* input, const HeadWeights& weights) {
  operations_->layer_norm_forward({.x = input,
                                   .weight = weights.norm_weight,
                                   .bias = weights.norm_bias,
                                   .mean = work_->mean,
                                   .inverse_dev = work_->inverse_dev,
                                   .y = work_->normed});
}

void Model::head_backward(const void* input, void* gradient, const HeadWeights& weights,
                          const HeadGradients& gradients) {
  const Workspace& w = *work_;
  operations_->linear_backward_weight({.dy = w.logits_gradient, .x = w.normed, .gradient = gradients.tokens});
  operations_->linear_backward_input(w.logits_gradient, weights.tokens, w.gradient_part);
  operations_->zero(gradient, rows() * options_.width);  // nothing flows past the head
  operations_->layer_norm_backward({.dy = w.gradient_part,
                                    .x = input,
                                    .weight = weights.norm_weight,
                                    .mean = w.mean,
                                    .inverse_dev = w.inverse_dev,
                                    .dx = gradient,
                                    .weight_gradient = gradients.norm_weight,
                                    .bias_gradient = gradients.norm_bias});
}

}  // namespace hoist::gpt
