// SPDX-License-Identifier: Apache-2.0
// config/detail/schedule_rules.hpp - rules of the section "scheduler", applied once each of its values is valid.
#pragma once

#include <hoist/config/detail/draft.hpp>
#include <hoist/config/detail/reader.hpp>
#include <hoist/config/detail/rules.hpp>

namespace hoist::config::detail {

// Fills draft.engine.learning_rate_schedule. Parameters that the type does not have, or that are missing, become
// problems. Settings without effect are removed from read.settings.
void apply_schedule(Draft& draft, ReadResult& read, RunLength run_length, RuleNotes& notes);

}  // namespace hoist::config::detail
