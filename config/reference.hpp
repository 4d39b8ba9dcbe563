// SPDX-License-Identifier: Apache-2.0
// config/reference.hpp - the key table as documents, for people and for editors.
//
// Both are in the tree as files and printed by `hoist check`; a test compares, so that they cannot drift.
//
// Threading  Pure functions.
#pragma once

#include <string>

namespace hoist::config {

std::string reference_markdown();  // docs/config.md; hoist check --print-keys
std::string schema_json();         // docs/hoist.schema.json, JSON Schema 2020-12; hoist check --print-schema

}  // namespace hoist::config
