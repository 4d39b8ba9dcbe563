// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file: what is accepted, and the sentence for everything that is not.
#include <array>

#include <gmock/gmock.h>

#include <hoist/interchange/safetensors.hpp>

namespace hoist::interchange::safetensors_test {
namespace {

using ::testing::HasSubstr;

// "accepted", or the problem without the origin.
std::string verdict(std::string_view json, std::uint64_t data_bytes) {
  try {
    parse_header(json, data_bytes, "f");
    return "accepted";
  } catch (const SafetensorsError& error) {
    return std::string(error.what()).substr(3);
  }
}

TEST(SafetensorsHeader, ReadsTensorsInTheOrderOfTheirData) {
  const SafetensorsHeader header = parse_header(R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
                                                R"("__metadata__":{"format":"pt","step":"7"},)"
                                                R"("none":{"dtype":"F64","shape":[0,9],"data_offsets":[16,16]},)"
                                                R"("a":{"shape":[],"data_offsets":[0,4],"dtype":"F32"}}   )",
                                                16, "f");
  ASSERT_EQ(header.tensors.size(), 3u);
  EXPECT_EQ(header.tensors[0], (TensorInfo{"a", TensorType::f32, {}, 0, 4}));
  EXPECT_EQ(header.tensors[1], (TensorInfo{"b", TensorType::bf16, {2, 3}, 4, 16}));
  EXPECT_EQ(header.tensors[2], (TensorInfo{"none", TensorType::f64, {0, 9}, 16, 16}));
  EXPECT_EQ(header.metadata, (Metadata{{"format", "pt"}, {"step", "7"}}));
}

TEST(SafetensorsHeader, MetadataMayBeNull) {
  EXPECT_TRUE(parse_header(R"({"__metadata__":null})", 0, "f").metadata.empty());
}

TEST(SafetensorsHeader, AcceptsEveryTypeTheFormatKnows) {
  for (const char* name : {"BOOL",    "U8",          "I8",          "U16",     "I16",     "U32", "I32",     "U64",
                           "I64",     "F16",         "BF16",        "F32",     "F64",     "C64", "F8_E4M3", "F8_E5M2",
                           "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"}) {
    const auto type = find_tensor_type(name);
    ASSERT_TRUE(type) << name;
    EXPECT_EQ(tensor_type_name(*type), name);
    const std::uint64_t bytes = 4 * tensor_type_bits(*type) / 8;
    EXPECT_EQ(verdict(R"({"t":{"dtype":")" + std::string(name) + R"(","shape":[4],"data_offsets":[0,)" +
                          std::to_string(bytes) + "]}}",
                      bytes),
              "accepted")
        << name;
  }
}

struct Refused {
  const char* json;
  std::uint64_t data_bytes;
  const char* problem;
};

TEST(SafetensorsHeader, RefusesEverythingElseAndSaysWhy) {
  const std::vector<Refused> cases{
      {"", 0, "does not begin with '{'"},
      {" {}", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{", 0, "the header is not JSON: the error is at byte 2"},
      {"{}x", 0, "the header is not JSON"},
      {"{}{}", 0, "the header is not JSON"},
      {"{\"\xff\":1}", 0, "the header is not JSON"},
      {R"({"t":1})", 0, "\"t\" is the number 1, not an object"},
      {R"({"t":null})", 0, "\"t\" is null, not an object"},
      {R"({"t":[]})", 0, "\"t\" is a list, not an object"},
      {R"({"t":{}})", 0, "tensor 't' lacks dtype"},
      {R"({"t":{"dtype":"F32"}})", 0, "tensor 't' lacks shape"},
      {R"({"t":{"dtype":"F32","shape":[]}})", 0, "tensor 't' lacks data_offsets"},
      {R"({"\u001b[2J":{}})", 0, "tensor '\\x1b[2J' lacks dtype"},
      {R"({"t":{"dtype":"F33","shape":[],"data_offsets":[0,4]}})", 4, "unknown dtype \"F33\""},
      {R"({"t":{"dtype":4,"shape":[],"data_offsets":[0,4]}})", 4, "dtype of tensor 't' has the number 4"},
      {R"({"t":{"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4, "has \"dtype\" twice"},
      {R"({"t":{"dtype":"F32","shape":[],"data_offsets":[0,4],"strides":[]}})", 4, "unknown key \"strides\""},
      {R"({"t":{"dtype":"F32","shape":"[]","data_offsets":[0,4]}})", 4, "shape of tensor 't' has a text"},
      {R"({"t":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "a negative number"},
      {R"({"t":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "the number 1.0"},
      {R"({"t":{"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]}})", 4, "has the number 1844674407"},
      {R"({"t":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", 4, "has a list"},
      {R"({"t":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}})", 4, "has true or false"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "are not two numbers"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,2,4]}})", 4, "has the number 4"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":{"a":1}}})", 4, "has an object"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "ends at 0, before it begins at 4"},
      {R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 3,
       "ends at byte 4 of the data, of which the file has 3"},
      {R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "has 4 bytes, but F32 [2] needs 8"},
      {R"({"t":{"dtype":"F32","shape":[0],"data_offsets":[0,4]}})", 4, "has 4 bytes, but F32 [0] needs 0"},
      {R"({"t":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2, "not a whole number of bytes"},
      {R"({"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0,
       "not a whole number of bytes"},
      {R"({"t":{"dtype":"U8","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0,
       "not a whole number of bytes"},
      {R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "two tensors are called 't'"},
      {R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"u":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "tensors 't' and 'u' overlap"},
      {R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"u":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
       5, "1 bytes before tensor 'u' do not belong to a tensor"},
      {R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 5, "3 bytes at the end of the file"},
      {R"({})", 1, "1 bytes at the end of the file"},
      {R"({"__metadata__":{"a":1}})", 0, "\"a\" in __metadata__ is the number 1, not a text"},
      {R"({"__metadata__":{"a":{}}})", 0, "is an object, not a text"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "__metadata__ has \"a\" twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ is there twice"},
      {R"({"__metadata__":"pt"})", 0, "\"__metadata__\" is a text, not an object"}};
  for (const Refused& refused : cases) {
    EXPECT_THAT(verdict(refused.json, refused.data_bytes), HasSubstr(refused.problem)) << refused.json;
  }
  // Not the end of a text, and not room for something else behind it.
  EXPECT_THAT(verdict(std::string("{}\0", 3), 0), HasSubstr("byte 3 of it is zero"));
  EXPECT_THAT(verdict(std::string("{}\0{\"t\"", 7), 0), HasSubstr("byte 3 of it is zero"));
}

