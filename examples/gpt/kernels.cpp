// SPDX-License-Identifier: Apache-2.0
#include "kernels.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <functional>
#include <vector>

#include <cblas.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

// OpenBLAS declares these functions in no header that it installs.
extern "C" {
void* blas_memory_alloc(int position);
void blas_memory_free(void* buffer);
}

namespace hoist::gpt {
namespace {

constexpr float kNormEpsilon = 1e-5f;

// Outputs per sgemm call. A call of 128 outputs reaches 95 % of the speed of a whole 1536-output product, and a layer
// of width 384 is still cut into three pieces at least.
constexpr Index kOutputChunk = 128;
constexpr Index kRowChunk = 32;         // rows per task of the row-wise kernels
constexpr Index kColumnChunk = 64;      // columns per task where rows are summed
constexpr Index kElementChunk = 16384;  // elements per task of the element-wise kernels

// work(i) over [0, count). The pool gets a reference, because a std::function would allocate its copy of `work`.
template <typename Work>
void for_each_index(UpdatePool& pool, Index count, const Work& work) {
  pool.run(static_cast<std::size_t>(count), std::cref(work));
}

// work(first, count) over [0, total) in fixed pieces of `chunk`.
template <typename Work>
void for_chunks(UpdatePool& pool, Index total, Index chunk, const Work& work) {
  for_each_index(pool, (total + chunk - 1) / chunk, [&](std::size_t i) {
    const Index first = static_cast<Index>(i) * chunk;
    work(first, std::min(chunk, total - first));
  });
}

// The sum of term(i) over [0, count) in eight fixed lanes: one order for every vector width.
template <typename Term>
float lane_sum(Index count, const Term& term) {
  float lane[8] = {};
  Index i = 0;
  for (; i + 8 <= count; i += 8) {
    for (Index l = 0; l < 8; ++l) lane[l] += term(i + l);
  }
  for (; i < count; ++i) lane[i % 8] += term(i);
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

// e^x to 2 ulp without a call, so that loops vectorise; arguments are clamped to [-87, 88]. Range reduction by a
// two-part ln 2 and a degree-5 polynomial: Moshier, Cephes mathematical library, expf.
inline float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float fraction = p * r * r + r + 1.0f;
  const std::int32_t exponent = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound);
  return fraction * std::bit_cast<float>((exponent + 127) << 23);
}

// Absolute error below 2e-7, which is what GELU needs (it adds 1).
inline float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

struct Operand {
  const float* data;
  Index leading;
  CBLAS_TRANSPOSE transpose = CblasNoTrans;
};

// c[m, n] = alpha * op(a)[m, k] op(b)[k, n] + beta * c.
struct Product {
  Index m, n, k;
  float alpha = 1.0f;
  float beta = 0.0f;
};
void sgemm(const Product& p, const Operand& a, const Operand& b, float* c, Index leading_c) {
  cblas_sgemm(CblasRowMajor, a.transpose, b.transpose, static_cast<int>(p.m), static_cast<int>(p.n),
              static_cast<int>(p.k), p.alpha, a.data, static_cast<int>(a.leading), b.data, static_cast<int>(b.leading),
              p.beta, c, static_cast<int>(leading_c));
}

// A rectangle of a matrix.
struct Part {
  Index row = 0;
  Index rows = 0;
  Index column = 0;
  Index columns = 0;
};

// panel[part.rows, part.columns] = the part, widened.
void widen(const Matrix& matrix, const Part& part, float* panel) {
  for (Index r = 0; r < part.rows; ++r) {
    const Index offset = (part.row + r) * matrix.columns + part.column;
    float* target = panel + r * part.columns;
    if (matrix.dtype == DType::bf16) {
      const bf16* source = static_cast<const bf16*>(matrix.data) + offset;
      for (Index c = 0; c < part.columns; ++c) target[c] = to_float(source[c]);
    } else if (matrix.dtype == DType::fp16) {
      std::transform(static_cast<const std::uint16_t*>(matrix.data) + offset,
                     static_cast<const std::uint16_t*>(matrix.data) + offset + part.columns, target, fp16_to_float);
    } else {
      std::copy_n(static_cast<const float*>(matrix.data) + offset, part.columns, target);
    }
  }
}

// gradient[part] += panel[part.rows, part.columns], rounded once.
void add_rounded(const GradientMatrix& gradient, const Part& part, const float* panel) {
  for (Index r = 0; r < part.rows; ++r) {
    const Index offset = (part.row + r) * gradient.columns + part.column;
    const float* source = panel + r * part.columns;
    if (gradient.dtype == DType::bf16) {
      bf16* target = static_cast<bf16*>(gradient.data) + offset;
      for (Index c = 0; c < part.columns; ++c) target[c] = to_bf16(to_float(target[c]) + source[c]);
    } else if (gradient.dtype == DType::fp16) {
      std::uint16_t* target = static_cast<std::uint16_t*>(gradient.data) + offset;
      for (Index c = 0; c < part.columns; ++c) target[c] = float_to_fp16(fp16_to_float(target[c]) + source[c]);
    } else {
      float* target = static_cast<float*>(gradient.data) + offset;
      for (Index c = 0; c < part.columns; ++c) target[c] += source[c];
    }
  }
}

// row[0, count) becomes its softmax.
void softmax_row(float* row, Index count) {
  float largest = row[0];
  for (Index i = 1; i < count; ++i) largest = std::max(largest, row[i]);
  for (Index i = 0; i < count; ++i) row[i] = exponential(row[i] - largest);
  const float scale = 1.0f / lane_sum(count, [&](Index i) { return row[i]; });
  for (Index i = 0; i < count; ++i) row[i] *= scale;
}

}  // namespace

