// SPDX-License-Identifier: Apache-2.0
#include "json_edit.hpp"

#include <optional>

#include <fmt/format.h>

#include <hoist/config/plain_json.hpp>

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

// Half open.
struct TextRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

struct Member {
  TextRange name;  // quotes included
  TextRange value;
};

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Walks over text that is known to be JSON, so it only needs to find the ends of values.
class Walker {
 public:
  explicit Walker(std::string_view text) : text_(text) {}

  std::size_t skip_space(std::size_t at) const {
    while (at < text_.size() && is_space(text_[at])) ++at;
    return at;
  }

  std::size_t end_of_string(std::size_t at) const {
    for (++at; at < text_.size() && text_[at] != '"'; ++at) {
      if (text_[at] == '\\') ++at;
    }
    return at + 1;
  }

  std::size_t end_of_value(std::size_t at) const {
    if (text_[at] == '"') return end_of_string(at);
    if (text_[at] != '{' && text_[at] != '[') return end_of_scalar(at);
    std::size_t depth = 0;
    do {
      const char c = text_[at];
      if (c == '"') {
        at = end_of_string(at);
        continue;
      }
      if (c == '{' || c == '[') ++depth;
      if (c == '}' || c == ']') --depth;
      ++at;
    } while (depth > 0);
    return at;
  }

  // The members, in order, of the object that begins at `at`.
  std::vector<Member> members(std::size_t at) const {
    std::vector<Member> result;
    at = skip_space(at + 1);
    while (text_[at] != '}') {
      Member member;
      member.name = {at, end_of_string(at)};
      at = skip_space(member.name.end);  // the colon
      at = skip_space(at + 1);
      member.value = {at, end_of_value(at)};
      result.push_back(member);
      at = skip_space(member.value.end);
      if (text_[at] == ',') at = skip_space(at + 1);
    }
    return result;
  }

  std::string_view text() const { return text_; }

 private:
  std::size_t end_of_scalar(std::size_t at) const {
    while (at < text_.size() && !is_space(text_[at]) && text_[at] != ',' && text_[at] != '}' && text_[at] != ']') ++at;
    return at;
  }

  std::string_view text_;
};

// All of the white space before `at`.
std::string gap_before(std::string_view text, std::size_t at) {
  std::size_t begin = at;
  while (begin > 0 && is_space(text[begin - 1])) --begin;
  return std::string(text.substr(begin, at - begin));
}

std::string indented(const Json& value, const std::string& gap) {
  const auto line = gap.rfind('\n');
  if (line == std::string::npos || !value.is_structured()) return value.dump();
  std::string text = value.dump(2);
  const std::string indent = gap.substr(line + 1);
  for (std::size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 1 + indent.size()))
    text.insert(at + 1, indent);
  return text;
}

// Adds `name`: `value` as the last member of the object that begins at `object`, in the style of its other members.
std::string with_new_member(const std::string& text, const Walker& walker, std::size_t object, std::string_view name,
                            const Json& value) {
  const auto members = walker.members(object);
  const std::string key = Json(name).dump() + ": ";
  if (!members.empty()) {
    const std::size_t end = members.back().value.end, closing = walker.skip_space(end);
    const std::string gap = gap_before(text, members.back().name.begin);
    const std::string member = (gap.empty() ? " " : gap) + key + indented(value, gap);
    std::string result = text;
    if (gap.find('\n') == std::string::npos) return result.insert(end, "," + member);
    // Below the comments of the last member.
    result.insert(closing - gap_before(text, closing).size(), member);
    const std::string more = config::plain_json(text.substr(0, closing) + "0");  // has a comma that `text` ends with
    return more[Walker(more).skip_space(end)] == ',' ? result : result.insert(end, ",");
  }
  // An empty object: one step further in than its line.
  const std::size_t line = text.rfind('\n', object) + 1;  // 0 when there is none
  const std::string indent = text.substr(line, Walker(text).skip_space(line) - line);
  const std::string gap = "\n" + indent + "  ";
  return text.substr(0, object + 1) + gap + key + indented(value, gap) + "\n" + indent +
         text.substr(Walker(text).skip_space(object + 1));  // a comment stays
}

Json nested(std::span<const std::string_view> path, const Json& value) {
  if (path.empty()) return value;
  return Json{{std::string(path.front()), nested(path.subspan(1), value)}};
}

}  // namespace

std::string with_member(const std::string& text, std::span<const std::string_view> path, const Json& value) {
  const std::string plain = config::plain_json(text);
  try {
    if (!Json::parse(plain).is_object()) throw JsonEditError("is JSON, but not an object");
  } catch (const Json::parse_error& error) {
    throw JsonEditError(fmt::format("is not JSON: {}", error.what()));
  }
  const Walker walker(plain);
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  std::size_t object = walker.skip_space(text.starts_with(kByteOrderMark) ? kByteOrderMark.size() : 0);
  for (std::size_t step = 0; step < path.size(); ++step) {
    std::optional<Member> found;
    for (const Member& member : walker.members(object)) {
      const auto name = walker.text().substr(member.name.begin, member.name.end - member.name.begin);
      if (Json::parse(name) == path[step]) found = member;
    }
    if (!found) return with_new_member(text, walker, object, path[step], nested(path.subspan(step + 1), value));
    if (step + 1 == path.size())
      return text.substr(0, found->value.begin) + indented(value, "") + text.substr(found->value.end);
    const std::string_view old = walker.text().substr(found->value.begin, found->value.end - found->value.begin);
    if (old == "null" || old == "true" || old == "false")  // a section left out, or DeepSpeed's old switch of one
      return text.substr(0, found->value.begin) + nested(path.subspan(step + 1), value).dump() +
             text.substr(found->value.end);
    if (text[found->value.begin] != '{')
      throw JsonEditError(fmt::format("has a \"{}\" that is not an object", path[step]));
    object = found->value.begin;
  }
  return text;
}

}  // namespace hoist::cli
