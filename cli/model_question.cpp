// SPDX-License-Identifier: Apache-2.0
#include "model_question.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/zero/predict/activations.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "storage.hpp"

namespace hoist::cli {

namespace {

bool is_trained(interchange::TensorType type) {
  using interchange::TensorType;
  return type == TensorType::f32 || type == TensorType::bf16 || type == TensorType::f16;
}

// Buffers, such as masks and positions, if they are the smaller part of a model: otherwise packed weights.
bool may_be_buffer(interchange::TensorType type) {
  using interchange::TensorType;
  return type <= TensorType::i64 || type == TensorType::f64 || type == TensorType::c64;
}

[[noreturn]] void refuse_type(const std::string& path, const interchange::TensorInfo& tensor) {
  throw UsageError(
      fmt::format("{}: tensor '{}' is {}, and weights are trained as bf16, fp16 or fp32; give the model "
                  "as it was before it was quantized, or its units with --units",
                  path, tensor.name, interchange::tensor_type_name(tensor.type)));
}

// "model.layers.12.mlp.up.weight" -> "model.layers.12"; without a number, "lm_head.weight" -> "lm_head".
std::string unit_of_tensor(std::string_view name) {
  std::size_t end = 0;
  for (std::size_t begin = 0; begin < name.size(); begin = end + 1) {
    end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
    if (number) return std::string(name.substr(0, end));
  }
  return std::string(name.substr(0, std::min(name.rfind('.'), name.size())));
}

}  // namespace

NamedModel read_weights(const std::string& path, DType dtype) {
  const interchange::SafetensorsModel weights(path);
  std::vector<std::string> order;
  std::map<std::string, std::vector<ParameterSpec>> units;
  const interchange::TensorInfo* largest_buffer = nullptr;
  std::uint64_t buffer_bytes = 0, trained_bytes = 0;
  for (const auto& file : weights.files()) {
    for (const interchange::TensorInfo& tensor : file->header().tensors) {
      const auto* const named = weights.find(tensor.name);
      if (named == nullptr || named->info != &tensor) continue;  // the index takes it from another file, or not at all
      if (may_be_buffer(tensor.type)) {
        buffer_bytes += tensor.bytes();
        if (largest_buffer == nullptr || tensor.bytes() > largest_buffer->bytes()) largest_buffer = &tensor;
        continue;
      }
      if (!is_trained(tensor.type)) refuse_type(file->path(), tensor);
      if (tensor.bytes() == 0) continue;
      trained_bytes += tensor.bytes();
      const std::string name = unit_of_tensor(tensor.name);
      auto [unit, is_new] = units.try_emplace(name);
      if (is_new) order.push_back(name);
      unit->second.push_back(
          {.name = tensor.name, .shape = {tensor.shape.begin(), tensor.shape.end()}, .dtype = dtype});
    }
  }
  if (buffer_bytes > trained_bytes) refuse_type(path, *largest_buffer);
  if (order.empty()) throw UsageError(fmt::format("{} has no weights of bf16, fp16 or fp32", path));
  NamedModel named;
  for (const std::string& name : order) named.model.add_unit(name, units[name]);
  named.name = fmt::format("{} units of {}", order.size(), path);
  return named;
}

void add_model_options(CLI::App& command, ModelArguments& arguments) {
  CLI::Option* const parameters =
      command.add_option("--parameters", arguments.parameters, "The model's number of parameters (7e9, 350M)");
  CLI::Option* const units =
      command.add_option("--units", arguments.units, "Take the model's units from this JSON file");
  CLI::Option* const weights = command.add_option(
      "--model", arguments.weights,
      "Take the model from its weights: a .safetensors file, an index, or a directory with one of them");
  units->excludes(parameters);
  weights->excludes(parameters)->excludes(units);
}

RuntimeOptions ModelQuestion::runtime(const Config& with) const {
  RuntimeOptions runtime = with.runtime;
  if (!device_memory.empty()) runtime.device_memory_bytes = bytes_of("--device-memory", device_memory);
  if (!pinned_memory.empty()) runtime.pinned_memory_bytes = bytes_of("--pinned-memory", pinned_memory);
  return runtime;
}

int ModelQuestion::refuse_unreadable_file(const char* command, const IoError& error) const {
  const std::string& path = error.where.path;
  if (path != config && path != machine && !model.is_about(path)) throw;
  complain("hoist {}: {}\n", command, error.what());
  return kBadInput;
}

NamedModel read_model(const ModelArguments& arguments, const EngineOptions& engine) {
  const DType dtype = engine.weights_dtype.value_or(DType::bf16);
  if (!arguments.units.empty()) return read_units(arguments.units, dtype);
  if (!arguments.weights.empty()) return read_weights(arguments.weights, dtype);
  const std::uint64_t count = parameter_count(arguments.parameters);
  NamedModel named{.model = uniform_model(count, assumed_layers(count), dtype)};
  named.name =
      fmt::format("assumed to be {} equal units; use --units FILE for the real ones", named.model.units().size());
  return named;
}

std::optional<std::uint64_t> parse_count(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;
  const std::string_view suffix = text.substr(static_cast<std::size_t>(end - text.data()));
  constexpr std::string_view kSuffixes = "KMBT";
  if (suffix.size() > 1) return std::nullopt;
  if (suffix.size() == 1) {
    const std::size_t power =
        kSuffixes.find(static_cast<char>(std::toupper(static_cast<unsigned char>(suffix.front()))));
    if (power == std::string_view::npos) return std::nullopt;
    number *= std::pow(1000.0, static_cast<double>(power) + 1);
  }
  if (!(number >= 1 && number <= kCountMax)) return std::nullopt;
  return static_cast<std::uint64_t>(std::llround(number));
}

std::uint64_t parameter_count(const std::string& text) {
  const auto count = parse_count(text);
  if (!count)
    throw UsageError(
        fmt::format("--parameters {} is not a count from 1 to {:g}; write 350000000, 3.5e8 or 350M", text, kCountMax));
  return *count;
}

std::uint64_t bytes_of(const char* option, const std::string& text) {
  if (const auto bytes = parse_bytes(text); bytes && *bytes < kBlockAlignment)
    throw UsageError(fmt::format("{} {} is less than 4 KiB", option, text));
  return parse_size_option(option, text);
}

}  // namespace hoist::cli
