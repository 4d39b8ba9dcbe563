// SPDX-License-Identifier: Apache-2.0
// zero/ranks/common_options.hpp - which options the ranks of an engine must have alike, so that their calls lead to
// the same collectives and each steps its shard as the others do.
//
// Threading  Pure, but for agree_on_options.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/comm/communicator.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/types.hpp>

namespace hoist::detail {

struct CommonOption {
  std::string_view key;
  std::string value;  // two ranks have the same text here if and only if their options agree
};
// All of them, in an order that every rank has. `groups`: the engine's parameter groups.
std::vector<CommonOption> common_options(const EngineOptions& engine, const RuntimeOptions& runtime,
                                         std::span<const GroupOptions> groups);

// [C] Errors: CommError on every rank naming the first option that is not everywhere the same, and two of its values.
// Cost: an exchange of 8 bytes an option and rank; another one where they differ.
void agree_on_options(comm::Communicator& ranks, std::span<const CommonOption> options);

}  // namespace hoist::detail
