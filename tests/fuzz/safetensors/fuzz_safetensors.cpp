// SPDX-License-Identifier: Apache-2.0
// libFuzzer: a file from anywhere is a header with checked tensors, or SafetensorsError; never anything else.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <hoist/interchange/safetensors.hpp>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  using namespace hoist::interchange;
  const std::string_view file(reinterpret_cast<const char*>(data), count);
  try {
    const std::uint64_t length = header_length(std::as_bytes(std::span(file)), file.size(), "file");
    const std::uint64_t data_bytes = file.size() - kHeaderLengthBytes - length;
    const SafetensorsHeader header = parse_header(file.substr(kHeaderLengthBytes, length), data_bytes, "file");
    // Tensors that were accepted lie within the file, and our own encoding returns them unchanged.
    for (const TensorInfo& tensor : header.tensors) {
      if (tensor.begin_bytes > tensor.end_bytes || tensor.end_bytes > data_bytes) std::abort();
    }
    const std::string encoded = encode_header(header.tensors, header.metadata, "file");
    const auto again = parse_header(std::string_view(encoded).substr(kHeaderLengthBytes), data_bytes, "file");
    if (again.tensors != header.tensors || again.metadata != header.metadata) std::abort();
  } catch (const SafetensorsError&) {
  }
  return 0;
}
