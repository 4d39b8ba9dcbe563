// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include <hoist/config/plain_json.hpp>

namespace hoist::config {

namespace {

std::size_t end_of_string(std::string_view text, std::size_t at) {
  for (++at; at < text.size() && text[at] != '"' && text[at] != '\n'; ++at) {
    if (text[at] == '\\') ++at;
  }
  return std::min(at + 1, text.size());
}

// The position after the comment that begins at `at`; nullopt if none begins there or it does not end. `last_close` is
// the position of the last "*/", so that a text with many "/*" is not searched from each of them.
std::optional<std::size_t> end_of_comment(std::string_view text, std::size_t at, std::size_t last_close) {
  const std::string_view rest = text.substr(at);
  if (rest.starts_with('#') || rest.starts_with("//")) return std::min(text.find('\n', at), text.size());
  if (!rest.starts_with("/*") || last_close == std::string_view::npos || at + 2 > last_close) return std::nullopt;
  return text.find("*/", at + 2) + 2;
}

constexpr std::string_view kInfinity = "Infinity";
static_assert(kInfinity.size() == kInfinityNumber.size());

// Whether a character ends an item of a list, which a comma may follow.
bool ends_item(char c) { return c != '\0' && c != '{' && c != '[' && c != ','; }

}  // namespace

std::string plain_json(std::string_view text) {
  std::string plain(text);
  const std::size_t last_close = text.rfind("*/");
  std::optional<std::size_t> last_comma;  // when nothing but space and comments came after it
  char before_comma = '\0', last = '\0';  // the last characters that were neither
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    const auto end = c == '#' || c == '/' ? end_of_comment(text, at, last_close) : std::nullopt;
    if (end) {
      for (; at < *end; ++at) {
        if (text[at] != '\n' && text[at] != '\r') plain[at] = ' ';
      }
      continue;
    }
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
      ++at;
      continue;
    }
    if (text.substr(at).starts_with(kInfinity)) plain.replace(at, kInfinity.size(), kInfinityNumber);
    if (last_comma && (c == '}' || c == ']') && ends_item(before_comma)) plain[*last_comma] = ' ';
    last_comma = c == ',' ? std::optional(at) : std::nullopt;
    if (c == ',') before_comma = last;
    last = c;
    at = c == '"' ? end_of_string(text, at) : at + 1;
  }
  return plain;
}

}  // namespace hoist::config
