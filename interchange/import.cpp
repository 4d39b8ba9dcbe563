// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/units.hpp>
#include <hoist/interchange/import.hpp>
#include <hoist/interchange/safetensors_reader.hpp>

namespace hoist::interchange {

namespace {

using Tensor = SafetensorsModel::Tensor;

bool is_importable(TensorType type) {
  return type == TensorType::f32 || type == TensorType::bf16 || type == TensorType::f16;
}

// The tensor of each parameter. Null: ImportOptions::otherwise gives its values.
struct Sources {
  explicit Sources(const std::string& path) : model(path) {}
  SafetensorsModel model;
  std::vector<const Tensor*> tensors;  // by ParameterId::index
};

std::string problem_of(const ParameterSpec& parameter, const Tensor& tensor) {
  const TensorInfo& info = *tensor.info;
  const bool same_shape = std::ranges::equal(info.shape, parameter.shape, [](std::uint64_t file, std::int64_t wanted) {
    return wanted >= 0 && file == static_cast<std::uint64_t>(wanted);
  });
  if (!same_shape) {
    return fmt::format("'{}' is {} in {}, but [{}] in the model", info.name, shape_text(info.shape),
                       tensor.file->path(), fmt::join(parameter.shape, ", "));
  }
  if (!is_importable(info.type)) {
    return fmt::format("'{}' is {} in {}; F32, BF16 and F16 can be imported: convert it first", info.name,
                       tensor_type_name(info.type), tensor.file->path());
  }
  return {};
}

// 16-bit values are read into the back half of `out` and widened from the front: element i is written to bytes
// [4i, 4i + 4), which end before the first byte not read yet, 2n + 2(i + 1), for every i < n.
template <typename Widen>
void read_widened(const Tensor& tensor, std::uint64_t first_element, std::span<float> out, const Widen& widen) {
  const auto bytes = std::as_writable_bytes(out);
  const auto narrow = bytes.subspan(bytes.size() / 2);
  tensor.read(2 * first_element, narrow);
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, narrow.data() + 2 * i, sizeof bits);
    out[i] = widen(bits);
  }
}

void read_as_float(const Tensor& tensor, std::uint64_t first_element, std::span<float> out) {
  switch (tensor.info->type) {
    case TensorType::f32:
      tensor.read(4 * first_element, std::as_writable_bytes(out));
      return;
    case TensorType::bf16:
      read_widened(tensor, first_element, out, [](std::uint16_t bits) { return to_float(bf16{bits}); });
      return;
    case TensorType::f16:
      read_widened(tensor, first_element, out, [](std::uint16_t bits) { return fp16_to_float(bits); });
      return;
    default:
      HOIST_ASSERT(false, "type {} passed the check", tensor_type_name(tensor.info->type));
  }
}

// 0.0 and -0.0 are equal, and NaNs of the same bits.
bool is_same_value(float one, float other) {
  return one == other || std::bit_cast<std::uint32_t>(one) == std::bit_cast<std::uint32_t>(other);
}

// Compares the values that would be imported, in pieces. The shapes are equal.
bool is_equal(const Tensor& one, const Tensor& other) {
  constexpr std::uint64_t kPieceElements = 1 << 18;
  const std::uint64_t element_count = one.info->bytes() * 8 / tensor_type_bits(one.info->type);
  std::vector<float> values(std::min(element_count, kPieceElements)), others(values.size());
  for (std::uint64_t first = 0; first < element_count; first += kPieceElements) {
    const std::uint64_t count = std::min(kPieceElements, element_count - first);
    read_as_float(one, first, std::span(values).first(count));
    read_as_float(other, first, std::span(others).first(count));
    if (!std::ranges::equal(std::span(values).first(count), std::span(others).first(count), is_same_value))
      return false;
  }
  return true;
}

// A file may hold the parameter's tensor under several of its names, all with the same values. Empty: it can be read.
std::string problem_of(const ParameterSpec& parameter, std::span<const Tensor* const> tensors) {
  for (const Tensor* tensor : tensors) {
    if (std::string problem = problem_of(parameter, *tensor); !problem.empty()) return problem;
  }
  const Tensor& used = *tensors.front();
  for (const Tensor* other : tensors.subspan(1)) {
    if (is_equal(used, *other)) continue;
    return fmt::format(
        "'{}' in {} and '{}' in {} differ, but the model ties them into one parameter: remove the wrong one, or build "
        "the model without that tie",
        used.info->name, used.file->path(), other->info->name, other->file->path());
  }
  return {};
}

// Lists as many as a person reads, and counts the rest.
[[noreturn]] void throw_problems(const std::string& path, const std::vector<std::string>& problems) {
  constexpr std::size_t kShownMax = 20;
  const std::size_t shown = std::min(problems.size(), kShownMax);
  std::string text =
      fmt::format("{}: {}", counted(problems.size(), "problem"),
                  fmt::join(problems.begin(), problems.begin() + static_cast<std::ptrdiff_t>(shown), "; "));
  if (shown < problems.size()) text += fmt::format("; and {} more", problems.size() - shown);
  throw SafetensorsError(path, text);
}

std::shared_ptr<const Sources> match(const std::string& path, std::span<const ParameterSpec> parameters,
                                     const ImportOptions& options) {
  auto sources = std::make_shared<Sources>(path);
  std::vector<std::string> problems;
  std::set<const Tensor*> used;
  for (const ParameterSpec& parameter : parameters) {
    std::vector<const Tensor*> found;
    const auto names = options.tensor_names ? options.tensor_names(parameter.name) : std::vector{parameter.name};
    for (const std::string& name : names) {
      if (const Tensor* const named = sources->model.find(name)) found.push_back(named);
    }
    used.insert(found.begin(), found.end());
    sources->tensors.push_back(found.empty() ? nullptr : found.front());
    if (found.empty()) {
      if (!options.otherwise) problems.push_back(fmt::format("'{}' is missing", fmt::join(names, "' or '")));
      continue;
    }
    if (std::string problem = problem_of(parameter, found); !problem.empty()) problems.push_back(std::move(problem));
  }
  if (!options.allow_unused && used.size() < sources->model.tensors().size()) {
    for (const auto& [name, tensor] : sources->model.tensors()) {
      if (!used.contains(&tensor) && !options.others.contains(name))
        problems.push_back(fmt::format("'{}' is not a parameter of the model", name));
    }
  }
  if (!problems.empty()) throw_problems(path, problems);
  return sources;
}

}  // namespace

Initializer fill_from(const std::string& path, std::span<const ParameterSpec> parameters,
                      const ImportOptions& options) {
  return [sources = match(path, parameters, options), otherwise = options.otherwise](
             ParameterId parameter, std::uint64_t first_element, std::span<float> out) {
    HOIST_ASSERT(parameter.index < sources->tensors.size(), "parameter {} of {}", parameter.index,
                 sources->tensors.size());
    const Tensor* tensor = sources->tensors[parameter.index];
    if (tensor == nullptr) {
      otherwise(parameter, first_element, out);
    } else {
      read_as_float(*tensor, first_element, out);
    }
  };
}

}  // namespace hoist::interchange
