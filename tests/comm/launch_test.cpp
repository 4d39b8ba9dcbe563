// SPDX-License-Identifier: Apache-2.0
// Which launcher is recognised by which variables, and which of several wins.
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/message_of.hpp>

namespace hoist::comm::launch_test {

namespace {

using Variables = std::map<std::string, std::string>;

Launch launch_in(const Variables& variables) {
  return read_launch([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

Variables joined(Variables all, const Variables& more) {
  all.insert(more.begin(), more.end());
  return all;
}

// As these launchers set them, for one process of several.
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_RANK", "5"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kHydra = {{"PMI_SIZE", "6"}, {"PMI_RANK", "4"}, {"MPI_LOCALRANKID", "0"}};
const Variables kMvapich = {
    {"MV2_COMM_WORLD_SIZE", "3"}, {"MV2_COMM_WORLD_RANK", "2"}, {"MV2_COMM_WORLD_LOCAL_RANK", "2"}};
const Variables kSrun = {{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "16"},         {"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "9"},  {"SLURM_STEP_NUM_TASKS", "12"}, {"SLURM_LOCALID", "3"}};
const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "none"}};

struct Case {
  const char* name;
  Variables variables;
  Launcher launcher;
  int rank, size, local_rank;
};

class LaunchTest : public testing::TestWithParam<Case> {};

TEST_P(LaunchTest, IsRead) {
  const Case& c = GetParam();
  const Launch launch = launch_in(c.variables);
  EXPECT_EQ(launch.launcher, c.launcher);
  EXPECT_EQ(launch.rank, c.rank);
  EXPECT_EQ(launch.size, c.size);
  EXPECT_EQ(launch.local_rank, c.local_rank);
}

TEST(Launch, ProcessesOfAMachine) {
  EXPECT_EQ(launch_in({}).local_size, 1);
  EXPECT_EQ(launch_in(kOpenMpi).local_size, 4);
  EXPECT_EQ(launch_in(kTorchrun).local_size, 4) << "not announced: all";
  Variables torchrun = kTorchrun;
  torchrun["LOCAL_SIZE"] = "1";
  EXPECT_EQ(launch_in(torchrun).local_size, 1) << "of DeepSpeed's launcher";
  torchrun["LOCAL_WORLD_SIZE"] = "2";
  EXPECT_EQ(launch_in(torchrun).local_size, 2);
  Variables srun = kSrun;
  EXPECT_EQ(launch_in(srun).local_size, 12);
  for (const auto& [list, most] : {std::pair("4(x3)", 4), std::pair("3,5(x1),4", 5), std::pair("many", 12)}) {
    srun["SLURM_STEP_TASKS_PER_NODE"] = list;
    EXPECT_EQ(launch_in(srun).local_size, most) << list;
  }
  srun["SLURM_STEP_TASKS_PER_NODE"] = "4(x3)";
  EXPECT_EQ(launch_in(joined({{"PMI_SIZE", "12"}, {"PMI_RANK", "9"}}, srun)).local_size, 4) << "srun --mpi=pmi2";
  torchrun["LOCAL_WORLD_SIZE"] = "9";  // of 4
  EXPECT_EQ(launch_in(torchrun).local_size, 4);
}

INSTANTIATE_TEST_SUITE_P(
    Environments, LaunchTest,
    testing::Values(
        Case{"nothing", {}, Launcher::none, 0, 1, -1}, Case{"open_mpi", kOpenMpi, Launcher::mpi, 5, 8, 1},
        Case{"hydra", kHydra, Launcher::mpi, 4, 6, 0}, Case{"mvapich", kMvapich, Launcher::mpi, 2, 3, 2},
        Case{"srun", kSrun, Launcher::slurm, 9, 12, 3}, Case{"torchrun", kTorchrun, Launcher::torchrun, 3, 4, 1},
        // Inside an allocation nothing is started yet: the variables of the batch script.
        Case{"sbatch",
             {{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "16"}, {"SLURM_PROCID", "0"}},
             Launcher::none,
             0,
             1,
             -1},
        Case{"srun_pmi2", joined({{"PMI_SIZE", "12"}, {"PMI_RANK", "9"}}, kSrun), Launcher::mpi, 9, 12, 3},
        // The variables of the srun that started mpirun are those of another process.
        Case{"mpirun_in_srun", joined({{"PMI_SIZE", "12"}, {"PMI_RANK", "2"}}, kSrun), Launcher::mpi, 2, 12, -1},
        Case{"mpirun_in_slurm", joined(kOpenMpi, kSrun), Launcher::mpi, 5, 8, 1},
        // One torchrun a node, started by srun or mpirun, whose variables its processes inherit.
        Case{"srun_torchrun", joined(kTorchrun, kSrun), Launcher::torchrun, 3, 4, 1},
        Case{"srun_pmi2_torchrun", joined(kTorchrun, kHydra), Launcher::torchrun, 3, 4, 1},
        Case{"mpirun_torchrun", joined(kTorchrun, kOpenMpi), Launcher::torchrun, 3, 4, 1},
        // RANK and WORLD_SIZE that a program exported for PyTorch, under mpirun and under srun.
        Case{"mpirun_exports", joined({{"RANK", "5"}, {"WORLD_SIZE", "8"}}, kOpenMpi), Launcher::mpi, 5, 8, 1},
        Case{"srun_exports", joined({{"RANK", "9"}, {"WORLD_SIZE", "12"}, {"LOCAL_RANK", "3"}}, kSrun),
             Launcher::torchrun, 9, 12, 3},
        Case{"only_world_size", {{"WORLD_SIZE", "4"}}, Launcher::none, 0, 1, -1},
        Case{"no_count", {{"OMPI_COMM_WORLD_SIZE", "four"}}, Launcher::none, 0, 1, -1}),
    [](const auto& case_info) { return std::string(case_info.param.name); });

TEST(Launch, TorchrunSaysWhereToMeet) {
  const Launch launch = launch_in(kTorchrun);
  EXPECT_EQ(launch.master_address, "node0");
  EXPECT_EQ(launch.master_port, 29500);
}

TEST(Launch, WhatTorchrunWouldNotSetIsRefusedWithItsValue) {
  const auto refusal = [](const Variables& changed) {
    return test::message_of<CommError>([&] { launch_in(joined(changed, kTorchrun)); });
  };
  EXPECT_THAT(refusal({{"RANK", "4"}}), testing::HasSubstr("RANK is '4'"));
  EXPECT_THAT(refusal({{"RANK", "-1"}}), testing::HasSubstr("'-1'"));
  EXPECT_THAT(refusal({{"WORLD_SIZE", "x"}}), testing::HasSubstr("'x'"));
  for (const char* no_port : {"70000", "http", "tcp://10.0.0.1:80"})
    EXPECT_EQ(launch_in(joined({{"MASTER_PORT", no_port}}, kTorchrun)).master_port, 0) << no_port;
}

}  // namespace

}  // namespace hoist::comm::launch_test
