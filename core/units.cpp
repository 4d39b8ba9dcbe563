// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/units.hpp>

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cmath>

namespace hoist {

namespace {

// Multiplier of a unit suffix, 0 when unknown.
double unit_factor(std::string_view unit) {
  if (unit.empty() || unit == "b") return 1;
  const std::size_t exponent = std::string_view("kmgt").find(unit[0]);
  if (exponent == std::string_view::npos) return 0;
  const std::string_view rest = unit.substr(1);
  const double power = static_cast<double>(exponent + 1);
  if (rest.empty() || rest == "ib") return std::pow(1024.0, power);
  if (rest == "b") return std::pow(1000.0, power);
  return 0;
}

}  // namespace

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || !(number >= 0)) return std::nullopt;
  std::string unit;
  for (const char* p = end; p != text.data() + text.size(); ++p) {
    if (!std::isspace(static_cast<unsigned char>(*p))) unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*p)));
  }
  const double factor = unit_factor(unit);
  const double bytes = number * factor;
  if (factor == 0 || bytes >= 9.2e18 || bytes != std::floor(bytes)) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return value >= 100 ? fmt::format("{:.0f} {}", value, kUnits[unit]) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace hoist
