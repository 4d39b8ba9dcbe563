// SPDX-License-Identifier: Apache-2.0
// The real program as several ranks, which mpirun starts.
#include <fmt/format.h>

#include "program.hpp"

namespace hoist::gpt::program_test {
namespace {

class Ranks : public Program {
 protected:
  Outcome run_ranks(int ranks, const std::vector<std::string>& words) const {
    return finish(start(words, test::set_open_mpi_variables, {HOIST_MPIEXEC, "-n", std::to_string(ranks)}));
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

TEST_F(Ranks, GroupsOfTwoThatGatherAmongThemselvesChangeNothing) {
  const auto report_of_four = [&] {
    remove_store();
    const Outcome outcome = run_ranks(4, usual(6, {"--threads", "1", "--report", path("report.json")}));
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    EXPECT_THAT(outcome.out, HasSubstr("4 ranks (the numbers below"));
    return report();
  };
  const json alone = report_of_four();
  change_config({{"zero_optimization", kWeightsComeForEachUse}});
  change_config({{"zero_optimization", {{"zero_hpz_partition_size", 2}}}});
  const json in_groups = report_of_four();
  EXPECT_EQ(in_groups.at("digest"), alone.at("digest"));
  EXPECT_GT(in_groups.at("links").at("wire").at("bytes_in_group"), 0);
}

TEST_F(Ranks, OnlyOneDescribesTheUnits) {
  const Outcome outcome = run_ranks(2, usual(1, {"--units", "/dev/stdout"}));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_EQ(count_of("program_device_bytes", outcome.out), 1u) << outcome.out;
}

TEST_F(Ranks, AllLearnThatTheReportCannotBeWritten) {
  const Outcome outcome = run_ranks(2, usual(1, {"--report", path("none/report.json")}));
  EXPECT_NE(outcome.code, 0);
  for (const std::string& of_rank :
       {"hoist-gpt: open of " + path("none/report.json"), std::string("hoist-gpt: rank 1: ")})
    EXPECT_THAT(outcome.error, HasSubstr(of_rank));
  EXPECT_EQ(count_of("name another file with --report", outcome.error), 2u) << outcome.error;
}

TEST_F(Ranks, OneWithOtherArgumentsIsNamed) {
  write("other", std::string(4000, 'x'));
  const auto refusal = [&](const std::string& text, const std::string& option) {
    remove_store();
    const std::string rank1 =
        fmt::format(R"(exec "$0" --config {} --text {} "$@" {})", path("config.json"), path(text), option);
    const Outcome outcome = finish(start(usual(2), test::set_open_mpi_variables,
                                         {HOIST_MPIEXEC, "-n", "2", "sh", "-c",
                                          R"([ "$OMPI_COMM_WORLD_RANK" = 1 ] || exec "$0" "$@"; shift 4; )" + rank1}));
    EXPECT_NE(outcome.code, 0) << option;
    return outcome.error;
  };
  EXPECT_THAT(refusal("text", "--resume"), HasSubstr("rank 1: '--resume yes' / rank 0: '--resume no'"));
  EXPECT_THAT(refusal("text", "--seed 3"), HasSubstr("rank 1: '--seed 3' / rank 0: '--seed 1'"));
  EXPECT_THAT(refusal("text", "--batch 3"), HasSubstr("rank 1: '--batch 3' / rank 0: '--batch 2'"));
  EXPECT_THAT(refusal("other", ""), HasSubstr("of 4000 bytes"));
}

// A pipe holds rank 0 up while it writes the report.
TEST_F(Ranks, ASignalToAllWhileOneWritesTheReportEndsThemInOrder) {
  const Pipe pipe(path("report.json"));
  const pid_t child =
      start(usual(200, {"--report", path("report.json")}), test::set_open_mpi_variables,
            {HOIST_MPIEXEC, "-n", "2", "sh", "-c", "echo $$ >> " + path("pids") + R"(; exec "$0" "$@")"});
  wait_until([&] { return contents_of(path("out")).find("where the time went") != std::string::npos; });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // of the other rank, to its end
  pid_t rank = 0;
  for (std::ifstream pids(path("pids")); pids >> rank;) kill(rank, SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_THAT(pipe.contents(), HasSubstr("\"committed_step\": 200"));
  const Outcome outcome = finish(child);
  EXPECT_EQ(outcome.code, 0) << outcome.error;
}

}  // namespace
}  // namespace hoist::gpt::program_test
