// SPDX-License-Identifier: Apache-2.0
// examples/gpt/run_state.hpp - what every commit keeps of the program itself, so that a resumed run is the same run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hoist::gpt {

struct RunState {
  static constexpr int kFormatVersion = 2;

  std::uint64_t step = 0;  // steps done
  std::uint64_t seed = 0;
  int layers = 0;
  int width = 0;
  int heads = 0;
  int context = 0;
  std::uint64_t samples_per_step = 0;  // over all ranks and micro-batches: it decides which windows a step sees
  std::uint64_t text_bytes = 0;
  std::uint64_t text_fingerprint = 0;

  friend bool operator==(const RunState&, const RunState&) = default;
};

// JSON text, so that a person can read it in the store.
std::vector<std::byte> encode(const RunState& state);
// Errors: BadInputError when the bytes are not a run state of a version this program knows.
RunState decode(std::span<const std::byte> bytes);
// Errors: BadInputError naming what differs, steps aside. A different seed, text or number of samples would continue
// another run; how ranks and micro-batches divide the samples of a step may change.
void check_same_run(const RunState& committed, const RunState& asked);

}  // namespace hoist::gpt