void use_own_threads() { openblas_set_num_threads(1); }

namespace {

// BUFFER_SIZE of OpenBLAS on x86-64 (32 << 22 bytes, common_x86_64.h) and some pages.
constexpr std::uint64_t kProductBufferBytes = 136 * kMiB;

void require_address_space(std::uint64_t bytes, unsigned threads) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    const int code = errno;
    throw Error(fmt::format(
        "OpenBLAS needs {} of address space for products on {} threads, which the system refuses: {}; raise the limit "
        "of address space (ulimit -v), or lower --threads",
        format_bytes(bytes), threads, errno_text(code)));
  }
  ::munmap(memory, bytes);
}

}  // namespace

void take_product_memory(unsigned threads) {
  require_address_space(threads * kProductBufferBytes, threads);
  std::vector<void*> buffers;
  for (unsigned i = 0; i < threads; ++i) buffers.push_back(blas_memory_alloc(0));
  for (void* buffer : buffers) blas_memory_free(buffer);  // stays mapped, for the next product
}

// --- linear --------------------------------------------------------------------------------------------------------

void linear_forward(const KernelContext& context, const LinearForward& a) {
  const Index in = a.layer.weight.columns;
  const Index out = a.layer.weight.rows;
  const float* const bias = a.layer.bias;
  for_chunks(context.pool, out, kOutputChunk, [&](Index first, Index count) {
    float* panel = context.panel + first * in;
    widen(a.layer.weight, {.row = first, .rows = count, .column = 0, .columns = in}, panel);
    for (Index r = 0; r < context.rows; ++r) {
      float* y = a.y + r * out + first;
      for (Index c = 0; c < count; ++c) y[c] = bias != nullptr ? bias[first + c] : 0.0f;
      if (a.residual == nullptr) continue;
      const float* residual = a.residual + r * out + first;
      for (Index c = 0; c < count; ++c) y[c] += residual[c];
    }
    sgemm({.m = context.rows, .n = count, .k = in, .beta = 1.0f}, {a.x, in}, {panel, in, CblasTrans}, a.y + first, out);
  });
}

