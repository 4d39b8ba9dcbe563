// SPDX-License-Identifier: Apache-2.0
// The text of a card's kernels, carried out thread by thread, against the CPU's kernels on the same values; in both
// orders of blocks and threads, with the same bits.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/platform/elements.hpp>

#include "card/column_major.hpp"
#include "emulated_card.hpp"
#include "kernels.hpp"

namespace hoist::gpt::card {
namespace {

using Floats = std::vector<float>;
using Halves = std::vector<std::uint16_t>;

std::size_t at(std::uint64_t i) { return static_cast<std::size_t>(i); }

// Values of a 16-bit type, as they are and in fp32, with a guard behind them.
class Values {
 public:
  Values(DType dtype, std::uint64_t count, std::uint64_t seed, double deviation = 1.0) : Values(dtype, count) {
    for (std::size_t i = 0; i < count_; ++i) set(i, static_cast<float>(deviation * random_normal(seed, i)));
  }
  // Not written to yet: NaN.
  Values(DType dtype, std::uint64_t count)
      : dtype_(dtype), count_(at(count)), bits_(at(count) + kGuardCount + 8, kGuard) {
    for (std::size_t i = 0; i < count_; ++i) data()[i] = 0xFFFF;
  }
  void set(std::size_t i, float value) {
    data()[i] = dtype_ == DType::bf16 ? platform::AsBf16::store(value) : platform::AsFp16::store(value);
  }
  std::uint16_t* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bits_.data());
    return bits_.data() + (16 - address % 16) % 16 / 2;
  }
  Floats floats() {
    Floats result(count_);
    for (std::size_t i = 0; i < count_; ++i)
      result[i] = dtype_ == DType::bf16 ? platform::AsBf16::load(data()[i]) : platform::AsFp16::load(data()[i]);
    return result;
  }
  Halves bits() { return Halves(data(), data() + count_); }
  bool guard_intact() {
    for (std::size_t i = 0; i < kGuardCount; ++i) {
      if (data()[count_ + i] != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr std::uint16_t kGuard = 0x5A5A;
  static constexpr std::size_t kGuardCount = 64;
  DType dtype_;
  std::size_t count_;
  Halves bits_;
};

// fp32 at 16 bytes.
class Singles {
 public:
  explicit Singles(std::uint64_t count, float value = NAN) : values_(at(count) + 4, value), count_(at(count)) {}
  Singles(std::uint64_t count, std::uint64_t seed, double deviation) : Singles(count) {
    for (std::size_t i = 0; i < count_; ++i) data()[i] = static_cast<float>(deviation * random_normal(seed, i));
  }
  float* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(values_.data());
    return values_.data() + (16 - address % 16) % 16 / 4;
  }
  Floats floats() { return Floats(data(), data() + count_); }

 private:
  Floats values_;
  std::size_t count_;
};

// Rounding to the type: 2^-9 of a value, twice where values are rounded on their way.
double unit_of(DType dtype) { return dtype == DType::bf16 ? 1.0 / 256 : 1.0 / 2048; }

// Every value, and all of them together.
void expect_close(const Floats& found, const Floats& expected, double unit, const char* what) {
  ASSERT_EQ(found.size(), expected.size());
  double difference = 0, norm = 0, largest = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_TRUE(std::isfinite(found[i])) << what << " " << i;
    const double d = static_cast<double>(found[i]) - static_cast<double>(expected[i]);
    difference += d * d;
    norm += static_cast<double>(expected[i]) * static_cast<double>(expected[i]);
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
  }
  for (std::size_t i = 0; i < found.size(); ++i)
    ASSERT_NEAR(found[i], expected[i], 4 * unit * std::max(largest / 4, std::abs(static_cast<double>(expected[i]))))
        << what << " " << i;
  EXPECT_LE(std::sqrt(difference), unit * std::sqrt(norm)) << what;
}

class CardKernels : public testing::TestWithParam<DType> {
 protected:
  CardKernels() { use_own_threads(); }
  DType dtype() const { return GetParam(); }
  double unit() const { return unit_of(GetParam()); }
  Values values(std::uint64_t count, std::uint64_t seed, double deviation = 1.0) const {
    return Values(GetParam(), count, seed, deviation);
  }
  Values unwritten(std::uint64_t count) const { return Values(GetParam(), count); }
  UpdatePool pool_{{.threads = 2}};
};

INSTANTIATE_TEST_SUITE_P(Types, CardKernels, testing::Values(DType::bf16, DType::fp16),
                         [](const auto& one) { return std::string(dtype_name(one.param)); });

// --- attention -------------------------------------------------------------------------------------------------------

struct AttentionArrays {
  AttentionArrays(const AttentionShape& given, DType dtype)
      : shape(given),
        rows(static_cast<std::uint64_t>(given.batch * given.context)),
        width(static_cast<std::uint64_t>(given.width())),
        qkv(dtype, rows * 3 * width, 1),
        dy(dtype, rows * width, 2),
        y(dtype, rows * width),
        dqkv(dtype, rows * 3 * width),
        log_sum(rows * static_cast<std::uint64_t>(given.heads)),
        delta(rows * static_cast<std::uint64_t>(given.heads)) {}

