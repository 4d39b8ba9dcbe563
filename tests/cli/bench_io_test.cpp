// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/tests/support/refused_system_call.hpp>

#include "storage_program.hpp"

namespace hoist::bench_io_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class BenchIo : public test::StorageProgramTest {};

TEST_F(BenchIo, TheReportHasEveryFieldAndItsNumbersAgree) {
  for (const std::string op : {"read", "write", "mixed"}) {
    const auto result =
        run("bench io --path drive --size 16MiB --op " + op + " --block-size 256KiB --queue-depth 4 --json io.json");
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("GB/s"));
    const auto json = json_of("io.json");
    EXPECT_EQ(json["op"], op);
    EXPECT_TRUE(json["engine"] == "io_uring" || json["engine"] == "threads") << json["engine"];
    EXPECT_EQ(json["block_bytes"], 262144);
    EXPECT_EQ(json["queue_depth"], 4);
    EXPECT_EQ(json["paths"], nlohmann::json::array({"drive"}));
    EXPECT_TRUE(json["compare"].is_null());
    const double seconds = json["seconds"];
    EXPECT_NEAR(json["gb_per_s"].get<double>(), 16 * 1048576 / seconds / 1e9, 1e-6);
    EXPECT_EQ(json["blocks"], 64);
    const auto& latency = json["latency_us"];
    EXPECT_GT(latency["p50"], 0);
    EXPECT_LE(latency["p50"], latency["p99"]);
    EXPECT_LE(latency["p99"], latency["max"]);
    EXPECT_LE(latency["max"].get<double>(), seconds * 1e6 + 1) << "but for rounding";
    EXPECT_GE(json["cpu_seconds_per_gb"], 0);
    const auto& drive = json["drives"][0];
    EXPECT_EQ(drive["read_bytes"].get<std::uint64_t>() + drive["written_bytes"].get<std::uint64_t>(), 16u << 20);
    EXPECT_EQ(drive["read_bytes"] > 0, op != "write");
    EXPECT_EQ(drive["written_bytes"] > 0, op != "read");
    EXPECT_THAT(drive["drive"]["filesystem"].get<std::string>(), Not(IsEmpty()));
    EXPECT_GT(json["machine"]["processors"], 0);
    EXPECT_FALSE(json["warnings"].empty()) << "a fraction of a second is too short for anything";
  }
  EXPECT_TRUE(drive_is_empty());
}

// The kernel's count of the program's traffic, from outside: the file is written once, then moved as asked.
TEST_F(BenchIo, TheDriveMovesWhatTheReportSays) {
  constexpr std::uint64_t kFile = 32u << 20;
  constexpr std::uint64_t kSlack = 4u << 20;  // the program's own pages, the directory
  auto before = traffic();
  ASSERT_EQ(run("bench io --path drive --size 32MiB --op read --json io.json").exit_code, 0);
  if (!json_of("io.json")["drives"][0]["direct"].get<bool>()) GTEST_SKIP() << "the test's directory has no O_DIRECT";
  auto after = traffic();
  EXPECT_GE(after.read_bytes - before.read_bytes, kFile);
  EXPECT_GE(after.written_bytes - before.written_bytes, kFile);
  EXPECT_LE(after.written_bytes - before.written_bytes, kFile + kSlack);
  before = after;
  ASSERT_EQ(run("bench io --path drive --size 32MiB --op write").exit_code, 0);
  after = traffic();
  EXPECT_GE(after.written_bytes - before.written_bytes, 2 * kFile);
  EXPECT_LE(after.written_bytes - before.written_bytes, 2 * kFile + kSlack);
}