namespace {

void add_weight_gradient(const KernelContext& context, const LinearBackward& a) {
  const Index in = a.layer.weight.columns;
  const Index out = a.layer.weight.rows;
  for_chunks(context.pool, out, kOutputChunk, [&](Index first, Index count) {
    float* panel = context.panel + first * in;
    sgemm({.m = count, .n = in, .k = context.rows}, {a.dy + first, out, CblasTrans}, {a.x, in}, panel, in);
    add_rounded(a.gradient.weight, {.row = first, .rows = count, .column = 0, .columns = in}, panel);
    if (a.gradient.bias == nullptr) return;
    float sum[kOutputChunk] = {};
    for (Index r = 0; r < context.rows; ++r) {
      const float* dy = a.dy + r * out + first;
      for (Index c = 0; c < count; ++c) sum[c] += dy[c];
    }
    for (Index c = 0; c < count; ++c) a.gradient.bias[first + c] += sum[c];
  });
}

void linear_input_gradient(const KernelContext& context, const LinearBackward& a) {
  const Index in = a.layer.weight.columns;
  const Index out = a.layer.weight.rows;
  for_chunks(context.pool, in, kOutputChunk, [&](Index first, Index count) {
    float* panel = context.panel + first * out;
    widen(a.layer.weight, {.row = 0, .rows = out, .column = first, .columns = count}, panel);
    sgemm({.m = context.rows, .n = count, .k = out}, {a.dy, out}, {panel, count}, a.dx + first, in);
  });
}

}  // namespace

void linear_backward(const KernelContext& context, const LinearBackward& a) {
  add_weight_gradient(context, a);
  linear_input_gradient(context, a);
}

// --- layer norm ----------------------------------------------------------------------------------------------------

void norm_forward(const KernelContext& context, const NormForward& a) {
  const Index width = a.layer.width;
  const float inverse_width = 1.0f / static_cast<float>(width);
  for_chunks(context.pool, context.rows, kRowChunk, [&](Index first, Index count) {
    for (Index r = first; r < first + count; ++r) {
      const float* x = a.x + r * width;
      float* y = a.y + r * width;
      const float mean = lane_sum(width, [&](Index i) { return x[i]; }) * inverse_width;
      const float variance = lane_sum(width, [&](Index i) { return (x[i] - mean) * (x[i] - mean); }) * inverse_width;
      const float inverse_dev = 1.0f / std::sqrt(variance + kNormEpsilon);
      for (Index i = 0; i < width; ++i) y[i] = (x[i] - mean) * inverse_dev * a.layer.weight[i] + a.layer.bias[i];
      a.statistics.mean[r] = mean;
      a.statistics.inverse_dev[r] = inverse_dev;
    }
  });
}

namespace {

void norm_backward_row(const NormBackward& a, Index r) {
  const Index width = a.layer.width;
  const float* weight = a.layer.weight;
  const float inverse_width = 1.0f / static_cast<float>(width);
  const float* x = a.x + r * width;
  const float* dy = a.dy + r * width;
  float* dx = a.dx + r * width;
  const float mean = a.statistics.mean[r];
  const float inverse_dev = a.statistics.inverse_dev[r];
  const float mean_dy = lane_sum(width, [&](Index i) { return dy[i] * weight[i]; }) * inverse_width;
  const float mean_dy_x =
      lane_sum(width, [&](Index i) { return dy[i] * weight[i] * ((x[i] - mean) * inverse_dev); }) * inverse_width;
  for (Index i = 0; i < width; ++i) {
    const float normalized = (x[i] - mean) * inverse_dev;
    dx[i] += (dy[i] * weight[i] - mean_dy - normalized * mean_dy_x) * inverse_dev;
  }
}

}  // namespace

void norm_backward(const KernelContext& context, const NormBackward& a) {
  const Index width = a.layer.width;
  for_chunks(context.pool, width, kColumnChunk, [&](Index first, Index count) {
    float weight_sum[kColumnChunk] = {};
    float bias_sum[kColumnChunk] = {};
    for (Index r = 0; r < context.rows; ++r) {
      const float* x = a.x + r * width + first;
      const float* dy = a.dy + r * width + first;
      const float mean = a.statistics.mean[r];
      const float inverse_dev = a.statistics.inverse_dev[r];
      for (Index c = 0; c < count; ++c) {
        weight_sum[c] += dy[c] * ((x[c] - mean) * inverse_dev);
        bias_sum[c] += dy[c];
      }
    }
    for (Index c = 0; c < count; ++c) {
      a.gradient.weight[first + c] += weight_sum[c];
      a.gradient.bias[first + c] += bias_sum[c];
    }
  });
  for_chunks(context.pool, context.rows, kRowChunk, [&](Index first, Index count) {
    for (Index r = first; r < first + count; ++r) norm_backward_row(a, r);
  });
}

