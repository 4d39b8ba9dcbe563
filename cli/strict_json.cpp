// SPDX-License-Identifier: Apache-2.0
#include "strict_json.hpp"

#include <set>
#include <vector>

#include <fmt/format.h>

#include <hoist/config/plain_json.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/named_file.hpp>

namespace hoist::cli {

namespace {

using StrictJson = nlohmann::json;

// Refuses what the parser would accept: a key given twice, and nesting deeper than any model's description.
class Watch {
 public:
  bool operator()(int depth, StrictJson::parse_event_t event, const StrictJson& parsed) {
    if (depth > kDepthMax) throw ConfigError("", fmt::format("nested deeper than {} levels", kDepthMax));
    if (event == StrictJson::parse_event_t::object_start) names_.emplace_back();
    if (event == StrictJson::parse_event_t::object_end) names_.pop_back();
    if (event == StrictJson::parse_event_t::key) {
      const auto& name = parsed.get_ref<const std::string&>();
      if (!names_.back().insert(name).second) throw ConfigError(name, "given twice in one object");
    }
    return true;
  }

 private:
  static constexpr int kDepthMax = 16;
  std::vector<std::set<std::string>> names_;  // of the objects that are open
};

}  // namespace

StrictJson read_strict_json(const std::string& path, const std::string& remedy) {
  return parse_strict_json(read_file(path, remedy));
}

StrictJson parse_strict_json(const std::string& text) {
  if (text.find('\0') != std::string::npos) throw ConfigError("", "is not JSON: it has a zero byte");
  try {
    Watch watch;
    return StrictJson::parse(config::plain_json(text), [&](int depth, StrictJson::parse_event_t event,
                                                           StrictJson& parsed) { return watch(depth, event, parsed); });
  } catch (const StrictJson::exception& error) {
    std::string_view problem = error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
    if (const auto end = problem.find("] "); end != std::string_view::npos) problem.remove_prefix(end + 2);
    constexpr std::size_t kShownMax = 200;
    if (problem.size() <= kShownMax) throw ConfigError("", fmt::format("is not JSON: {}", problem));
    std::size_t shown = kShownMax;
    while (shown > 0 && (static_cast<unsigned char>(problem[shown]) & 0xC0) == 0x80) --shown;  // not inside a character
    throw ConfigError("", fmt::format("is not JSON: {}...", problem.substr(0, shown)));
  }
}

void refuse(const std::string& key, const StrictJson& value, std::string_view allowed) {
  std::string shown = value.dump(-1, ' ', true, StrictJson::error_handler_t::replace);
  if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
  throw ConfigError(key, fmt::format("{} is not {}", shown, allowed));
}

std::string text_of(const std::string& key, const StrictJson& value) {
  if (!value.is_string() || value.get<std::string>().empty()) refuse(key, value, "a string of at least one character");
  return value.get<std::string>();
}

}  // namespace hoist::cli
