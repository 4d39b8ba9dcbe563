// SPDX-License-Identifier: Apache-2.0
// How far plans are from the lower bound of their placement: models, machines, placements and both orders of
// micro-batches. docs/benchmarks.md has the table.
#include <cstdio>
#include <string_view>

#include <fmt/format.h>

#include "program.hpp"

namespace hoist {
namespace {

constexpr double kTarget = 1.10;

struct GapCase {
  const char* parameters;
  const char* machine;
  int tokens;
  const char* order;  // of 4 micro-batches; empty: there is one
  const char *weights, *optimizer;
  double gap = kTarget;  // at most; above the target: this case misses it, and that is what it reaches
};

// With weights on NVMe, backward reads them from where the update has just written them, in the order of forward: the
// last unit's are written last and read first. With little memory, a drive that has done its writes waits for buffers.
constexpr GapCase kCases[] = {
    {"1e9", "laptop", 1024, "", "device", "pinned"},
    {"1e9", "laptop", 1024, "", "pinned", "nvme"},
    {"1e9", "laptop", 1024, "", "nvme", "nvme"},
    {"1e9", "laptop", 64, "", "device", "pinned"},
    {"1e9", "laptop", 64, "", "pinned", "nvme"},
    {"1e9", "laptop", 64, "", "nvme", "nvme"},
    {"7e9", "laptop", 512, "", "nvme", "nvme", 1.40},
    {"7e9", "h200-4-drives", 16384, "", "device", "device"},
    {"7e9", "h200-4-drives", 16384, "", "device", "pinned"},
    {"7e9", "h200-4-drives", 16384, "", "pinned", "nvme"},
    {"7e9", "h200-4-drives", 16384, "", "nvme", "nvme"},
    {"30e9", "h200-4-drives", 16384, "", "pinned", "pinned"},
    {"30e9", "h200-4-drives", 16384, "", "pinned", "nvme"},
    {"70e9", "h200-4-drives", 16384, "", "pinned", "nvme", 1.12},
    {"70e9", "h200-4-drives", 16384, "", "nvme", "nvme", 1.12},
    {"70e9", "h100-8", 16384, "", "device", "pinned"},
    {"70e9", "h100-8", 16384, "", "pinned", "nvme"},
    {"70e9", "h100-8", 16384, "", "nvme", "nvme"},
    {"175e9", "h100-8", 16384, "", "pinned", "nvme"},
    {"175e9", "h100-8x32", 16384, "", "pinned", "nvme"},
    {"175e9", "h100-8x32", 16384, "", "nvme", "nvme"},
    {"7e9", "h100-8", 65536, "vertical", "pinned", "pinned"},
    {"70e9", "h200-4-drives", 65536, "vertical", "pinned", "nvme", 1.16},
    {"70e9", "h200-4-drives", 65536, "vertical", "nvme", "nvme", 1.24},
};

class PlanGap : public test::ProgramTest {};

TEST_F(PlanGap, IsWithinTheTargetOrWhatTheCaseReaches) {
  std::string last;
  nlohmann::json report;
  for (const GapCase& one : kCases) {
    const bool vertical = std::string_view(one.order) == "vertical";
    if (vertical)
      write("vertical.json", R"({"gradient_accumulation_steps": 4,
                                 "hoist": {"micro_batch_order": "vertical", "optimizer_pinned_fraction": "auto"}})");
    const std::string arguments =
        fmt::format("plan {} --parameters {} --tokens {} --json plan.json --machine {}/machines/{}.json",
                    vertical ? "vertical.json" : "", one.parameters, one.tokens, HOIST_SOURCE_DIR, one.machine);
    if (arguments != last) {
      const auto result = run(arguments);
      ASSERT_EQ(result.exit_code, 0) << result.errors;
      report = json_of("plan.json");
      EXPECT_EQ(report["overrun"], nullptr) << arguments;
      last = arguments;
    }
    for (const auto& row : report["rows"]) {
      if (row["parameters"] != one.weights || row["optimizer"] != one.optimizer) continue;
      EXPECT_EQ(row["fits"], true) << arguments << row;
      const double gap = row["seconds"]["gap"];
      std::printf("| %s | %s | %d | %s / %s%s | %.2f s | %.2f |\n", one.parameters, one.machine, one.tokens,
                  one.weights, one.optimizer, vertical ? ", vertical" : "", row["seconds"]["expected"].get<double>(),
                  gap);
      EXPECT_GE(gap, 1) << arguments;
      EXPECT_LE(gap, one.gap) << arguments << " " << one.weights << " / " << one.optimizer;
      if (one.gap > kTarget) {
        EXPECT_GT(gap, kTarget) << "it does not miss the target any more: say so here and in docs/benchmarks.md";
      }
    }
  }
}

}  // namespace
}  // namespace hoist
