// SPDX-License-Identifier: Apache-2.0
// interchange/safetensors.hpp - the safetensors format: reads and writes a file's header. Start here.
//
//   8 bytes   length of the header, little-endian, at most 100 000 000
//   header    JSON, {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}},
//             padded with spaces
//   data      the tensors, row-major, little-endian, one after another without holes; offsets count from its beginning
//
// The parser trusts nothing in a header, because a file may come from anywhere. Format:
// huggingface.co/docs/safetensors.
//
// Threading  Pure functions and plain values.
// Errors     SafetensorsError, naming the file, the tensor and the problem.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/core/error.hpp>

namespace hoist::interchange {

// A file that is damaged, is not a safetensors file, or does not fit the request.
class SafetensorsError : public Error {
 public:
  SafetensorsError(const std::string& origin, const std::string& problem) : Error(origin + ": " + problem) {}
};

// Every type of the format, so that a file may hold tensors that hoist does not read.
enum class TensorType : std::uint8_t {
  boolean,
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  u64,
  i64,
  f16,
  bf16,
  f32,
  f64,
  c64,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  f6_e2m3,
  f6_e3m2,
  f4,
};
std::string_view tensor_type_name(TensorType type);  // as headers spell it: "BF16"
std::optional<TensorType> find_tensor_type(std::string_view name);
unsigned tensor_type_bits(TensorType type);  // of one element

// A tensor and the position of its bytes within the data of its file.
struct TensorInfo {
  std::string name;
  TensorType type = TensorType::f32;
  std::vector<std::uint64_t> shape;  // empty for a scalar; an extent may be 0
  std::uint64_t begin_bytes = 0;
  std::uint64_t end_bytes = 0;

  std::uint64_t bytes() const { return end_bytes - begin_bytes; }
  friend bool operator==(const TensorInfo&, const TensorInfo&) = default;
};

// Bytes of a dense tensor; nullopt if that exceeds 64 bits or is not a whole number of bytes.
std::optional<std::uint64_t> tensor_bytes(TensorType type, std::span<const std::uint64_t> shape);

using Metadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their data
  Metadata metadata;
};

inline constexpr std::uint64_t kHeaderLengthBytes = 8;
inline constexpr std::uint64_t kHeaderBytesMax = 100'000'000;  // the reference implementation's bound

// The length of the JSON, from the first bytes of a file of `file_bytes`; checked before anything is read by it.
std::uint64_t header_length(std::span<const std::byte> first, std::uint64_t file_bytes, const std::string& origin);

// Checks `json` against the `data_bytes` that follow it: names are unique, every type is known, each tensor's bytes are
// what its type and shape need, and the tensors fill the data without overlap or hole.
SafetensorsHeader parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& origin);

// The length and the JSON, padded so that the data begins at a multiple of 8 bytes. `tensors` in the order of their
// data. Errors: a name that is not UTF-8 or is "__metadata__", two of one name, a header longer than readers accept.
std::string encode_header(std::span<const TensorInfo> tensors, const Metadata& metadata, const std::string& origin);

// "[2, 3]", for messages.
std::string shape_text(std::span<const std::uint64_t> shape);

}  // namespace hoist::interchange
