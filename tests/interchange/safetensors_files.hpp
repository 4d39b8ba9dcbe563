// SPDX-License-Identifier: Apache-2.0
// tests/interchange/safetensors_files.hpp - small safetensors files for tests.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include <hoist/interchange/safetensors_writer.hpp>

namespace hoist::test {

struct TestTensor {
  interchange::TensorSpec spec;
  std::string data;
};

template <typename T>
TestTensor tensor(std::string name, interchange::TensorType type, std::vector<std::uint64_t> shape,
                  const std::vector<T>& values) {
  return {{std::move(name), type, std::move(shape)},
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T))};
}

inline void save(const std::string& directory, const std::vector<TestTensor>& tensors,
                 std::uint64_t shard_bytes_max = 5'000'000'000) {
  std::vector<interchange::TensorSpec> specs;
  for (const TestTensor& t : tensors) specs.push_back(t.spec);
  interchange::SafetensorsWriter writer({.directory = directory, .shard_bytes_max = shard_bytes_max}, specs);
  for (const TestTensor& t : tensors) writer.write(std::as_bytes(std::span(t.data)));
  writer.finish();
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace hoist::test