TEST(SafetensorsHeader, DeepNestingIsRefusedAtOnce) {
  EXPECT_THAT(verdict("{\"t\":" + std::string(1 << 20, '['), 0), HasSubstr("\"t\" is a list"));
  EXPECT_THAT(verdict(R"({"t":{"shape":)" + std::string(1 << 20, '['), 0), HasSubstr("has a list"));
}

TEST(SafetensorsHeader, TheLengthIsCheckedBeforeItIsUsed) {
  const auto length = [](std::array<unsigned char, 8> bytes, std::uint64_t file_bytes) {
    return header_length(std::as_bytes(std::span(bytes)), file_bytes, "f");
  };
  EXPECT_EQ(length({2, 1}, 8 + 258), 258u);
  EXPECT_EQ(length({0xff, 0xe0, 0xf5, 5}, 1ull << 40), 99'999'999u);
  const auto problem = [&](std::array<unsigned char, 8> bytes, std::uint64_t file_bytes) -> std::string {
    try {
      length(bytes, file_bytes);
      return "accepted";
    } catch (const SafetensorsError& error) {
      return error.what();
    }
  };
  EXPECT_THAT(problem({2}, 7), HasSubstr("7 bytes are too few"));
  EXPECT_THAT(problem({3}, 10), HasSubstr("the file ends after 2"));
  EXPECT_THAT(problem({0x01, 0xe1, 0xf5, 5}, 1ull << 40), HasSubstr("100000001 bytes long, and at most 100000000"));
  EXPECT_THAT(problem({0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, 1 << 20), HasSubstr("no safetensors file"));
}

TEST(SafetensorsHeader, WhatIsEncodedIsReadBack) {
  const std::vector<TensorInfo> tensors{{"plain", TensorType::f32, {2, 2}, 0, 16},
                                        {"\"quoted\\\n\u00fc", TensorType::bf16, {}, 16, 18},
                                        {"empty", TensorType::f16, {0}, 18, 18}};
  const Metadata metadata{{"format", "pt"}, {"a\tb", "\""}};
  const std::string encoded = encode_header(tensors, metadata, "f");
  EXPECT_EQ(encoded.size() % 8, 0u);
  const std::uint64_t length = header_length(std::as_bytes(std::span(encoded)), encoded.size(), "f");
  EXPECT_EQ(length, encoded.size() - 8);
  const SafetensorsHeader header = parse_header(std::string_view(encoded).substr(8), 18, "f");
  EXPECT_EQ(header.tensors, tensors);
  EXPECT_EQ(header.metadata, metadata);
  EXPECT_EQ(encode_header({}, {}, "f"), std::string("\x8\0\0\0\0\0\0\0{}      ", 16));
}

TEST(SafetensorsHeader, NamesTheFormatCannotHoldAreNotEncoded) {
  const auto problem = [](std::vector<TensorInfo> tensors) -> std::string {
    try {
      encode_header(tensors, {}, "f");
      return "accepted";
    } catch (const SafetensorsError& error) {
      return error.what();
    }
  };
  EXPECT_THAT(problem({{"\xff", TensorType::u8, {0}, 0, 0}}), HasSubstr("not UTF-8"));
  EXPECT_THAT(problem({{"__metadata__", TensorType::u8, {0}, 0, 0}}), HasSubstr("reserves"));
  EXPECT_THAT(problem({{"t", TensorType::u8, {0}, 0, 0}, {"t", TensorType::u8, {0}, 0, 0}}), HasSubstr("two tensors"));
}

}  // namespace
}  // namespace hoist::interchange::safetensors_test
