// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <future>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include <hoist/core/units.hpp>
#include <hoist/interchange/export.hpp>
#include <hoist/interchange/safetensors_writer.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::interchange {

namespace {

// Read and converted as one piece: 4 MiB of masters.
constexpr std::uint64_t kPieceElements = 1 << 20;

// A piece of a large parameter, as hoist.optim (python/hoist/optim/pieces.py) names them: "weight[0:1024]" has its
// first 1024 rows.
struct Rows {
  std::string_view parameter;
  std::uint64_t first = 0, end = 0;
};

std::optional<Rows> rows_of(const StoredParameter& piece) {
  const std::string_view name = piece.name;
  const std::size_t bracket = name.rfind('['), colon = name.rfind(':');
  if (!name.ends_with(']') || bracket == std::string_view::npos || colon == std::string_view::npos || colon < bracket)
    return std::nullopt;
  const auto first = parse_number<std::uint64_t>(name.substr(bracket + 1, colon - bracket - 1));
  const auto end = parse_number<std::uint64_t>(name.substr(colon + 1, name.size() - colon - 2));
  if (!first || !end || *first >= *end || piece.shape.empty() ||
      static_cast<std::uint64_t>(piece.shape.front()) != *end - *first)
    return std::nullopt;
  return Rows{name.substr(0, bracket), *first, *end};
}

// How many of the parameters, from `first` on, are the pieces of one: all of its rows, in order. Otherwise 1.
std::size_t pieces_from(std::span<const StoredParameter> parameters, std::size_t first) {
  const std::optional<Rows> start = rows_of(parameters[first]);
  if (!start || start->first != 0) return 1;
  std::uint64_t rows = start->end;
  std::size_t count = 1;
  for (; first + count < parameters.size(); ++count) {
    const StoredParameter& next = parameters[first + count];
    const std::optional<Rows> more = rows_of(next);
    if (!more || more->parameter != start->parameter || more->first != rows ||
        !std::ranges::equal(std::span(next.shape).subspan(1), std::span(parameters[first].shape).subspan(1)))
      break;
    rows = more->end;
  }
  return count;
}

// Only hoist.optim cuts parameters; its commits begin with this (python/hoist/optim/offload.py). Other programs may
// have such names themselves.
bool is_made_by_hoist_optim(const StoredModel& model) {
  constexpr std::string_view kBegin = R"({"groups": [)";
  const std::span<const std::byte> state = model.caller_state(0);
  return std::string_view(reinterpret_cast<const char*>(state.data()), state.size()).starts_with(kBegin);
}

std::vector<TensorSpec> tensors_of(std::span<StoredModel* const> slices, TensorType type) {
  std::vector<TensorSpec> tensors;
  std::set<std::string> names;
  for (const StoredModel* slice : slices) {
    const std::span<const StoredParameter> parameters = slice->parameters();
    const bool may_be_cut = is_made_by_hoist_optim(*slice);
    for (std::size_t p = 0; p < parameters.size();) {
      const StoredParameter& parameter = parameters[p];
      TensorSpec tensor{parameter.name, type, {parameter.shape.begin(), parameter.shape.end()}};
      const std::size_t pieces = may_be_cut ? pieces_from(parameters, p) : 1;
      if (pieces > 1) {
        tensor.name = rows_of(parameter)->parameter;
        tensor.shape.front() = rows_of(parameters[p + pieces - 1])->end;
      }
      p += pieces;
      if (!names.insert(tensor.name).second)
        throw UsageError(
            fmt::format("parameter '{}' is in more than one store, and stores do not say whether these are parts of "
                        "one tensor or copies; export each store into its own directory",
                        tensor.name));
      tensors.push_back(std::move(tensor));
    }
  }
  return tensors;
}

void check_slices(std::span<StoredModel* const> slices, DType dtype) {
  if (slices.empty()) throw UsageError("there is nothing to export");
  for (const StoredModel* slice : slices) {
    if (slice->step() != slices.front()->step())
      throw UsageError(fmt::format("a model has one step, but these stores have steps {} and {}",
                                   slices.front()->step(), slice->step()));
    for (const StoredParameter& parameter : slice->parameters())
      refuse_lost_range(parameter.name, parameter.dtype, dtype);
  }
}

// The values of one piece, in the form of the file.
class Piece {
 public:
  explicit Piece(DType dtype) : dtype_(dtype), bytes_(kPieceElements * dtype_bytes(dtype)) {
    if (dtype_ != DType::fp32) masters_.resize(kPieceElements);
  }

