// SPDX-License-Identifier: Apache-2.0
// core/units.hpp - parses and formats numbers and byte counts, and computes with byte counts.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace hoist {

inline constexpr std::uint64_t kKiB = 1024;
inline constexpr std::uint64_t kMiB = 1024 * kKiB;
inline constexpr std::uint64_t kGiB = 1024 * kMiB;

// Direct transfers are multiples of this in length, offset and address; every record region is padded to it.
inline constexpr std::uint64_t kBlockAlignment = 4096;

// The number that the whole text is; nullopt if it is none, or one that is out of range.
template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

// "8GiB", "512 MiB", "5e8", "64k", "1.5GB" -> bytes. K/M/G/T/P(+B) are powers of ten only when followed by a plain 'B'
// ("GB"); a bare letter or the "iB" form is a power of two. A fraction of a byte is dropped. nullopt: no byte count.
std::optional<std::uint64_t> parse_bytes(std::string_view text);

// 1536 -> "1.5 KiB".
std::string format_bytes(std::uint64_t bytes);

// 1, "rank" -> "1 rank"; 2, "rank" -> "2 ranks".
template <std::integral Count>
std::string counted(Count count, std::string_view noun) {
  return std::to_string(count).append(" ").append(noun).append(count == 1 ? "" : "s");
}

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t multiple) { return value / multiple * multiple; }
constexpr std::uint64_t divide_up(std::uint64_t value, std::uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}
// What `taken` leaves of `all`: 0 if it is more.
constexpr std::uint64_t left_of(std::uint64_t all, std::uint64_t taken) { return all > taken ? all - taken : 0; }

}  // namespace hoist
