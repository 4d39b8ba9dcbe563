// SPDX-License-Identifier: Apache-2.0
#include <cctype>
#include <charconv>

#include <fmt/format.h>

#include <hoist/core/units.hpp>

namespace hoist {

namespace {

// Holds a 64-bit mantissa times the largest unit.
__extension__ using Wide = unsigned __int128;

// Byte counts stay below 2^63, so that they are also valid file offsets.
constexpr Wide kBytesMax = (Wide{1} << 63) - 1;

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Multiplier of a unit suffix, 0 when unknown.
std::uint64_t unit_factor(std::string_view unit) {
  if (unit.empty() || unit == "b") return 1;
  const std::size_t exponent = std::string_view("kmgtp").find(unit[0]);
  if (exponent == std::string_view::npos) return 0;
  const std::string_view rest = unit.substr(1);
  if (!rest.empty() && rest != "ib" && rest != "b") return 0;
  std::uint64_t factor = 1;
  for (std::size_t k = 0; k <= exponent; ++k) factor *= rest == "b" ? 1000u : 1024u;
  return factor;
}

// digits * 10^exponent, kept exact: a double would make 2.01 GB one byte too small, and has no odd byte counts beyond
// 2^53.
struct Decimal {
  std::uint64_t digits = 0;
  int exponent = 0;
};

// Removes "12", "1.5", ".5" or "5e8" from the front of `text`; false if there is no number whose digits fit 64 bits.
bool take_decimal(std::string_view& text, Decimal& number) {
  std::size_t seen = 0;
  bool fraction = false;
  for (; !text.empty(); text.remove_prefix(1)) {
    if (text[0] == '.' && !fraction) {
      fraction = true;
      continue;
    }
    if (!is_digit(text[0])) break;
    const auto digit = static_cast<std::uint64_t>(text[0] - '0');
    if (number.digits > (~std::uint64_t{0} - digit) / 10) return false;
    number.digits = 10 * number.digits + digit;
    if (fraction) --number.exponent;
    ++seen;
  }
  if (seen == 0) return false;
  if (text.empty() || (text[0] != 'e' && text[0] != 'E')) return true;
  const bool is_plus = text.size() > 1 && text[1] == '+';
  text.remove_prefix(is_plus ? 2 : 1);
  if (is_plus && text.starts_with('-')) return false;
  int power = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), power);
  if (error != std::errc{} || power > 100 || power < -100) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  number.exponent += power;
  return true;
}

}  // namespace

std::optional<std::uint64_t> parse_bytes(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  Decimal number;
  if (!take_decimal(text, number)) return std::nullopt;
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  std::string unit(text);
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const std::uint64_t factor = unit_factor(unit);
  if (factor == 0) return std::nullopt;
  Wide bytes = Wide{number.digits} * factor;
  if (bytes == 0) return 0;
  for (; number.exponent < 0; ++number.exponent) {
    if (factor == 1 && bytes % 10 != 0) return std::nullopt;  // "1.5": without a unit
    bytes /= 10;
  }
  for (; number.exponent > 0; --number.exponent) {
    if (bytes > kBytesMax) return std::nullopt;
    bytes *= 10;
  }
  if (bytes > kBytesMax) return std::nullopt;
  return static_cast<std::uint64_t>(bytes);
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= (unit == 0 ? 1024 : 1023.5) && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  if (unit == 0) return fmt::format("{} B", bytes);
  return value >= 99.95 ? fmt::format("{:.0f} {}", value, kUnits[unit]) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

}  // namespace hoist
