// SPDX-License-Identifier: Apache-2.0
#include "emulated_card.hpp"

#include <cstring>
#include <span>
#include <vector>

#include "card/attention.hpp"
#include "card/rows.hpp"
#include "emulated_team.hpp"

namespace hoist::gpt::card {
namespace {

using platform::AsBf16;
using platform::AsFp16;

// A grid: which way through it, and the work of a block or of a thread.
struct Grid {
  bool backwards = false;

  template <typename Body>
  void blocks(std::uint64_t count, const Body& body) const {
    for (std::uint64_t i = 0; i < count; ++i) body(backwards ? count - 1 - i : i);
  }
  // As many threads as make several turns of the stride.
  template <typename Body>
  void threads(const Body& body) const {
    constexpr std::uint64_t kThreads = 37;
    blocks(kThreads, [&](std::uint64_t t) { body(Place{t, kThreads}); });
  }
  template <typename Body>
  void rows(std::uint64_t count, const Body& body) const {
    blocks((count + kRowsPerBlock - 1) / kRowsPerBlock, [&](std::uint64_t block) {
      EmulatedTeam team(kRowThreads, backwards);
      body(team, block);
    });
  }
  template <typename Shared, typename Body>
  void heads(const Attention& a, const Body& body) const {
    const std::uint32_t per_head = (a.context + kBlockRows - 1) / kBlockRows;
    const auto shared = std::make_unique<Shared>();
    blocks(std::uint64_t{per_head} * a.heads * a.batch, [&](std::uint64_t i) {
      std::memset(static_cast<void*>(shared.get()), 0xFF, sizeof(Shared));  // NaN
      EmulatedTeam team(kAttentionThreads, backwards, std::as_writable_bytes(std::span(shared.get(), 1)));
      body(team,
           AttentionPlace{static_cast<std::uint32_t>(i / per_head / a.heads),
                          static_cast<std::uint32_t>(i / per_head % a.heads), static_cast<std::uint32_t>(i % per_head)},
           *shared);
    });
  }
};

template <typename As>
void emulate(const FinishLinear& a, const Grid& grid) {
  grid.threads([&](const Place& place) { finish_linear_thread<As>(a, place); });
}
template <typename As>
void emulate(const Gelu& a, const Grid& grid) {
  grid.threads([&](const Place& place) { gelu_thread<As>(a, place); });
}
template <typename As>
void emulate(const CastWeights& a, const Grid& grid) {
  grid.threads([&](const Place& place) { cast_weights_thread<As>(a, place); });
}
template <typename As>
void emulate(const Embed& a, const Grid& grid) {
  grid.threads([&](const Place& place) {
    a.weight_dtype == DType::fp32 ? embed_thread<As, AsFp32>(a, place) : embed_thread<As, As>(a, place);
  });
}
template <typename As>
void emulate(const OneHot& a, const Grid& grid) {
  grid.threads([&](const Place& place) { one_hot_thread<As>(a, place); });
}
template <typename As>
void emulate(const PositionGradient& a, const Grid& grid) {
  grid.threads([&](const Place& place) {
    a.gradient_dtype == DType::fp32 ? position_gradient_thread<As, AsFp32>(a, place)
                                    : position_gradient_thread<As, As>(a, place);
  });
}
template <typename As>
void emulate(const NormForward& a, const Grid& grid) {
  grid.rows(a.rows, [&](EmulatedTeam& team, std::uint64_t block) { norm_forward_block<As>(team, a, block); });
}
template <typename As>
void emulate(const NormBackward& a, const Grid& grid) {
  grid.rows(a.rows, [&](EmulatedTeam& team, std::uint64_t block) { norm_backward_block<As>(team, a, block); });
}
template <typename As, bool kNorm>
void emulate_column_sums(const ColumnSums& a, const Grid& grid) {
  const std::uint64_t groups = (a.columns + kColumnsPerBlock - 1) / kColumnsPerBlock;
  const auto shared = std::make_unique<ColumnSumsShared<kNorm>>();
  grid.blocks(groups * a.slices(), [&](std::uint64_t block) {
    std::memset(static_cast<void*>(shared.get()), 0xFF, sizeof *shared);
    EmulatedTeam team(kRowThreads, grid.backwards);
    column_sums_block<As, kNorm>(team, a, block % groups, block / groups, *shared);
  });
  grid.threads([&](const Place& place) { add_slices_thread(a, place); });
}
template <typename As>
void emulate(const ColumnSums& a, const Grid& grid) {
  a.x != nullptr ? emulate_column_sums<As, true>(a, grid) : emulate_column_sums<As, false>(a, grid);
}
template <typename As>
void emulate(const CrossEntropyRows& a, const Grid& grid) {
  grid.rows(a.rows, [&](EmulatedTeam& team, std::uint64_t block) { cross_entropy_block<As>(team, a, block); });
}
template <typename As>
void emulate(const Mean& a, const Grid& grid) {
  double shared[kRowThreads];
  EmulatedTeam team(kRowThreads, grid.backwards);
  mean_block(team, a, shared);
}

template <typename As, unsigned kWidth>
void emulate_forward(const Attention& a, const Grid& grid) {
  grid.heads<ForwardShared<kWidth>>(a, [&](EmulatedTeam& team, const AttentionPlace& place, auto& shared) {
    attention_forward_block<As, kWidth>(team, a, place, shared);
  });
}
template <typename As>
void emulate(const ForwardAttention& a, const Grid& grid) {
  a.attention.head_width == 64 ? emulate_forward<As, 64>(a.attention, grid)
                               : emulate_forward<As, 128>(a.attention, grid);
}
template <typename As, unsigned kWidth>
void emulate_backward(const Attention& a, const Grid& grid) {
  grid.heads<KeysBackwardShared<kWidth>>(a, [&](EmulatedTeam& team, const AttentionPlace& place, auto& shared) {
    attention_backward_keys_block<As, kWidth>(team, a, place, shared);
  });
  grid.heads<QueriesBackwardShared<kWidth>>(a, [&](EmulatedTeam& team, const AttentionPlace& place, auto& shared) {
    attention_backward_queries_block<As, kWidth>(team, a, place, shared);
  });
}
template <typename As>
void emulate(const BackwardAttention& b, const Grid& grid) {
  const Attention& a = b.attention;
  grid.rows(std::uint64_t{a.batch} * a.context * a.heads,
            [&](EmulatedTeam& team, std::uint64_t block) { attention_delta_block<As>(team, a, block); });
  a.head_width == 64 ? emulate_backward<As, 64>(a, grid) : emulate_backward<As, 128>(a, grid);
}

float load(const void* data, DType dtype, std::uint64_t i) {
  switch (dtype) {
    case DType::bf16:
      return AsBf16::load(static_cast<const std::uint16_t*>(data)[i]);
    case DType::fp16:
      return AsFp16::load(static_cast<const std::uint16_t*>(data)[i]);
    case DType::fp32:
      break;
  }
  return static_cast<const float*>(data)[i];
}

void store(void* data, DType dtype, std::uint64_t i, float value) {
  if (dtype == DType::fp32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<std::uint16_t*>(data)[i] = dtype == DType::bf16 ? AsBf16::store(value) : AsFp16::store(value);
  }
}

}  // namespace

void emulate(const Kernel& kernel, DType activations, bool backwards) {
  const Grid grid{backwards};
  std::visit(
      [&](const auto& arguments) {
        activations == DType::bf16 ? emulate<AsBf16>(arguments, grid) : emulate<AsFp16>(arguments, grid);
      },
      kernel);
}

void EmulatedCard::launch(const Kernel& kernel) { emulate(kernel, activations_); }

void EmulatedCard::multiply(const Product& p) {
  // In fp32 first, so that the loops are over plain rows.
  std::vector<float> a(p.m * p.k), b(p.k * p.n), d(p.m * p.n, 0.0f);
  for (std::uint64_t i = 0; i < p.m; ++i)
    for (std::uint64_t k = 0; k < p.k; ++k)
      a[i * p.k + k] = load(p.a, p.dtype, p.transposed_a ? k * p.m + i : i * p.k + k);
  for (std::uint64_t k = 0; k < p.k; ++k)
    for (std::uint64_t j = 0; j < p.n; ++j)
      b[k * p.n + j] = load(p.b, p.dtype, p.transposed_b ? j * p.k + k : k * p.n + j);
  for (std::uint64_t i = 0; i < p.m; ++i) {
    for (std::uint64_t k = 0; k < p.k; ++k) {
      const float factor = a[i * p.k + k];
      for (std::uint64_t j = 0; j < p.n; ++j) d[i * p.n + j] += factor * b[k * p.n + j];
    }
  }
  for (std::uint64_t i = 0; i < d.size(); ++i) store(p.d, p.d_dtype, i, p.add ? load(p.d, p.d_dtype, i) + d[i] : d[i]);
}

void EmulatedCard::zero(void* target, std::uint64_t bytes) { std::memset(target, 0, bytes); }

}  // namespace hoist::gpt::card
