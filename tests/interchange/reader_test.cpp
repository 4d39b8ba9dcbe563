// SPDX-License-Identifier: Apache-2.0
// Files and sharded models: what is found, and what a broken or malicious one says.
#include <filesystem>

#include <gmock/gmock.h>

#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "safetensors_files.hpp"

namespace hoist::interchange::reader_test {
namespace {

using test::save;
using test::TempDirectory;
using test::tensor;
using test::write_file;
using ::testing::HasSubstr;

std::string problem_of(const std::string& path) {
  try {
    const SafetensorsModel model(path);
    return "opened";
  } catch (const Error& error) {
    return error.what();
  }
}

std::vector<float> floats(float first, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i);
  return values;
}

void save_three(const std::string& directory, std::uint64_t shard_bytes_max) {
  save(directory,
       {tensor("a", TensorType::f32, {3, 4}, floats(0, 12)), tensor("b", TensorType::f32, {5}, floats(100, 5)),
        tensor("c", TensorType::f32, {2, 1, 3}, floats(200, 6))},
       shard_bytes_max);
}

TEST(SafetensorsReader, ReadsSlicesOfOneFileAndOfShards) {
  for (const std::uint64_t shard_bytes_max : {1000u, 70u, 1u}) {
    const TempDirectory directory;
    save_three(directory / "m", shard_bytes_max);
    const SafetensorsModel model(directory / "m");
    EXPECT_EQ(model.files().size(), shard_bytes_max == 1000 ? 1u : shard_bytes_max == 70 ? 2u : 3u);
    ASSERT_EQ(model.tensors().size(), 3u);
    EXPECT_EQ(model.metadata(), (Metadata{{"format", "pt"}}));
    std::vector<float> slice(3);
    model.find("c")->read(2 * 4, std::as_writable_bytes(std::span(slice)));
    EXPECT_EQ(slice, floats(202, 3));
    EXPECT_EQ(model.find("c")->info->shape, (std::vector<std::uint64_t>{2, 1, 3}));
    EXPECT_EQ(model.find("d"), nullptr);
  }
}

TEST(SafetensorsReader, FindsTheModelByFileIndexOrDirectory) {
  const TempDirectory directory;
  save_three(directory / "m", 1);
  EXPECT_EQ(problem_of(directory / "m/model.safetensors.index.json"), "opened");
  EXPECT_EQ(SafetensorsModel(directory / "m/model-00002-of-00003.safetensors").tensors().size(), 1u);
  std::filesystem::create_symlink(directory / "m", directory / "link");
  EXPECT_EQ(problem_of(directory / "link"), "opened");
  std::filesystem::remove(directory / "m/model.safetensors.index.json");
  EXPECT_THAT(problem_of(directory / "m"), HasSubstr("there are 3 .safetensors files in it; name one of them"));
  save_three(directory / "whole", 1000);
  std::filesystem::rename(directory / "whole/model.safetensors", directory / "m/model.safetensors");
  EXPECT_EQ(SafetensorsModel(directory / "m").files().size(), 1u) << "beside an old model's shards";
  write_file(directory / "m/model.safetensors.index.json",
             R"({"weight_map":{"a":"model-00009-of-00009.safetensors"}})");
  EXPECT_EQ(problem_of(directory / "m"), "opened") << "transformers takes model.safetensors before an index";
  std::filesystem::create_directory(directory / "empty");
  EXPECT_THAT(problem_of(directory / "empty"), HasSubstr("there is no .safetensors file"));
  EXPECT_THAT(problem_of(directory / "missing"), HasSubstr("missing"));
}

TEST(SafetensorsReader, EveryTruncationOfAFileIsNoticed) {
  const TempDirectory directory;
  save_three(directory / "m", 1000);
  const std::string path = directory / "m/model.safetensors";
  const auto length = std::filesystem::file_size(path);
  for (std::uintmax_t kept = length; kept-- > 0;) {
    std::filesystem::resize_file(path, kept);
    EXPECT_NE(problem_of(path), "opened") << kept;
  }
}

TEST(SafetensorsReader, AFileThatShrinksWhileOpenIsAnError) {
  const TempDirectory directory;
  save_three(directory / "m", 1000);
  const std::string path = directory / "m/model.safetensors";
  const SafetensorsModel model(path);
  std::filesystem::resize_file(path, 100);
  std::vector<float> values(6);
  EXPECT_THROW(model.find("c")->read(0, std::as_writable_bytes(std::span(values))), IoError);
}

TEST(SafetensorsReader, AnIndexIsNotTrusted) {
  const TempDirectory directory;
  save_three(directory / "m", 1);
  const std::string index = directory / "m/model.safetensors.index.json";
  const auto with = [&](const std::string& text) {
    write_file(index, text);
    return problem_of(index);
  };
  EXPECT_THAT(with("{"), HasSubstr("not JSON"));
  EXPECT_THAT(with("[]"), HasSubstr("no \"weight_map\""));
  EXPECT_THAT(with(std::string(R"({"weight_map":{"a":"x"}})") + '\0'), HasSubstr("not JSON"));
  EXPECT_THAT(with(R"({"weight_map":{"a":{"deep":[1]}}})"), HasSubstr("not a file name"));
  EXPECT_THAT(with(std::string(40 * kMiB, '[')), HasSubstr("too many for an index"));
  EXPECT_THAT(with(std::string(kMiB, '[')), HasSubstr("nested too deeply"));
  EXPECT_THAT(with(R"({"weight_map":[]})"), HasSubstr("no \"weight_map\""));
  EXPECT_THAT(with(R"({"weight_map":{}})"), HasSubstr("names no tensor"));
  EXPECT_THAT(with(R"({"weight_map":{"a":1}})"), HasSubstr("not a file name"));
  EXPECT_THAT(with(R"({"weight_map":{"a":"../m/model-00001-of-00003.safetensors"}})"), HasSubstr("not a file name"));
  EXPECT_THAT(with(R"({"weight_map":{"a":".."}})"), HasSubstr("not a file name"));
  EXPECT_THAT(with(R"({"weight_map":{"a":"model-00001-of-00003.safetensors\u0000x"}})"), HasSubstr("not a file name"));
  EXPECT_THAT(with(R"({"weight_map":{"a":"absent.safetensors"}})"), HasSubstr("absent.safetensors"));
  EXPECT_THAT(with(R"({"weight_map":{"b":"model-00001-of-00003.safetensors"}})"),
              HasSubstr("expects tensor 'b' in it"));
}

TEST(SafetensorsReader, RefusesWhatIsNoFile) {
  const TempDirectory directory;
  std::filesystem::create_directory(directory / "d.safetensors");
  EXPECT_THAT(problem_of(directory / "d.safetensors"), HasSubstr("there is no .safetensors file in it"));
  EXPECT_THAT(problem_of("/dev/null"), HasSubstr("not a regular file"));
  const test::TestDeadline deadline;  // a pipe is not waited for
  for (const test::OtherKind& kind : test::kOtherKinds) {
    for (const char* ending : {"", ".json", ".safetensors"}) {
      const std::string path = directory / (kind.name + std::string(ending));
      if (kind.type == S_IFDIR || !kind.make(path)) continue;
      EXPECT_THAT(problem_of(path), HasSubstr("not a regular file")) << path;
    }
  }
  write_file(directory / "index.json", R"({"weight_map":{"a":"pipe.safetensors"}})");
  EXPECT_THAT(problem_of(directory / "index.json"), HasSubstr("not a regular file"));
  write_file(directory / "text", "hello, this is a text and no model\n");
  EXPECT_THAT(problem_of(directory / "text"), HasSubstr("no safetensors file"));
}

}  // namespace
}  // namespace hoist::interchange::reader_test
