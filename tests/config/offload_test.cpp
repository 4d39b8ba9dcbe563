// SPDX-License-Identifier: Apache-2.0
// Where state is put for every combination of offload_param, offload_optimizer, stage and device: no combination that
// DeepSpeed takes is refused. That the bits of the result are those of every other one is shown in tests/zero.
#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/config/config.hpp>
#include <hoist/config/setting.hpp>

namespace hoist::offload_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr std::array kNames{"none", "cpu", "nvme"};
constexpr Placement kD = Placement::device, kP = Placement::pinned, kN = Placement::nvme;

struct Combination {
  int stage;
  std::size_t parameters, optimizer;  // of kNames
  const char* device;                 // "": not in the file
};

std::vector<Combination> combinations() {
  std::vector<Combination> all;
  for (const char* device : {"", "host", "cuda"})
    for (int stage = 0; stage <= 3; ++stage)
      for (std::size_t parameters = 0; parameters < 3; ++parameters)
        for (std::size_t optimizer = 0; optimizer < 3; ++optimizer)
          all.push_back({stage, parameters, optimizer, device});
  return all;
}

std::string section(const char* name, const char* device) {
  const std::string_view where = device;
  return fmt::format(R"("{}": {{"device": "{}"{}}})", name, device, where == "nvme" ? R"(, "nvme_path": "/nvme")" : "");
}

Config parse(const Combination& c) {
  return Config::parse(
      fmt::format(R"({{"zero_optimization": {{"stage": {}, {}, {}}}{}}})", c.stage,
                  section("offload_param", kNames[c.parameters]), section("offload_optimizer", kNames[c.optimizer]),
                  *c.device == '\0' ? "" : fmt::format(R"(, "hoist": {{"device": "{}"}})", c.device)),
      "test.json");
}

struct Expected {
  Placement parameters, optimizer;
};

// Rows: offload_param none, cpu, nvme. Columns: offload_optimizer none, cpu, nvme.
constexpr Expected kBelowStage3[3][3] = {
    {{kD, kD}, {kD, kP}, {kD, kN}}, {{kD, kD}, {kD, kP}, {kD, kN}}, {{kD, kD}, {kD, kP}, {kD, kN}}};
constexpr Expected kStage3[3][3] = {
    {{kD, kD}, {kD, kP}, {kD, kN}}, {{kP, kP}, {kP, kP}, {kP, kN}}, {{kN, kN}, {kN, kP}, {kN, kN}}};
constexpr Expected kStage3OnHost[3][3] = {
    {{kD, kD}, {kD, kP}, {kD, kN}}, {{kP, kD}, {kP, kP}, {kP, kN}}, {{kN, kD}, {kN, kP}, {kN, kN}}};

std::string value_of(const Config& config, std::string_view path) {
  for (const ConfigSetting& setting : config.settings())
    if (setting.row->path == path) return to_text(setting.value);
  return {};
}

TEST(Offload, EveryCombinationHasItsPlacement) {
  for (const Combination& c : combinations()) {
    SCOPED_TRACE(fmt::format("stage {}, offload_param {}, offload_optimizer {}, device {}", c.stage,
                             kNames[c.parameters], kNames[c.optimizer], c.device));
    const Config config = parse(c);
    const bool host = std::string_view(c.device) == "host";
    const Expected& expected = (c.stage < 3 ? kBelowStage3 : host ? kStage3OnHost : kStage3)[c.parameters][c.optimizer];
    EXPECT_EQ(config.engine.parameters, expected.parameters);
    EXPECT_EQ(config.engine.optimizer, expected.optimizer);
    EXPECT_EQ(config.engine.store_directory, config.engine.uses_nvme() ? "/nvme/hoist" : "");
    EXPECT_EQ(config.engine.durability, config.engine.uses_nvme() ? tiers::Durability::step : tiers::Durability::none);
    for (const auto device : {platform::DeviceKind::cuda, platform::DeviceKind::host}) {
      if (config.runtime.device && *config.runtime.device != device) continue;
      RuntimeOptions runtime = config.runtime;
      runtime.device = device;
      EXPECT_NO_THROW(check(config.engine, runtime, 4));
    }
    // A note names a value that was chosen instead of the file's, and the settings show it.
    const Placement asked_parameters = std::array{kD, kP, kN}[c.parameters];
    const Placement asked_optimizer = std::array{kD, kP, kN}[c.optimizer];
    const auto ignored = Contains(HasSubstr("offload_param is not used: stage"));
    const auto moved = Contains(HasSubstr("optimizer states are offloaded to"));
    EXPECT_EQ(testing::Matches(ignored)(config.warnings), asked_parameters != expected.parameters);
    EXPECT_EQ(testing::Matches(moved)(config.warnings), asked_optimizer != expected.optimizer);
    const auto shown = [](Placement place) { return fmt::format("\"{}\"", kNames[static_cast<std::size_t>(place)]); };
    EXPECT_EQ(value_of(config, "zero_optimization.offload_param.device"), shown(expected.parameters));
    EXPECT_EQ(value_of(config, "zero_optimization.offload_optimizer.device"), shown(expected.optimizer));
  }
}

