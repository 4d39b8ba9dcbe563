// SPDX-License-Identifier: Apache-2.0
// The parts that were compiled in, the values that a launcher announces, and what NCCL can show on this machine.
#include <cstdlib>
#include <cstring>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/tests/support/message_of.hpp>

#ifdef HOIST_HAVE_NCCL
#include <nccl.h>
#endif

namespace hoist::comm::communicator_test {

namespace {

constexpr const char* kLaunchVariables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE",     "MV2_COMM_WORLD_SIZE",
                                            "SLURM_STEP_ID",        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
                                            "SLURM_NTASKS",         "RANK",         "WORLD_SIZE"};

// Exactly these launcher variables, whatever the test itself was started by; put back afterwards.
class LaunchEnvironment {
 public:
  explicit LaunchEnvironment(const std::map<std::string, std::string>& variables) {
    for (const char* name : kLaunchVariables) {
      if (const char* value = std::getenv(name)) saved_[name] = value;
      ::unsetenv(name);
    }
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~LaunchEnvironment() {
    for (const char* name : kLaunchVariables) ::unsetenv(name);
    for (const auto& [name, value] : saved_) ::setenv(name.c_str(), value.c_str(), 1);
  }
  LaunchEnvironment(const LaunchEnvironment&) = delete;
  LaunchEnvironment& operator=(const LaunchEnvironment&) = delete;

 private:
  std::map<std::string, std::string> saved_;
};

int size_with(const std::map<std::string, std::string>& variables) {
  const LaunchEnvironment environment(variables);
  return mpi_size_of_launch();
}

std::string why_no_gpu() {
  std::string why;
  return platform::cuda_device_count(&why) > 0 ? std::string() : why;
}

}  // namespace

TEST(LaunchSize, IsWhatTheLauncherAnnounced) {
  EXPECT_EQ(size_with({}), 0);
  EXPECT_EQ(size_with({{"OMPI_COMM_WORLD_SIZE", "4"}}), 4);
  EXPECT_EQ(size_with({{"PMI_SIZE", "3"}}), 3);
  EXPECT_EQ(size_with({{"MV2_COMM_WORLD_SIZE", "2"}}), 2);
  // An allocation alone starts nothing; a step does, and its size is the step's.
  EXPECT_EQ(size_with({{"SLURM_NTASKS", "8"}}), 0);
  EXPECT_EQ(size_with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}}), 0);
  EXPECT_EQ(size_with({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}}), 8);
  EXPECT_EQ(
      size_with({{"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_ID", "0"}}),
      2);
}

TEST(LaunchSize, IgnoresWhatIsNoCount) {
  for (const char* text : {"", "0", "-4", "four", "4x", "99999999999999999999"}) {
    EXPECT_EQ(size_with({{"OMPI_COMM_WORLD_SIZE", text}}), 0) << text;
  }
}

TEST(Mpi, WithoutItTheErrorSaysWhatToDo) {
  if (have_mpi()) GTEST_SKIP() << "this build has MPI; its suite runs under mpirun";
  EXPECT_THAT(test::message_of<CommError>([] { make_mpi(); }), ::testing::HasSubstr("HOIST_WITH_MPI"));
}

TEST(Nccl, WithoutItTheErrorSaysWhatToDo) {
  if (have_nccl()) GTEST_SKIP() << "this build has NCCL";
  const auto make = [&] { make_nccl_over(make_self()); };
  EXPECT_THAT(test::message_of<CommError>(make), ::testing::HasSubstr("HOIST_WITH_NCCL"));
}

TEST(Nccl, WithoutAGpuTheErrorIsNcclsOwn) {
  if (!have_nccl()) GTEST_SKIP() << "this build has no NCCL";
  if (why_no_gpu().empty()) GTEST_SKIP() << "there is a GPU";
  for (const int ordinal : {-1, 0}) {
    const auto make = [&] { make_nccl_over(make_self(), {.device_ordinal = ordinal}); };
    EXPECT_THAT(test::message_of<CommError>(make), ::testing::HasSubstr("nccl:"));
  }
}