TEST_F(BenchIo, SeveralPathsAreMeasuredTogetherAndApart) {
  std::filesystem::create_directory(path("second"));
  const auto result = run("bench io --path drive --path second --size 16MiB --json io.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("together"));
  EXPECT_THAT(result.output, HasSubstr("share one drive"));
  const auto json = json_of("io.json");
  ASSERT_EQ(json["drives"].size(), 2u);
  double bytes = 0;
  for (const auto& drive : json["drives"]) bytes += drive["read_bytes"].get<double>();
  EXPECT_EQ(bytes, 32 << 20);
  EXPECT_NEAR(json["gb_per_s"].get<double>(), bytes / json["seconds"].get<double>() / 1e9, 1e-6);
}

TEST_F(BenchIo, TheNullEngineMovesNothing) {
  const auto before = traffic();
  const auto result = run("bench io --path drive --size 1GiB --engine null --json io.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_LT(traffic().written_bytes - before.written_bytes, 8u << 20);
  EXPECT_EQ(json_of("io.json")["engine"], "null");
  EXPECT_EQ(json_of("io.json")["blocks"], 1024);
  EXPECT_THAT(result.output, HasSubstr("ns of processor time for each block"));
}

TEST_F(BenchIo, ThreadsWorkToo) {
  ASSERT_EQ(run("bench io --path drive --size 8MiB --op mixed --engine threads --threads 3 --json io.json").exit_code,
            0);
  EXPECT_EQ(json_of("io.json")["engine"], "threads");
  EXPECT_TRUE(json_of("io.json")["drives"][0]["cpu_seconds_per_gb"].is_null());
}

TEST_F(BenchIo, BadInputIsRefusedWithTheRemedyAndTouchesNothing) {
  write("file", "");
  const std::vector<std::pair<std::string, std::string>> refusals{
      {"--path missing", "No such file or directory"},
      {"--path file", "is not a directory"},
      {"--path drive --path ./drive", "name each drive once"},
      {"--path drive --size 100TiB", "lower --size"},
      {"--path drive --size many", "is not a number of bytes"},
      {"--path drive --size 0", "is not a number of bytes"},
      {"--path drive --size 512KiB", "smaller than one block of 1.0 MiB"},
      {"--path drive --block-size 5000", "the next is 8192"},
      {"--path drive --block-size 2GiB", "at most 1 GiB"},
      {"--path drive --queue-depth 0", "must be 1 to 4096"},
      {"--path drive --queue-depth 5000", "must be 1 to 4096"},
      {"--path drive --op append", "must be read, write or mixed"},
      {"--path drive --engine libaio", "must be io_uring, threads or null"},
      {"--path drive --threads 0", "must be 1 to 256"},
      {"--path drive --seconds -1", "must be 0 to 86400"},
      {"--path drive --seconds nan", "must be 0 to 86400"},
      {"--path drive --compare dd", "must be fio or libaio"},
      {"--path drive --compare fio --engine null", "nothing to compare"},
      {"--path drive --pairs 0", "must be 1 to 10000"},
      {"", "--path is required"},
      {"--path drive --nonsense", "nonsense"}};
  for (const auto& [arguments, part] : refusals) {
    const auto result = run("bench io " + arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.errors, HasSubstr(part)) << arguments;
    EXPECT_THAT(result.output, IsEmpty()) << arguments;
  }
  EXPECT_EQ(run("bench").exit_code, 2);
  EXPECT_TRUE(drive_is_empty());
}

TEST_F(BenchIo, ADirectoryThatIsNotOursIsLeftAlone) {
  std::filesystem::create_directory(scratch_data().parent_path());
  std::ofstream(scratch_data()) << "precious";
  const auto result = run("bench io --path drive --size 8MiB");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("was not made by a hoist measurement"));
  EXPECT_EQ(test::contents_of(scratch_data()), "precious");
}

TEST_F(BenchIo, SignalsEndItCleanly) {
  for (const auto& [signal, code] :
       std::vector<std::pair<std::string, int>>{{"INT", 130}, {"TERM", 143}, {"HUP", 129}}) {
    // Through timeout(1), which sends the signal once.
    const std::string line = "bench io --path drive --size 64MiB --seconds 60";
    const auto result =
        run("--version >/dev/null; timeout --preserve-status -s " + signal + " 1 '" HOIST_PROGRAM "' " + line);
    EXPECT_EQ(result.exit_code, code) << signal << ": " << result.errors;
    EXPECT_THAT(result.errors, HasSubstr("interrupted; its files are removed"));
    EXPECT_TRUE(drive_is_empty()) << signal;
  }
}

TEST_F(BenchIo, WhatAKilledRunLeftIsRemovedByTheNext) {
  run("--version >/dev/null; timeout -s KILL 1 '" HOIST_PROGRAM "' bench io --path drive --size 64MiB --seconds 60");
  ASSERT_TRUE(std::filesystem::exists(scratch_data()));
  EXPECT_EQ(run("bench io --path drive --size 8MiB").exit_code, 0);
  EXPECT_TRUE(drive_is_empty());
}

TEST_F(BenchIo, AFullDiskIsAFailureThatCleansUp) {
  // The limit of file sizes stands in for a full disk: the reserve fails in the same place.
  const auto result = run("--version >/dev/null; (trap '' XFSZ; ulimit -f 4096; '" HOIST_PROGRAM
                          "' bench io --path drive --size 64MiB)");
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  EXPECT_THAT(result.errors, HasSubstr("drive/hoist-bench-io/data"));
  EXPECT_TRUE(drive_is_empty());
}

TEST_F(BenchIo, WithoutODirectItSaysWhatIsMeasured) {
  struct statfs info {};
  constexpr long kTmpfs = 0x01021994;
  if (::statfs("/dev/shm", &info) != 0 || info.f_type != kTmpfs) GTEST_SKIP() << "/dev/shm is no tmpfs here";
  const test::TempDirectory memory("/dev/shm");
  const auto result = run("bench io --path " + memory.path().string() + " --size 8MiB --json io.json");
  if (result.exit_code == 2 && result.errors.find("lower --size") != std::string::npos)
    GTEST_SKIP() << "/dev/shm is too small";
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  // Newer kernels do have O_DIRECT on tmpfs; the drive is then still named.
  const auto drive = json_of("io.json")["drives"][0];
  EXPECT_EQ(drive["drive"]["filesystem"], "tmpfs");
  if (drive["direct"].get<bool>()) GTEST_SKIP() << "this kernel's tmpfs takes O_DIRECT";
  EXPECT_THAT(result.output, HasSubstr("has no O_DIRECT: the benchmark measures the page cache"));
}

TEST_F(BenchIo, FallsBackToThreadsWhereIoUringIsForbidden) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!test::refuse_system_call(__NR_io_uring_setup, EPERM)) ::_exit(test::kNoFilter);
    const auto automatic = run("bench io --path drive --size 8MiB --json io.json");
    const auto named = run("bench io --path drive --size 8MiB --engine io_uring");
    ::_exit(automatic.exit_code == 0 && named.exit_code == 1 ? 0 : 10 * automatic.exit_code + named.exit_code);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == test::kNoFilter) GTEST_SKIP() << "this system allows no seccomp filter";
  EXPECT_EQ(WEXITSTATUS(status), 0) << "tens: exit code of the automatic choice; ones: of io_uring by name";
  EXPECT_EQ(json_of("io.json")["engine"], "threads");
  EXPECT_THAT(json_of("io.json")["engine_description"].get<std::string>(), HasSubstr("not permitted"));
  EXPECT_TRUE(drive_is_empty());
}

