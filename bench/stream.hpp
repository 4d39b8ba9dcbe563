// SPDX-License-Identifier: Apache-2.0
// bench/stream.hpp - the limit that updates are measured against: the same loads and stores and no arithmetic.
#pragma once

#include <hoist/optim_cpu/update.hpp>

namespace hoist::bench {

enum class Prefetch { none, ahead };

// Reads every array of the tile and writes back, unchanged, those that an update writes. Gradients must be bf16 for a
// split tile and fp32 for a whole one; `count` a multiple of 32. Returns a value that depends on every gradient.
unsigned stream_tile(const optim::SplitTile& tile, Prefetch prefetch);
unsigned stream_tile(const optim::WholeTile& tile, Prefetch prefetch);

}  // namespace hoist::bench
