// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "program.hpp"

namespace hoist::bench_optimizer_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class BenchOptimizer : public test::ProgramTest {};

TEST_F(BenchOptimizer, TheVerdictFollowsFromTheUsualKernel) {
  const auto result =
      run("bench optimizer --only \"AdamW, split master, fp32 moments, bf16 gradient, checksums\" --size 24MiB "
          "--pairs 3 --threads 1 --json optimizer.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto json = json_of("optimizer.json");
  const auto& kernel = json["kernels"][0];
  const auto& verdict = json["verdict"];
  const double rate = verdict["parameters_per_second"];
  EXPECT_NEAR(rate * kernel["bytes_per_parameter"].get<double>() / 1e9, kernel["gb_per_s"].get<double>(), 1e-3);
  EXPECT_EQ(verdict["limit"], kernel["limit"]);
  EXPECT_EQ(verdict["threads"], 1);
  // 6 FLOP a parameter and token.
  EXPECT_NEAR(verdict["hidden_from_tokens"].get<double>() * 6 * rate / verdict["gpu_flop_per_second"].get<double>(), 1,
              1e-9);
  EXPECT_THAT(result.output, HasSubstr("million parameters a second with 1 thread"));
}

TEST_F(BenchOptimizer, WithoutTheUsualKernelThereIsNoVerdict) {
  const auto result =
      run("bench optimizer --only \"SGD, split\" --size 24MiB --pairs 3 --threads 1 --json optimizer.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_TRUE(json_of("optimizer.json")["verdict"].is_null());
  EXPECT_THAT(result.output, Not(HasSubstr("million parameters a second")));
}

TEST_F(BenchOptimizer, ANumberOfParametersIsReadAsPlanReadsIt) {
  const std::string command = "bench optimizer --only \"SGD, split\" --size 24MiB --pairs 1 --threads 1 --parameters ";
  for (const char* count : {"1e9", "2B", "200000000"}) EXPECT_EQ(run(command + count).exit_code, 0) << count;
  for (const auto& [count, part] : {std::pair("many", "--parameters many is not a count"),
                                    std::pair("1e3", "--parameters 1000: must be 16384 to 1000000000000"),
                                    std::pair("2T", "--parameters 2000000000000: must be 16384 to 1000000000000")}) {
    const auto result = run(command + count);
    EXPECT_EQ(result.exit_code, 2) << count;
    EXPECT_THAT(result.errors, HasSubstr(part));
  }
}

}  // namespace
}  // namespace hoist::bench_optimizer_test
