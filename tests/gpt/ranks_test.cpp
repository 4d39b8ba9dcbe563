// SPDX-License-Identifier: Apache-2.0
// The real program as several ranks, which mpirun starts.
#include <cstdlib>

#include "program.hpp"

namespace hoist::gpt::program_test {
namespace {

class Ranks : public Program {
 protected:
  // As hoist_mpi_run() in cmake/HoistModule.cmake: more ranks than cores, unbound, also as root and in containers.
  static void SetUpTestSuite() {
    for (const char* name :
         {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"})
      ::setenv(name, "1", 1);
    ::setenv("OMPI_MCA_hwloc_base_binding_policy", "none", 1);
    ::setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 1);
  }
  Outcome run_ranks(int ranks, const std::vector<std::string>& words) const {
    return finish(start(words, {HOIST_MPIEXEC, "-n", std::to_string(ranks)}));
  }
};

std::size_t count_of(const std::string& part, const std::string& text) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_F(Ranks, AnotherNumberOfRanksContinuesWithTheSameSamplesPerStep) {
  const json whole = report_of(usual(8, {"--batch", "4"}));
  remove_store();
  const Outcome begun = run_ranks(2, usual(4, {"--batch", "2"}));
  ASSERT_EQ(begun.code, 0) << begun.error;
  // One rank with the same --batch would see other windows. The refusal spoils nothing.
  expect_refused(usual(8, {"--resume", "--batch", "2"}), "a run of 4 samples a step, not 2");
  const json resumed = report_of(usual(8, {"--resume", "--batch", "4"}));
  ASSERT_EQ(resumed["steps"].size(), 4u);
  // The same windows; gradients are summed in another order.
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(resumed["steps"][i]["loss"].get<double>(), whole["steps"][4 + i]["loss"].get<double>(), 0.002)
        << "step " << 5 + i;
  }
}

TEST_F(Ranks, OnlyOneDescribesTheUnits) {
  const Outcome outcome = run_ranks(2, usual(1, {"--units", "/dev/stdout"}));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_EQ(count_of("program_device_bytes", outcome.out), 1u) << outcome.out;
}

TEST_F(Ranks, AllLearnThatTheReportCannotBeWritten) {
  const Outcome outcome = run_ranks(2, usual(1, {"--report", path("none/report.json")}));
  EXPECT_NE(outcome.code, 0);
  for (const char* of_rank : {"hoist-gpt: cannot write the report", "hoist-gpt: rank 1: "})
    EXPECT_THAT(outcome.error, HasSubstr(of_rank));
  EXPECT_EQ(count_of("cannot write the report", outcome.error), 2u) << outcome.error;
}

}  // namespace
}  // namespace hoist::gpt::program_test
