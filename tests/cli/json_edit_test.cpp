// SPDX-License-Identifier: Apache-2.0
#include "../../cli/json_edit.hpp"

#include <array>

#include <gmock/gmock.h>

#include <hoist/config/plain_json.hpp>

namespace hoist::cli::json_edit_test {
namespace {

using Json = nlohmann::ordered_json;

std::string set(const std::string& text, std::vector<std::string_view> path, const Json& value) {
  return with_member(text, path, value);
}

TEST(JsonEdit, ChangesAValueAndNothingElse) {
  EXPECT_EQ(set("{ \"a\" : 1e-5 ,\n\t\"b\":[1,  2] }", {"b"}, 7), "{ \"a\" : 1e-5 ,\n\t\"b\":7 }");
  EXPECT_EQ(set(R"({"x": {"y": {"z": "old"}}, "z": 1})", {"x", "y", "z"}, "new"),
            R"({"x": {"y": {"z": "new"}}, "z": 1})");
}

TEST(JsonEdit, AddsInTheStyleOfTheNeighbours) {
  EXPECT_EQ(set("{\n    \"a\": 1\n}\n", {"b"}, 2), "{\n    \"a\": 1,\n    \"b\": 2\n}\n");
  EXPECT_EQ(set(R"({"a": 1, "b": 2})", {"c"}, 3), R"({"a": 1, "b": 2, "c": 3})");
  EXPECT_EQ(set(R"({"a":1})", {"b"}, 2), R"({"a":1, "b": 2})");
  EXPECT_EQ(set("{}", {"a"}, 1), "{\n  \"a\": 1\n}");
  EXPECT_EQ(set("{\n  \"aio\": {\n  }\n}", {"aio", "n"}, 1), "{\n  \"aio\": {\n    \"n\": 1\n  }\n}");
}

TEST(JsonEdit, AddsMissingObjectsOnTheWay) {
  EXPECT_EQ(set("{\n  \"a\": 1\n}", {"hoist", "measured", "n"}, 5),
            "{\n  \"a\": 1,\n  \"hoist\": {\n    \"measured\": {\n      \"n\": 5\n    }\n  }\n}");
}

TEST(JsonEdit, BracesAndQuotesInsideStringsAreText) {
  const std::string text = R"({"p}\"{": {"aio": "}\\"}, "aio": {"deep": {"aio": 1}}})";
  EXPECT_EQ(Json::parse(set(text, {"aio", "n"}, 1)),
            Json::parse(R"({"p}\"{": {"aio": "}\\"}, "aio": {"deep": {"aio": 1}, "n": 1}})"));
}

TEST(JsonEdit, EscapedNamesAreTheSameName) {
  EXPECT_EQ(set(R"({"\u0061io": {"n": 1}})", {"aio", "n"}, 2), R"({"\u0061io": {"n": 2}})");
}

TEST(JsonEdit, KeepsByteOrderMarkAndLineEndings) {
  EXPECT_EQ(set("\xEF\xBB\xBF{\r\n  \"a\": 1\r\n}\r\n", {"b"}, 2),
            "\xEF\xBB\xBF{\r\n  \"a\": 1,\r\n  \"b\": 2\r\n}\r\n");
}

TEST(JsonEdit, CommentsAndLastCommasStay) {
  EXPECT_EQ(set("{\n  // \"a\": 0\n  \"a\": 1, # one\n}", {"a"}, 2), "{\n  // \"a\": 0\n  \"a\": 2, # one\n}");
  EXPECT_EQ(set("{\n  \"a\": 1 // one\n}", {"b"}, 2), "{\n  \"a\": 1, // one\n  \"b\": 2\n}");
  EXPECT_EQ(set("{\n  \"a\": 1, /* o,\n ne */\n}", {"b"}, 2), "{\n  \"a\": 1, /* o,\n ne */\n  \"b\": 2\n}");
  EXPECT_EQ(set("{\n  \"a\": 1 # o,ne\r\n  // two\r\n}", {"b"}, 2),
            "{\n  \"a\": 1, # o,ne\r\n  // two\n  \"b\": 2\r\n}");
  EXPECT_EQ(set("{\"a\": 1,}", {"b"}, 2), "{\"a\": 1, \"b\": 2,}");
  EXPECT_EQ(set("{ /* none */ }", {"a"}, 1), "{\n  \"a\": 1\n/* none */ }");
}

// Only white space before an empty object is its indentation. A second edit reads the result of the first.
TEST(JsonEdit, ACommentBeforeAnEmptyObjectIsNotCopied) {
  const auto twice = [](const std::string& text) { return set(set(text, {"hoist", "b"}, 2), {"aio", "c"}, 3); };
  EXPECT_EQ(twice("/* run 3 */ {}"),
            "/* run 3 */ {\n  \"hoist\": {\n    \"b\": 2\n  },\n  \"aio\": {\n    \"c\": 3\n  }\n}");
  EXPECT_EQ(twice("{\n  \"hoist\": /* filled by\n    tune */ {}\n}"),
            "{\n  \"hoist\": /* filled by\n    tune */ {\n      \"b\": 2\n    },\n"
            "  \"aio\": {\n    \"c\": 3\n  }\n}");
}

TEST(JsonEdit, RefusesWhatItCannotEdit) {
  EXPECT_THROW(set("", {"a"}, 1), JsonEditError);
  EXPECT_THROW(set("{\"a\": 1,,}", {"a"}, 1), JsonEditError);
  EXPECT_THROW(set("[1]", {"a"}, 1), JsonEditError);
  EXPECT_THROW(set("{\"a\": 1}", {"a", "b"}, 1), JsonEditError);
}

// A comment before every value of an object, and at the end of every line.
std::string with_comments(const std::string& text) {
  std::string result;
  for (const char c : text) result += c == '\n' ? " // ,}\n" : c == ':' ? ":/* x\n y */" : std::string(1, c);
  return result;
}

// Whatever the layout, the result parses to the same document with one member changed.
TEST(JsonEdit, AgreesWithTheParserOnEveryLayout) {
  const Json document = Json::parse(R"({"a": {"b": [1, {"c": "x,}"}], "d": null}, "e": {}, "f": -1.5e300, "g": true})");
  const std::vector<std::vector<std::string_view>> paths{{"a"}, {"a", "b"}, {"a", "d"}, {"a", "new"}, {"e", "new"},
                                                         {"f"}, {"g"},      {"new"},    {"new", "er"}};
  for (const int indent : {-1, 0, 2, 7}) {
    for (const auto& path : paths) {
      Json expected = document;
      Json* at = &expected;
      for (const std::string_view step : path) at = &(*at)[std::string(step)];
      *at = 42;
      const std::string text = document.dump(indent);
      EXPECT_EQ(Json::parse(set(text, path, 42)), expected) << indent << " " << path.back();
      const std::string edited = set(with_comments(text), path, 42);
      EXPECT_EQ(Json::parse(config::plain_json(edited)), expected) << edited;
    }
  }
}

}  // namespace
}  // namespace hoist::cli::json_edit_test
