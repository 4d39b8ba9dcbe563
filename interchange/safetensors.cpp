// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <hoist/core/assert.hpp>
#include <hoist/core/units.hpp>
#include <hoist/interchange/safetensors.hpp>

namespace hoist::interchange {

namespace {

struct TypeRow {
  TensorType type;
  std::string_view name;
  unsigned bits;
};
constexpr std::array kTypes{TypeRow{TensorType::boolean, "BOOL", 8},
                            TypeRow{TensorType::u8, "U8", 8},
                            TypeRow{TensorType::i8, "I8", 8},
                            TypeRow{TensorType::u16, "U16", 16},
                            TypeRow{TensorType::i16, "I16", 16},
                            TypeRow{TensorType::u32, "U32", 32},
                            TypeRow{TensorType::i32, "I32", 32},
                            TypeRow{TensorType::u64, "U64", 64},
                            TypeRow{TensorType::i64, "I64", 64},
                            TypeRow{TensorType::f16, "F16", 16},
                            TypeRow{TensorType::bf16, "BF16", 16},
                            TypeRow{TensorType::f32, "F32", 32},
                            TypeRow{TensorType::f64, "F64", 64},
                            TypeRow{TensorType::c64, "C64", 64},
                            TypeRow{TensorType::f8_e4m3, "F8_E4M3", 8},
                            TypeRow{TensorType::f8_e5m2, "F8_E5M2", 8},
                            TypeRow{TensorType::f8_e8m0, "F8_E8M0", 8},
                            TypeRow{TensorType::f8_e4m3fnuz, "F8_E4M3FNUZ", 8},
                            TypeRow{TensorType::f8_e5m2fnuz, "F8_E5M2FNUZ", 8},
                            TypeRow{TensorType::f6_e2m3, "F6_E2M3", 6},
                            TypeRow{TensorType::f6_e3m2, "F6_E3M2", 6},
                            TypeRow{TensorType::f4, "F4", 4}};

const TypeRow& row_of(TensorType type) {
  const auto row = std::ranges::find(kTypes, type, &TypeRow::type);
  HOIST_ASSERT(row != kTypes.end(), "type {}", static_cast<int>(type));
  return *row;
}

constexpr std::string_view kMetadataName = "__metadata__";

}  // namespace

std::string_view tensor_type_name(TensorType type) { return row_of(type).name; }
unsigned tensor_type_bits(TensorType type) { return row_of(type).bits; }

std::optional<TensorType> find_tensor_type(std::string_view name) {
  const auto row = std::ranges::find(kTypes, name, &TypeRow::name);
  return row == kTypes.end() ? std::nullopt : std::optional(row->type);
}

std::optional<std::uint64_t> tensor_bytes(TensorType type, std::span<const std::uint64_t> shape) {
  std::uint64_t bits = tensor_type_bits(type);
  // An extent of 0 makes the product 0 however large the others are.
  if (std::ranges::find(shape, 0u) != shape.end()) return 0;
  for (const std::uint64_t extent : shape) {
    if (bits > std::numeric_limits<std::uint64_t>::max() / extent) return std::nullopt;
    bits *= extent;
  }
  return bits % 8 == 0 ? std::optional(bits / 8) : std::nullopt;
}

std::string shape_text(std::span<const std::uint64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::uint64_t header_length(std::span<const std::byte> first, std::uint64_t file_bytes, const std::string& origin) {
  if (file_bytes < kHeaderLengthBytes || first.size() < kHeaderLengthBytes) {
    throw SafetensorsError(origin, fmt::format("{} bytes are too few for a safetensors file", file_bytes));
  }
  std::uint64_t length = 0;
  for (std::size_t i = kHeaderLengthBytes; i-- > 0;) length = length << 8 | std::to_integer<std::uint64_t>(first[i]);
  if (length > kHeaderBytesMax) {
    throw SafetensorsError(origin, fmt::format("the header would be {} bytes long, and at most {} are allowed: this is "
                                               "no safetensors file",
                                               length, kHeaderBytesMax));
  }
  if (length > file_bytes - kHeaderLengthBytes) {
    throw SafetensorsError(
        origin, fmt::format("the header is {} bytes long, but the file ends after {}: it was cut off", length,
                            file_bytes - kHeaderLengthBytes));
  }
  return length;
}

// --- reading a header ------------------------------------------------------------------------------------------------

namespace {

// Receives the parser's events and builds the list of tensors directly, without a tree of a hundred megabytes in
// between; sees names that come twice.
class HeaderBuilder : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderBuilder(const std::string& origin) : origin_(origin) {}

  SafetensorsHeader take() { return std::move(header_); }

  // "__metadata__": null is a file without metadata, as other readers have it.
  bool null() override {
    if (state_ != ParserState::root || key_ != kMetadataName) fail("null");
    return true;
  }
  bool boolean(bool) override { fail("true or false"); }
  bool number_integer(number_integer_t) override { fail("a negative number"); }
  bool number_float(number_float_t, const string_t& text) override { fail(fmt::format("the number {}", text)); }
  bool binary(binary_t&) override { fail("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (state_ == ParserState::shape) {
      tensor().shape.push_back(value);
    } else if (state_ == ParserState::offsets && offset_count_ < 2) {
      (offset_count_++ == 0 ? tensor().begin_bytes : tensor().end_bytes) = value;
    } else {
      fail(fmt::format("the number {}", value));
    }
    return true;
  }

  bool string(string_t& value) override {
    if (state_ == ParserState::metadata) {
      if (!header_.metadata.emplace(key_, value).second) problem(fmt::format("__metadata__ has \"{}\" twice", key_));
    } else if (state_ == ParserState::tensor && key_ == "dtype") {
      const auto type = find_tensor_type(value);
      if (!type) problem(fmt::format("tensor '{}' has the unknown dtype \"{}\"", tensor().name, value));
      tensor().type = *type;
      see(kDtype);
    } else {
      fail("a text");
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (state_ == ParserState::start) {
      state_ = ParserState::root;
    } else if (state_ == ParserState::root && key_ == kMetadataName) {
      state_ = ParserState::metadata;
    } else if (state_ == ParserState::root) {
      header_.tensors.push_back({.name = key_});
      seen_ = 0;
      state_ = ParserState::tensor;
    } else {
      fail("an object");
    }
    return true;
  }

  bool end_object() override {
    if (state_ == ParserState::tensor && seen_ != kAll) {
      problem(fmt::format("tensor '{}' lacks {}", tensor().name,
                          !(seen_ & kDtype)   ? "dtype"
                          : !(seen_ & kShape) ? "shape"
                                              : "data_offsets"));
    }
    state_ = state_ == ParserState::root ? ParserState::end : ParserState::root;
    return true;
  }

  bool start_array(std::size_t) override {
    if (state_ == ParserState::tensor && key_ == "shape") {
      see(kShape);
      state_ = ParserState::shape;
    } else if (state_ == ParserState::tensor && key_ == "data_offsets") {
      see(kOffsets);
      offset_count_ = 0;
      state_ = ParserState::offsets;
    } else {
      fail("a list");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == ParserState::offsets && offset_count_ != 2) {
      problem(fmt::format("data_offsets of tensor '{}' are not two numbers", tensor().name));
    }
    state_ = ParserState::tensor;
    return true;
  }

  bool key(string_t& name) override {
    key_ = name;
    if (state_ == ParserState::root && name == kMetadataName) {
      if (std::exchange(metadata_seen_, true)) problem("__metadata__ is there twice");
    } else if (state_ == ParserState::tensor && name != "dtype" && name != "shape" && name != "data_offsets") {
      problem(fmt::format("tensor '{}' has the unknown key \"{}\"", tensor().name, name));
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    problem(fmt::format("the header is not JSON: the error is at byte {}", position));
  }

 private:
  enum class ParserState : std::uint8_t { start, root, metadata, tensor, shape, offsets, end };
  static constexpr unsigned kDtype = 1, kShape = 2, kOffsets = 4, kAll = 7;

  TensorInfo& tensor() { return header_.tensors.back(); }

  void see(unsigned part) {
    if (seen_ & part) problem(fmt::format("tensor '{}' has \"{}\" twice", tensor().name, key_));
    seen_ |= part;
  }

  [[noreturn]] void problem(const std::string& text) const { throw SafetensorsError(origin_, text); }

  // A value of a kind that the format does not allow here.
  [[noreturn]] void fail(const std::string& found) const {
    switch (state_) {
      case ParserState::start:
      case ParserState::end:
        problem(fmt::format("the header is {}, not an object", found));
      case ParserState::root:
        problem(fmt::format("\"{}\" is {}, not an object", key_, found));
      case ParserState::metadata:
        problem(fmt::format("\"{}\" in __metadata__ is {}, not a text", key_, found));
      default:
        problem(fmt::format("{} of tensor '{}' has {}", key_, header_.tensors.back().name, found));
    }
  }

  const std::string& origin_;
  SafetensorsHeader header_;
  ParserState state_ = ParserState::start;
  std::string key_;
  unsigned seen_ = 0;
  unsigned offset_count_ = 0;
  bool metadata_seen_ = false;
};

// The two that share a name, if any. Sorting pointers beats a map of a million names.
void check_names(std::span<const TensorInfo> tensors, const std::string& origin) {
  std::vector<const std::string*> names;
  names.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) names.push_back(&tensor.name);
  const auto less = [](const std::string* a, const std::string* b) { return *a < *b; };
  std::ranges::sort(names, less);
  const auto twice =
      std::ranges::adjacent_find(names, [](const std::string* a, const std::string* b) { return *a == *b; });
  if (twice != names.end()) throw SafetensorsError(origin, fmt::format("two tensors are called '{}'", **twice));
}

void check_bytes(const TensorInfo& tensor, std::uint64_t data_bytes, const std::string& origin) {
  const auto refuse = [&](const std::string& problem) {
    throw SafetensorsError(origin, fmt::format("tensor '{}' {}", tensor.name, problem));
  };
  if (tensor.begin_bytes > tensor.end_bytes) {
    refuse(fmt::format("ends at {}, before it begins at {}", tensor.end_bytes, tensor.begin_bytes));
  }
  if (tensor.end_bytes > data_bytes) {
    refuse(fmt::format("ends at byte {} of the data, of which the file has {}: it was cut off or is damaged",
                       tensor.end_bytes, data_bytes));
  }
  const auto needed = tensor_bytes(tensor.type, tensor.shape);
  if (!needed) {
    refuse(fmt::format("of {} {} is not a whole number of bytes that 64 bits can count", tensor_type_name(tensor.type),
                       shape_text(tensor.shape)));
  } else if (*needed != tensor.bytes()) {
    refuse(fmt::format("has {} bytes, but {} {} needs {}", tensor.bytes(), tensor_type_name(tensor.type),
                       shape_text(tensor.shape), *needed));
  }
}

void check_tiling(std::span<const TensorInfo> tensors, std::uint64_t data_bytes, const std::string& origin) {
  std::uint64_t reached = 0;
  const TensorInfo* before = nullptr;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin_bytes < reached) {
      throw SafetensorsError(origin, fmt::format("tensors '{}' and '{}' overlap", before->name, tensor.name));
    }
    if (tensor.begin_bytes > reached) {
      throw SafetensorsError(origin, fmt::format("{} bytes before tensor '{}' do not belong to a tensor",
                                                 tensor.begin_bytes - reached, tensor.name));
    }
    reached = tensor.end_bytes;
    before = &tensor;
  }
  if (reached != data_bytes) {
    throw SafetensorsError(
        origin, fmt::format("{} bytes at the end of the file do not belong to a tensor", data_bytes - reached));
  }
}

}  // namespace

