// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include <fmt/format.h>

#include <hoist/core/printable.hpp>

namespace hoist {

namespace {

unsigned char byte_at(std::string_view text, std::size_t i) { return static_cast<unsigned char>(text[i]); }

bool is_continuation(unsigned char byte) { return (byte & 0xC0) == 0x80; }

// The bytes of the UTF-8 character at the beginning of `text`; 0 if there is none (RFC 3629, table 3-7 of Unicode).
std::size_t character_bytes(std::string_view text) {
  const unsigned char first = byte_at(text, 0);
  if (first < 0x80) return 1;
  if (first < 0xC2 || first > 0xF4) return 0;
  const std::size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (text.size() < bytes) return 0;
  const unsigned char second = byte_at(text, 1);
  const unsigned char least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
  const unsigned char most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
  if (second < least || second > most) return 0;
  for (std::size_t i = 2; i < bytes; ++i)
    if (!is_continuation(byte_at(text, i))) return 0;
  return bytes;
}

// `character` is UTF-8.
bool is_control(std::string_view character) {
  const unsigned char first = byte_at(character, 0);
  return first < 0x20 || first == 0x7F || (first == 0xC2 && byte_at(character, 1) < 0xA0);
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    const std::string_view character = text.substr(0, bytes == 0 ? 1 : bytes);
    if (bytes != 0 && (character == "\n" || !is_control(character))) {
      shown += character;
    } else {
      for (const char c : character) shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
    text.remove_prefix(character.size());
  }
  return shown;
}

bool has_control_characters(std::string_view text) {
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    if (bytes != 0 && is_control(text.substr(0, bytes))) return true;
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return false;
}

std::string on_one_line(std::string text) {
  for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos;) text.replace(at, 1, "\\x0a");
  return text;
}

}  // namespace hoist
