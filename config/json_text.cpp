// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <iterator>

#include <fmt/format.h>

#include <hoist/config/detail/json_errors.hpp>
#include <hoist/config/detail/json_text.hpp>
#include <hoist/config/plain_json.hpp>

namespace hoist::config::detail {

namespace {

// Counts what the lexer has consumed; it copies iterators, so the count lives outside.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, std::size_t* consumed) : at_(at), consumed_(consumed) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*consumed_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const CountingIterator& a, const CountingIterator& b) { return a.at_ == b.at_; }

 private:
  const char* at_;
  std::size_t* consumed_;
};

// "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while ..." -> "syntax error while
// ..."
std::string without_prefix(std::string text) {
  if (const auto bracket = text.find("] "); bracket != std::string::npos) text.erase(0, bracket + 2);
  if (text.starts_with("parse error")) {
    if (const auto colon = text.find(": "); colon != std::string::npos) text.erase(0, colon + 2);
  }
  return text;
}

// Receives the parser's events. An event arrives when the lexer has consumed its token and at most one byte after a
// number, so the token begins at the first byte after the previous token that is neither space nor separator.
class TreeBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  TreeBuilder(std::string_view text, const std::size_t& consumed) : text_(text), consumed_(consumed) {}

  JsonNode take() { return std::move(root_); }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(number_integer_t value) override { return scalar(value); }
  bool number_unsigned(number_unsigned_t value) override { return scalar(value); }
  bool number_float(number_float_t value, const string_t&) override { return scalar(value); }
  bool string(string_t& value) override { return scalar(value); }
  bool binary(binary_t&) override { return false; }  // text never has it

  bool start_object(std::size_t) override { return open(JsonNode::Kind::object); }
  bool start_array(std::size_t) override { return open(JsonNode::Kind::list); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    open_.back()->members.push_back({name, token_offset(), {}});
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) override {
    const std::size_t read = position == 0 ? consumed_ : position;
    throw explain(text_, {.token_begin = next_token(),
                          .offset = std::min(read > 0 ? read - 1 : 0, text_.size()),
                          .parser_says = without_prefix(error.what())});
  }

 private:
  std::size_t next_token() const {
    std::size_t at = previous_end_;
    while (at < text_.size() && std::string_view(" \t\r\n,:\xEF\xBB\xBF").find(text_[at]) != std::string_view::npos)
      ++at;
    return at;
  }

  std::size_t token_offset() {
    const std::size_t at = next_token();
    previous_end_ = consumed_;
    return at;
  }

  JsonNode& place() {
    if (++node_count_ > kJsonValuesMax) {
      throw JsonSyntaxError(consumed_, fmt::format("more than {} values: this is not a configuration", kJsonValuesMax));
    }
    if (open_.empty()) return root_;
    JsonNode& parent = *open_.back();
    if (parent.kind == JsonNode::Kind::object) return parent.members.back().value;
    return parent.items.emplace_back();
  }

  template <typename T>
  bool scalar(T&& value) {
    const std::size_t offset = token_offset();
    JsonNode& node = place();
    node.scalar = std::forward<T>(value);
    node.offset = offset;
    return true;
  }

  bool open(JsonNode::Kind kind) {
    const std::size_t offset = token_offset();
    if (open_.size() >= kJsonDepthMax) {
      throw JsonSyntaxError(offset, fmt::format("nested deeper than {} levels", kJsonDepthMax));
    }
    JsonNode& node = place();
    node.kind = kind;
    node.offset = offset;
    // Only the innermost open container grows, so pointers to the outer ones stay valid.
    open_.push_back(&node);
    return true;
  }

  bool close() {
    previous_end_ = consumed_;
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::size_t& consumed_;
  std::size_t previous_end_ = 0;
  std::size_t node_count_ = 0;
  JsonNode root_;
  std::vector<JsonNode*> open_;
};

}  // namespace

bool is_infinite(const JsonNode& node) {
  return node.kind == JsonNode::Kind::scalar && node.scalar.is_number_float() &&
         std::abs(node.scalar.get<double>()) == kInfinityValue;
}

JsonNode parse_json_text(std::string_view original) {
  if (const auto refusal = refuse_by_content(original)) throw *refusal;
  const std::string text = plain_json(original);
  std::size_t consumed = 0;
  TreeBuilder builder(text, consumed);
  nlohmann::json::sax_parse(CountingIterator(text.data(), &consumed),
                            CountingIterator(text.data() + text.size(), &consumed), &builder);
  return builder.take();
}

TextPosition position_of(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  TextPosition position;
  position.line = 1 + static_cast<std::size_t>(std::count(before.begin(), before.end(), '\n'));
  const std::size_t newline = before.rfind('\n');
  position.column = newline == std::string_view::npos ? before.size() + 1 : before.size() - newline;
  return position;
}

std::string display(const JsonNode& node) {
  if (node.kind == JsonNode::Kind::object) return node.members.empty() ? "{}" : "{...}";
  if (node.kind == JsonNode::Kind::list) {
    std::string text = "[";
    for (const JsonNode& item : node.items) {
      text += (text.size() > 1 ? ", " : "") + display(item);
      if (text.size() > 60) return "[...]";
    }
    return text + "]";
  }
  using nlohmann::json;
  if (is_infinite(node)) return node.scalar.get<double>() < 0 ? "-Infinity" : "Infinity";
  std::string text =
      node.scalar.dump(-1, ' ', true, json::error_handler_t::replace);  // ASCII: never cut in a character
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

}  // namespace hoist::config::detail
