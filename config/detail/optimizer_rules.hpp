// SPDX-License-Identifier: Apache-2.0
// config/detail/optimizer_rules.hpp - rules of the section "optimizer", applied once each of its values is valid.
#pragma once

#include <hoist/config/detail/draft.hpp>
#include <hoist/config/detail/reader.hpp>
#include <hoist/config/detail/rules.hpp>

namespace hoist::config::detail {

// Completes draft.engine.optimizer_defaults. Parameters that the type does not have become problems. Settings without
// effect are removed from read.settings.
void apply_optimizer(Draft& draft, ReadResult& read, RuleNotes& notes);

}  // namespace hoist::config::detail
