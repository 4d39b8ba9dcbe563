// SPDX-License-Identifier: Apache-2.0
#include "finding.hpp"

#include <charconv>
#include <fstream>

namespace hoist::cli {

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::well:
      return "ok";
    case Verdict::lacking:
      return "lacking";
    case Verdict::missing:
      return "missing";
  }
  return "";
}

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::optional<std::uint64_t> number_in(const std::string& path) {
  const auto line = first_line(path);
  if (!line) return std::nullopt;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(line->data(), line->data() + line->size(), value);
  if (error != std::errc() || end != line->data() + line->size()) return std::nullopt;
  return value;
}

std::optional<std::string> field_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key + ":")) continue;
    const auto start = line.find_first_not_of(" \t", key.size() + 1);
    return start == std::string::npos ? std::string() : line.substr(start);
  }
  return std::nullopt;
}

std::optional<std::uint64_t> field_bytes(const std::string& path, const std::string& key) {
  const auto field = field_of(path, key);
  if (!field) return std::nullopt;
  std::uint64_t kilobytes = 0;
  const auto [end, error] = std::from_chars(field->data(), field->data() + field->size(), kilobytes);
  if (error != std::errc()) return std::nullopt;
  return kilobytes * 1024;
}

}  // namespace hoist::cli
