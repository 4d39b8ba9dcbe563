// SPDX-License-Identifier: Apache-2.0
// Every kernel against a plain double-precision version of its formula; every derivative against central differences
// of that version.
#include "kernels.hpp"

#include <cmath>
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>

namespace hoist::gpt::kernels_test {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

Floats random_floats(Index count, std::uint64_t seed, double deviation = 1.0) {
  Floats values(at(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(deviation * random_normal(seed, i));
  return values;
}

std::vector<bf16> to_bf16s(const Floats& values) {
  std::vector<bf16> result;
  for (const float v : values) result.push_back(to_bf16(v));
  return result;
}

Doubles to_doubles(const Floats& values) { return Doubles(values.begin(), values.end()); }

double dot(const Doubles& a, const Floats& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * static_cast<double>(b[i]);
  return sum;
}

// The gradient of `function` at `x`, by central differences.
Doubles differences(Doubles x, const std::function<double(const Doubles&)>& function) {
  constexpr double kStep = 1e-5;
  Doubles gradient(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double value = x[i];
    x[i] = value + kStep;
    const double above = function(x);
    x[i] = value - kStep;
    gradient[i] = (above - function(x)) / (2 * kStep);
    x[i] = value;
  }
  return gradient;
}

void expect_close(const Floats& found, const Doubles& expected, double tolerance, const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  double largest = 1;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(found[i]), expected[i], tolerance * largest) << what << " element " << i;
  }
}

class KernelTest : public testing::Test {
 protected:
  KernelTest() { use_own_threads(); }
  UpdatePool pool_{{.threads = 2}};
};

// --- linear --------------------------------------------------------------------------------------------------------

Doubles linear_reference(Index rows, const Doubles& x, const Doubles& weight, const Doubles& bias, Index out) {
  const Index in = static_cast<Index>(weight.size()) / out;
  Doubles y(at(rows * out));
  for (Index r = 0; r < rows; ++r) {
    for (Index o = 0; o < out; ++o) {
      double sum = bias.empty() ? 0 : bias[at(o)];
      for (Index i = 0; i < in; ++i) sum += x[at(r * in + i)] * weight[at(o * in + i)];
      y[at(r * out + o)] = sum;
    }
  }
  return y;
}

struct LinearShape {
  Index rows, in, out;
};

class LinearTest : public KernelTest, public testing::WithParamInterface<LinearShape> {};

TEST_P(LinearTest, ForwardMatchesReference) {
  const auto [rows, in, out] = GetParam();
  const Floats x = random_floats(rows * in, 1);
  const Floats weight = random_floats(out * in, 2);
  const Floats bias = random_floats(out, 3);
  const Floats residual = random_floats(rows * out, 4);
  Floats panel(at(out * in)), y(at(rows * out), NAN);
  linear_forward({pool_, rows, panel.data()}, {.x = x.data(),
                                               .layer = {{weight.data(), DType::fp32, out, in}, bias.data()},
                                               .residual = residual.data(),
                                               .y = y.data()});
  Doubles expected = linear_reference(rows, to_doubles(x), to_doubles(weight), to_doubles(bias), out);
  for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += static_cast<double>(residual[i]);
  expect_close(y, expected, 1e-5, "y");
}

TEST_P(LinearTest, BackwardMatchesDifferences) {
  const auto [rows, in, out] = GetParam();
  const Floats x = random_floats(rows * in, 1);
  const Floats weight = random_floats(out * in, 2);
  const Floats bias = random_floats(out, 3);
  const Floats dy = random_floats(rows * out, 4);
  // Linear in each argument: the gradients are written down instead of differenced, which keeps large shapes quick.
  Doubles dx(at(rows * in)), dweight(at(out * in)), dbias(at(out));
  for (Index r = 0; r < rows; ++r) {
    for (Index o = 0; o < out; ++o) {
      const double d = static_cast<double>(dy[at(r * out + o)]);
      dbias[at(o)] += d;
      for (Index i = 0; i < in; ++i) {
        dx[at(r * in + i)] += d * static_cast<double>(weight[at(o * in + i)]);
        dweight[at(o * in + i)] += d * static_cast<double>(x[at(r * in + i)]);
      }
    }
  }
  Floats panel(at(out * in)), found_dx(at(rows * in), NAN), found_dweight(at(out * in), 0.5f),
      found_dbias(at(out), 2.0f);
  linear_backward({pool_, rows, panel.data()},
                  {.x = x.data(),
                   .dy = dy.data(),
                   .layer = {{weight.data(), DType::fp32, out, in}},
                   .gradient = {{found_dweight.data(), DType::fp32, out, in}, found_dbias.data()},
                   .dx = found_dx.data()});
  for (double& d : dweight) d += 0.5;  // kernels add to what is there
  for (double& d : dbias) d += 2.0;
  expect_close(found_dx, dx, 1e-5, "dx");
  expect_close(found_dweight, dweight, 1e-5, "dweight");
  expect_close(found_dbias, dbias, 1e-5, "dbias");
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearTest,
                         testing::Values(LinearShape{1, 1, 1}, LinearShape{3, 5, 7}, LinearShape{17, 131, 1},
                                         LinearShape{33, 300, 129}, LinearShape{8, 129, 384}));

TEST_F(KernelTest, Bf16WeightsAreWidenedExactly) {
  const Index rows = 4, in = 19, out = 130;
  const Floats x = random_floats(rows * in, 1);
  const std::vector<bf16> weight = to_bf16s(random_floats(out * in, 2));
  Floats widened;
  for (const bf16 w : weight) widened.push_back(to_float(w));
  Floats panel(at(out * in)), from_bf16(at(rows * out)), from_fp32(at(rows * out));
  const KernelContext context{pool_, rows, panel.data()};
  linear_forward(context, {.x = x.data(), .layer = {{weight.data(), DType::bf16, out, in}}, .y = from_bf16.data()});
  linear_forward(context, {.x = x.data(), .layer = {{widened.data(), DType::fp32, out, in}}, .y = from_fp32.data()});
  EXPECT_EQ(from_bf16, from_fp32);
}

TEST_F(KernelTest, Bf16GradientIsRoundedOncePerAddition) {
  const Index rows = 6, in = 21, out = 140;
  const Floats x = random_floats(rows * in, 1);
  const Floats dy = random_floats(rows * out, 2);
  const std::vector<bf16> before = to_bf16s(random_floats(out * in, 3));
  std::vector<bf16> found = before;
  const Floats weight(at(out * in));
  Floats exact(at(out * in), 0.0f), panel(at(out * in)), dx(x.size());
  LinearBackward a{.x = x.data(),
                   .dy = dy.data(),
                   .layer = {{weight.data(), DType::fp32, out, in}},
                   .gradient = {{found.data(), DType::bf16, out, in}},
                   .dx = dx.data()};
  linear_backward({pool_, rows, panel.data()}, a);
  a.gradient = {{exact.data(), DType::fp32, out, in}};
  linear_backward({pool_, rows, panel.data()}, a);
  for (std::size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], to_bf16(to_float(before[i]) + exact[i])) << i;
}

