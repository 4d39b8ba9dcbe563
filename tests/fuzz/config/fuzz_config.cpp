// SPDX-License-Identifier: Apache-2.0
// libFuzzer: any text is a configuration or ConfigProblems; never anything else. tests/config runs the corpus without
// a fuzzer; with one: cmake --preset fuzz, then build/fuzz/bin/fuzz_config tests/fuzz/config/corpus.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include <hoist/config/config.hpp>
#include <hoist/config/setting.hpp>
#include <hoist/zero/update/learning_rate.hpp>

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

// A file that was accepted must be usable.
void use(const hoist::Config& config) {
  for (const std::uint64_t budget : {config.runtime.device_memory_bytes, config.runtime.pinned_memory_bytes})
    require(budget == 0 || budget >= 4096);  // 0: as this machine allows
  require(config.engine.update_buffer_count >= 3 && config.engine.sub_group_elements >= 1);
  check(config.engine.learning_rate_schedule);
  for (const std::uint64_t step : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1000}, ~std::uint64_t{0}}) {
    const double rate = learning_rate(config.engine.learning_rate_schedule, step, 0.001);
    require(rate >= 0);
  }
  for (const hoist::ConfigSetting& setting : config.settings()) require(!hoist::to_text(setting.value).empty());
  try {
    config.check_world_size(3);
  } catch (const hoist::ConfigProblems&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  const std::string_view text(reinterpret_cast<const char*>(data), count);
  try {
    use(hoist::Config::parse(text, "fuzz.json"));
  } catch (const hoist::ConfigProblems& error) {
    require(!error.problems.empty() && error.problems.size() <= hoist::kProblemsMax);
    for (const hoist::ConfigProblem& problem : error.problems) require(!problem.problem.empty());
  }
  return 0;
}