SafetensorsHeader parse_header(std::string_view json, std::uint64_t data_bytes, const std::string& origin) {
  if (json.empty() || json.front() != '{') {
    throw SafetensorsError(origin, "the header does not begin with '{': this is not a safetensors file");
  }
  // The parser treats a zero byte as the end and would not check the bytes after it.
  if (const std::size_t zero = json.find('\0'); zero != std::string_view::npos)
    throw SafetensorsError(origin, fmt::format("the header is not JSON: byte {} of it is zero", zero + 1));
  HeaderBuilder builder(origin);
  nlohmann::json::sax_parse(json.begin(), json.end(), &builder);
  SafetensorsHeader header = builder.take();
  check_names(header.tensors, origin);
  for (const TensorInfo& tensor : header.tensors) check_bytes(tensor, data_bytes, origin);
  // By begin and end, so that empty tensors come before the one that begins where they do.
  std::ranges::stable_sort(header.tensors, [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.begin_bytes, a.end_bytes) < std::pair(b.begin_bytes, b.end_bytes);
  });
  check_tiling(header.tensors, data_bytes, origin);
  return header;
}

// --- writing one -----------------------------------------------------------------------------------------------------

std::string encode_header(std::span<const TensorInfo> tensors, const Metadata& metadata, const std::string& origin) {
  check_names(tensors, origin);
  const auto quoted = [&](const std::string& text) {
    try {
      return nlohmann::json(text).dump();
    } catch (const nlohmann::json::type_error&) {
      throw SafetensorsError(origin, fmt::format("the name '{}' is not UTF-8, which safetensors requires", text));
    }
  };
  std::string json = "{";
  if (!metadata.empty()) {
    json += fmt::format("\"{}\":{{", kMetadataName);
    for (const auto& [key, value] : metadata) {
      json += fmt::format("{}{}:{}", json.back() == '{' ? "" : ",", quoted(key), quoted(value));
    }
    json += "}";
  }
  for (const TensorInfo& tensor : tensors) {
    if (tensor.name == kMetadataName) {
      throw SafetensorsError(origin,
                             fmt::format("a tensor cannot be called {}: the format reserves it", kMetadataName));
    }
    json += fmt::format(R"({}{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json.back() == '{' ? "" : ",",
                        quoted(tensor.name), tensor_type_name(tensor.type), fmt::join(tensor.shape, ","),
                        tensor.begin_bytes, tensor.end_bytes);
  }
  json += "}";
  json.append(round_up(json.size(), kHeaderLengthBytes) - json.size(), ' ');
  if (json.size() > kHeaderBytesMax) {
    throw SafetensorsError(origin, fmt::format("the header would be {} bytes long, and readers accept {}: use smaller "
                                               "shards",
                                               json.size(), kHeaderBytesMax));
  }
  std::string text(kHeaderLengthBytes, '\0');
  for (std::size_t i = 0; i < kHeaderLengthBytes; ++i) text[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return text + json;
}

}  // namespace hoist::interchange
