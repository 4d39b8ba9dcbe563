// SPDX-License-Identifier: Apache-2.0
// config/detail/rules.hpp - rules between keys, applied once each key is valid by itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <hoist/config/detail/draft.hpp>
#include <hoist/config/detail/reader.hpp>

namespace hoist::config::detail {

struct RuleNotes {
  std::vector<std::string> warnings;
  std::vector<std::string> notes;
};

// Completes the draft; problems are appended to read.problems.
RuleNotes apply_rules(Draft& draft, ReadResult& read, RunLength run_length);

// The rules of the sections "optimizer" and "scheduler": defaults of each type, and parameters that a type lacks or
// needs. Settings without effect are removed from read.settings.
void apply_optimizer(Draft& draft, ReadResult& read, RuleNotes& notes);
void apply_schedule(Draft& draft, ReadResult& read, RunLength run_length, RuleNotes& notes);

// Parameters that were given below `section` ("optimizer.params.") and are not among `names` become problems.
void refuse_other_parameters(ReadResult& read, std::string_view section, std::string_view type,
                             const std::vector<std::string_view>& names);

}  // namespace hoist::config::detail
