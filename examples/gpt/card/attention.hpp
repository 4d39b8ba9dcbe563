// SPDX-License-Identifier: Apache-2.0
// examples/gpt/card/attention.hpp - causal attention by tiles, forward and backward: scores never leave the block. Read
// by the C++ compiler and by nvcc.
//
// Forward: a block has 64 queries of one head, each of its four warps 16, and goes over the keys tile by tile with a
// running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691). Backward: one kernel whose
// blocks have keys and go over queries (dk, dv), and one whose blocks have queries and go over keys (dq). Scores are
// computed in both: two products more than with one kernel, but every sum has one order, and nothing is added by atomic
// operations. All three are made of two products: of a warp's rows with the rows of a tile, and of a warp's weights
// with the columns of a tile. `As` is the type of activations; scores, sums and statistics are fp32.
#pragma once

#include "arguments.hpp"
#include "team.hpp"

namespace hoist::gpt::card {

inline constexpr unsigned kAttentionThreads = 128;
inline constexpr unsigned kWarpRows = 16;  // of an mma
inline constexpr unsigned kBlockRows = kAttentionThreads / kWarpThreads * kWarpRows;
inline constexpr float kNothing = -INFINITY;  // the score of a key that a query may not see

// Which head, and which of its blocks of 64 rows.
struct AttentionPlace {
  std::uint32_t batch = 0, head = 0, block = 0;
};

// --- tiles in shared memory ------------------------------------------------------------------------------------------

// Rows of 8 values more than they have: eight rows below each other then lie in different banks.
template <unsigned kRows, unsigned kWidth>
struct alignas(16) Tile {
  static constexpr unsigned kStride = kWidth + 8;
  std::uint16_t values[kRows * kStride];
  HOIST_ON_CARD std::uint16_t* at(unsigned row, unsigned column) { return values + row * kStride + column; }
};

// Rows [first, first + kRows) of one head of a matrix in device memory; zeros from `rows` on. source: its row 0.
template <unsigned kRows, unsigned kWidth, typename Team>
HOIST_ON_CARD void load_tile(Team& team, Tile<kRows, kWidth>& tile, const std::uint16_t* source, std::uint64_t stride,
                             std::uint32_t first, std::uint32_t rows) {
  constexpr unsigned kPacksPerRow = kWidth / 8;
  team.each([&](unsigned t) {
    HOIST_UNROLL
    for (unsigned pack = t; pack < kRows * kPacksPerRow; pack += kAttentionThreads) {
      const unsigned row = pack / kPacksPerRow, column = pack % kPacksPerRow * 8;
      platform::Block16 words{};
      if (first + row < rows) words = platform::load_block(source + (first + row) * stride + column);
      platform::store_block(tile.at(row, column), words);
    }
  });
}

// --- products --------------------------------------------------------------------------------------------------------

// A warp's 16 rows of 8 * kTiles columns. Value v of tile j of a thread: row lane / 4, 8 more for v 2 and 3; column
// 8 * j + 2 * (lane % 4), one more for v 1 and 3.
template <unsigned kTiles>
struct Sums {
  float tile[kTiles][4];
};
HOIST_ON_CARD unsigned row_of(unsigned thread, unsigned value) {
  return thread / kWarpThreads * kWarpRows + thread % kWarpThreads / 4 + value / 2 * 8;
}
HOIST_ON_CARD unsigned column_of(unsigned thread, unsigned tile, unsigned value) {
  return tile * 8 + thread % 4 * 2 + value % 2;
}
template <unsigned kTiles>
HOIST_ON_CARD void clear(Sums<kTiles>& sums) {
  HOIST_UNROLL
  for (unsigned j = 0; j < kTiles; ++j) {
    HOIST_UNROLL
    for (unsigned v = 0; v < 4; ++v) sums.tile[j][v] = 0;
  }
}
// work(tile, value) for all that a thread has.
template <unsigned kTiles, typename Work>
HOIST_ON_CARD void for_sums(const Work& work) {
  HOIST_UNROLL
  for (unsigned j = 0; j < kTiles; ++j) {
    HOIST_UNROLL
    for (unsigned v = 0; v < 4; ++v) work(j, v);
  }
}

// Four registers of a thread: an A operand, or the B operands of two products.
struct Four {
  std::uint32_t r[4];
};

// sums[16 rows of the warp, columns] += left[the warp's rows, width] times the rows of right[columns, width].
template <typename As, unsigned kColumns, unsigned kWidth, typename Team>
HOIST_ON_CARD void multiply_by_rows(Team& team, typename Team::template Private<Sums<kColumns / 8>>& sums,
                                    Tile<kBlockRows, kWidth>& left, Tile<kColumns, kWidth>& right) {
  typename Team::template Private<Four> a, b;
  HOIST_UNROLL
  for (unsigned k = 0; k < kWidth; k += 16) {
    // Matrices: rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
    team.template load_matrices<false>(
        [&](unsigned t) {
          const unsigned matrix = t % kWarpThreads / 8;
          return left.at(t / kWarpThreads * kWarpRows + matrix % 2 * 8 + t % 8, k + matrix / 2 * 8);
        },
        [&](unsigned t) { return a[t].r; });
    HOIST_UNROLL
    for (unsigned n = 0; n < kColumns; n += 16) {
      // Columns 0-7 and 8-15 of rows 0-7, then of rows 8-15.
      team.template load_matrices<false>(
          [&](unsigned t) {
            const unsigned matrix = t % kWarpThreads / 8;
            return right.at(n + matrix / 2 * 8 + t % 8, k + matrix % 2 * 8);
          },
          [&](unsigned t) { return b[t].r; });
      HOIST_UNROLL
      for (unsigned half = 0; half < 2; ++half)
        team.template multiply<As>([&](unsigned t) { return sums[t].tile[n / 8 + half]; },
                                   [&](unsigned t) { return a[t].r; }, [&](unsigned t) { return b[t].r + 2 * half; });
    }
  }
}

// sums[16 rows of the warp, width] += weights[16 rows, kRows] times right[kRows, width]; weights are rounded to As. A
// thread's values of two neighbouring tiles of sums are just what it has of an A operand.
template <typename As, unsigned kRows, unsigned kWidth, typename Team>
HOIST_ON_CARD void multiply_by_columns(Team& team, typename Team::template Private<Sums<kWidth / 8>>& sums,
                                       typename Team::template Private<Sums<kRows / 8>>& weights,
                                       Tile<kRows, kWidth>& right) {
  typename Team::template Private<Four> a, b;
  HOIST_UNROLL
  for (unsigned k = 0; k < kRows; k += 16) {
    team.each([&](unsigned t) {
      const float(&low)[4] = weights[t].tile[k / 8];
      const float(&high)[4] = weights[t].tile[k / 8 + 1];
      a[t].r[0] = pack_pair<As>(low[0], low[1]);
      a[t].r[1] = pack_pair<As>(low[2], low[3]);
      a[t].r[2] = pack_pair<As>(high[0], high[1]);
      a[t].r[3] = pack_pair<As>(high[2], high[3]);
    });
    HOIST_UNROLL
    for (unsigned n = 0; n < kWidth; n += 16) {
      // Rows 0-7 and 8-15 of columns 0-7, then of columns 8-15.
      team.template load_matrices<true>(
          [&](unsigned t) {
            const unsigned matrix = t % kWarpThreads / 8;
            return right.at(k + matrix % 2 * 8 + t % 8, n + matrix / 2 * 8);
          },
          [&](unsigned t) { return b[t].r; });
      HOIST_UNROLL
      for (unsigned half = 0; half < 2; ++half)
        team.template multiply<As>([&](unsigned t) { return sums[t].tile[n / 8 + half]; },
                                   [&](unsigned t) { return a[t].r; }, [&](unsigned t) { return b[t].r + 2 * half; });
    }
  }
}

// --- where things are ------------------------------------------------------------------------------------------------

// One head of one sequence.
template <unsigned kWidth>
struct HeadPlace {
  HOIST_ON_CARD HeadPlace(const Attention& a, const AttentionPlace& place)
      : width(static_cast<std::uint64_t>(a.heads) * kWidth),
        stride(3 * width),
        queries(static_cast<std::uint64_t>(place.batch) * a.context * stride + place.head * kWidth),
        keys(queries + width),
        values(keys + width),
        outputs(static_cast<std::uint64_t>(place.batch) * a.context * width + place.head * kWidth),
        statistics((static_cast<std::uint64_t>(place.batch) * a.heads + place.head) * a.context) {}
  std::uint64_t width, stride;          // of a row of outputs; of qkv
  std::uint64_t queries, keys, values;  // offsets in qkv
  std::uint64_t outputs, statistics;    // offsets in y; in log_sum and delta
};
HOIST_ON_CARD const std::uint16_t* values_of(const void* activations) {
  return static_cast<const std::uint16_t*>(activations);
}

// target[row, columns of the head] = sums * factor, for the rows there are. Two neighbours are one store of 4 bytes.
template <typename As, unsigned kWidth, typename Team>
HOIST_ON_CARD void store_sums(Team& team, typename Team::template Private<Sums<kWidth / 8>>& sums, void* target,
                              std::uint64_t stride, std::uint32_t first, std::uint32_t rows, float factor) {
  team.each([&](unsigned t) {
    for_sums<kWidth / 8>([&](unsigned j, unsigned v) {
      const std::uint32_t row = first + row_of(t, v);
      if (v % 2 == 1 || row >= rows) return;
      const std::uint32_t pair = pack_pair<As>(sums[t].tile[j][v] * factor, sums[t].tile[j][v + 1] * factor);
      std::uint16_t* const at = static_cast<std::uint16_t*>(target) + row * stride + column_of(t, j, v);
      *reinterpret_cast<std::uint32_t*>(at) = pair;
    });
  });
}

HOIST_ON_CARD float scale_of(std::uint32_t head_width) { return 1.0f / sqrtf(static_cast<float>(head_width)); }

// --- forward ---------------------------------------------------------------------------------------------------------

template <unsigned kWidth>
struct ForwardShared {
  static constexpr unsigned kKeys = 64;  // of a tile
  Tile<kBlockRows, kWidth> queries;
  Tile<kKeys, kWidth> keys, values;
};

// The two rows that a thread has a part of.
struct RowState {
  float largest[2], sum[2];
};

template <typename As, unsigned kWidth, typename Team>
HOIST_ON_CARD void attention_forward_block(Team& team, const Attention& a, const AttentionPlace& place,
                                           ForwardShared<kWidth>& shared) {
  constexpr unsigned kKeys = ForwardShared<kWidth>::kKeys, kTiles = kKeys / 8;
  const HeadPlace<kWidth> head(a, place);
  const std::uint16_t* const qkv = values_of(a.qkv);
  const std::uint32_t first_query = place.block * kBlockRows;
  const std::uint32_t end = first_query + kBlockRows < a.context ? first_query + kBlockRows : a.context;  // of keys
  const float scale = scale_of(kWidth) * kLog2OfE;

  typename Team::template Private<Sums<kWidth / 8>> output;
  typename Team::template Private<Sums<kTiles>> scores;
  typename Team::template Private<RowState> rows;
  team.each([&](unsigned t) {
    clear(output[t]);
    for (unsigned r = 0; r < 2; ++r) {
      rows[t].largest[r] = kNothing;
      rows[t].sum[r] = 0;
    }
  });
  load_tile(team, shared.queries, qkv + head.queries, head.stride, first_query, a.context);
  for (std::uint32_t first_key = 0; first_key < end; first_key += kKeys) {
    team.barrier();  // everybody has read the last tiles
    load_tile(team, shared.keys, qkv + head.keys, head.stride, first_key, a.context);
    load_tile(team, shared.values, qkv + head.values, head.stride, first_key, a.context);
    team.barrier();
    team.each([&](unsigned t) { clear(scores[t]); });
    multiply_by_rows<As, kKeys, kWidth>(team, scores, shared.queries, shared.keys);

    typename Team::template Private<RowState> next;
    team.each([&](unsigned t) {
      next[t] = rows[t];
      for_sums<kTiles>([&](unsigned j, unsigned v) {
        const std::uint32_t query = first_query + row_of(t, v), key = first_key + column_of(t, j, v);
        float& score = scores[t].tile[j][v];
        score = key <= query && key < a.context ? score * scale : kNothing;
        next[t].largest[v / 2] = fmaxf(next[t].largest[v / 2], score);
      });
    });
    // Four lanes share a row. The first tile has key 0, which every query sees: the maximum is a number from then on.
    HOIST_UNROLL
    for (unsigned mask = 1; mask <= 2; mask *= 2) {
      HOIST_UNROLL
      for (unsigned r = 0; r < 2; ++r)
        team.exchange(
            mask, [&](unsigned t) { return next[t].largest[r]; },
            [&](unsigned t, float other) { next[t].largest[r] = fmaxf(next[t].largest[r], other); });
    }
    team.each([&](unsigned t) {
      float correction[2];
      for (unsigned r = 0; r < 2; ++r) {
        correction[r] = exp2(rows[t].largest[r] - next[t].largest[r]);
        next[t].sum[r] *= correction[r];
      }
      for_sums<kTiles>([&](unsigned j, unsigned v) {
        float& score = scores[t].tile[j][v];
        score = exp2(score - next[t].largest[v / 2]);
        next[t].sum[v / 2] += score;
      });
      for_sums<kWidth / 8>([&](unsigned j, unsigned v) { output[t].tile[j][v] *= correction[v / 2]; });
      rows[t] = next[t];
    });
    multiply_by_columns<As, kKeys, kWidth>(team, output, scores, shared.values);
  }

  HOIST_UNROLL
  for (unsigned mask = 1; mask <= 2; mask *= 2) {
    HOIST_UNROLL
    for (unsigned r = 0; r < 2; ++r)
      team.exchange(
          mask, [&](unsigned t) { return rows[t].sum[r]; }, [&](unsigned t, float other) { rows[t].sum[r] += other; });
  }
  team.each([&](unsigned t) {
    for_sums<kWidth / 8>([&](unsigned j, unsigned v) { output[t].tile[j][v] /= rows[t].sum[v / 2]; });
    for (unsigned r = 0; r < 2; ++r) {
      const std::uint32_t query = first_query + row_of(t, 2 * r);
      if (t % 4 == 0 && query < a.context)
        a.log_sum[head.statistics + query] = rows[t].largest[r] + log2f(rows[t].sum[r]);
    }
  });
  store_sums<As, kWidth>(team, output, static_cast<std::uint16_t*>(a.y) + head.outputs, head.width, first_query,
                         a.context, 1.0f);
}

// --- backward --------------------------------------------------------------------------------------------------------

// The number of keys and values, or of queries and gradients, of a block: fewer if registers would not suffice.
template <unsigned kWidth>
inline constexpr unsigned kBackwardRows = kWidth > 64 ? 32 : 64;

// dk and dv of a block of keys.
template <unsigned kWidth>
struct KeysBackwardShared {
  static constexpr unsigned kQueries = kBackwardRows<kWidth>;
  Tile<kBlockRows, kWidth> keys, values;
  Tile<kQueries, kWidth> queries, gradients;
  float log_sum[kQueries], delta[kQueries];
};

template <typename As, unsigned kWidth, typename Team>
HOIST_ON_CARD void attention_backward_keys_block(Team& team, const Attention& a, const AttentionPlace& place,
                                                 KeysBackwardShared<kWidth>& shared) {
  constexpr unsigned kQueries = KeysBackwardShared<kWidth>::kQueries, kTiles = kQueries / 8;
  const HeadPlace<kWidth> head(a, place);
  const std::uint16_t* const qkv = values_of(a.qkv);
  const std::uint32_t first_key = place.block * kBlockRows;
  const float scale = scale_of(kWidth);

  typename Team::template Private<Sums<kWidth / 8>> dk, dv;
  typename Team::template Private<Sums<kTiles>> weights, slopes;  // of keys by rows, queries by columns
  team.each([&](unsigned t) {
    clear(dk[t]);
    clear(dv[t]);
  });
  load_tile(team, shared.keys, qkv + head.keys, head.stride, first_key, a.context);
  load_tile(team, shared.values, qkv + head.values, head.stride, first_key, a.context);
  for (std::uint32_t first_query = first_key; first_query < a.context; first_query += kQueries) {
    team.barrier();
    load_tile(team, shared.queries, qkv + head.queries, head.stride, first_query, a.context);
    load_tile(team, shared.gradients, values_of(a.dy) + head.outputs, head.width, first_query, a.context);
    team.each([&](unsigned t) {
      const std::uint32_t query = first_query + t;
      if (t >= kQueries) return;
      shared.log_sum[t] = query < a.context ? a.log_sum[head.statistics + query] : 0;
      shared.delta[t] = query < a.context ? a.delta[head.statistics + query] : 0;
    });
    team.barrier();
    team.each([&](unsigned t) {
      clear(weights[t]);
      clear(slopes[t]);
    });
    multiply_by_rows<As, kQueries, kWidth>(team, weights, shared.keys, shared.queries);
    multiply_by_rows<As, kQueries, kWidth>(team, slopes, shared.values, shared.gradients);
    team.each([&](unsigned t) {
      for_sums<kTiles>([&](unsigned j, unsigned v) {
        const unsigned column = column_of(t, j, v);
        const std::uint32_t key = first_key + row_of(t, v), query = first_query + column;
        const bool sees = key <= query && query < a.context;
        float& weight = weights[t].tile[j][v];
        weight = sees ? exp2(weight * (scale * kLog2OfE) - shared.log_sum[column]) : 0.0f;
        slopes[t].tile[j][v] = weight * (slopes[t].tile[j][v] - shared.delta[column]);
      });
    });
    multiply_by_columns<As, kQueries, kWidth>(team, dv, weights, shared.gradients);
    multiply_by_columns<As, kQueries, kWidth>(team, dk, slopes, shared.queries);
  }
  std::uint16_t* const dqkv = static_cast<std::uint16_t*>(a.dqkv);
  store_sums<As, kWidth>(team, dk, dqkv + head.keys, head.stride, first_key, a.context, scale);
  store_sums<As, kWidth>(team, dv, dqkv + head.values, head.stride, first_key, a.context, 1.0f);
}

// dq of a block of queries.
template <unsigned kWidth>
struct QueriesBackwardShared {
  static constexpr unsigned kKeys = kBackwardRows<kWidth>;
  Tile<kBlockRows, kWidth> queries, gradients;
  Tile<kKeys, kWidth> keys, values;
};

template <typename As, unsigned kWidth, typename Team>
HOIST_ON_CARD void attention_backward_queries_block(Team& team, const Attention& a, const AttentionPlace& place,
                                                    QueriesBackwardShared<kWidth>& shared) {
  constexpr unsigned kKeys = QueriesBackwardShared<kWidth>::kKeys, kTiles = kKeys / 8;
  const HeadPlace<kWidth> head(a, place);
  const std::uint16_t* const qkv = values_of(a.qkv);
  const std::uint32_t first_query = place.block * kBlockRows;
  const std::uint32_t end = first_query + kBlockRows < a.context ? first_query + kBlockRows : a.context;
  const float scale = scale_of(kWidth);

  typename Team::template Private<Sums<kWidth / 8>> dq;
  typename Team::template Private<Sums<kTiles>> scores, slopes;
  typename Team::template Private<RowState> rows;  // largest: log_sum; sum: delta
  team.each([&](unsigned t) {
    clear(dq[t]);
    for (unsigned r = 0; r < 2; ++r) {
      const std::uint32_t query = first_query + row_of(t, 2 * r);
      rows[t].largest[r] = query < a.context ? a.log_sum[head.statistics + query] : 0;
      rows[t].sum[r] = query < a.context ? a.delta[head.statistics + query] : 0;
    }
  });
  load_tile(team, shared.queries, qkv + head.queries, head.stride, first_query, a.context);
  load_tile(team, shared.gradients, values_of(a.dy) + head.outputs, head.width, first_query, a.context);
  for (std::uint32_t first_key = 0; first_key < end; first_key += kKeys) {
    team.barrier();
    load_tile(team, shared.keys, qkv + head.keys, head.stride, first_key, a.context);
    load_tile(team, shared.values, qkv + head.values, head.stride, first_key, a.context);
    team.barrier();
    team.each([&](unsigned t) {
      clear(scores[t]);
      clear(slopes[t]);
    });
    multiply_by_rows<As, kKeys, kWidth>(team, scores, shared.queries, shared.keys);
    multiply_by_rows<As, kKeys, kWidth>(team, slopes, shared.gradients, shared.values);
    team.each([&](unsigned t) {
      for_sums<kTiles>([&](unsigned j, unsigned v) {
        const std::uint32_t query = first_query + row_of(t, v), key = first_key + column_of(t, j, v);
        const bool sees = key <= query && query < a.context;
        const float weight = sees ? exp2(scores[t].tile[j][v] * (scale * kLog2OfE) - rows[t].largest[v / 2]) : 0.0f;
        slopes[t].tile[j][v] = weight * (slopes[t].tile[j][v] - rows[t].sum[v / 2]);
      });
    });
    multiply_by_columns<As, kKeys, kWidth>(team, dq, slopes, shared.keys);
  }
  store_sums<As, kWidth>(team, dq, static_cast<std::uint16_t*>(a.dqkv) + head.queries, head.stride, first_query,
                         a.context, scale);
}

}  // namespace hoist::gpt::card
