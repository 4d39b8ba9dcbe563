// SPDX-License-Identifier: Apache-2.0
// config/reference.hpp - the key table as documents, for people and for editors.
//
// Both are files in the tree, and `hoist check` prints them; a test compares the two.
//
// Threading  Pure functions.
#pragma once

#include <string>

namespace hoist::config {

std::string reference_markdown();  // docs/config.md; hoist check --print-keys
std::string schema_json();         // docs/hoist.schema.json, JSON Schema 2020-12; hoist check --print-schema

}  // namespace hoist::config
