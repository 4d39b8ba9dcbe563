// SPDX-License-Identifier: Apache-2.0
#include "card_operations.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::gpt::card {
namespace {

constexpr std::uint64_t kPieceAlignment = 256;

std::uint64_t count_of(Index count) { return static_cast<std::uint64_t>(count); }

tiers::PinnedPoolOptions pool_options(Runtime& runtime, std::initializer_list<std::uint64_t> pieces) {
  tiers::PinnedPlan plan;
  for (const std::uint64_t bytes : pieces) plan.add(bytes);
  return {.bytes = plan.bytes(), .huge_pages = runtime.options().huge_pages};
}

void check(const OperationsOptions& options) {
  const AttentionShape& shape = options.attention;
  if (shape.head_width == 64 || shape.head_width == 128) return;
  const Index width = shape.width();
  const std::string remedy = width % 64 == 0 ? fmt::format("--heads {}{}", width / 64,
                                                           width % 128 == 0 ? fmt::format(" or {}", width / 128) : "")
                                             : std::string("a --width that is a multiple of 64");
  throw UsageError(
      fmt::format("on a card attention heads are 64 or 128 wide, --width {} with --heads {} makes them {}: "
                  "choose {}, or --device host",
                  width, shape.heads, shape.head_width, remedy));
}

}  // namespace

CardOperations::CardOperations(Runtime& runtime, platform::Stream& stream, std::unique_ptr<Card> card,
                               const OperationsOptions& options)
    : device_(runtime.device()),
      stream_(stream),
      options_((check(options), options)),
      activation_dtype_(activations_beside(options.matrix_dtype)),
      pool_(runtime.pinned_budget(), pool_options(runtime, {token_bytes(), loss_bytes()})),
      card_(std::move(card)) {
  staged_tokens_ = pool_.carve(token_bytes(), "tokens");
  fetched_losses_ = pool_.carve(loss_bytes(), "losses");
  device_.register_host(pool_.memory().bytes());
}

CardOperations::~CardOperations() { device_.unregister_host(pool_.memory().bytes()); }

std::uint64_t CardOperations::attention_kept_bytes() const { return attention().statistics() * sizeof(float); }

CardOperations::Workspace CardOperations::carve(std::byte* base, std::uint64_t& bytes) const {
  bytes = 0;
  const auto take = [&](std::uint64_t count) {
    std::byte* at = base == nullptr ? nullptr : base + bytes;
    bytes += round_up(count, kPieceAlignment);
    return at;
  };
  const std::uint64_t value_bytes = dtype_bytes(activation_dtype_);
  const std::uint64_t hidden = count_of(options_.hidden), vocabulary = count_of(options_.vocabulary);
  const ColumnSums norm{.rows = rows(), .columns = width(), .x = this};
  const ColumnSums biases{.rows = rows(), .columns = std::max(hidden, 3 * width())};
  Workspace w;
  w.weights = take(options_.matrix_dtype == DType::fp32 ? std::max(hidden, vocabulary) * width() * value_bytes : 0);
  w.one_hot = take(rows() * vocabulary * value_bytes);
  w.partial = take(std::max(norm.partial_floats(), biases.partial_floats()) * sizeof(float));
  w.losses = take(loss_bytes());
  w.tokens = take(token_bytes());
  w.products = take(card_->workspace_bytes());
  return w;
}

std::uint64_t CardOperations::workspace_bytes() const {
  std::uint64_t bytes = 0;
  carve(nullptr, bytes);
  return bytes;
}

void CardOperations::use_workspace(std::byte* workspace) {
  std::uint64_t bytes = 0;
  work_ = carve(workspace, bytes);
  card_->use_workspace({work_.products, card_->workspace_bytes()});
}

