// SPDX-License-Identifier: Apache-2.0
// The main function of every test program. ctest starts a program once or a few times, not once per test, so the
// program itself says which tests failed or were skipped:
//
//   exit status   0 all passed; 1 some failed; 77 every one was skipped, which ctest shows as skipped
//   skipped       the file that HOIST_TEST_SKIPS names gets a line for each skipped test, with its reason
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace {

class Skips final : public testing::EmptyTestEventListener {
 public:
  explicit Skips(std::string program) : program_(std::move(program)) {}

  const std::vector<std::string>& lines() const { return lines_; }

 private:
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Skipped()) return;
    std::string reason = "no reason given";
    for (int i = 0; i < test.result()->total_part_count(); ++i) {
      const testing::TestPartResult& part = test.result()->GetTestPartResult(i);
      if (part.skipped()) reason = part.message();
    }
    lines_.push_back(program_ + ": " + test.test_suite_name() + "." + test.name() + ": " + reason);
  }

  std::string program_;
  std::vector<std::string> lines_;
};

void write_skips(const char* path, const std::vector<std::string>& lines) {
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) return;
  for (const std::string& line : lines) std::fprintf(file, "%s\n", line.c_str());
  std::fclose(file);
}

}  // namespace

int main(int argc, char** argv) {
  // Earlier tests of the program leave threads behind (pools, streams), so a death test starts the program anew.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  testing::InitGoogleMock(&argc, argv);
  const std::string program = argv[0];
  auto* const skips = new Skips(program.substr(program.rfind('/') + 1));  // the listeners own it
  testing::UnitTest::GetInstance()->listeners().Append(skips);

  const int status = RUN_ALL_TESTS();
  if (testing::GTEST_FLAG(list_tests)) return status;
  if (const char* const path = std::getenv("HOIST_TEST_SKIPS")) write_skips(path, skips->lines());
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  if (status != 0) {
    std::printf("To run some of them alone: %s --gtest_filter=NAME\n", argv[0]);
    return status;
  }
  const bool all_skipped = all.skipped_test_count() > 0 && all.successful_test_count() == 0;
  return all_skipped ? 77 : 0;
}
