// SPDX-License-Identifier: Apache-2.0
// config/detail/rules.hpp - rules between keys, applied once each key is valid by itself.
#pragma once

#include <string>
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

}  // namespace hoist::config::detail