// --- GELU ----------------------------------------------------------------------------------------------------------

namespace {
constexpr float kGeluScale = 0.7978845608f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;
}  // namespace

void gelu_forward(UpdatePool& pool, const float* x, Index count, float* y) {
  for_chunks(pool, count, kElementChunk, [&](Index first, Index length) {
    for (Index i = first; i < first + length; ++i) {
      const float v = x[i];
      y[i] = 0.5f * v * (1.0f + hyperbolic_tangent(kGeluScale * (v + kGeluCubic * v * v * v)));
    }
  });
}

void gelu_backward(UpdatePool& pool, const float* x, const float* dy, Index count, float* dx) {
  for_chunks(pool, count, kElementChunk, [&](Index first, Index length) {
    for (Index i = first; i < first + length; ++i) {
      const float v = x[i];
      const float t = hyperbolic_tangent(kGeluScale * (v + kGeluCubic * v * v * v));
      const float inner = kGeluScale * (1.0f + 3.0f * kGeluCubic * v * v);
      dx[i] = dy[i] * (0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * inner);
    }
  });
}

// --- attention -----------------------------------------------------------------------------------------------------

namespace {

// The position of one head of one sequence.
struct Head {
  Head(const AttentionShape& shape, std::size_t task) {
    const Index batch = static_cast<Index>(task) / shape.heads;
    const Index head = static_cast<Index>(task) % shape.heads;
    const Index row = batch * shape.context;
    query = row * 3 * shape.width() + head * shape.head_width;
    key = query + shape.width();
    value = key + shape.width();
    output = row * shape.width() + head * shape.head_width;
    probabilities = static_cast<Index>(task) * shape.context * shape.context;
  }
  Index query, key, value;  // offsets in qkv, rows 3 * width apart
  Index output;             // offset in y, rows width apart
  Index probabilities;
};

}  // namespace

void attention_forward(UpdatePool& pool, const AttentionShape& shape, const float* qkv, float* probabilities,
                       float* y) {
  const Index t = shape.context;
  const Index qkv_stride = 3 * shape.width();
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_width));
  for_each_index(pool, shape.batch * shape.heads, [&](std::size_t task) {
    const Head head(shape, task);
    float* p = probabilities + head.probabilities;
    sgemm({.m = t, .n = t, .k = shape.head_width, .alpha = scale}, {qkv + head.query, qkv_stride},
          {qkv + head.key, qkv_stride, CblasTrans}, p, t);
    for (Index row = 0; row < t; ++row) {
      softmax_row(p + row * t, row + 1);
      std::fill(p + row * t + row + 1, p + (row + 1) * t, 0.0f);
    }
    sgemm({.m = t, .n = shape.head_width, .k = t}, {p, t}, {qkv + head.value, qkv_stride}, y + head.output,
          shape.width());
  });
}

void attention_backward(UpdatePool& pool, const AttentionShape& shape, const AttentionBackward& a) {
  const Index t = shape.context;
  const Index width = shape.width();
  const Index qkv_stride = 3 * width;
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.head_width));
  for_each_index(pool, shape.batch * shape.heads, [&](std::size_t task) {
    const Head head(shape, task);
    const float* p = a.probabilities + head.probabilities;
    float* ds = a.scratch + head.probabilities;
    const float* dy = a.dy + head.output;
    sgemm({.m = t, .n = shape.head_width, .k = t}, {p, t, CblasTrans}, {dy, width}, a.dqkv + head.value, qkv_stride);
    sgemm({.m = t, .n = t, .k = shape.head_width}, {dy, width}, {a.qkv + head.value, qkv_stride, CblasTrans}, ds, t);
    for (Index row = 0; row < t; ++row) {
      float* ds_row = ds + row * t;
      const float* p_row = p + row * t;
      const float dot = lane_sum(row + 1, [&](Index i) { return ds_row[i] * p_row[i]; });
      for (Index i = 0; i <= row; ++i) ds_row[i] = p_row[i] * (ds_row[i] - dot);
      std::fill(ds_row + row + 1, ds_row + t, 0.0f);
    }
    sgemm({.m = t, .n = shape.head_width, .k = t, .alpha = scale}, {ds, t}, {a.qkv + head.key, qkv_stride},
          a.dqkv + head.query, qkv_stride);
    sgemm({.m = t, .n = shape.head_width, .k = t, .alpha = scale}, {ds, t, CblasTrans},
          {a.qkv + head.query, qkv_stride}, a.dqkv + head.key, qkv_stride);
  });
}

