// SPDX-License-Identifier: Apache-2.0
// cli/model_question.hpp - which model a prediction is about: units from a file, weights, or a number of parameters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <hoist/config/config.hpp>

#include "units_file.hpp"

namespace CLI {
class App;
}

namespace hoist::cli {

// Reads a model from the headers of its weights: a .safetensors file, an index or a directory. Tensors whose names are
// equal up to their first number form a unit ("model.layers.12"); others form one with the tensors of the same module.
// Errors: IoError, SafetensorsError; UsageError if there are none.
NamedModel read_weights(const std::string& path, DType dtype);

// A command's arguments about a model: one of them is given.
struct ModelArguments {
  std::string parameters;
  std::string units;
  std::string weights;

  bool given() const { return !parameters.empty() || !units.empty() || !weights.empty(); }
  // Whether an error is about the file that was given.
  bool is_about(const std::string& path) const {
    return (!units.empty() && path == units) || (!weights.empty() && path.starts_with(weights));
  }
};
// Adds --parameters, --units and --model to a command.
void add_model_options(CLI::App& command, ModelArguments& arguments);

// The question of check and plan: a configuration, a model, a machine, and budgets instead of the configuration's.
struct ModelQuestion {
  std::string config;
  std::string machine;  // a file, or as the command says
  std::string device_memory, pinned_memory;
  int world_size = 0;  // 0: not given
  std::string json;
  ModelArguments model;

  RuntimeOptions runtime(const Config& config) const;  // of the configuration, with these budgets
  // Called in the error's catch block. If the error is about an input file, prints it after the command's name and
  // returns kBadInput; rethrows others.
  int refuse_unreadable_file(const char* command, const IoError& error) const;
};

// Weights are of the type that the configuration names, unless a units file says otherwise: check() then says whether
// it may. If only a size is given, makes equal units. Errors: as of read_units; UsageError for an impossible size.
NamedModel read_model(const ModelArguments& arguments, const EngineOptions& engine);

// "350000000", "3.5e8", "350M", "7b" -> a count; nullopt if it is not a count. K, M, B and T are powers of a thousand.
std::optional<std::uint64_t> parse_count(std::string_view text);

// Parses the value of --parameters. Errors: UsageError.
std::uint64_t parameter_count(const std::string& text);

// A number of bytes that was given to `option`. Errors: UsageError.
std::uint64_t bytes_of(const char* option, const std::string& text);

}  // namespace hoist::cli