  Attention arguments() {
    return {.batch = static_cast<std::uint32_t>(shape.batch),
            .context = static_cast<std::uint32_t>(shape.context),
            .heads = static_cast<std::uint32_t>(shape.heads),
            .head_width = static_cast<std::uint32_t>(shape.head_width),
            .qkv = qkv.data(),
            .y = y.data(),
            .log_sum = log_sum.data(),
            .dy = dy.data(),
            .delta = delta.data(),
            .dqkv = dqkv.data()};
  }
  void emulate_both(DType dtype, bool backwards) {
    emulate(ForwardAttention{arguments()}, dtype, backwards);
    emulate(BackwardAttention{arguments()}, dtype, backwards);
  }

  AttentionShape shape;
  std::uint64_t rows, width;
  Values qkv, dy, y, dqkv;
  Singles log_sum, delta;
};

TEST_P(CardKernels, Attention) {
  for (const AttentionShape& shape :
       {AttentionShape{2, 1, 1, 64}, AttentionShape{1, 5, 2, 64}, AttentionShape{2, 64, 1, 64},
        AttentionShape{1, 70, 2, 128}, AttentionShape{1, 200, 1, 64}, AttentionShape{1, 161, 1, 128}}) {
    SCOPED_TRACE(testing::Message() << shape.batch << " x " << shape.context << " x " << shape.heads << " x "
                                    << shape.head_width);
    AttentionArrays card(shape, dtype()), again(shape, dtype());
    card.emulate_both(dtype(), false);
    EXPECT_TRUE(card.y.guard_intact() && card.dqkv.guard_intact());
    again.emulate_both(dtype(), true);
    EXPECT_EQ(again.y.bits(), card.y.bits());
    EXPECT_EQ(again.dqkv.bits(), card.dqkv.bits());
    EXPECT_EQ(again.log_sum.floats(), card.log_sum.floats());

    Floats probabilities(at(static_cast<std::uint64_t>(shape.probability_count()))), scratch(probabilities.size());
    Floats y(at(card.rows * card.width)), dqkv(at(card.rows * 3 * card.width));
    const Floats qkv = card.qkv.floats(), dy = card.dy.floats();
    attention_forward(pool_, shape, qkv.data(), probabilities.data(), y.data());
    attention_backward(pool_, shape,
                       {.qkv = qkv.data(),
                        .probabilities = probabilities.data(),
                        .dy = dy.data(),
                        .scratch = scratch.data(),
                        .dqkv = dqkv.data()});
    expect_close(card.y.floats(), y, unit(), "y");
    expect_close(card.dqkv.floats(), dqkv, 2 * unit(), "dqkv");
  }
}

TEST_P(CardKernels, AttentionSurvivesLargeScoresAndNeverLooksAhead) {
  AttentionArrays card({1, 100, 1, 64}, dtype()), other({1, 100, 1, 64}, dtype());
  for (std::size_t i = 0; i < 100 * 3 * 64; ++i) card.qkv.set(i, 30 * card.qkv.floats()[i]);
  const Floats scaled = card.qkv.floats();
  for (std::size_t i = 0; i < scaled.size(); ++i) other.qkv.set(i, i / (3 * 64) < 80 ? scaled[i] : 100.0f);
  card.emulate_both(dtype(), false);
  other.emulate_both(dtype(), false);
  for (const float value : card.y.floats()) ASSERT_TRUE(std::isfinite(value));
  for (const float value : card.dqkv.floats()) ASSERT_TRUE(std::isfinite(value));
  const Halves here = card.y.bits(), there = other.y.bits();
  EXPECT_TRUE(std::equal(here.begin(), here.begin() + 80 * 64, there.begin()));
  EXPECT_FALSE(std::equal(here.begin() + 80 * 64, here.end(), there.begin() + 80 * 64));
}

// --- rows ------------------------------------------------------------------------------------------------------------

// Odd numbers of rows, and widths that fill a warp's packs in part, once and several times.
struct RowShape {
  std::uint64_t rows, width;
};
constexpr RowShape kRowShapes[] = {{1, 8}, {13, 64}, {37, 256}, {300, 264}, {9, 1032}};

TEST_P(CardKernels, LayerNorm) {
  for (const auto& [rows, width] : kRowShapes) {
    SCOPED_TRACE(testing::Message() << rows << " x " << width);
    Values x = values(rows * width, 1, 3.0), dy = values(rows * width, 2), y = unwritten(rows * width);
    Singles weight(width, 3, 1.0), bias(width, 4, 1.0), mean(rows), inverse_dev(rows);
    emulate(NormForward{.rows = rows,
                        .width = width,
                        .x = x.data(),
                        .weight = weight.data(),
                        .bias = bias.data(),
                        .mean = mean.data(),
                        .inverse_dev = inverse_dev.data(),
                        .y = y.data()},
            dtype());
    EXPECT_TRUE(y.guard_intact());
    const Floats xs = x.floats(), dys = dy.floats(), weights = weight.floats(), biases = bias.floats();
    Floats expected(xs.size()), means(at(rows)), inverse_devs(at(rows));
    layer_norm_forward(pool_, {.rows = static_cast<Index>(rows),
                               .width = static_cast<Index>(width),
                               .x = xs.data(),
                               .weight = weights.data(),
                               .bias = biases.data(),
                               .mean = means.data(),
                               .inverse_dev = inverse_devs.data(),
                               .y = expected.data()});
    expect_close(y.floats(), expected, unit(), "y");
    expect_close(mean.floats(), means, 1e-5, "mean");
    expect_close(inverse_dev.floats(), inverse_devs, 1e-5, "inverse_dev");

    Values dx = values(rows * width, 5);
    const Floats before = dx.floats();
    Floats expected_dx = before, expected_weight(at(width), 0.5f), expected_bias(at(width), 0.25f);
    layer_norm_backward(pool_, {.rows = static_cast<Index>(rows),
                                .width = static_cast<Index>(width),
                                .dy = dys.data(),
                                .x = xs.data(),
                                .weight = weights.data(),
                                .mean = means.data(),
                                .inverse_dev = inverse_devs.data(),
                                .dx = expected_dx.data(),
                                .weight_gradient = expected_weight.data(),
                                .bias_gradient = expected_bias.data()});
    ColumnSums sums{.rows = rows,
                    .columns = width,
                    .dy = dy.data(),
                    .x = x.data(),
                    .mean = mean.data(),
                    .inverse_dev = inverse_dev.data()};
    Singles partial(sums.partial_floats()), weight_gradient(width, 0.5f), bias_gradient(width, 0.25f);
    sums.partial = partial.data();
    sums.weight_gradient = weight_gradient.data();
    sums.bias_gradient = bias_gradient.data();
    emulate(sums, dtype(), true);
    expect_close(weight_gradient.floats(), expected_weight, 1e-4, "weight gradient");
    expect_close(bias_gradient.floats(), expected_bias, 1e-4, "bias gradient");
    emulate(NormBackward{.rows = rows,
                         .width = width,
                         .dy = dy.data(),
                         .x = x.data(),
                         .weight = weight.data(),
                         .mean = mean.data(),
                         .inverse_dev = inverse_dev.data(),
                         .dx = dx.data()},
            dtype());
    EXPECT_TRUE(dx.guard_intact());
    expect_close(dx.floats(), expected_dx, unit(), "dx");
  }
}

TEST_P(CardKernels, BiasGradientsAreTheSameInEitherOrder) {
  for (const auto& [rows, width] : {RowShape{1, 8}, RowShape{256, 256}, RowShape{257, 264}, RowShape{700, 1032}}) {
    Values dy = values(rows * width, 2);
    const auto run = [&, rows = rows, width = width](bool backwards) {
      ColumnSums sums{.rows = rows, .columns = width, .dy = dy.data()};
      Singles partial(sums.partial_floats()), gradient(width, 0.5f);
      sums.partial = partial.data();
      sums.bias_gradient = gradient.data();
      emulate(sums, dtype(), backwards);
      return gradient.floats();
    };
    const Floats found = run(false), values = dy.floats();
    EXPECT_EQ(run(true), found);
    for (std::uint64_t column = 0; column < width; ++column) {
      double sum = 0.5;
      for (std::uint64_t row = 0; row < rows; ++row) sum += static_cast<double>(values[at(row * width + column)]);
      ASSERT_NEAR(found[at(column)], sum, 1e-3) << column;
    }
  }
}

TEST_P(CardKernels, FinishesLinearLayers) {
  const std::uint64_t rows = 21, columns = 72;
  Singles bias(columns, 3, 1.0);
  for (const bool with_residual : {false, true}) {
    for (const bool with_gelu : {false, true}) {
      Values y = values(rows * columns, 1), residual = values(rows * columns, 2), gelu = unwritten(rows * columns);
      Floats expected = y.floats();
      for (std::size_t i = 0; i < expected.size(); ++i)
        expected[i] += bias.floats()[i % columns] + (with_residual ? residual.floats()[i] : 0.0f);
      emulate(FinishLinear{.rows = rows,
                           .columns = columns,
                           .y = y.data(),
                           .bias = bias.data(),
                           .residual = with_residual ? residual.data() : nullptr,
                           .gelu = with_gelu ? gelu.data() : nullptr},
              dtype());
      EXPECT_TRUE(y.guard_intact() && gelu.guard_intact());
      expect_close(y.floats(), expected, unit(), "y");
      if (!with_gelu) continue;
      // Just what the way back makes of what is kept.
      Values later = unwritten(rows * columns);
      emulate(card::Gelu{.count = rows * columns, .x = y.data(), .out = later.data()}, dtype());
      EXPECT_EQ(gelu.bits(), later.bits());
    }
  }
}

TEST_P(CardKernels, Gelu) {
  Values x = values(4096, 1, 4.0);
  const float edges[] = {0.0f, -0.0f, 1e-6f, -1e-6f, 60.0f, -60.0f, 6e4f, -6e4f};
  for (std::size_t i = 0; i < std::size(edges); ++i) x.set(i, edges[i]);
  Values dy = values(4096, 2), y = unwritten(4096), dx = unwritten(4096);
  emulate(card::Gelu{.count = 4096, .x = x.data(), .out = y.data()}, dtype());
  emulate(card::Gelu{.count = 4096, .x = x.data(), .dy = dy.data(), .out = dx.data()}, dtype());
  const Floats xs = x.floats(), dys = dy.floats(), ys = y.floats(), dxs = dx.floats();
  Floats expected(xs.size());
  gelu_forward(pool_, xs.data(), 4096, expected.data());
  for (std::size_t i = 0; i < xs.size(); ++i)
    ASSERT_NEAR(ys[i], expected[i], unit() * std::abs(expected[i]) + 1e-6) << xs[i];
  gelu_backward(pool_, xs.data(), dys.data(), 4096, expected.data());
  for (std::size_t i = 0; i < xs.size(); ++i) {
    if (std::abs(xs[i]) > 1e3f) {
      EXPECT_EQ(dxs[i], xs[i] > 0 ? dys[i] : 0.0f) << xs[i];  // the CPU's polynomial is no number there
    } else {
      ASSERT_NEAR(dxs[i], expected[i], unit() * std::abs(expected[i]) + 1e-5) << xs[i];
    }
  }
  emulate(card::Gelu{.count = 4096, .x = x.data(), .dy = dy.data(), .out = dy.data()}, dtype(), true);  // in place
  EXPECT_EQ(dy.bits(), dx.bits());
}

TEST_P(CardKernels, CrossEntropy) {
  for (const std::uint64_t rows : {1u, 41u}) {
    const std::uint64_t classes = 256;
    std::vector<std::uint8_t> targets;
    for (std::uint64_t r = 0; r < rows; ++r) targets.push_back(static_cast<std::uint8_t>(random_bits(9, r)));
    Singles logits(rows * classes, 2, 4.0), row_loss(rows);
    logits.data()[5] = 3e4f;
    Floats expected = logits.floats(), expected_rows(at(rows));
    const double expected_loss = cross_entropy(pool_, static_cast<Index>(rows), 256, targets.data(), expected.data(),
                                               expected_rows.data(), 64.0f);
    Values gradient = unwritten(rows * classes);
    emulate(CrossEntropyRows{.rows = rows,
                             .classes = classes,
                             .targets = targets.data(),
                             .logits = logits.data(),
                             .gradient = gradient.data(),
                             .row_loss = row_loss.data(),
                             .scale = 64.0f / static_cast<float>(rows)},
            dtype());
    double loss = 0;
    emulate(Mean{.count = rows, .values = row_loss.data(), .mean = &loss}, dtype());
    EXPECT_TRUE(gradient.guard_intact());
    EXPECT_NEAR(loss, expected_loss, 1e-5 * std::max(1.0, expected_loss));
    expect_close(gradient.floats(), expected, unit(), "gradient");
    logits.data()[17] = NAN;
    emulate(CrossEntropyRows{.rows = rows,
                             .classes = classes,
                             .targets = targets.data(),
                             .logits = logits.data(),
                             .gradient = gradient.data(),
                             .row_loss = row_loss.data()},
            dtype());
    emulate(Mean{.count = rows, .values = row_loss.data(), .mean = &loss}, dtype(), true);
    EXPECT_TRUE(std::isnan(loss));
  }
}

TEST_P(CardKernels, Embedding) {
  const EmbeddingShape shape{3, 7};
  const std::uint64_t rows = 21, width = 72, vocabulary = 256;
  std::vector<std::uint8_t> tokens;
  for (std::uint64_t r = 0; r < rows; ++r) tokens.push_back(static_cast<std::uint8_t>(random_bits(1, r) % 5 + 251));
  for (const DType weights : {dtype(), DType::fp32}) {
    Values token16 = values(vocabulary * width, 2), position16 = values(7 * width, 3);
    Singles token32(vocabulary * width, 2, 1.0), position32(7 * width, 3, 1.0);
    const bool single = weights == DType::fp32;
    const Floats token = single ? token32.floats() : token16.floats();
    const Floats position = single ? position32.floats() : position16.floats();
    Values x = unwritten(rows * width);
    emulate(Embed{.rows = rows,
                  .context = 7,
                  .width = width,
                  .tokens = tokens.data(),
                  .token_weight = single ? static_cast<void*>(token32.data()) : token16.data(),
                  .position_weight = single ? static_cast<void*>(position32.data()) : position16.data(),
                  .weight_dtype = weights,
                  .x = x.data()},
            dtype());
    Floats expected(at(rows * width));
    embedding_forward(pool_, shape, tokens.data(), {token.data(), DType::fp32, 256, static_cast<Index>(width)},
                      {position.data(), DType::fp32, 7, static_cast<Index>(width)}, expected.data());
    EXPECT_TRUE(x.guard_intact());
    expect_close(x.floats(), expected, unit(), "x");

    Values dx = values(rows * width, 4), gradient16 = values(7 * width, 5);
    Singles gradient32(7 * width, 5, 1.0);
    Floats sums = single ? gradient32.floats() : gradient16.floats();
    for (std::size_t i = 0; i < at(rows * width); ++i) sums[i % at(7 * width)] += dx.floats()[i];
    emulate(PositionGradient{.batch = 3,
                             .context = 7,
                             .width = width,
                             .dx = dx.data(),
                             .gradient = single ? static_cast<void*>(gradient32.data()) : gradient16.data(),
                             .gradient_dtype = weights},
            dtype());
    expect_close(single ? gradient32.floats() : gradient16.floats(), sums, single ? 1e-6 : unit(), "position gradient");
  }
  Values one_hot = unwritten(rows * vocabulary);
  emulate(OneHot{.rows = rows, .classes = vocabulary, .tokens = tokens.data(), .out = one_hot.data()}, dtype());
  for (std::uint64_t i = 0; i < rows * vocabulary; ++i)
    ASSERT_EQ(one_hot.floats()[at(i)], tokens[at(i / vocabulary)] == i % vocabulary ? 1.0f : 0.0f);
}

// --- products --------------------------------------------------------------------------------------------------------

// What a library that thinks in columns is told, carried out by the definition of such a product.
TEST(ByColumns, IsTheProductByRows) {
  for (const bool transposed_a : {false, true}) {
    for (const bool transposed_b : {false, true}) {
      const std::uint64_t m = 3, n = 5, k = 4;
      Floats a(at(m * k)), b(at(k * n)), expected(at(m * n)), found(at(m * n));
      for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(i + 1);
      for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(i * i + 1);
      const Product product{.m = m,
                            .n = n,
                            .k = k,
                            .a = a.data(),
                            .b = b.data(),
                            .transposed_a = transposed_a,
                            .transposed_b = transposed_b};
      for (std::uint64_t i = 0; i < m; ++i)
        for (std::uint64_t j = 0; j < n; ++j)
          for (std::uint64_t x = 0; x < k; ++x)
            expected[at(i * n + j)] +=
                a[at(transposed_a ? x * m + i : i * k + x)] * b[at(transposed_b ? j * k + x : x * n + j)];
      const ColumnMajorProduct by = by_columns(product);
      ASSERT_EQ(by.first.rows * by.first.columns, b.size());
      ASSERT_EQ(by.second.rows * by.second.columns, a.size());
      const auto element = [](const ColumnMajor& matrix, const Floats& values, std::uint64_t row,
                              std::uint64_t column) {
        return matrix.transposed ? values[at(row * matrix.rows + column)] : values[at(column * matrix.rows + row)];
      };
      const std::uint64_t inner = by.first.transposed ? by.first.rows : by.first.columns;
      ASSERT_EQ(by.second.transposed ? by.second.columns : by.second.rows, inner);
      for (std::uint64_t row = 0; row < by.result.rows; ++row)
        for (std::uint64_t column = 0; column < by.result.columns; ++column)
          for (std::uint64_t x = 0; x < inner; ++x)
            found[at(column * by.result.rows + row)] += element(by.first, b, row, x) * element(by.second, a, x, column);
      EXPECT_EQ(found, expected) << transposed_a << transposed_b;
    }
  }
}

}  // namespace
}  // namespace hoist::gpt::card
