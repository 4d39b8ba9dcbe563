// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/config/detail/json_text.hpp>
#include <hoist/config/plain_json.hpp>

namespace hoist::config::detail::json_text_test {
namespace {

// Every value and key whose text is unique in `text` stands where its text stands.
TEST(JsonText, PositionsAreWhereTheTextIs) {
  const std::string text =
      "\xEF\xBB\xBF {\r\n\t\"a\" :1,\"b\":[ 2 ,3.5e1, true,null,{\"c\":\"x\\\"y\"}],\n  \"d\" : {} , \"e\":\"\"}";
  const JsonNode root = parse_json_text(text);
  ASSERT_EQ(root.members.size(), 4u);
  EXPECT_EQ(root.offset, text.find('{'));
  EXPECT_EQ(root.members[0].key_offset, text.find("\"a\""));
  EXPECT_EQ(root.members[0].value.offset, text.find("1,"));
  const JsonNode& list = root.members[1].value;
  ASSERT_EQ(list.items.size(), 5u);
  EXPECT_EQ(list.offset, text.find('['));
  EXPECT_EQ(list.items[0].offset, text.find("2 ,"));
  EXPECT_EQ(list.items[1].offset, text.find("3.5e1"));
  EXPECT_EQ(list.items[2].offset, text.find("true"));
  EXPECT_EQ(list.items[3].offset, text.find("null"));
  EXPECT_EQ(list.items[4].offset, text.find("{\"c\""));
  EXPECT_EQ(list.items[4].members[0].value.offset, text.find("\"x"));
  EXPECT_EQ(list.items[4].members[0].value.scalar, "x\"y");
  EXPECT_EQ(root.members[2].key_offset, text.find("\"d\""));
  EXPECT_EQ(root.members[2].value.offset, text.find("{}"));
  EXPECT_EQ(root.members[3].value.offset, text.find("\"\"}"));
}

// Everything else stays where it is.
TEST(JsonText, CommentsAndLastCommasBecomeSpaces) {
  EXPECT_EQ(plain_json("{\"a\": 1, // one, {\r\n \"b\": [2, /* x\n */ 3,], # end\n}"),
            "{\"a\": 1,          \r\n \"b\": [2,     \n    3 ]       \n}");
  EXPECT_EQ(plain_json("{\"a\": 1 /**/, # last\n\n}"), "{\"a\": 1             \n\n}");
  for (const std::string text : {"{\"a//b\": \"# /* */ ,}\"}", "{\"a\\\"#\": \"\\\\\"}", "{,}", "[,]", "[1,,]",
                                 "{\"a\": /* 1}", "\"open # string", "/", ",}", "\"\\", ""})
    EXPECT_EQ(plain_json(text), text);
}

TEST(JsonText, LinesAndColumnsCountFromOne) {
  const std::string text = "ab\ncd\n";
  const auto at = [&](std::size_t offset) {
    const TextPosition p = position_of(text, offset);
    return std::pair(p.line, p.column);
  };
  EXPECT_EQ(at(0), std::pair(std::size_t{1}, std::size_t{1}));
  EXPECT_EQ(at(1), std::pair(std::size_t{1}, std::size_t{2}));
  EXPECT_EQ(at(3), std::pair(std::size_t{2}, std::size_t{1}));
  EXPECT_EQ(at(4), std::pair(std::size_t{2}, std::size_t{2}));
  EXPECT_EQ(at(100), std::pair(std::size_t{3}, std::size_t{1}));
}

TEST(JsonText, SyntaxErrorsPointAtTheByte) {
  const auto offset_of = [](const std::string& text) -> std::ptrdiff_t {
    try {
      parse_json_text(text);
    } catch (const JsonSyntaxError& error) {
      return static_cast<std::ptrdiff_t>(error.offset);
    }
    return -1;
  };
  EXPECT_EQ(offset_of("{\"a\": 1}"), -1);
  EXPECT_EQ(offset_of("{\"a\": ]}"), 6);
  EXPECT_EQ(offset_of("{\"a\" 1}"), 5);
  EXPECT_EQ(offset_of("{\"a\": 1,}"), -1);
  EXPECT_EQ(offset_of("{,}"), 1);
  EXPECT_EQ(offset_of("[1,,]"), 3);
  EXPECT_EQ(offset_of("{\"a\": /* 1}"), 6);
  EXPECT_EQ(offset_of(""), 0);
  EXPECT_EQ(offset_of("{"), 1);
  EXPECT_EQ(offset_of("{}" + std::string(5000, ' ') + std::string(1, '\0') + "{\"a\": 1}"), 5002);
}

TEST(JsonText, DeepNestingIsRefusedBeforeTheStackIs) {
  const std::string open(1'000'000, '[');
  EXPECT_THROW(parse_json_text(open), JsonSyntaxError);
  std::string deep = std::string(kJsonDepthMax, '[') + std::string(kJsonDepthMax, ']');
  EXPECT_NO_THROW(parse_json_text(deep));
  deep = "[" + deep + "]";
  EXPECT_THROW(parse_json_text(deep), JsonSyntaxError);
}

TEST(JsonText, DisplayIsShortAndPrintable) {
  JsonNode node;
  node.scalar = std::string("a\x01\n\xff") + std::string(500, 'x');
  const std::string shown = display(node);
  EXPECT_LE(shown.size(), 80u);
  for (const char c : shown) EXPECT_TRUE(c >= ' ' && c <= '~') << static_cast<int>(c);
}

}  // namespace
}  // namespace hoist::config::detail::json_text_test
