// SPDX-License-Identifier: Apache-2.0
// cli/json_edit.hpp - changes single values of a JSON text and leaves every other byte as it was: order, spacing, the
// spelling of numbers, comments.
//
// Errors  JsonEditError if the text is not JSON, or a part of the path exists and is not an object.
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

// Returns `text` with the member named by `path` ("hoist", "measured", "read_bytes_per_second") set to `value`. Missing
// objects of the path are added at the end of their parent. Pre: the path is not empty.
std::string with_member(const std::string& text, std::span<const std::string_view> path,
                        const nlohmann::ordered_json& value);

}  // namespace hoist::cli
