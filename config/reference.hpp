// SPDX-License-Identifier: Apache-2.0
// config/reference.hpp - the key table as text for people: docs/config.md.
#pragma once

#include <string>

namespace hoist::config {

// Markdown; the same text for the same table.
std::string reference_markdown();

}  // namespace hoist::config
