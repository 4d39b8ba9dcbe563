// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/commit_state.hpp - what a commit keeps beside the records: in the store's words, its caller state.
//
//   [0, 192)    the commit's name, empty for a step's; zero-terminated
//   [192, 256)  the loss scaler's state, zeros without a dynamic one (and in commits of versions that had none)
//   [256, ...)  the program's own bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/zero/update/loss_scale.hpp>

namespace hoist::detail {

inline constexpr std::size_t kCommitNameBytes = 192;
inline constexpr std::size_t kCommitHeadBytes = kCommitNameBytes + kLossScalerBytes;
static_assert(kCommitHeadBytes == 256, "part of the format");

struct CommitState {
  std::optional<LossScaler::State> scaler;
  std::vector<std::byte> program;

  // Includes the scaler's state if the loss scale is dynamic.
  static CommitState of(const LossScaler& scaler, std::span<const std::byte> program_state);
};

std::vector<std::byte> encode(const std::string& name, const CommitState& state);
// Returns nullopt if no engine can have written these bytes.
std::optional<CommitState> decode(std::span<const std::byte> bytes);

}  // namespace hoist::detail
