// SPDX-License-Identifier: Apache-2.0
// examples/gpt/arguments.hpp - the command line of hoist-gpt.
//
// Errors     BadInputError for values that do not fit each other; what CLI11 finds is printed and becomes an exit code.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <hoist/config/config.hpp>

#include "model.hpp"
#include "text.hpp"

namespace hoist::gpt {

inline constexpr int kExitFailure = 1;
inline constexpr int kExitBadInput = 2;

struct Arguments {
  std::string config;
  std::string text;
  std::uint64_t steps = 0;  // in total, the steps before a resume included
  int layers = 14;
  int width = 384;
  int heads = 6;
  int context = 64;
  std::optional<int> batch;          // sequences per rank and micro-batch; else the file's, else 8
  std::optional<int> micro_batches;  // of a step; else the file's gradient_accumulation_steps, else 1
  bool vertical = false;             // else the file's hoist.micro_batch_order
  std::uint64_t seed = 1;
  std::string report;  // empty: none
  std::string units;   // empty: train; else only describe the model there, for hoist check
  bool resume = false;
  std::string from;              // a named checkpoint to resume from; empty: the newest commit
  std::uint64_t save_every = 0;  // steps; 0: never
  std::string init;              // safetensors to begin from; empty: random
  ActivationPolicy activations = ActivationPolicy::recompute;
  unsigned threads = 0;                 // of the kernels; 0: every CPU
  std::optional<double> learning_rate;  // else the file's
  std::uint64_t warmup = 0;             // steps over which the learning rate rises to its value
};

// Either the arguments or, after --help (0) or a mistake (2), the code to exit with.
std::variant<Arguments, int> parse_arguments(int argc, const char* const* argv);

// Errors: BadInputError.
void check_shape(const Arguments& arguments);

// The batch sizes and the learning rate in effect: the command line wins over the file, and `notes` says so.
struct Settled {
  int batch = 8;
  int micro_batches = 1;
  bool vertical = false;  // one pass holds them all
  double learning_rate = 0;
  std::vector<std::string> notes;
};
// Errors: ConfigProblems, BadInputError.
Settled settle(const Arguments& arguments, const Config& config, int world_size);
// The file's, on the host device, which is what the kernels compute on.
// Errors: BadInputError where the file asks for another device.
RuntimeOptions runtime_options(const Config& config);

}  // namespace hoist::gpt
