// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <future>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include <hoist/interchange/export.hpp>
#include <hoist/interchange/safetensors_writer.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::interchange {

namespace {

// Read and converted as one piece: 4 MiB of masters.
constexpr std::uint64_t kPieceElements = 1 << 20;

std::vector<TensorSpec> tensors_of(std::span<StoredModel* const> slices, TensorType type) {
  std::vector<TensorSpec> tensors;
  std::set<std::string_view> names;
  for (const StoredModel* slice : slices) {
    for (const StoredParameter& parameter : slice->parameters()) {
      if (!names.insert(parameter.name).second)
        throw UsageError(
            fmt::format("parameter '{}' is in more than one store, and stores do not say whether these are parts of "
                        "one tensor or copies; export each store into its own directory",
                        parameter.name));
      tensors.push_back({parameter.name, type, {parameter.shape.begin(), parameter.shape.end()}});
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

ExportReport export_model(StoredModel& model, const ExportOptions& options) {
  StoredModel* const whole = &model;
  return export_model(std::span(&whole, 1), options);
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
