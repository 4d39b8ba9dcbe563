// SPDX-License-Identifier: Apache-2.0
// How far plans are from the lower bound of their placement: models, machines, placements and both orders of
// micro-batches. docs/benchmarks.md has the table.
#include <cstdio>
#include <string_view>

#include <fmt/format.h>

#include "program.hpp"

namespace hoist::plan_gap_test {
namespace {

constexpr double kTarget = 1.10;
constexpr double kWaitTarget = 0.05;  // share of a step

struct StandardCase {
  const char* parameters;
  const char* machine;
  int tokens;
  const char* order;  // of 4 micro-batches; empty: there is one
  const char *weights, *optimizer;
};

constexpr StandardCase kCases[] = {
    {"1e9", "laptop", 1024, "", "device", "pinned"},
    {"1e9", "laptop", 1024, "", "pinned", "nvme"},
    {"1e9", "laptop", 1024, "", "nvme", "nvme"},
    {"1e9", "laptop", 64, "", "device", "pinned"},
    {"1e9", "laptop", 64, "", "pinned", "nvme"},
    {"1e9", "laptop", 64, "", "nvme", "nvme"},
    {"7e9", "laptop", 512, "", "nvme", "nvme"},
    {"7e9", "h200-4-drives", 16384, "", "device", "device"},
    {"7e9", "h200-4-drives", 16384, "", "device", "pinned"},
    {"7e9", "h200-4-drives", 16384, "", "pinned", "nvme"},
    {"7e9", "h200-4-drives", 16384, "", "nvme", "nvme"},
    {"30e9", "h200-4-drives", 16384, "", "pinned", "pinned"},
    {"30e9", "h200-4-drives", 16384, "", "pinned", "nvme"},
    {"70e9", "h200-4-drives", 16384, "", "pinned", "nvme"},
    {"70e9", "h200-4-drives", 16384, "", "nvme", "nvme"},
    {"70e9", "h100-8", 16384, "", "device", "pinned"},
    {"70e9", "h100-8", 16384, "", "pinned", "nvme"},
    {"70e9", "h100-8", 16384, "", "nvme", "nvme"},
    {"175e9", "h100-8", 16384, "", "pinned", "nvme"},
    {"175e9", "h100-8x32", 16384, "", "pinned", "nvme"},
    {"175e9", "h100-8x32", 16384, "", "nvme", "nvme"},
    {"7e9", "h100-8", 65536, "vertical", "pinned", "pinned"},
    {"70e9", "h200-4-drives", 65536, "vertical", "pinned", "nvme"},
    {"70e9", "h200-4-drives", 65536, "vertical", "nvme", "nvme"},
};

// With drives that are `factor` times as fast as the machine's, the lower bound is that of infinitely fast drives, and
// with a tenth less it is longer: they are just fast enough.
struct JustFastEnough {
  StandardCase standard;
  double factor;
};
constexpr JustFastEnough kJustFastEnough[] = {
    {{"7e9", "laptop", 512, "", "nvme", "nvme"}, 2.425},
    {{"30e9", "h200-4-drives", 16384, "", "pinned", "nvme"}, 1.321},
    {{"175e9", "h100-8x32", 16384, "", "nvme", "nvme"}, 0.041},
    {{"70e9", "h200-4-drives", 65536, "vertical", "nvme", "nvme"}, 1.272},
};

class PlanGap : public test::ProgramTest {
 protected:
  std::string machine_file(const StandardCase& one) const {
    return fmt::format("{}/machines/{}.json", HOIST_SOURCE_DIR, one.machine);
  }
  std::string with_drives(const StandardCase& one, double factor) const {
    auto machine = nlohmann::json::parse(test::contents_of(machine_file(one)));
    for (const char* key : {"read_gb_per_s", "write_gb_per_s"})
      machine["drives"][key] = factor * machine["drives"][key].get<double>();
    write("machine.json", machine.dump());
    return "machine.json";
  }
  // The rows of a case's plan. Equal questions are asked once.
  const nlohmann::json& plan(const StandardCase& one, const std::string& machine) {
    const bool vertical = std::string_view(one.order) == "vertical";
    write("vertical.json", R"({"gradient_accumulation_steps": 4, "hoist": {"micro_batch_order": "vertical"}})");
    const std::string arguments = fmt::format("plan {} --parameters {} --tokens {} --json plan.json --machine {}",
                                              vertical ? "vertical.json" : "", one.parameters, one.tokens, machine);
    if (arguments == last_ && machine != "machine.json") return report_;
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    report_ = json_of("plan.json");
    EXPECT_EQ(report_["overrun"], nullptr) << arguments;
    last_ = arguments;
    return report_;
  }
  nlohmann::json row(const StandardCase& one, const std::string& machine) {
    for (const auto& row : plan(one, machine)["rows"])
      if (row["parameters"] == one.weights && row["optimizer"] == one.optimizer) return row;
    ADD_FAILURE() << one.weights << " / " << one.optimizer;
    return {};
  }

 private:
  std::string last_;
  nlohmann::json report_;
};

TEST_F(PlanGap, IsWithinTheTarget) {
  for (const StandardCase& one : kCases) {
    const auto found = row(one, machine_file(one));
    const std::string where =
        fmt::format("{} {} {} {} / {}", one.parameters, one.machine, one.order, one.weights, one.optimizer);
    EXPECT_EQ(found["fits"], true) << where;
    const double gap = found["seconds"]["gap"];
    std::printf("| %s | %s | %d | %s / %s%s%s | %.2f s | %.2f |\n", one.parameters, one.machine, one.tokens,
                one.weights, one.optimizer, *one.order != '\0' ? ", " : "", one.order,
                found["seconds"]["expected"].get<double>(), gap);
    EXPECT_GE(gap, 1) << where;
    EXPECT_LE(gap, kTarget) << where;
  }
}

TEST_F(PlanGap, WithDrivesThatAreJustFastEnoughKernelsHardlyWait) {
  for (const auto& [one, factor] : kJustFastEnough) {
    const std::string where = fmt::format("{} {} {}", one.parameters, one.machine, one.order);
    const auto least = [&](double speed) {
      return row(one, with_drives(one, speed))["seconds"]["least"].get<double>();
    };
    const double least_of_all = least(1000);
    EXPECT_GT(least(0.9 * factor), 1.003 * least_of_all) << where << ": slower drives would do";
    const auto found = row(one, with_drives(one, factor));
    EXPECT_LE(found["seconds"]["least"].get<double>(), 1.002 * least_of_all) << where << ": not fast enough";
    const double seconds = found["seconds"]["expected"];
    const double share = found["wait_seconds"]["nvme"].get<double>() / seconds;
    std::printf("| %s | %s | %d | %s / %s%s%s | %.3f | %.2f s | %.1f %% |\n", one.parameters, one.machine, one.tokens,
                one.weights, one.optimizer, *one.order != '\0' ? ", " : "", one.order, factor, seconds, 100 * share);
    EXPECT_LE(share, kWaitTarget) << where;
  }
}

}  // namespace
}  // namespace hoist::plan_gap_test
