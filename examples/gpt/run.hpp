// SPDX-License-Identifier: Apache-2.0
// examples/gpt/run.hpp - one invocation of hoist-gpt, from arguments to report.
//
// Main path  Config -> Runtime -> model -> Engine::create or Engine::restore -> steps -> save, digests, report, table.
#pragma once

#include "arguments.hpp"

namespace hoist::gpt {

// Runs, prints, and returns the exit code: 0, kExitFailure or kExitBadInput. Never throws.
int run(const Arguments& arguments) noexcept;

}  // namespace hoist::gpt
