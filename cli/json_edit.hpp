// SPDX-License-Identifier: Apache-2.0
// cli/json_edit.hpp - changes single values of a JSON text and leaves every other byte as its author wrote it: order,
// spacing, the spelling of numbers, comments.
//
// Errors  JsonEditError when the text is not JSON, or a step of the path is there and is no object.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include <hoist/core/error.hpp>

namespace hoist::cli {

class JsonEditError : public Error {
 public:
  using Error::Error;
};

// `text` with the member named by `path` ("hoist", "measured", "read_bytes_per_second") set to `value`; objects on the
// way that are missing are added at the end of their parent.
// Pre: the path is not empty.
std::string with_member(const std::string& text, std::span<const std::string_view> path,
                        const nlohmann::ordered_json& value);

}  // namespace hoist::cli
