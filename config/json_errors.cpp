// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/format.h>

#include <hoist/config/detail/json_errors.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kSpace = " \t\r\n";

bool is_word_letter(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return std::isalnum(byte) != 0 || c == '_' || c == '.' || c == '+' || c == '-';
}

// The letters from `begin` on, shortened for a message.
std::string_view word_at(std::string_view text, std::size_t begin) {
  constexpr std::size_t kLettersMax = 40;
  const std::string_view rest = text.substr(std::min(begin, text.size()));
  const auto end = std::ranges::find_if_not(rest, is_word_letter);
  return rest.substr(0, std::min(kLettersMax, static_cast<std::size_t>(end - rest.begin())));
}

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

char last_before(std::string_view text, std::size_t offset) {
  const std::size_t at = text.substr(0, offset).find_last_not_of(kSpace);
  return at == std::string_view::npos ? '\0' : text[at];
}

std::string about_word(std::string_view word) {
  if (word == "true" || word == "false" || word == "null") return {};  // it is right, but not here
  const std::string name = lower(word);
  const std::string_view unsigned_name =
      name.starts_with('-') || name.starts_with('+') ? std::string_view(name).substr(1) : std::string_view(name);
  if (unsigned_name == "nan" || unsigned_name == "inf" || unsigned_name == "infinity") {
    return fmt::format("{} is not a number in JSON; write a finite number, or leave the key out", word);
  }
  if (name == "true" || name == "false") return fmt::format("{} is written {} in JSON", word, name);
  if (name == "none" || name == "null") return fmt::format("{} is not a value in JSON; leave the key out", word);
  if (name == "yes" || name == "no" || name == "on" || name == "off") {
    const bool yes = name == "yes" || name == "on";
    return fmt::format("{} is not a value in JSON; write {}", word, yes ? "true" : "false");
  }
  return {};
}

std::string about_number(std::string_view word) {
  if (word.empty()) return {};
  if (word.front() == '+' || word.front() == '.') {
    return fmt::format("{} is not a number in JSON: a number begins with a digit or a minus sign", word);
  }
  const std::string_view digits = word.front() == '-' ? word.substr(1) : word;
  if (digits.size() < 2 || digits.front() != '0') return {};
  if (digits[1] == 'x' || digits[1] == 'X') return fmt::format("{} is hexadecimal; JSON numbers are decimal", word);
  return std::isdigit(static_cast<unsigned char>(digits[1])) != 0
             ? fmt::format("{} begins with a zero, which JSON does not allow", word)
             : std::string{};
}

// For a string token with an error inside.
std::string inside_string(char offender, const std::string& parser_says) {
  if (parser_says.find("UTF-8") != std::string::npos) return "a byte that is not UTF-8; save the file as UTF-8";
  if (parser_says.find("missing closing quote") != std::string::npos) return "a string without its closing quote";
  if (offender == '\n' || offender == '\r') return "a line ends inside a string: a closing quote is missing before it";
  if (parser_says.find("control character") != std::string::npos) {
    return fmt::format("a control character (0x{:02X}) inside a string; write it as \\u{:04x}", offender, offender);
  }
  if (parser_says.find("backslash") != std::string::npos) return "no such escape; write \\\\ for a backslash";
  return {};
}

std::string at_end(const std::string& parser_says) {
  if (parser_says.find("parsing object") != std::string::npos) return "the text ends inside an object: a } is missing";
  if (parser_says.find("parsing array") != std::string::npos) return "the text ends inside a list: a ] is missing";
  return "the text ends where a value should be";
}

