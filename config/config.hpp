// SPDX-License-Identifier: Apache-2.0
// config/config.hpp - reads a DeepSpeed JSON file, or refuses it. Start here.
//
// Names and structure are DeepSpeed's; hoist's own settings go under the key "hoist". An unknown key is an error; at
// the top level, one that is unlike all others is a warning. A key that changes the mathematics is implemented or
// refused, never ignored. `warnings` names performance hints without effect. docs/config.md lists every key.
//
// Threading  A Config is a plain value.
// Errors     ConfigProblems with every problem of the file (up to kProblemsMax), each with key, value, what is allowed,
//            line and column. A file that cannot be read is an IoError.
// Main path  text -> located JSON tree -> checked against the key table -> rules between keys -> options structs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/core/error.hpp>
#include <hoist/zero/options.hpp>

namespace hoist {

// A file with more problems than this is probably not a configuration; the message says how many more there are.
inline constexpr std::size_t kProblemsMax = 100;

struct ConfigProblem {
  std::string key;       // path, empty for malformed JSON
  std::string problem;   // one sentence
  std::size_t line = 0;  // 0: the problem has no single position
  std::size_t column = 0;
};

// All problems of one file. what() has one line for each.
class ConfigProblems : public ConfigError {
 public:
  ConfigProblems(const std::string& origin, std::vector<ConfigProblem> listed, std::size_t unlisted_count = 0);
  const std::vector<ConfigProblem> problems;
  const std::size_t unlisted;  // further ones that were only counted
};

// Settings for the program's own loop; absent if the file does not set them or says "auto".
struct TrainingOptions {
  std::optional<std::uint64_t> train_batch_size;
  std::optional<std::uint64_t> train_micro_batch_size_per_gpu;
  std::optional<std::uint64_t> gradient_accumulation_steps;
};

// Bandwidths of the drives, from `hoist tune`; for predictions.
struct MeasuredBandwidth {
  std::optional<std::uint64_t> read_bytes_per_second;
  std::optional<std::uint64_t> write_bytes_per_second;
  std::optional<std::uint64_t> mixed_bytes_per_second;  // both directions together
};

struct ConfigSetting;  // for hoist's own programs

// Who gives the length of the run, which some schedules need, if the file says "auto". A reader that trains needs it in
// the file. One that only explains or predicts leaves it to the trainer that will read the file: a note says so, and
// EngineOptions::learning_rate_schedule stays constant.
enum class RunLength : std::uint8_t { in_the_file, left_to_the_trainer };

class Config {
 public:
  // Errors: ConfigProblems; IoError when the file cannot be read.
  static Config load(const std::string& path, RunLength run_length = RunLength::in_the_file);
  // `origin` names the text in messages.
  static Config parse(std::string_view json_text, std::string origin, RunLength run_length = RunLength::in_the_file);

  RuntimeOptions runtime;
  EngineOptions engine;
  TrainingOptions training;
  MeasuredBandwidth measured;
  std::vector<std::string> warnings;  // print them once
  std::vector<std::string> notes;     // values of "auto" and absent keys that may surprise

  // train_batch_size = micro-batch * accumulation * world; two of them imply the third. Returns the batch sizes with
  // the implied ones filled in. Errors: ConfigProblems.
  TrainingOptions check_world_size(int world_size) const;
  // The same, and takes the result: `training` has the batch sizes that the file gives or implies, and the number of
  // micro-batches; engine.micro_batches_max is at least that. A program calls it before it makes an engine.
  void settle(int world_size);
  // Micro-batches of a step: as the file says or as two batch sizes imply, at most 2^20; 1 where these do not go with
  // so many ranks.
  std::uint64_t micro_batches(int world_size) const;
  // `engine` for so many ranks: its micro_batches_max is at least the number of micro-batches of a step.
  EngineOptions engine_at(int world_size) const;

  const std::string& origin() const { return origin_; }
  // Every key with the value in effect, in the order of docs/config.md. For hoist's own programs.
  const std::vector<ConfigSetting>& settings() const { return *settings_; }

 private:
  Config() = default;  // parse() fills it in
  std::string origin_;
  std::shared_ptr<const std::vector<ConfigSetting>> settings_;  // never null
};

}  // namespace hoist