TEST(Offload, AShareOfTheStatesStaysOnAGpuOnlyBesideItsWeights) {
  const auto ratio = [](const char* weights, const char* more) {
    return Config::parse(fmt::format(R"({{"zero_optimization": {{"stage": 3, "offload_param": {{"device": "{}"}},
                                          "offload_optimizer": {{"device": "cpu", "ratio": 0.4}}}}{}}})",
                                     weights, more),
                         "test.json");
  };
  EXPECT_EQ(ratio("none", "").engine.optimizer_offload_ratio, 0.4);
  EXPECT_EQ(ratio("cpu", R"(, "hoist": {"device": "host"})").engine.optimizer_offload_ratio, 0.4);
  const Config config = ratio("cpu", "");
  EXPECT_EQ(config.engine.optimizer_offload_ratio, 1);
  EXPECT_EQ(value_of(config, "zero_optimization.offload_optimizer.ratio"), "1.0");
  EXPECT_THAT(config.warnings, Contains(HasSubstr("offload_optimizer.ratio 0.4 is read as 1")));
  RuntimeOptions gpu;
  gpu.device = platform::DeviceKind::cuda;
  EXPECT_NO_THROW(check(config.engine, gpu, 1));
}

TEST(Offload, TheOldKeysAreTheSameCombinations) {
  const Config weights = Config::parse(R"({"zero_optimization": {"stage": 3, "cpu_offload_params": true}})", "t.json");
  EXPECT_EQ(weights.engine.parameters, kP);
  EXPECT_EQ(weights.engine.optimizer, kP);
  const Config below = Config::parse(
      R"({"zero_optimization": {"stage": 2, "cpu_offload": true, "cpu_offload_params": true}})", "t.json");
  EXPECT_EQ(below.engine.parameters, kD);
  EXPECT_EQ(below.engine.optimizer, kP);
}

// As in DeepSpeed, which takes both.
TEST(Offload, KeysThatTheStageLeavesWithoutEffectAreSaid) {
  const Config config = Config::parse(R"({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}})", "t.json");
  EXPECT_EQ(config.engine.secondary_shard_ranks, 1);
  EXPECT_THAT(config.warnings, Contains(HasSubstr("zero_hpz_partition_size is not used: stage 2")));
  EXPECT_NO_THROW(config.check_world_size(4));
  EXPECT_NO_THROW(check(config.engine, config.runtime, 16));
}

TEST(Offload, FewBuffersAreAsManyAsAnUpdateNeeds) {
  const Config config =
      Config::parse(R"({"zero_optimization": {"offload_optimizer": {"device": "cpu", "buffer_count": 1}}})", "t.json");
  EXPECT_EQ(config.engine.update_buffer_count, 3u);
  EXPECT_THAT(config.notes, Contains(HasSubstr("buffer_count 1 is read as 3")));
  EXPECT_EQ(value_of(config, "zero_optimization.offload_optimizer.buffer_count"), "3");
}

// A record holds both.
TEST(Offload, TwoPathsAreOneStore) {
  const Config config = Config::parse(
      R"({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/small"},
                                "offload_optimizer": {"device": "nvme", "nvme_path": ["/large", "/larger"]}}})",
      "t.json");
  EXPECT_EQ(config.engine.store_directory, "/large/hoist");
  EXPECT_THAT(config.engine.stripe_directories, testing::ElementsAre("/larger/hoist"));
  EXPECT_THAT(config.warnings, Contains(HasSubstr("offload_param.nvme_path \"/small\" is not used")));
}

}  // namespace
}  // namespace hoist::offload_test
