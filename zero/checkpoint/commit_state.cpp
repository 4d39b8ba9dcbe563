// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <hoist/zero/checkpoint/commit_state.hpp>

namespace hoist::detail {

CommitState CommitState::of(const LossScaler& scaler, std::span<const std::byte> program_state) {
  return {.scaler = scaler.is_dynamic() ? std::optional(scaler.state()) : std::nullopt,
          .program = {program_state.begin(), program_state.end()}};
}

std::vector<std::byte> encode(const std::string& name, const CommitState& state) {
  std::vector<std::byte> bytes(kCommitHeadBytes + state.program.size());
  std::memcpy(bytes.data(), name.data(), std::min(name.size(), kCommitNameBytes - 1));
  if (state.scaler) store_loss_scaler(*state.scaler, std::span(bytes).subspan<kCommitNameBytes, kLossScalerBytes>());
  std::ranges::copy(state.program, bytes.begin() + kCommitHeadBytes);
  return bytes;
}

std::optional<CommitState> decode(std::span<const std::byte> bytes) {
  if (bytes.size() < kCommitHeadBytes) return std::nullopt;
  const auto program = bytes.subspan(kCommitHeadBytes);
  return CommitState{.scaler = load_loss_scaler(bytes.subspan<kCommitNameBytes, kLossScalerBytes>()),
                     .program = {program.begin(), program.end()}};
}

}  // namespace hoist::detail