const std::uint8_t* CardOperations::tokens_on_device(Tokens which, std::size_t micro_batch,
                                                     std::span<const std::uint8_t> tokens) {
  const std::uint64_t place = (2 * micro_batch + (which == Tokens::targets ? 1 : 0)) * rows();
  std::memcpy(staged_tokens_.data() + place, tokens.data(), tokens.size());
  stream_.copy(work_.tokens + place, staged_tokens_.data() + place, tokens.size(), platform::CopyKind::host_to_device);
  return reinterpret_cast<const std::uint8_t*>(work_.tokens + place);
}

// --- embedding -------------------------------------------------------------------------------------------------------

void CardOperations::embedding_forward(const EmbeddingForward& a) {
  card_->launch(Embed{.rows = rows(),
                      .context = count_of(options_.attention.context),
                      .width = width(),
                      .tokens = a.tokens,
                      .token_weight = a.token_weight.data,
                      .position_weight = a.position_weight.data,
                      .weight_dtype = a.token_weight.dtype,
                      .x = a.x});
}

// Rows of one token are added up by a product: exact, and in one order.
void CardOperations::embedding_backward(const EmbeddingBackward& a) {
  card_->launch(
      OneHot{.rows = rows(), .classes = count_of(options_.vocabulary), .tokens = a.tokens, .out = work_.one_hot});
  linear_backward_weight({.dy = work_.one_hot, .x = a.dx, .gradient = a.token_gradient});
  card_->launch(PositionGradient{.batch = count_of(options_.attention.batch),
                                 .context = count_of(options_.attention.context),
                                 .width = width(),
                                 .dx = a.dx,
                                 .gradient = a.position_gradient.data,
                                 .gradient_dtype = a.position_gradient.dtype});
}

// --- linear ----------------------------------------------------------------------------------------------------------

const void* CardOperations::as_activations(const Matrix& weight) {
  if (weight.dtype == activation_dtype_) return weight.data;
  card_->launch(CastWeights{.count = count_of(weight.rows * weight.columns),
                            .source = static_cast<const float*>(weight.data),
                            .target = work_.weights});
  return work_.weights;
}

void CardOperations::linear_forward(const LinearForward& a) {
  card_->multiply({.m = rows(),
                   .n = count_of(a.weight.rows),
                   .k = count_of(a.weight.columns),
                   .a = a.x,
                   .b = as_activations(a.weight),
                   .transposed_b = true,
                   .dtype = activation_dtype_,
                   .d = a.y,
                   .d_dtype = activation_dtype_});
  if (a.bias == nullptr && a.residual == nullptr && a.gelu == nullptr) return;
  card_->launch(FinishLinear{.rows = rows(),
                             .columns = count_of(a.weight.rows),
                             .y = a.y,
                             .bias = a.bias,
                             .residual = a.residual,
                             .gelu = a.gelu});
}

void CardOperations::logits_forward(const void* x, const Matrix& weight, float* y) {
  card_->multiply({.m = rows(),
                   .n = count_of(weight.rows),
                   .k = count_of(weight.columns),
                   .a = x,
                   .b = as_activations(weight),
                   .transposed_b = true,
                   .dtype = activation_dtype_,
                   .d = y,
                   .d_dtype = DType::fp32});
}

void CardOperations::linear_backward_input(const void* dy, const Matrix& weight, void* dx) {
  card_->multiply({.m = rows(),
                   .n = count_of(weight.columns),
                   .k = count_of(weight.rows),
                   .a = dy,
                   .b = as_activations(weight),
                   .dtype = activation_dtype_,
                   .d = dx,
                   .d_dtype = activation_dtype_});
}

void CardOperations::linear_backward_weight(const LinearBackwardWeight& a) {
  card_->multiply({.m = count_of(a.gradient.rows),
                   .n = count_of(a.gradient.columns),
                   .k = rows(),
                   .a = a.dy,
                   .b = a.x,
                   .transposed_a = true,
                   .add = true,
                   .dtype = activation_dtype_,
                   .d = a.gradient.data,
                   .d_dtype = a.gradient.dtype});
  if (a.bias_gradient == nullptr) return;
  sum_columns({.columns = count_of(a.gradient.rows), .dy = a.dy, .bias_gradient = a.bias_gradient});
}