std::string about_place(std::string_view text, const SyntaxFailure& failure) {
  const std::string& says = failure.parser_says;
  const char first = text[failure.token_begin];
  const bool expects_key = says.find("; expected string literal") != std::string::npos;
  if ((first == '}' || first == ']') && last_before(text, failure.token_begin) == ',') {
    return fmt::format("a comma before {}, which JSON does not allow; remove the comma", first);
  }
  if (says.find("expected end of input") != std::string::npos) {
    return "something follows the end of the configuration; one file holds one object";
  }
  if (expects_key && first == ',') return "two commas, or a comma before the first key";
  if (expects_key) return "a key should be here, in double quotes";
  if (says.find("object separator") != std::string::npos && says.find("expected ':'") != std::string::npos) {
    return "a colon is missing after the key";
  }
  const bool in_object = says.find("parsing object - unexpected") != std::string::npos;
  const bool in_list = says.find("parsing array - unexpected") != std::string::npos;
  if (in_object || in_list) {
    if (first == '}' || first == ']') return fmt::format("{} closes what {} opened", first, in_list ? '[' : '{');
    return "a comma is missing before this";
  }
  return {};
}

// Whether a text begins with a line such as "distributed_type: DEEPSPEED".
bool is_yaml_key(std::string_view text) {
  const std::string_view line = text.substr(0, text.find('\n'));
  const auto key = line.substr(0, line.find(':'));
  return key.size() < line.size() && !key.empty() && std::ranges::all_of(key, is_word_letter);
}

std::string sentence(std::string_view text, const SyntaxFailure& failure) {
  const std::string_view from_token = text.substr(failure.token_begin);
  if (from_token.starts_with("/*")) return "a comment begins here and does not end; close it with */";
  if (from_token.starts_with('\'')) return "single quotes; JSON strings and keys are in double quotes";
  // The parser reads "016" and "0x10" as a zero and something else.
  std::size_t word_begin = failure.token_begin;
  while (word_begin > 0 && is_word_letter(text[word_begin - 1])) --word_begin;
  const std::string_view word = word_at(text, word_begin);
  if (std::string about = about_word(word); !about.empty()) return about;
  if (std::string about = about_number(word); !about.empty()) return about;
  const bool at_the_start =
      text.substr(0, word_begin).find_first_not_of(" \t\r\n\xEF\xBB\xBF") == std::string_view::npos;
  if (at_the_start && is_yaml_key(text.substr(word_begin))) {
    return "this is YAML; the configuration is the JSON file that it names, as deepspeed or deepspeed_config_file (of "
           "Accelerate's own settings in YAML, Trainer and hoist.torch read the file)";
  }
  if (at_the_start) return "this is not JSON: a configuration begins with {";
  return about_place(text, failure);
}

}  // namespace

JsonSyntaxError explain(std::string_view text, const SyntaxFailure& failure) {
  const std::size_t begin = std::min(failure.token_begin, failure.offset);
  const auto or_parsers = [&](const std::string& said) { return said.empty() ? failure.parser_says : said; };
  if (failure.offset >= text.size() || begin >= text.size()) {
    const bool open_string = failure.parser_says.find("missing closing quote") != std::string::npos;
    return {text.size(),
            open_string ? "the text ends inside a string: a quote is missing" : at_end(failure.parser_says)};
  }
  if (failure.parser_says.find("invalid string") != std::string::npos) {
    return {failure.offset, or_parsers(inside_string(text[failure.offset], failure.parser_says))};
  }
  if (failure.parser_says.find("overflow") != std::string::npos) {
    return {begin, fmt::format("{} is larger than any number here", word_at(text, begin))};
  }
  return {begin, or_parsers(sentence(text, {begin, failure.offset, failure.parser_says}))};
}

std::optional<JsonSyntaxError> refuse_by_content(std::string_view text) {
  for (const std::string_view mark : {std::string_view("\xFF\xFE"), std::string_view("\xFE\xFF")}) {
    if (text.starts_with(mark)) return JsonSyntaxError(0, "UTF-16 text; save the file as UTF-8");
  }
  const std::string_view content = text.starts_with("\xEF\xBB\xBF") ? text.substr(3) : text;
  if (content.find_first_not_of(kSpace) == std::string_view::npos) {
    return JsonSyntaxError(0, "the file is empty; the smallest configuration is {}");
  }
  if (const auto zero = text.find('\0'); zero != std::string_view::npos)
    return JsonSyntaxError(zero, "a zero byte: this is a binary file, not a configuration");
  return std::nullopt;
}

}  // namespace hoist::config::detail