// --- layer norm ----------------------------------------------------------------------------------------------------

Doubles norm_reference(const Doubles& x, Index width, const Doubles& weight, const Doubles& bias) {
  Doubles y(x.size());
  for (std::size_t row = 0; row < x.size(); row += at(width)) {
    double mean = 0, variance = 0;
    for (std::size_t i = 0; i < at(width); ++i) mean += x[row + i] / static_cast<double>(width);
    for (std::size_t i = 0; i < at(width); ++i) variance += std::pow(x[row + i] - mean, 2) / static_cast<double>(width);
    for (std::size_t i = 0; i < at(width); ++i) {
      y[row + i] = (x[row + i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
    }
  }
  return y;
}

TEST_F(KernelTest, LayerNorm) {
  for (const Index width : {3, 8, 77, 130}) {
    SCOPED_TRACE(width);
    const Index rows = width > 100 ? 3 : 37;
    const Floats x = random_floats(rows * width, 1, 3.0);
    const Floats weight = random_floats(width, 2), bias = random_floats(width, 3), dy = random_floats(rows * width, 4);
    Floats mean(at(rows)), inverse_dev(at(rows)), y(x.size());
    const KernelContext context{pool_, rows};
    const Norm layer{weight.data(), bias.data(), width};
    const NormStatistics statistics{mean.data(), inverse_dev.data()};
    norm_forward(context, {.x = x.data(), .layer = layer, .statistics = statistics, .y = y.data()});
    const auto reference = [&](const Doubles& a, const Doubles& b, const Doubles& c) {
      return norm_reference(a, width, b, c);
    };
    const Doubles dx0 = to_doubles(x), dw0 = to_doubles(weight), db0 = to_doubles(bias);
    expect_close(y, reference(dx0, dw0, db0), 1e-5, "y");

    Floats dx(x.size(), 1.0f), weight_gradient(at(width), 2.0f), bias_gradient(at(width), 3.0f);
    norm_backward(context, {.x = x.data(),
                            .dy = dy.data(),
                            .layer = layer,
                            .statistics = statistics,
                            .gradient = {weight_gradient.data(), bias_gradient.data()},
                            .dx = dx.data()});
    Doubles expected_dx = differences(dx0, [&](const Doubles& v) { return dot(reference(v, dw0, db0), dy); });
    Doubles expected_dw = differences(dw0, [&](const Doubles& v) { return dot(reference(dx0, v, db0), dy); });
    Doubles expected_db = differences(db0, [&](const Doubles& v) { return dot(reference(dx0, dw0, v), dy); });
    for (double& d : expected_dx) d += 1.0;
    for (double& d : expected_dw) d += 2.0;
    for (double& d : expected_db) d += 3.0;
    expect_close(dx, expected_dx, 2e-5, "dx");
    expect_close(weight_gradient, expected_dw, 2e-5, "weight gradient");
    expect_close(bias_gradient, expected_db, 2e-5, "bias gradient");
  }
}

// --- GELU ----------------------------------------------------------------------------------------------------------

double gelu_reference(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

TEST_F(KernelTest, GeluOverItsWholeRange) {
  Floats x;
  for (double v = -12; v <= 12; v += 0.0007) x.push_back(static_cast<float>(v));
  for (const float v : {0.0f, -0.0f, 1e-30f, -1e-30f, 60.0f, -60.0f, 1e6f, -1e6f}) x.push_back(v);
  Floats y(x.size()), dy(x.size(), 2.0f), dx(x.size());
  gelu_forward(pool_, x.data(), static_cast<Index>(x.size()), y.data());
  gelu_backward(pool_, x.data(), dy.data(), static_cast<Index>(x.size()), dx.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double v = static_cast<double>(x[i]);
    ASSERT_NEAR(static_cast<double>(y[i]), gelu_reference(v), 4e-7 * std::max(1.0, std::abs(v))) << v;
    if (std::abs(v) > 100) {  // the difference would drown in rounding
      ASSERT_EQ(dx[i], v > 0 ? 2.0f : 0.0f) << v;
      continue;
    }
    const double slope = (gelu_reference(v + 1e-5) - gelu_reference(v - 1e-5)) / 2e-5;
    ASSERT_NEAR(static_cast<double>(dx[i]), 2 * slope, 2e-5) << v;
  }
  gelu_backward(pool_, x.data(), dy.data(), static_cast<Index>(x.size()), dy.data());  // in place
  EXPECT_EQ(dy, dx);
}

// --- attention -----------------------------------------------------------------------------------------------------

Doubles attention_reference(const AttentionShape& s, const Doubles& qkv) {
  const Index stride = 3 * s.width();
  Doubles y(at(s.batch * s.context * s.width()));
  for (Index b = 0; b < s.batch; ++b) {
    for (Index h = 0; h < s.heads; ++h) {
      const auto value = [&](Index part, Index t, Index i) {
        return qkv[at((b * s.context + t) * stride + part * s.width() + h * s.head_width + i)];
      };
      for (Index t = 0; t < s.context; ++t) {
        Doubles weights(at(t + 1));
        double sum = 0;
        for (Index u = 0; u <= t; ++u) {
          double score = 0;
          for (Index i = 0; i < s.head_width; ++i) score += value(0, t, i) * value(1, u, i);
          weights[at(u)] = std::exp(score / std::sqrt(static_cast<double>(s.head_width)));
          sum += weights[at(u)];
        }
        for (Index i = 0; i < s.head_width; ++i) {
          double mixed = 0;
          for (Index u = 0; u <= t; ++u) mixed += weights[at(u)] / sum * value(2, u, i);
          y[at((b * s.context + t) * s.width() + h * s.head_width + i)] = mixed;
        }
      }
    }
  }
  return y;
}

TEST_F(KernelTest, Attention) {
  for (const AttentionShape& shape :
       {AttentionShape{1, 1, 1, 1}, AttentionShape{2, 5, 3, 4}, AttentionShape{1, 13, 2, 3}}) {
    SCOPED_TRACE(testing::Message() << shape.batch << "x" << shape.context << "x" << shape.heads);
    const Index rows = shape.batch * shape.context;
    const Floats qkv = random_floats(rows * 3 * shape.width(), 1);
    const Floats dy = random_floats(rows * shape.width(), 2);
    Floats probabilities(at(shape.probability_count()), NAN), scratch(at(shape.probability_count()), NAN);
    Floats y(dy.size(), NAN), dqkv(qkv.size(), NAN);
    attention_forward(pool_, shape, qkv.data(), probabilities.data(), y.data());
    expect_close(y, attention_reference(shape, to_doubles(qkv)), 1e-5, "y");
    attention_backward(pool_, shape,
                       {.qkv = qkv.data(),
                        .probabilities = probabilities.data(),
                        .dy = dy.data(),
                        .scratch = scratch.data(),
                        .dqkv = dqkv.data()});
    const Doubles expected =
        differences(to_doubles(qkv), [&](const Doubles& v) { return dot(attention_reference(shape, v), dy); });
    expect_close(dqkv, expected, 2e-5, "dqkv");
  }
}

TEST_F(KernelTest, AttentionNeverLooksAhead) {
  const AttentionShape shape{1, 9, 2, 8};
  Floats qkv = random_floats(shape.context * 3 * shape.width(), 5);
  Floats probabilities(at(shape.probability_count())), before(at(shape.context * shape.width())), after(before.size());
  attention_forward(pool_, shape, qkv.data(), probabilities.data(), before.data());
  const auto last_row = qkv.end() - 3 * shape.width();
  std::fill(last_row, qkv.end(), 1e3f);
  attention_forward(pool_, shape, qkv.data(), probabilities.data(), after.data());
  const auto unchanged = (shape.context - 1) * shape.width();
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + unchanged, after.begin()));
  EXPECT_FALSE(std::equal(before.begin() + unchanged, before.end(), after.begin() + unchanged));
}

// --- embedding and loss --------------------------------------------------------------------------------------------

TEST_F(KernelTest, Embedding) {
  const EmbeddingShape shape{3, 7};
  const Index rows = shape.batch * shape.context, width = 70, vocabulary = 256;
  std::vector<std::uint8_t> tokens;
  for (Index r = 0; r < rows; ++r) tokens.push_back(static_cast<std::uint8_t>(random_bits(1, at(r)) % 5 + 251));
  const Floats token_weight = random_floats(vocabulary * width, 2),
               position_weight = random_floats(shape.context * width, 3);
  Floats x(at(rows * width), NAN);
  embedding_forward(pool_, shape, tokens.data(), {token_weight.data(), DType::fp32, vocabulary, width},
                    {position_weight.data(), DType::fp32, shape.context, width}, x.data());
  const Floats dx = random_floats(rows * width, 4);
  Doubles dtoken(token_weight.size(), 1.0), dposition(position_weight.size(), 0.0);
  for (Index r = 0; r < rows; ++r) {
    const Index t = r % shape.context, token = tokens[at(r)];
    for (Index i = 0; i < width; ++i) {
      ASSERT_EQ(x[at(r * width + i)], token_weight[at(token * width + i)] + position_weight[at(t * width + i)]);
      dtoken[at(token * width + i)] += static_cast<double>(dx[at(r * width + i)]);
      dposition[at(t * width + i)] += static_cast<double>(dx[at(r * width + i)]);
    }
  }
  Floats scratch(token_weight.size(), NAN), token_gradient(token_weight.size(), 1.0f),
      position_gradient(position_weight.size(), 0.0f);
  embedding_backward(pool_, shape, tokens.data(), dx.data(), {token_gradient.data(), DType::fp32, vocabulary, width},
                     {position_gradient.data(), DType::fp32, shape.context, width}, scratch.data());
  expect_close(token_gradient, dtoken, 1e-6, "token gradient");
  expect_close(position_gradient, dposition, 1e-6, "position gradient");
}

TEST_F(KernelTest, CrossEntropy) {
  const Index rows = 41, classes = 256;
  std::vector<std::uint8_t> targets;
  for (Index r = 0; r < rows; ++r) targets.push_back(static_cast<std::uint8_t>(random_bits(9, at(r))));
  Floats logits = random_floats(rows * classes, 2, 4.0), row_loss(at(rows));
  const auto reference = [&](const Doubles& l) {
    double total = 0;
    for (Index r = 0; r < rows; ++r) {
      double sum = 0;
      for (Index c = 0; c < classes; ++c) sum += std::exp(l[at(r * classes + c)]);
      total += std::log(sum) - l[at(r * classes + targets[at(r)])];
    }
    return total / static_cast<double>(rows);
  };
  const Doubles start = to_doubles(logits);
  const double loss = cross_entropy(pool_, rows, classes, targets.data(), logits.data(), row_loss.data());
  EXPECT_NEAR(loss, reference(start), 1e-5);
  for (Index r = 0; r < rows; ++r) {  // softmax minus one-hot, written down: 256 * 41 differences would say no more
    double sum = 0;
    for (Index c = 0; c < classes; ++c) sum += std::exp(start[at(r * classes + c)]);
    for (Index c = 0; c < classes; ++c) {
      const double expected =
          (std::exp(start[at(r * classes + c)]) / sum - (c == targets[at(r)] ? 1 : 0)) / static_cast<double>(rows);
      ASSERT_NEAR(static_cast<double>(logits[at(r * classes + c)]), expected, 1e-6);
    }
  }
}

TEST_F(KernelTest, CrossEntropySurvivesHugeLogitsAndShowsNan) {
  const std::vector<std::uint8_t> targets = {3, 200};
  Floats logits(512, 0.0f), row_loss(2);
  logits[3] = 1e30f;
  logits[256] = -1e30f;
  const double loss = cross_entropy(pool_, 2, 256, targets.data(), logits.data(), row_loss.data());
  EXPECT_NEAR(loss, std::log(255.0) / 2, 1e-4);
  for (const float g : logits) ASSERT_TRUE(std::isfinite(g));
  logits[17] = NAN;
  EXPECT_TRUE(std::isnan(cross_entropy(pool_, 2, 256, targets.data(), logits.data(), row_loss.data())));
}

// --- the same bits for any number of threads -----------------------------------------------------------------------

TEST(KernelThreads, NumberOfThreadsChangesNoBit) {
  use_own_threads();
  const Index rows = 96, in = 260, out = 520;
  const AttentionShape shape{3, 32, 4, 65};
  const Floats x = random_floats(rows * in, 1), dy = random_floats(rows * out, 2),
               qkv = random_floats(rows * 3 * in, 3);
  const std::vector<bf16> weight = to_bf16s(random_floats(out * in, 4));
  const auto all = [&](unsigned threads) {
    UpdatePool pool({.threads = threads});
    Floats panel(at(out * in)), y(at(rows * out)), dx(x.size()), dw(at(out * in)), db(at(out)), result;
    const Matrix matrix{weight.data(), DType::bf16, out, in};
    const KernelContext context{pool, rows, panel.data()};
    linear_forward(context, {.x = x.data(), .layer = {matrix}, .y = y.data()});
    linear_backward(context, {.x = x.data(),
                              .dy = dy.data(),
                              .layer = {matrix},
                              .gradient = {{dw.data(), DType::fp32, out, in}, db.data()},
                              .dx = dx.data()});
    Floats probabilities(at(shape.probability_count())), mixed(x.size()), scratch(probabilities.size()),
        dqkv(qkv.size());
    attention_forward(pool, shape, qkv.data(), probabilities.data(), mixed.data());
    attention_backward(pool, shape,
                       {.qkv = qkv.data(),
                        .probabilities = probabilities.data(),
                        .dy = x.data(),
                        .scratch = scratch.data(),
                        .dqkv = dqkv.data()});
    for (const Floats* part : {&y, &dx, &dw, &db, &mixed, &dqkv})
      result.insert(result.end(), part->begin(), part->end());
    return result;
  };
  const Floats one = all(1);
  for (const unsigned threads : {2u, 3u, 4u}) {
    for (int repeat = 0; repeat < 3; ++repeat) EXPECT_TRUE(all(threads) == one) << threads << " threads";
  }
}

}  // namespace
}  // namespace hoist::gpt::kernels_test