bool have_fio() { return std::system("fio --version >/dev/null 2>&1") == 0; }

TEST_F(BenchIo, ComparesWithFioWhereIoUringIsForbidden) {
  if (!have_fio()) GTEST_SKIP() << "fio is not installed";
  const pid_t child = ::fork();
  if (child == 0) {
    if (!test::refuse_system_call(__NR_io_uring_setup, EPERM)) ::_exit(test::kNoFilter);
    ::_exit(run("bench io --path drive --size 16MiB --compare fio --pairs 1 --json io.json").exit_code);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == test::kNoFilter) GTEST_SKIP() << "this system allows no seccomp filter";
  EXPECT_EQ(WEXITSTATUS(status), 0) << test::contents_of(path("err"));
  EXPECT_THAT(json_of("io.json")["compare"]["description"].get<std::string>(), HasSubstr("libaio (io_uring is not"));
}

TEST_F(BenchIo, ComparesWithFioWhereTheMemlockLimitForbidsItsBuffers) {
  if (!have_fio() || ::geteuid() != 0) GTEST_SKIP() << "needs fio, and root, which drops CAP_IPC_LOCK";
  const auto result = run("--version >/dev/null; ulimit -l 1024; setpriv --bounding-set -ipc_lock '" HOIST_PROGRAM
                          "' bench io --path drive --size 16MiB --compare fio --pairs 1 --json io.json");
  if (result.errors.find("setpriv") != std::string::npos) GTEST_SKIP() << result.errors;
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(json_of("io.json")["compare"]["description"].get<std::string>(), HasSubstr("no fixedbufs"));
}

