// SPDX-License-Identifier: Apache-2.0
#include "output.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include <hoist/core/error.hpp>

namespace hoist::cli {

void write_json(const std::string& path, const nlohmann::ordered_json& value) {
  if (path.empty()) return;
  // Bytes of a path or of the configuration need not be UTF-8.
  const std::string text = value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  std::FILE* file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) throw IoError({.operation = "open", .path = path, .code = errno}, "choose another --json file");
  errno = 0;
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) {
    throw IoError({.operation = "write", .path = path, .length_bytes = text.size(), .code = errno},
                  "choose another --json file");
  }
}

std::string columns(const std::vector<std::vector<std::string>>& rows, std::size_t indent) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    text.append(indent, ' ');
    for (std::size_t c = 0; c < row.size(); ++c) {
      text += row[c];
      if (c + 1 < row.size()) text.append(widths[c] - row[c].size() + 2, ' ');
    }
    while (text.ends_with(' ')) text.pop_back();
    text += '\n';
  }
  return text;
}

}  // namespace hoist::cli