  // Reads `count` elements of a parameter. If the stored weights have the requested form, only they are read, a sixth
  // of a record. Masters need the whole record, because the optimizer state beside the remainders is verified with
  // them.
  void read(StoredModel& model, std::size_t parameter, std::uint64_t first, std::uint64_t count) {
    used_bytes_ = count * dtype_bytes(dtype_);
    const auto target = std::span(bytes_).first(used_bytes_);
    if (dtype_ == DType::fp32) {
      model.read(parameter, State::master, first, {reinterpret_cast<float*>(target.data()), count});
    } else if (model.parameters()[parameter].dtype == dtype_) {
      model.read_weights(parameter, first, target);
    } else {
      const auto masters = std::span(masters_).first(count);
      model.read(parameter, State::master, first, masters);
      narrow(masters, dtype_, model.parameters()[parameter].name, target.data());
    }
  }

  std::span<const std::byte> bytes() const { return std::span(bytes_).first(used_bytes_); }

 private:
  const DType dtype_;
  std::vector<std::byte> bytes_;
  std::vector<float> masters_;
  std::uint64_t used_bytes_ = 0;
};

}  // namespace

TensorType tensor_type(DType dtype) {
  constexpr std::array kTypes{TensorType::bf16, TensorType::f16, TensorType::f32};
  return kTypes[static_cast<std::size_t>(dtype)];
}

void refuse_lost_range(const std::string& parameter, DType weights, DType dtype) {
  if (dtype != DType::fp16 || weights != DType::bf16) return;
  throw UsageError(
      fmt::format("parameter '{}' is bf16, of which fp16 would lose range; export as bf16 or fp32", parameter));
}

void narrow(std::span<const float> masters, DType dtype, const std::string& parameter, std::byte* out) {
  if (dtype == DType::bf16) {
    std::ranges::transform(masters, reinterpret_cast<bf16*>(out), to_bf16);
    return;
  }
  const auto narrowed = [&](float value) {
    if (master_is_committable(value, DType::fp16)) return float_to_fp16(value);
    throw UsageError(
        fmt::format("parameter '{}' holds {}, which is too large for fp16; export as fp32 or bf16", parameter, value));
  };
  std::ranges::transform(masters, reinterpret_cast<std::uint16_t*>(out), narrowed);
}

ExportReport export_model(std::span<StoredModel* const> slices, const ExportOptions& options) {
  check_slices(slices, options.dtype);
  const std::vector<TensorSpec> tensors = tensors_of(slices, tensor_type(options.dtype));
  SafetensorsWriter writer({.directory = options.directory,
                            .shard_bytes_max = options.shard_bytes_max,
                            .metadata = {{"format", "pt"}, {"hoist.step", std::to_string(slices.front()->step())}}},
                           tensors);
  ExportReport report{.files = writer.files(), .tensor_count = tensors.size(), .data_bytes = writer.data_bytes()};

  // While one piece is written, the next is read.
  Piece pieces[2] = {Piece(options.dtype), Piece(options.dtype)};
  std::future<void> writing;
  std::size_t turn = 0;
  std::uint64_t done = 0;
  const auto write_parameter = [&](StoredModel& model, std::size_t p) {
    const std::uint64_t elements = model.parameters()[p].element_count();
    report.element_count += elements;
    for (std::uint64_t first = 0; first < elements; first += kPieceElements) {
      Piece& piece = pieces[turn];
      turn = 1 - turn;
      piece.read(model, p, first, std::min(kPieceElements, elements - first));
      if (writing.valid()) writing.get();
      writing = std::async(std::launch::async, [&writer, &piece] { writer.write(piece.bytes()); });
      done += piece.bytes().size();
      if (options.progress) options.progress(done, report.data_bytes);
    }
  };
  for (StoredModel* slice : slices)
    for (std::size_t p = 0; p < slice->parameters().size(); ++p) write_parameter(*slice, p);
  if (writing.valid()) writing.get();
  writer.finish();
  return report;
}

}  // namespace hoist::interchange