// --- embedding -----------------------------------------------------------------------------------------------------

void embedding_forward(UpdatePool& pool, const EmbeddingShape& shape, const std::uint8_t* tokens, Matrix token_weight,
                       Matrix position_weight, float* x) {
  const Index width = token_weight.columns;
  for_chunks(pool, shape.batch * shape.context, kRowChunk, [&](Index first, Index count) {
    for (Index r = first; r < first + count; ++r) {
      float* row = x + r * width;
      for (Index c = 0; c < width; c += kColumnChunk) {
        const Index columns = std::min(kColumnChunk, width - c);
        float position[kColumnChunk];
        widen(token_weight, {.row = tokens[r], .rows = 1, .column = c, .columns = columns}, row + c);
        widen(position_weight, {.row = r % shape.context, .rows = 1, .column = c, .columns = columns}, position);
        for (Index i = 0; i < columns; ++i) row[c + i] += position[i];
      }
    }
  });
}

void embedding_backward(UpdatePool& pool, const EmbeddingShape& shape, const std::uint8_t* tokens, const float* dx,
                        GradientMatrix token_gradient, GradientMatrix position_gradient, float* scratch) {
  const Index width = token_gradient.columns;
  const Index rows = shape.batch * shape.context;
  // Each task owns columns, and walks the rows in order.
  const auto scatter = [&](GradientMatrix gradient, auto&& target_row) {
    for_chunks(pool, width, kColumnChunk, [&](Index first, Index count) {
      float* sums = scratch + first * gradient.rows;
      std::fill(sums, sums + gradient.rows * count, 0.0f);
      for (Index r = 0; r < rows; ++r) {
        float* sum = sums + target_row(r) * count;
        const float* source = dx + r * width + first;
        for (Index c = 0; c < count; ++c) sum[c] += source[c];
      }
      add_rounded(gradient, {.row = 0, .rows = gradient.rows, .column = first, .columns = count}, sums);
    });
  };
  scatter(token_gradient, [&](Index r) -> Index { return tokens[r]; });
  scatter(position_gradient, [&](Index r) -> Index { return r % shape.context; });
}

// --- loss ----------------------------------------------------------------------------------------------------------

double cross_entropy(UpdatePool& pool, Index rows, Index classes, const std::uint8_t* targets, float* logits,
                     float* row_loss, float loss_scale) {
  const float scale = loss_scale / static_cast<float>(rows);
  for_chunks(pool, rows, kRowChunk, [&](Index first, Index count) {
    for (Index r = first; r < first + count; ++r) {
      float* row = logits + r * classes;
      const float target_logit = row[targets[r]];
      float largest = row[0];
      for (Index c = 1; c < classes; ++c) largest = std::max(largest, row[c]);
      for (Index c = 0; c < classes; ++c) row[c] = exponential(row[c] - largest);
      const float sum = lane_sum(classes, [&](Index c) { return row[c]; });
      row_loss[r] = std::log(sum) + (largest - target_logit);
      const float row_scale = scale / sum;
      for (Index c = 0; c < classes; ++c) row[c] *= row_scale;
      row[targets[r]] -= scale;
    }
  });
  double total = 0;
  for (Index r = 0; r < rows; ++r) total += static_cast<double>(row_loss[r]);
  return total / static_cast<double>(rows);
}

}  // namespace hoist::gpt