TEST_F(BenchIo, ComparesWithFioWhateverCharactersThePathHas) {
  if (!have_fio()) GTEST_SKIP() << "fio is not installed";
  const std::string odd = "a:b\\c;d\ne";
  std::filesystem::create_directory(path(odd));
  const auto result = run("bench io --path '" + odd + "' --path drive --size 16MiB --compare fio --pairs 1");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
}

// What hoist has measured counts in any case.
TEST_F(BenchIo, AContenderThatFailsIsSaidInOneLineAfterTheResult) {
  write("fio",
        "#!/bin/sh\n[ \"$1\" = --version ] && exec echo fio-9\n"
        "echo 'fio: pid=1, err=5, error=Input/output error'; echo '{'; echo '\"jobs\": []}'; exit 1\n");
  std::filesystem::permissions(path("fio"), std::filesystem::perms::owner_all);
  const auto result = run("--version >/dev/null; PATH=\"$PWD:$PATH\" '" HOIST_PROGRAM
                          "' bench io --path drive --size 16MiB --compare fio --json io.json --quiet");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("GB/s"));
  EXPECT_THAT(result.errors,
              HasSubstr("--compare fio: fio ended with code 1: fio: pid=1, err=5, error=Input/output error\n"));
  EXPECT_THAT(result.errors, Not(HasSubstr("jobs")));
  EXPECT_GT(json_of("io.json")["gb_per_s"], 0);
  EXPECT_TRUE(json_of("io.json")["compare"].is_null());
}

TEST_F(BenchIo, AReportThatCannotBeWrittenIsAFailure) {
  const auto result = run("bench io --path drive --size 8MiB --json /dev/full");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("No space left on device"));
}

class BenchIoCompare : public BenchIo, public ::testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(Contenders, BenchIoCompare, ::testing::Values("fio", "libaio"),
                         [](const auto& contender) { return contender.param; });

TEST_P(BenchIoCompare, GivesARatioForEachPairAndAControl) {
  const std::string contender = GetParam();
  if (contender == "fio" && !have_fio()) GTEST_SKIP() << "fio is not installed";
  const auto result =
      run("bench io --path drive --size 16MiB --op mixed --compare " + contender + " --pairs 4 --json io.json");
  if (contender == "libaio" && result.errors.find("this build has no libaio") != std::string::npos)
    GTEST_SKIP() << "this build has no libaio";
  if (::geteuid() != 0 && result.errors.find("Cannot allocate memory") != std::string::npos)
    GTEST_SKIP() << "other processes of this user have locked what the memlock limit allows";
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto compare = json_of("io.json")["compare"];
  EXPECT_EQ(compare["tool"], contender);
  ASSERT_EQ(compare["ratios"].size(), 4u);
  std::vector<double> ratios = compare["ratios"];
  std::sort(ratios.begin(), ratios.end());
  EXPECT_GT(ratios.front(), 0);
  EXPECT_DOUBLE_EQ(compare["ratio_median"].get<double>(), (ratios[1] + ratios[2]) / 2);
  EXPECT_EQ(compare["control_ratios"].size(), 2u);
  EXPECT_EQ(compare["ratio_interval"].size(), 2u);
  EXPECT_THAT(compare["description"].get<std::string>(), HasSubstr("huge pages"));
  EXPECT_TRUE(drive_is_empty());
}

}  // namespace
}  // namespace hoist::bench_io_test
