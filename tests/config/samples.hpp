// SPDX-License-Identifier: Apache-2.0
// tests/config/samples.hpp - the sample configurations of this folder.
//
// data/accept has one configuration a file. data/refuse and data/wild have tables, a file for each topic:
//
//   === NAME                        the sample, which the parser sees as the file NAME.json
//   {"train_batch_size": "many"}
//   ---
//   train_batch_size: ...           what parsing it must say
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/tests/support/file_contents.hpp>

namespace hoist::test {

struct Sample {
  std::string name;
  std::string text;
  std::string verdict;
};

inline std::filesystem::path data_directory() {
  return std::filesystem::path(HOIST_SOURCE_DIR) / "tests" / "config" / "data";
}

// The files of a kind ("accept", "refuse", "wild"), sorted.
inline std::vector<std::filesystem::path> sample_files(const std::string& kind) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(data_directory() / kind)) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

inline std::vector<Sample> read_table(const std::filesystem::path& path) {
  std::vector<Sample> samples;
  std::ifstream file(path, std::ios::binary);
  std::string* part = nullptr;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("=== ")) {
      samples.push_back({.name = line.substr(4), .text = {}, .verdict = {}});
      part = &samples.back().text;
    } else if (part == nullptr) {
      throw std::runtime_error(path.string() + " does not begin with a sample");
    } else if (line == "---") {
      part = &samples.back().verdict;
    } else {
      *part += line + "\n";
    }
  }
  return samples;
}

inline std::string format_table(const std::vector<Sample>& samples) {
  std::string text;
  for (const Sample& sample : samples) text += "=== " + sample.name + "\n" + sample.text + "---\n" + sample.verdict;
  return text;
}

// Refused texts that a table cannot hold: bytes that are no text, no last newline, nothing at all.
inline std::vector<Sample> byte_samples() {
  const auto malformed = [](const std::string& name, std::string text, const std::string& what) {
    return Sample{.name = name, .text = std::move(text), .verdict = "malformed JSON: " + what};
  };
  std::string utf16 = "\xff\xfe";
  for (const char letter : std::string_view("{\"train_batch_size\": 16}\n")) (utf16 += letter) += '\0';
  return {
      malformed("malformed_binary",
                std::string("\x7f"
                            "ELF\x02\x01\x01\0\0\0\0\0",
                            12),
                "a zero byte: this is a binary file, not a configuration (malformed_binary.json:1:8)\n"),
      malformed("malformed_deep", std::string(100'000, '['),
                "nested deeper than 64 levels (malformed_deep.json:1:65)\n"),
      malformed("malformed_empty", "",
                "the file is empty; the smallest configuration is {} (malformed_empty.json:1:1)\n"),
      malformed("malformed_open_string", "{\"hoist\": {\"metrics\": \"m.jsonl",
                "the text ends inside a string: a quote is missing (malformed_open_string.json:1:31)\n"),
      malformed("malformed_spaces_only", "  \n\t \n",
                "the file is empty; the smallest configuration is {} (malformed_spaces_only.json:1:1)\n"),
      malformed("malformed_utf16", utf16, "UTF-16 text; save the file as UTF-8 (malformed_utf16.json:1:1)\n"),
      malformed("malformed_utf8", "{\"hoist\": {\"metrics\": \"caf\xe9.jsonl\"}}\n",
                "a byte that is not UTF-8; save the file as UTF-8 (malformed_utf8.json:1:28)\n"),
  };
}

// All samples of "refuse" or "wild".
inline std::vector<Sample> table_samples(const std::string& kind) {
  std::vector<Sample> samples = kind == "refuse" ? byte_samples() : std::vector<Sample>{};
  for (const auto& file : sample_files(kind)) std::ranges::move(read_table(file), std::back_inserter(samples));
  return samples;
}

inline Sample table_sample(const std::string& kind, std::string_view name) {
  for (Sample& sample : table_samples(kind)) {
    if (sample.name == name) return std::move(sample);
  }
  throw std::runtime_error("there is no sample " + std::string(name));
}

// The text of every sample.
inline std::vector<std::string> sample_texts() {
  std::vector<std::string> texts;
  for (const auto& file : sample_files("accept")) texts.push_back(contents_of(file));
  for (const char* kind : {"refuse", "wild"}) {
    for (Sample& sample : table_samples(kind)) texts.push_back(std::move(sample.text));
  }
  return texts;
}

}  // namespace hoist::test
