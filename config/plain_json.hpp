// SPDX-License-Identifier: Apache-2.0
// config/plain_json.hpp - what configurations in the wild have beyond JSON, and DeepSpeed's reader takes: comments from
// # or // to the end of the line, comments between /* and */, and a comma after the last member or item.
//
// Threading  Pure function of its argument.
#pragma once

#include <string>
#include <string_view>

namespace hoist::config {

// `text` with spaces instead of all of them: JSON, when there was nothing else wrong, with every byte of it where it
// was. What is within strings is left alone, and so is a comment that does not end.
std::string plain_json(std::string_view text);

}  // namespace hoist::config
