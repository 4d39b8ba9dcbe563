// SPDX-License-Identifier: Apache-2.0
// zero/passes/gradient_norm.hpp - this rank's sum of squares of a step's gradients.
//
// A gradient is summed up in chunks (core/norm_order.hpp), on the host or on the device. The chunks' sums are added up
// in unit, segment and chunk order, wherever and whenever they were made, so that placement changes no bit of the norm.
//
// Threading  One thread at a time for each unit; total() when all sums have been made.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::detail {

class GradientNorm {
 public:
  GradientNorm(Runtime& runtime, const UnitTable& table, const Memory& memory);

  // A unit's gradient, whose shards of this rank are at `shards`.
  void sum(UnitId unit, const std::byte* shards);
  // Those of several units at once; `shards` by unit.
  void sum(std::span<const UnitId> units, std::span<std::byte* const> shards);
  // Those of all units whose gradients are on the device only (Memory::device_only), which have arrived there. Blocks.
  void sum_on_device(platform::Stream& stream);

  // Whether all elements of a gradient that was summed up are finite.
  bool is_finite(UnitId unit) const;
  // The sum over parameters that count in the norm. Infinity if any gradient has an element that is not finite, also of
  // a parameter that does not count.
  double total() const;

 private:
  struct Chunk {
    std::uint64_t offset_bytes = 0;  // within the unit's shards
    DType dtype = DType::bf16;
    std::size_t count = 0;
    bool in_norm = true;
    double sum = 0;
  };
  std::span<Chunk> chunks_of(UnitId unit);
  static void sum_chunk(Chunk& chunk, const std::byte* shards);

  Runtime& runtime_;
  const UnitTable& table_;
  const Memory& memory_;
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> first_chunk_;  // by unit, and one past the last
  struct Work {
    Chunk* chunk;
    const std::byte* shards;
  };
  std::vector<Work> work_;  // of a call for several units; kept for its memory
};

}  // namespace hoist::detail
