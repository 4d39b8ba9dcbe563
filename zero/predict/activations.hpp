// SPDX-License-Identifier: Apache-2.0
// zero/predict/activations.hpp - memory that a training program needs beside the engine: activations, by formula.
//
// Assumed: a unit is a transformer layer of 12 width^2 parameters (attention 4, feed-forward 8), 16-bit activations, an
// attention kernel that keeps no matrix of scores, and checkpointing at every unit: its input is kept (2 bytes a token
// and width), the rest is computed again in backward (34 bytes a token and width, of one unit at a time; Korthikanti et
// al. 2022, equation 1 without the scores).
//
//   bytes = sum over units (2 x width x tokens kept) + 34 x width of the widest x tokens of a micro-batch
//
// Threading  Pure functions.
#pragma once

#include <cstdint>

#include <hoist/zero/model.hpp>

namespace hoist {

struct ActivationBytes {
  std::uint64_t checkpoints = 0;
  std::uint64_t working = 0;
  std::uint64_t sum() const { return checkpoints + working; }
};
// `tokens_kept`: tokens of the micro-batches that are between forward and backward; in vertical order, all of a step.
ActivationBytes activation_bytes(const Model& model, double tokens_kept, double micro_batch_tokens);

// Floating-point operations that a token takes, for a checkpoint at every unit. Each parameter takes part in a
// multiplication and an addition in forward, in forward's repetition, for the gradient of the unit's input and, if it
// is trained, for its own.
struct TokenOperations {
  double all = 0;
  double forward = 0;  // of them
};
TokenOperations operations_per_token(const Model& model);

// The layers of a model if only its size is known: as in GPT-3, where width = 128 x layers.
std::uint64_t assumed_layers(std::uint64_t parameters);

}  // namespace hoist