void CardOperations::sum_columns(ColumnSums sums) {
  sums.rows = rows();
  sums.partial = reinterpret_cast<float*>(work_.partial);
  card_->launch(sums);
}

// --- norm, GELU, attention, loss -------------------------------------------------------------------------------------

void CardOperations::layer_norm_forward(const LayerNormForward& a) {
  card_->launch(NormForward{.rows = rows(),
                            .width = width(),
                            .x = a.x,
                            .weight = a.weight,
                            .bias = a.bias,
                            .mean = a.mean,
                            .inverse_dev = a.inverse_dev,
                            .y = a.y});
}

void CardOperations::layer_norm_backward(const LayerNormBackward& a) {
  sum_columns({.columns = width(),
               .dy = a.dy,
               .x = a.x,
               .mean = a.mean,
               .inverse_dev = a.inverse_dev,
               .bias_gradient = a.bias_gradient,
               .weight_gradient = a.weight_gradient});
  card_->launch(NormBackward{.rows = rows(),
                             .width = width(),
                             .dy = a.dy,
                             .x = a.x,
                             .weight = a.weight,
                             .mean = a.mean,
                             .inverse_dev = a.inverse_dev,
                             .dx = a.dx});
}

void CardOperations::gelu_forward(const void* x, void* y) {
  card_->launch(Gelu{.count = rows() * count_of(options_.hidden), .x = x, .out = y});
}

void CardOperations::gelu_backward(const void* x, const void* dy, void* dx) {
  card_->launch(Gelu{.count = rows() * count_of(options_.hidden), .x = x, .dy = dy, .out = dx});
}

Attention CardOperations::attention() const {
  return {.batch = static_cast<std::uint32_t>(options_.attention.batch),
          .context = static_cast<std::uint32_t>(options_.attention.context),
          .heads = static_cast<std::uint32_t>(options_.attention.heads),
          .head_width = static_cast<std::uint32_t>(options_.attention.head_width)};
}

void CardOperations::attention_forward(const void* qkv, void* kept, void* y) {
  Attention a = attention();
  a.qkv = qkv;
  a.log_sum = static_cast<float*>(kept);
  a.y = y;
  card_->launch(ForwardAttention{a});
}

void CardOperations::attention_backward(const Operations::AttentionBackward& given) {
  Attention a = attention();
  a.qkv = given.qkv;
  a.log_sum = static_cast<float*>(const_cast<void*>(given.kept));  // read only
  a.y = const_cast<void*>(given.y);                                // read only
  a.dy = given.dy;
  a.delta = static_cast<float*>(given.scratch);
  a.dqkv = given.dqkv;
  card_->launch(BackwardAttention{a});
}

void CardOperations::cross_entropy(const CrossEntropy& a) {
  card_->launch(CrossEntropyRows{.rows = rows(),
                                 .classes = count_of(options_.vocabulary),
                                 .targets = a.targets,
                                 .logits = a.logits,
                                 .gradient = a.gradient,
                                 .row_loss = a.row_loss,
                                 .scale = a.loss_scale / static_cast<float>(rows())});
  card_->launch(
      Mean{.count = rows(), .values = a.row_loss, .mean = reinterpret_cast<double*>(work_.losses) + a.micro_batch});
}

void CardOperations::zero(void* activations, Index count) {
  card_->zero(activations, count_of(count) * dtype_bytes(activation_dtype_));
}

void CardOperations::fetch_losses() {
  stream_.copy(fetched_losses_.data(), work_.losses, loss_bytes(), platform::CopyKind::device_to_host);
}

double CardOperations::loss(std::size_t micro_batch) const {
  double loss = 0;
  std::memcpy(&loss, fetched_losses_.data() + micro_batch * sizeof loss, sizeof loss);
  return loss;
}

}  // namespace hoist::gpt::card