// What torchrun's environment comes to: every rank makes the same id out of the endpoint, without a word between them.
TEST(Nccl, RanksThatKnowTheEndpointNeedNotHandOutTheId) {
#ifdef HOIST_HAVE_NCCL
  const auto id_at = [](const char* endpoint) {
    ::setenv("NCCL_COMM_ID", endpoint, 1);
    ncclUniqueId id{};
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ::unsetenv("NCCL_COMM_ID");
    return std::string(std::begin(id.internal), std::end(id.internal));
  };
  EXPECT_EQ(id_at("127.0.0.1:29511"), id_at("127.0.0.1:29511"));
  EXPECT_NE(id_at("127.0.0.1:29511"), id_at("127.0.0.1:29512"));
#else
  GTEST_SKIP() << "this build has no NCCL";
#endif
}

TEST(Nccl, AtAnEndpointWithoutAGpuTheErrorIsNcclsOwn) {
  if (!have_nccl()) GTEST_SKIP() << "this build has no NCCL";
  if (why_no_gpu().empty()) GTEST_SKIP() << "there is a GPU";
  for (const int ordinal : {-1, 0}) {
    const auto make = [&] { make_nccl_at("127.0.0.1:29513", 0, 1, {.device_ordinal = ordinal}); };
    EXPECT_THAT(test::message_of<CommError>(make), ::testing::HasSubstr("nccl:"));
  }
  EXPECT_EQ(std::getenv("NCCL_COMM_ID"), nullptr) << "left behind";
  EXPECT_THROW(make_nccl_at("127.0.0.1:29513", 2, 2), UsageError);
}

TEST(Nccl, AtAnEndpointOneRankOnOneGpu) {
  if (!have_nccl()) GTEST_SKIP() << "this build has no NCCL";
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  const auto communicator = make_nccl_at("127.0.0.1:29514", 0, 1);
  communicator->barrier();
  const int mine = 7;
  int all = 0;
  communicator->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(&all, 1)));
  EXPECT_EQ(all, 7);
  communicator->duplicate()->barrier();
}

// One GPU: every operation passes through NCCL, and a reduction over one rank is its scale.
TEST(Nccl, OneRankOnOneGpu) {
  if (!have_nccl()) GTEST_SKIP() << "this build has no NCCL";
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  platform::DeviceOptions options;
  options.kind = platform::DeviceKind::cuda;
  options.memory_bytes = 1 * kMiB;
  const auto device = platform::Device::create(options);
  const auto stream = device->create_stream("nccl");
  const auto communicator = make_nccl_over(make_self());
  EXPECT_EQ(communicator->name(), "nccl");

  std::vector<float> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  std::byte* const memory = device->memory().data();
  stream->copy(memory, reinterpret_cast<const std::byte*>(values.data()), 4000, platform::CopyKind::host_to_device);
  const ReducePiece reduce{memory, DType::fp32, 1000, 0.5f};
  communicator->reduce_scatter({&reduce, 1}, *stream);
  const GatherPiece gather{memory, 4000};
  communicator->all_gather({&gather, 1}, *stream);
  std::vector<float> found(1000);
  stream->copy(reinterpret_cast<std::byte*>(found.data()), memory, 4000, platform::CopyKind::device_to_host);
  stream->synchronize();
  for (std::size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], 0.5f * static_cast<float>(i));
}

TEST(Nccl, RefusesAStreamOfTheHostDevice) {
  if (!have_nccl()) GTEST_SKIP() << "this build has no NCCL";
  if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  const auto communicator = make_nccl_over(make_self());
  platform::DeviceOptions options;
  options.memory_bytes = 1 * kMiB;
  const auto device = platform::Device::create(options);
  const auto stream = device->create_stream("host");
  EXPECT_THROW(communicator->all_gather({}, *stream), UsageError);
}

}  // namespace hoist::comm::communicator_test
