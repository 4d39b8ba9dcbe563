// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <hoist/config/config.hpp>
#include <hoist/config/detail/draft.hpp>
#include <hoist/config/detail/json_text.hpp>
#include <hoist/config/detail/reader.hpp>
#include <hoist/config/detail/rules.hpp>
#include <hoist/config/setting.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/core/units.hpp>

namespace hoist {

namespace {

using config::detail::Draft;

std::string join_problems(const std::string& origin, const std::vector<ConfigProblem>& problems, std::size_t unlisted) {
  std::string text;
  for (const ConfigProblem& problem : problems) {
    if (!text.empty()) text += "\n" + (problem.key.empty() ? std::string{} : problem.key + ": ");
    text += problem.problem;
    text += problem.line == 0 ? fmt::format(" ({})", origin)
                              : fmt::format(" ({}:{}:{})", origin, problem.line, problem.column);
  }
  if (unlisted > 0) text += fmt::format("\nand {} more ({})", unlisted, origin);
  return text;
}

// No configuration is larger than this; a larger file is a device or a data file.
constexpr std::size_t kFileBytesMax = 64u << 20;

[[noreturn]] void unreadable(const std::string& operation, const std::string& path, int code) {
  std::string remedy = "check the path of the configuration";
  if (code == EISDIR) remedy = "name the configuration file in it";
  if (code == EINVAL) remedy = open_file_remedy(code);
  if (code == EFBIG) remedy = "a configuration has at most 64 MiB; name the right file";
  throw IoError({.operation = operation, .path = path, .code = code}, remedy);
}

std::string read_file(const std::string& path) {
  const int descriptor = open_input_file(path);
  if (descriptor < 0) unreadable("open", path, errno);
  std::string text;
  if (const int code = read_and_close(descriptor, kFileBytesMax, text); code != 0) unreadable("read", path, code);
  return text;
}

void apply_settings(const std::vector<ConfigSetting>& settings, Draft& draft) {
  for (const ConfigSetting& setting : settings) {
    if (setting.row->apply != nullptr) setting.row->apply(draft, setting.value);
  }
}

}  // namespace

ConfigProblems::ConfigProblems(const std::string& origin, std::vector<ConfigProblem> listed, std::size_t unlisted_count)
    : ConfigError(listed.empty() ? std::string{} : listed.front().key, join_problems(origin, listed, unlisted_count)),
      problems(std::move(listed)),
      unlisted(unlisted_count) {}

std::string to_text(const config::Value& value) {
  return std::visit(
      [](const auto& v) -> std::string {
        if constexpr (std::is_same_v<std::decay_t<decltype(v)>, std::monostate>) {
          return {};
        } else {
          return nlohmann::json(v).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
        }
      },
      value);
}

Config Config::load(const std::string& path, RunLength run_length) { return parse(read_file(path), path, run_length); }

Config Config::parse(std::string_view json_text, std::string origin, RunLength run_length) {
  config::detail::ReadResult read;
  try {
    read = config::detail::read_settings(config::detail::parse_json_text(json_text), json_text);
  } catch (const config::detail::JsonSyntaxError& error) {
    const auto at = config::detail::position_of(json_text, error.offset);
    throw ConfigProblems(origin, {{"", fmt::format("malformed JSON: {}", error.what()), at.line, at.column}});
  }
  Draft draft;
  apply_settings(read.settings, draft);
  config::detail::RuleNotes notes = config::detail::apply_rules(draft, read, run_length);
  if (!read.problems.empty()) {
    std::ranges::stable_sort(read.problems, {}, [](const ConfigProblem& p) { return std::pair(p.line, p.column); });
    if (read.problems.size() > kProblemsMax) {  // rules between keys may have added some
      read.unlisted += read.problems.size() - kProblemsMax;
      read.problems.resize(kProblemsMax);
    }
    throw ConfigProblems(origin, std::move(read.problems), read.unlisted);
  }

  Config config;
  config.runtime = draft.runtime;
  config.engine = std::move(draft.engine);
  config.training = draft.training;
  config.measured = draft.measured;
  for (const std::string& warning : notes.warnings) config.warnings.push_back(printable(warning));
  for (const std::string& note : notes.notes) config.notes.push_back(printable(note));
  config.origin_ = std::move(origin);
  config.settings_ = std::make_shared<const std::vector<ConfigSetting>>(std::move(read.settings));
  return config;
}

namespace {

constexpr std::uint64_t kMicroBatchesMax = 1 << 20;  // of gradient_accumulation_steps

}  // namespace

TrainingOptions Config::check_world_size(int world_size) const {
  const auto refuse = [&](const std::string& key, const std::string& sentence) {
    ConfigProblem problem{key, sentence};
    for (const ConfigSetting& setting : *settings_) {
      if (setting.row->path != key) continue;
      problem.line = setting.line;
      problem.column = setting.column;
    }
    throw ConfigProblems(origin_, {problem});
  };
  if (world_size < 1) throw UsageError(fmt::format("a world size of {} is not possible; it is at least 1", world_size));

  if (const int group = std::max(1, engine.secondary_shard_ranks); group < world_size && world_size % group != 0) {
    refuse("zero_optimization.zero_hpz_partition_size",
           fmt::format("{} ranks cannot be cut into groups of {}; use a number that divides them, or 1", world_size,
                       group));
  }

  TrainingOptions result = training;
  const auto world = static_cast<std::uint64_t>(world_size);
  const auto& micro_batch = result.train_micro_batch_size_per_gpu;
  const std::uint64_t accumulation = micro_batches(world_size);
  result.gradient_accumulation_steps = accumulation;
  const std::uint64_t per_micro_batch = accumulation * world;
  if (result.train_batch_size && !training.gradient_accumulation_steps && micro_batch &&
      (*result.train_batch_size % *micro_batch != 0 || *result.train_batch_size / *micro_batch % world != 0)) {
    refuse("train_batch_size", fmt::format("{} is not a multiple of train_micro_batch_size_per_gpu {} times {}",
                                           *result.train_batch_size, *micro_batch, counted(world, "rank")));
  }
  if (result.train_batch_size && *result.train_batch_size % per_micro_batch != 0) {
    refuse("train_batch_size", fmt::format("{} is not a multiple of {} times {}", *result.train_batch_size,
                                           counted(world, "rank"), counted(accumulation, "accumulation step")));
  }
  if (result.train_batch_size && micro_batch && *result.train_batch_size / per_micro_batch != *micro_batch) {
    refuse("train_batch_size",
           fmt::format("{} is not train_micro_batch_size_per_gpu {} times "
                       "gradient_accumulation_steps {} times {}",
                       *result.train_batch_size, *micro_batch, accumulation, counted(world, "rank")));
  }
  if (result.train_batch_size) {
    result.train_micro_batch_size_per_gpu = *result.train_batch_size / per_micro_batch;
  } else if (result.train_micro_batch_size_per_gpu) {
    constexpr std::uint64_t kBatchMax = std::numeric_limits<std::int64_t>::max();
    if (*result.train_micro_batch_size_per_gpu > kBatchMax / per_micro_batch) {
      refuse("train_micro_batch_size_per_gpu",
             fmt::format("{} on each of {} is more samples than fit a 64-bit count",
                         *result.train_micro_batch_size_per_gpu, counted(world, "rank")));
    }
    result.train_batch_size = *result.train_micro_batch_size_per_gpu * per_micro_batch;
  }
  return result;
}

// If fewer than two of the three sizes are given, a step is one micro-batch.
std::uint64_t Config::micro_batches(int world_size) const {
  if (training.gradient_accumulation_steps) return *training.gradient_accumulation_steps;
  const auto world = static_cast<std::uint64_t>(std::max(1, world_size));
  const auto &all = training.train_batch_size, &one = training.train_micro_batch_size_per_gpu;
  if (!all || !one || *all % world != 0 || *all / world % *one != 0) return 1;
  return std::clamp<std::uint64_t>(*all / world / *one, 1, kMicroBatchesMax);
}

EngineOptions Config::engine_at(int world_size) const {
  EngineOptions result = engine;
  result.micro_batches_max = std::max(result.micro_batches_max, static_cast<unsigned>(micro_batches(world_size)));
  return result;
}

void Config::settle(int world_size) {
  training = check_world_size(world_size);
  engine = engine_at(world_size);
}

}  // namespace hoist
