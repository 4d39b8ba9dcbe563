// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>

#include "model_parts.hpp"

namespace hoist::gpt {
namespace {

constexpr float kInitialDeviation = 0.02f;
constexpr std::uint64_t kBufferAlignment = 64;  // a cache line

}  // namespace

Gpt::Gpt(Runtime& runtime, const EngineOptions& engine, const GptOptions& options)
    : options_(options),
      pool_({.threads = options.threads}),
      losses_(static_cast<std::size_t>(options.held_micro_batches)) {
  if (!runtime.device().host_accessible()) {
    throw UsageError(
        fmt::format("the CPU cannot read the memory of {}: {}", runtime.device().description(), kComputesOnCpu));
  }
  use_own_threads();
  take_product_memory(pool_.threads());
  stream_ = runtime.device().create_stream("compute");
  declare(engine.optimizer_defaults);
  carve(nullptr, device_bytes_);
  require_device_memory(runtime, engine, model_, device_bytes_);
  memory_ = runtime.device_arena().allocate(device_bytes_, "hoist-gpt's activations and work buffers");
  work_ = std::make_unique<Workspace>(carve(memory_.data(), device_bytes_));
  inputs_ = std::make_unique<BlockInputs>(runtime, input_options());
  inputs_->use_buffers(work_->inputs);
}

Gpt::~Gpt() = default;

// Collects the parameters of one unit, named after it, and adds it to the model.
class Gpt::UnitBuilder {
 public:
  UnitBuilder(Gpt& gpt, std::string unit) : gpt_(gpt), unit_(std::move(unit)) {}

  void matrix(const std::string& name, std::int64_t out, std::int64_t in) {
    specs_.push_back({.name = full(name), .shape = {out, in}, .dtype = gpt_.options_.matrix_dtype});
  }
  void linear(const std::string& name, std::int64_t out, std::int64_t in) {
    matrix(name + ".weight", out, in);
    vector(name + ".bias", out);
  }
  void norm(const std::string& name) {
    vector(name + ".weight", gpt_.width());
    vector(name + ".bias", gpt_.width());
  }
  UnitId add() { return gpt_.model_.add_unit(unit_, specs_); }
  ParameterId id(const std::string& name) const { return gpt_.model_.parameter(full(name)); }
  Layer layer(const std::string& name) const { return {id(name + ".weight"), id(name + ".bias")}; }

 private:
  void vector(const std::string& name, std::int64_t count) {
    specs_.push_back({.name = full(name), .shape = {count}, .dtype = DType::fp32, .group = gpt_.no_decay_});
  }
  std::string full(const std::string& name) const { return fmt::format("{}.{}", unit_, name); }
  Gpt& gpt_;
  const std::string unit_;
  std::vector<ParameterSpec> specs_;
};

void Gpt::declare(const GroupOptions& defaults) {
  GroupOptions without_decay = defaults;
  without_decay.weight_decay = 0;
  no_decay_ = model_.add_group(without_decay);

  UnitBuilder first(*this, "embed");
  first.matrix("token", kVocabulary, options_.width);
  first.matrix("position", options_.context, options_.width);
  embed_ = first.add();
  token_embedding_ = first.id("token");
  position_embedding_ = first.id("position");

  for (int layer = 0; layer < options_.layers; ++layer) blocks_.push_back(declare_block(layer));

  UnitBuilder last(*this, "head");
  last.norm("norm");
  head_ = last.add();
  head_norm_ = std::make_unique<Layer>(last.layer("norm"));
  model_.tie(head_, token_embedding_);
}

Gpt::Block Gpt::declare_block(int layer) {
  const std::int64_t d = options_.width;
  UnitBuilder unit(*this, fmt::format("block.{}", layer));
  unit.norm("norm1");
  unit.linear("qkv", 3 * d, d);
  unit.linear("out", d, d);
  unit.norm("norm2");
  unit.linear("up", 4 * d, d);
  unit.linear("down", d, 4 * d);
  return {.unit = unit.add(),
          .norm1 = unit.layer("norm1"),
          .qkv = unit.layer("qkv"),
          .out = unit.layer("out"),
          .norm2 = unit.layer("norm2"),
          .up = unit.layer("up"),
          .down = unit.layer("down")};
}

// Called once with a null base to learn the bytes, and once to place the buffers.
Gpt::Workspace Gpt::carve(std::byte* base, std::uint64_t& bytes) const {
  bytes = 0;
  const auto floats = [&](Index count) {
    std::byte* at = base == nullptr ? nullptr : base + bytes;
    bytes += round_up(static_cast<std::uint64_t>(count) * sizeof(float), kBufferAlignment);
    return reinterpret_cast<float*>(at);
  };
  const auto take = [&](Index values_per_row) { return floats(rows() * values_per_row); };
  const Index d = width(), probabilities = attention_shape().probability_count();
  const auto take_block = [&] {
    return BlockActivations{.qkv = take(3 * d),
                            .probabilities = floats(probabilities),
                            .mixed = take(d),
                            .middle = take(d),
                            .hidden = take(4 * d),
                            .norm1 = {take(1), take(1)},
                            .norm2 = {take(1), take(1)}};
  };
  Workspace w;
  for (std::size_t i = 0; i < BlockInputs::buffer_count(input_options()); ++i) w.inputs.push_back(take(d));
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
  w.head_norm = {take(1), take(1)};
  w.row_loss = take(1);
  w.logits = take(kVocabulary);
  w.attention_scratch = floats(probabilities);
  w.panel = floats(std::max({4 * d * d, kVocabulary * d, options_.context * d}));
  return w;
}

void Gpt::enqueue(const char* what, std::function<void()> work) {
  stream_->launch(what, [this, work = std::move(work)] {
    const TimePoint begin = Clock::now();
    work();
    compute_time_ += Clock::now() - begin;
  });
}

KernelContext Gpt::context() { return {.pool = pool_, .rows = rows(), .panel = work_->panel}; }

AttentionShape Gpt::attention_shape() const {
  return {.batch = options_.batch,
          .context = options_.context,
          .heads = options_.heads,
          .head_width = options_.width / options_.heads};
}

BlockInputsOptions Gpt::input_options() const {
  return {.layers = static_cast<std::size_t>(options_.layers),
          .held_micro_batches = static_cast<std::size_t>(options_.held_micro_batches),
          .item_bytes = static_cast<std::uint64_t>(rows() * width()) * sizeof(float),
          .offload = options_.activations == ActivationPolicy::offload};
}

Initializer Gpt::initial_values() const {
  struct Rule {
    float constant = 0;
    float deviation = 0;
  };
  std::vector<Rule> rules;
  const float residual = kInitialDeviation / std::sqrt(2.0f * static_cast<float>(options_.layers));
  for (const ParameterSpec& spec : model_.parameters()) {
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

void Gpt::set_learning_rate(double learning_rate) {
  engine_->set_learning_rate(GroupId{0}, learning_rate);
  engine_->set_learning_rate(no_decay_, learning_rate);
}

}  // namespace hoist::gpt
