// SPDX-License-Identifier: Apache-2.0
// examples/gpt/card/rows.hpp - what a thread of every kernel but attention does. Read by the C++ compiler and by nvcc.
//
// Element-wise kernels: a thread takes packs of 8 values, any number of threads. Kernels of rows: a warp has a row;
// sums go lane by lane and then through the warp in one order. `As` is the type of activations.
#pragma once

#include <type_traits>

#include "arguments.hpp"
#include "team.hpp"

namespace hoist::gpt::card {

using platform::AsFp32;
using platform::load_floats;
using platform::store_floats;

inline constexpr std::uint64_t kPack = platform::kPackElements;

struct Place {
  std::uint64_t thread = 0;
  std::uint64_t threads = 1;
};

// work(pack) for the packs of this thread.
template <typename Work>
HOIST_ON_CARD void for_packs(std::uint64_t values, const Place& place, const Work& work) {
  for (std::uint64_t pack = place.thread; pack < values / kPack; pack += place.threads) work(pack);
}

// --- element-wise ----------------------------------------------------------------------------------------------------

// GELU, tanh form: x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
inline constexpr float kGeluScale = 0.7978845608f;
inline constexpr float kGeluCubic = 0.044715f;

HOIST_ON_CARD float gelu_sigmoid(float x) {
  const float u = kGeluScale * (x + kGeluCubic * x * x * x);
  return divide(1.0f, 1.0f + exp2(-2.0f * kLog2OfE * u));
}
HOIST_ON_CARD float gelu(float x) { return x * gelu_sigmoid(x); }
HOIST_ON_CARD float gelu_slope(float x) {
  const float s = gelu_sigmoid(x);
  const float slope_of_u = kGeluScale * (1.0f + 3.0f * kGeluCubic * x * x);
  // If s is 0 or 1 there is no second term, however large x is.
  const float tail = s * (1.0f - s);
  return s + (tail == 0.0f ? 0.0f : 2.0f * x * tail * slope_of_u);
}

template <typename As>
HOIST_ON_CARD void finish_linear_thread(const FinishLinear& a, const Place& place) {
  for_packs(a.rows * a.columns, place, [&](std::uint64_t pack) {
    const std::uint64_t first = pack * kPack;
    float y[kPack], more[kPack];
    load_floats<As>(a.y, first, y);
    if (a.bias != nullptr) {
      load_floats<AsFp32>(a.bias, first % a.columns, more);
      for (std::uint64_t j = 0; j < kPack; ++j) y[j] += more[j];
    }
    if (a.residual != nullptr) {
      load_floats<As>(a.residual, first, more);
      for (std::uint64_t j = 0; j < kPack; ++j) y[j] += more[j];
    }
    store_floats<As>(a.y, first, y);
    if (a.gelu == nullptr) return;
    // Of the stored value, which the backward pass will read.
    for (std::uint64_t j = 0; j < kPack; ++j) y[j] = gelu(As::load(As::store(y[j])));
    store_floats<As>(a.gelu, first, y);
  });
}

template <typename As>
HOIST_ON_CARD void gelu_thread(const Gelu& a, const Place& place) {
  for_packs(a.count, place, [&](std::uint64_t pack) {
    float x[kPack], dy[kPack];
    load_floats<As>(a.x, pack * kPack, x);
    if (a.dy == nullptr) {
      for (std::uint64_t j = 0; j < kPack; ++j) x[j] = gelu(x[j]);
    } else {
      load_floats<As>(a.dy, pack * kPack, dy);
      for (std::uint64_t j = 0; j < kPack; ++j) x[j] = dy[j] * gelu_slope(x[j]);
    }
    store_floats<As>(a.out, pack * kPack, x);
  });
}

template <typename As>
HOIST_ON_CARD void cast_weights_thread(const CastWeights& a, const Place& place) {
  for_packs(a.count, place, [&](std::uint64_t pack) {
    float values[kPack];
    load_floats<AsFp32>(a.source, pack * kPack, values);
    store_floats<As>(a.target, pack * kPack, values);
  });
}

template <typename As, typename Weight>
HOIST_ON_CARD void embed_thread(const Embed& a, const Place& place) {
  for_packs(a.rows * a.width, place, [&](std::uint64_t pack) {
    const std::uint64_t row = pack * kPack / a.width, column = pack * kPack % a.width;
    float token[kPack], position[kPack];
    load_floats<Weight>(a.token_weight, a.tokens[row] * a.width + column, token);
    load_floats<Weight>(a.position_weight, row % a.context * a.width + column, position);
    for (std::uint64_t j = 0; j < kPack; ++j) token[j] += position[j];
    store_floats<As>(a.x, pack * kPack, token);
  });
}

template <typename As>
HOIST_ON_CARD void one_hot_thread(const OneHot& a, const Place& place) {
  for_packs(a.rows * a.classes, place, [&](std::uint64_t pack) {
    const std::uint64_t row = pack * kPack / a.classes, first = pack * kPack % a.classes;
    float values[kPack];
    for (std::uint64_t j = 0; j < kPack; ++j) values[j] = a.tokens[row] == first + j ? 1.0f : 0.0f;
    store_floats<As>(a.out, pack * kPack, values);
  });
}

template <typename As, typename Gradient>
HOIST_ON_CARD void position_gradient_thread(const PositionGradient& a, const Place& place) {
  const std::uint64_t values = a.context * a.width;
  for_packs(values, place, [&](std::uint64_t pack) {
    float sum[kPack] = {}, dx[kPack];
    for (std::uint64_t sequence = 0; sequence < a.batch; ++sequence) {
      load_floats<As>(a.dx, sequence * values + pack * kPack, dx);
      for (std::uint64_t j = 0; j < kPack; ++j) sum[j] += dx[j];
    }
    load_floats<Gradient>(a.gradient, pack * kPack, dx);
    for (std::uint64_t j = 0; j < kPack; ++j) sum[j] += dx[j];
    store_floats<Gradient>(a.gradient, pack * kPack, sum);
  });
}

// The second kernel of ColumnSums: a thread has a column.
HOIST_ON_CARD void add_slices_thread(const ColumnSums& a, const Place& place) {
  for (std::uint64_t column = place.thread; column < a.columns; column += place.threads) {
    const auto sum_of = [&](const float* partial) {
      float sum = 0;
      for (std::uint64_t slice = 0; slice < a.slices(); ++slice) sum += partial[slice * a.columns + column];
      return sum;
    };
    a.bias_gradient[column] += sum_of(a.partial);
    if (a.x != nullptr) a.weight_gradient[column] += sum_of(a.partial + a.slices() * a.columns);
  }
}

// --- rows ------------------------------------------------------------------------------------------------------------

inline constexpr unsigned kRowThreads = 256;
inline constexpr unsigned kRowsPerBlock = kRowThreads / kWarpThreads;

// values becomes combine over its warp, the same in every lane.
template <typename Team, typename T, typename Combine>
HOIST_ON_CARD void warp_combine(Team& team, typename Team::template Private<T>& values, const Combine& combine) {
  HOIST_UNROLL
  for (unsigned mask = kWarpThreads / 2; mask > 0; mask /= 2)
    team.exchange(
        mask, [&](unsigned t) { return values[t]; },
        [&](unsigned t, T other) { values[t] = combine(values[t], other); });
}
template <typename Team>
HOIST_ON_CARD void warp_sum(Team& team, typename Team::template Private<float>& values) {
  warp_combine<Team, float>(team, values, [](float a, float b) { return a + b; });
}

// The row of a thread of block `block`, and its packs.
struct WarpRow {
  HOIST_ON_CARD WarpRow(std::uint64_t block, unsigned thread)
      : row(block * kRowsPerBlock + thread / kWarpThreads), lane(thread % kWarpThreads) {}
  // work(first) for each pack of this lane in [0, width).
  template <typename Work>
  HOIST_ON_CARD void packs(std::uint64_t width, const Work& work) const {
    for (std::uint64_t first = lane * kPack; first < width; first += kWarpThreads * kPack) work(first);
  }
  std::uint64_t row;
  unsigned lane;
};

inline constexpr float kNormEpsilon = 1e-5f;

template <typename As, typename Team>
HOIST_ON_CARD void norm_forward_block(Team& team, const NormForward& a, std::uint64_t block) {
  typename Team::template Private<float> sum, mean;
  const float inverse_width = 1.0f / static_cast<float>(a.width);
  const auto sum_over_row = [&](const auto& term) {
    team.each([&](unsigned t) {
      sum[t] = 0;
      const WarpRow place(block, t);
      if (place.row >= a.rows) return;
      place.packs(a.width, [&](std::uint64_t first) {
        float x[kPack];
        load_floats<As>(a.x, place.row * a.width + first, x);
        for (std::uint64_t j = 0; j < kPack; ++j) sum[t] += term(t, x[j]);
      });
    });
    warp_sum(team, sum);
  };
  sum_over_row([](unsigned, float x) { return x; });
  team.each([&](unsigned t) { mean[t] = sum[t] * inverse_width; });
  sum_over_row([&](unsigned t, float x) { return (x - mean[t]) * (x - mean[t]); });
  team.each([&](unsigned t) {
    const WarpRow place(block, t);
    if (place.row >= a.rows) return;
    const float inverse_dev = 1.0f / sqrtf(sum[t] * inverse_width + kNormEpsilon);
    place.packs(a.width, [&](std::uint64_t first) {
      float x[kPack], weight[kPack], bias[kPack];
      load_floats<As>(a.x, place.row * a.width + first, x);
      load_floats<AsFp32>(a.weight, first, weight);
      load_floats<AsFp32>(a.bias, first, bias);
      for (std::uint64_t j = 0; j < kPack; ++j) x[j] = (x[j] - mean[t]) * inverse_dev * weight[j] + bias[j];
      store_floats<As>(a.y, place.row * a.width + first, x);
    });
    if (place.lane != 0) return;
    a.mean[place.row] = mean[t];
    a.inverse_dev[place.row] = inverse_dev;
  });
}

template <typename As, typename Team>
HOIST_ON_CARD void norm_backward_block(Team& team, const NormBackward& a, std::uint64_t block) {
  typename Team::template Private<float> mean_dy, mean_dy_x;
  const float inverse_width = 1.0f / static_cast<float>(a.width);
  // use(first, dy * weight, normalized x) for the packs of a thread.
  const auto over_row = [&](const WarpRow& place, const auto& use) {
    const float mean = a.mean[place.row], inverse_dev = a.inverse_dev[place.row];
    place.packs(a.width, [&](std::uint64_t first) {
      float dy[kPack], x[kPack], weight[kPack];
      load_floats<As>(a.dy, place.row * a.width + first, dy);
      load_floats<As>(a.x, place.row * a.width + first, x);
      load_floats<AsFp32>(a.weight, first, weight);
      for (std::uint64_t j = 0; j < kPack; ++j) {
        dy[j] *= weight[j];
        x[j] = (x[j] - mean) * inverse_dev;
      }
      use(first, dy, x);
    });
  };
  team.each([&](unsigned t) {
    mean_dy[t] = 0;
    mean_dy_x[t] = 0;
    const WarpRow place(block, t);
    if (place.row >= a.rows) return;
    over_row(place, [&](std::uint64_t, const float(&dy)[kPack], const float(&x)[kPack]) {
      for (std::uint64_t j = 0; j < kPack; ++j) {
        mean_dy[t] += dy[j];
        mean_dy_x[t] += dy[j] * x[j];
      }
    });
  });
  warp_sum(team, mean_dy);
  warp_sum(team, mean_dy_x);
  team.each([&](unsigned t) {
    const WarpRow place(block, t);
    if (place.row >= a.rows) return;
    const float inverse_dev = a.inverse_dev[place.row];
    over_row(place, [&](std::uint64_t first, const float(&dy)[kPack], const float(&x)[kPack]) {
      float dx[kPack];
      load_floats<As>(a.dx, place.row * a.width + first, dx);
      for (std::uint64_t j = 0; j < kPack; ++j)
        dx[j] += (dy[j] - mean_dy[t] * inverse_width - x[j] * (mean_dy_x[t] * inverse_width)) * inverse_dev;
      store_floats<As>(a.dx, place.row * a.width + first, dx);
    });
  });
}

// Softmax of a row of logits, its gradient and loss.
template <typename As, typename Team>
HOIST_ON_CARD void cross_entropy_block(Team& team, const CrossEntropyRows& a, std::uint64_t block) {
  typename Team::template Private<float> largest, sum;
  const auto over_row = [&](const WarpRow& place, const auto& use) {
    place.packs(a.classes, [&](std::uint64_t first) {
      float logits[kPack];
      load_floats<AsFp32>(a.logits, place.row * a.classes + first, logits);
      use(first, logits);
    });
  };
  team.each([&](unsigned t) {
    largest[t] = -INFINITY;
    const WarpRow place(block, t);
    if (place.row >= a.rows) return;
    over_row(place, [&](std::uint64_t, const float(&logits)[kPack]) {
      for (std::uint64_t j = 0; j < kPack; ++j) largest[t] = fmaxf(largest[t], logits[j]);
    });
  });
  warp_combine<Team, float>(team, largest, [](float x, float y) { return fmaxf(x, y); });
  team.each([&](unsigned t) {
    sum[t] = 0;
    const WarpRow place(block, t);
    if (place.row >= a.rows) return;
    over_row(place, [&](std::uint64_t, const float(&logits)[kPack]) {
      for (std::uint64_t j = 0; j < kPack; ++j) sum[t] += exp2((logits[j] - largest[t]) * kLog2OfE);
    });
  });
  warp_sum(team, sum);
  team.each([&](unsigned t) {
    const WarpRow place(block, t);
    if (place.row >= a.rows) return;
    const std::uint8_t target = a.targets[place.row];
    const float row_scale = a.scale / sum[t];
    over_row(place, [&](std::uint64_t first, const float(&logits)[kPack]) {
      float gradient[kPack];
      for (std::uint64_t j = 0; j < kPack; ++j) {
        gradient[j] = exp2((logits[j] - largest[t]) * kLog2OfE) * row_scale;
        if (first + j == target) gradient[j] -= a.scale;
      }
      store_floats<As>(a.gradient, place.row * a.classes + first, gradient);
    });
    if (place.lane == 0) a.row_loss[place.row] = logf(sum[t]) + (largest[t] - a.logits[place.row * a.classes + target]);
  });
}

// A warp has one head of one row: delta = the dot product of dy and y.
template <typename As, typename Team>
HOIST_ON_CARD void attention_delta_block(Team& team, const Attention& a, std::uint64_t block) {
  typename Team::template Private<float> sum;
  const std::uint64_t rows = static_cast<std::uint64_t>(a.batch) * a.context;
  team.each([&](unsigned t) {
    sum[t] = 0;
    const WarpRow place(block, t);  // rows of heads
    if (place.row >= rows * a.heads) return;
    place.packs(a.head_width, [&](std::uint64_t first) {
      float y[kPack], dy[kPack];
      load_floats<As>(a.y, place.row * a.head_width + first, y);
      load_floats<As>(a.dy, place.row * a.head_width + first, dy);
      for (std::uint64_t j = 0; j < kPack; ++j) sum[t] += y[j] * dy[j];
    });
  });
  warp_sum(team, sum);
  team.each([&](unsigned t) {
    const WarpRow place(block, t);
    if (place.row >= rows * a.heads || place.lane != 0) return;
    const std::uint64_t row = place.row / a.heads, head = place.row % a.heads;
    a.delta[(row / a.context * a.heads + head) * a.context + row % a.context] = sum[t];
  });
}

// --- sums of columns -------------------------------------------------------------------------------------------------

// A lane has 8 neighbouring columns, a warp every eighth row of a slice; then the warps' sums are added in order.
inline constexpr std::uint64_t kColumnsPerBlock = kWarpThreads * kPack;

template <bool kNorm>
struct ColumnSumsShared {
  float of_dy[kRowsPerBlock][kColumnsPerBlock];
  float of_dy_x[kNorm ? kRowsPerBlock : 1][kColumnsPerBlock];
};

template <typename As, bool kNorm, typename Team>
HOIST_ON_CARD void column_sums_block(Team& team, const ColumnSums& a, std::uint64_t group, std::uint64_t slice,
                                     ColumnSumsShared<kNorm>& shared) {
  team.each([&](unsigned t) {
    const std::uint64_t lane = t % kWarpThreads, warp = t / kWarpThreads;
    const std::uint64_t column = group * kColumnsPerBlock + lane * kPack;
    float sum[kPack] = {}, sum_x[kPack] = {};
    const std::uint64_t end = (slice + 1) * a.kSliceRows < a.rows ? (slice + 1) * a.kSliceRows : a.rows;
    for (std::uint64_t row = slice * a.kSliceRows + warp; column < a.columns && row < end; row += kRowsPerBlock) {
      float dy[kPack], x[kPack];
      load_floats<As>(a.dy, row * a.columns + column, dy);
      for (std::uint64_t j = 0; j < kPack; ++j) sum[j] += dy[j];
      if constexpr (kNorm) {
        load_floats<As>(a.x, row * a.columns + column, x);
        for (std::uint64_t j = 0; j < kPack; ++j) sum_x[j] += dy[j] * ((x[j] - a.mean[row]) * a.inverse_dev[row]);
      }
    }
    for (std::uint64_t j = 0; j < kPack; ++j) shared.of_dy[warp][lane * kPack + j] = sum[j];
    if constexpr (kNorm) {
      for (std::uint64_t j = 0; j < kPack; ++j) shared.of_dy_x[warp][lane * kPack + j] = sum_x[j];
    }
  });
  team.barrier();
  team.each([&](unsigned t) {
    static_assert(kRowThreads == kColumnsPerBlock, "a thread has a column");
    const std::uint64_t column = group * kColumnsPerBlock + t;
    if (column >= a.columns) return;
    float sum = 0, sum_x = 0;
    for (unsigned warp = 0; warp < kRowsPerBlock; ++warp) sum += shared.of_dy[warp][t];
    a.partial[slice * a.columns + column] = sum;
    if constexpr (kNorm) {
      for (unsigned warp = 0; warp < kRowsPerBlock; ++warp) sum_x += shared.of_dy_x[warp][t];
      a.partial[(a.slices() + slice) * a.columns + column] = sum_x;
    }
  });
}

// One block: every thread adds up its share, the first one their sums.
template <typename Team>
HOIST_ON_CARD void mean_block(Team& team, const Mean& a, double (&shared)[kRowThreads]) {
  team.each([&](unsigned t) {
    double sum = 0;
    for (std::uint64_t i = t; i < a.count; i += kRowThreads) sum += static_cast<double>(a.values[i]);
    shared[t] = sum;
  });
  team.barrier();
  team.each([&](unsigned t) {
    if (t != 0) return;
    double sum = 0;
    for (const double part : shared) sum += part;
    *a.mean = sum / static_cast<double>(a.count);
  });
}

}  // namespace hoist::gpt::card
