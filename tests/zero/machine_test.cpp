// SPDX-License-Identifier: Apache-2.0
// The parts of a machine that a runtime takes where its options leave the choice.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/zero/machine.hpp>
#include <hoist/zero/predict/machine_fit.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_model.hpp"

namespace hoist::test::machine_test {
namespace {

using platform::DeviceKind;
using ::testing::HasSubstr;

constexpr std::uint64_t kReserve = 6 * kGiB + 410 * kMiB;  // a tenth of 64 GiB, rounded up

Machine workstation() {
  return {.host = {.total_bytes = 64 * kGiB, .free_bytes = 60 * kGiB}, .cpu_count = 16, .allowed_cpu_count = 16};
}

Machine with_gpu() {
  Machine machine = workstation();
  machine.gpu_count = 2;
  machine.gpu_ordinal = 1;
  machine.gpu = {.total_bytes = 80 * kGiB, .free_bytes = 79 * kGiB};
  return machine;
}

TEST(MachineChoice, TheGpuIfThereIsOne) {
  EXPECT_EQ(choose({}, workstation()).runtime.device, DeviceKind::host);
  EXPECT_EQ(choose({}, with_gpu()).runtime.device, DeviceKind::cuda);
  EXPECT_EQ(choose({}, with_gpu()).runtime.device_ordinal, 1);
  EXPECT_EQ(choose({.device = DeviceKind::host}, with_gpu()).runtime.device, DeviceKind::host);
}

TEST(MachineChoice, OfTheGpuAndOfTheHostWhatIsFreeLessTheReserve) {
  const RuntimeOptions chosen = choose({}, with_gpu()).runtime;
  EXPECT_EQ(chosen.device_memory_bytes, 70 * kGiB);  // 79 less 8, in steps of 2.5
  EXPECT_EQ(chosen.pinned_memory_bytes, 52 * kGiB);  // 60 less 6.4, in steps of 2
  EXPECT_LE(chosen.pinned_memory_bytes, 60 * kGiB - kReserve);
  EXPECT_EQ(chosen.host_memory_bytes, 0u) << "two memories";
}

Machine with_integrated_gpu() {
  Machine machine = workstation();
  machine.gpu_count = 1;
  machine.gpu = machine.host;
  machine.gpu_memory = platform::gpu_memory({.is_integrated = true, .uses_host_page_tables = true});
  return machine;
}

TEST(MachineChoice, OnAnIntegratedGpuBothBudgetsAreOneMemory) {
  const ChosenOptions chosen = choose({}, with_integrated_gpu());
  EXPECT_EQ(chosen.runtime.device, DeviceKind::cuda);
  EXPECT_EQ(chosen.runtime.host_memory_bytes, 52 * kGiB);
  EXPECT_EQ(chosen.runtime.device_memory_bytes, 52 * kGiB);
  EXPECT_EQ(chosen.runtime.pinned_memory_bytes, 52 * kGiB);
  EXPECT_THAT(chosen.choices[1].reason, HasSubstr("of the memory that GPU and processors share"));

  const RuntimeOptions one = choose({.device_memory_bytes = 20 * kGiB}, with_integrated_gpu()).runtime;
  EXPECT_EQ(one.pinned_memory_bytes, 32 * kGiB) << "the rest, not the same bytes again";
  const RuntimeOptions other = choose({.pinned_memory_bytes = 20 * kGiB}, with_integrated_gpu()).runtime;
  EXPECT_EQ(other.device_memory_bytes, 32 * kGiB);
}

// What the GPU takes at the start is not pinned memory any more.
TEST(MachineChoice, AnIntegratedGpuTakesAPartAndPinnedMemoryHasTheRest) {
  ChosenOptions half = choose({}, with_integrated_gpu());
  divide_shared_memory(half);
  EXPECT_EQ(half.runtime.device_arena_bytes, 26 * kGiB);
  EXPECT_EQ(half.runtime.pinned_memory_bytes, 26 * kGiB);
  EXPECT_EQ(half.choices.back().value, "\"26624MiB\"");

  ChosenOptions told = choose({.device_arena_bytes = 12 * kGiB}, with_integrated_gpu());
  divide_shared_memory(told);
  EXPECT_EQ(told.runtime.device_arena_bytes, 12 * kGiB);
  EXPECT_EQ(told.runtime.pinned_memory_bytes, 40 * kGiB);

  for (const Machine& machine : {with_gpu(), workstation()}) {
    ChosenOptions other = choose({}, machine);
    const RuntimeOptions before = other.runtime;
    divide_shared_memory(other);
    EXPECT_EQ(other.runtime.device_arena_bytes, 0u);
    EXPECT_EQ(other.runtime.pinned_memory_bytes, before.pinned_memory_bytes);
  }
}

TEST(MachineChoice, OnlyAnIntegratedGpuHasNoMemoryOfItsOwn) {
  using platform::GpuMemory;
  EXPECT_EQ(platform::gpu_memory({}), GpuMemory::separate);
  EXPECT_EQ(platform::gpu_memory({.uses_host_page_tables = true}), GpuMemory::coherent);
  EXPECT_EQ(platform::gpu_memory({.is_integrated = true}), GpuMemory::integrated);
  Machine coherent = with_gpu();
  coherent.gpu_memory = GpuMemory::coherent;
  EXPECT_EQ(choose({}, coherent).runtime.host_memory_bytes, 0u);
  EXPECT_EQ(choose({}, coherent).runtime.device_memory_bytes, 70 * kGiB);
}

TEST(MachineChoice, OfAnIntegratedGpuAndOfTheHostTheFitIsOneMemory) {
  const Machine machine = with_integrated_gpu();
  const RuntimeOptions runtime = choose({}, machine).runtime;
  Prediction prediction;
  prediction.device = {.budget_bytes = 52 * kGiB, .least_bytes = 30 * kGiB, .bytes = 30 * kGiB};
  prediction.pinned = prediction.device;
  prediction.host_budget_bytes = runtime.host_memory_bytes;
  const MachineFit fit = machine_fit(prediction, runtime, {}, machine);
  ASSERT_EQ(fit.memories.size(), 1u);
  EXPECT_EQ(fit.memories[0].name, "memory of GPU and processors");
  EXPECT_EQ(fit.memories[0].least_bytes, 60 * kGiB);
  EXPECT_FALSE(fit.fits()) << "52 GiB are not enough for 30 and 30";
}

// Each remedy is about the memory that is short, and leads to the next one until nothing more can leave it.
TEST(MachineFit, TheRemedyMovesStateOutOfTheMemoryThatIsShort) {
  using enum Placement;
  const auto remedy = [](const Machine& machine, EngineOptions engine) {
    Prediction prediction;
    (machine.gpu_count > 0 ? prediction.device : prediction.pinned).least_bytes = 500 * kGiB;
    const std::vector<std::string> problems =
        machine_fit(prediction, choose({}, machine).runtime, engine, machine).problems;
    return problems.empty() ? "" : problems.front();
  };
  EngineOptions engine;
  EXPECT_THAT(remedy(with_gpu(), engine), HasSubstr(R"(offload_optimizer with device "cpu" or "nvme")"));
  EXPECT_THAT(remedy(workstation(), engine), HasSubstr(R"(offload_optimizer with device "nvme")"));
  engine.optimizer = nvme;
  EXPECT_THAT(remedy(with_gpu(), engine), HasSubstr(R"(; offload_param with device "cpu" or "nvme")"));
  EXPECT_THAT(remedy(workstation(), engine), HasSubstr(R"(; offload_param with device "nvme")"));
  engine.stage = 2;
  EXPECT_THAT(remedy(with_gpu(), engine), HasSubstr("stage 3 with offload_param"));
  engine.stage = 3;
  engine.optimizer_pinned_fraction = 0.5;
  EXPECT_THAT(remedy(workstation(), engine), HasSubstr("; a smaller hoist.optimizer_pinned_fraction, or \"auto\""));
  engine.optimizer_pinned_fraction.reset();
  engine.parameters = pinned;
  EXPECT_THAT(remedy(with_gpu(), engine), HasSubstr("more ranks"));
  EXPECT_THAT(remedy(workstation(), engine), HasSubstr(R"(; offload_param with device "nvme")"));
}

// No placement of the engine's state helps.
TEST(MachineFit, AProgramThatDoesNotFitByItselfIsNamed) {
  const auto problem = [](const Machine& machine, const ProgramMemory& program) {
    Prediction prediction;
    prediction.device.least_bytes = program.device_bytes + kGiB;
    prediction.pinned.least_bytes = program.pinned_bytes + kGiB;
    prediction.program = program;
    const auto problems = machine_fit(prediction, choose({}, machine).runtime, {}, machine).problems;
    return problems.empty() ? "" : problems.front();
  };
  const auto names = [](const char* bytes, const char* keys = "program_device_bytes") {
    return ::testing::EndsWith(
        fmt::format("; the program's own memory is {} of it: use more memory, or a smaller {}", bytes, keys));
  };
  EXPECT_THAT(problem(workstation(), {.device_bytes = 500 * kGiB}), names("500 GiB"));
  EXPECT_THAT(problem(workstation(), {.device_bytes = 300 * kGiB, .pinned_bytes = 300 * kGiB}),
              names("600 GiB", "program_device_bytes or program_pinned_bytes"));
  EXPECT_THAT(problem(with_gpu(), {.device_bytes = 500 * kGiB}), names("500 GiB"));
  EXPECT_THAT(problem(with_gpu(), {.pinned_bytes = 500 * kGiB}), names("500 GiB", "program_pinned_bytes"));
  // The program fits into the 60 GiB that are free, and the engine's state beside it does not.
  EXPECT_THAT(problem(workstation(), {.device_bytes = 59 * kGiB}), HasSubstr("; offload_optimizer with"));
  Machine two = workstation();
  two.processes = 2;
  EXPECT_THAT(problem(two, {.device_bytes = 40 * kGiB}), names("80.0 GiB"));
}

TEST(MachineFit, ABudgetThatIsTakenAtTheStartMustBeThere) {
  const Machine machine = with_gpu();
  RuntimeOptions runtime = choose({}, machine).runtime;
  EXPECT_TRUE(machine_fit({}, runtime, {}, machine).fits());
  runtime.device_memory_bytes = machine.gpu.free_bytes + kBlockAlignment;
  EXPECT_THAT(machine_fit({}, runtime, {}, machine).problems, ::testing::ElementsAre(HasSubstr("taken at the start")));
  runtime.device_arena_bytes = kGiB;  // less is taken
  EXPECT_TRUE(machine_fit({}, runtime, {}, machine).fits());
}

// A store takes as much of each drive; one that is nearly full limits it.
TEST(MachineFit, EachDriveMustHaveRoomForItsShare) {
  const TempDirectory on_disk, in_memory(scratch_in_memory());
  const auto free = [](const TempDirectory& directory) { return std::filesystem::space(directory.path()).available; };
  const std::uint64_t less = std::min(free(on_disk), free(in_memory));
  const std::uint64_t more = std::max(free(on_disk), free(in_memory));
  if (more < 2 * less) GTEST_SKIP() << "the two file systems have about as much room";
  EngineOptions engine;
  engine.store_directory = on_disk / "a";
  engine.stripe_directories = {in_memory / "b"};
  Prediction prediction;
  prediction.nvme_bytes = 2 * (less + less / 4);  // less than there is in all
  const MachineFit fit = machine_fit(prediction, {}, engine, workstation());
  ASSERT_EQ(fit.memories.size(), 3u) << "host memory and two file systems";
  const auto* small = &fit.memories[1];
  if (small->fits()) small = &fit.memories[2];
  EXPECT_FALSE(fit.fits());
  EXPECT_NEAR(static_cast<double>(fit.memories[1].bytes + fit.memories[2].bytes),
              static_cast<double>(prediction.nvme_bytes), 10);
  EXPECT_THAT(fit.problems, ::testing::ElementsAre(HasSubstr(small->name)));
}

TEST(MachineFit, ADriveThatIsTooSmallHidesNoBudgetThatIs) {
  const TempDirectory directory;
  const EngineOptions engine{.optimizer = Placement::nvme, .store_directory = directory / "hoist"};
  Prediction prediction;
  prediction.nvme_bytes = std::uint64_t{1} << 60;
  prediction.pinned = {.budget_bytes = kGiB, .least_bytes = 2 * kGiB, .bytes = 2 * kGiB};
  EXPECT_THAT(machine_fit(prediction, {}, engine, workstation()).problems,
              ::testing::ElementsAre(HasSubstr("name a larger drive"), HasSubstr("hoist.pinned_memory is 1.0 GiB")));
}

TEST(MachineFit, AStoreNeedsADirectoryThatCanBeWrittenTo) {
  const TempDirectory directory;
  std::ofstream(directory / "file") << "no directory";
  EngineOptions engine{.optimizer = Placement::nvme, .store_directory = directory / "new/hoist"};
  Prediction prediction;
  prediction.nvme_bytes = prediction.mirror_bytes = kMiB;
  engine.mirror.directory = directory / "file/hoist";
  const auto problems = [&] { return machine_fit(prediction, {}, engine, workstation()).problems; };
  EXPECT_THAT(problems(), ::testing::ElementsAre(::testing::AllOf(HasSubstr("hoist.mirror.path: "),
                                                                  HasSubstr("hoist cannot be made"),
                                                                  HasSubstr("file is not a directory"))));
  engine.mirror.directory = directory / "mirror";
  EXPECT_THAT(problems(), ::testing::IsEmpty());
}

TEST(MachineFit, AStoreNeedsADirectoryThatThisUserMayWriteTo) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  const EngineOptions engine{.optimizer = Placement::nvme, .store_directory = "/hoist"};
  Prediction prediction;
  prediction.nvme_bytes = kMiB;
  EXPECT_THAT(
      machine_fit(prediction, {}, engine, workstation()).problems,
      ::testing::ElementsAre(HasSubstr("nvme_path: /hoist cannot be made: / cannot be written to: Permission denied")));
}

TEST(MachineChoice, OnTheHostDeviceBothBudgetsAreOneMemory) {
  const RuntimeOptions chosen = choose({}, workstation()).runtime;
  EXPECT_EQ(chosen.host_memory_bytes, 52 * kGiB);
  EXPECT_EQ(chosen.device_memory_bytes, 52 * kGiB);
  EXPECT_EQ(chosen.pinned_memory_bytes, 52 * kGiB);
}

TEST(MachineChoice, ANumberThatIsGivenStays) {
  const ChosenOptions both =
      choose({.device_memory_bytes = kGiB, .pinned_memory_bytes = 100 * kGiB, .update_threads = 3}, workstation());
  EXPECT_EQ(both.runtime.device_memory_bytes, kGiB);
  EXPECT_EQ(both.runtime.pinned_memory_bytes, 100 * kGiB);
  EXPECT_EQ(both.runtime.host_memory_bytes, 0u);
  EXPECT_EQ(both.runtime.update_threads, 3u);
  ASSERT_EQ(both.choices.size(), 1u);
  EXPECT_EQ(both.choices[0].key, "hoist.device");

  const RuntimeOptions one = choose({.device_memory_bytes = 2 * kGiB}, workstation()).runtime;
  EXPECT_EQ(one.device_memory_bytes, 2 * kGiB);
  EXPECT_EQ(one.pinned_memory_bytes, 50 * kGiB);
  const RuntimeOptions other = choose({.pinned_memory_bytes = 40 * kGiB}, workstation()).runtime;
  EXPECT_EQ(other.device_memory_bytes, 12 * kGiB);
}

TEST(MachineChoice, ProcessesOfAMachineDivideItsMemoryAndItsProcessors) {
  Machine machine = workstation();
  machine.processes = 4;
  const RuntimeOptions chosen = choose({}, machine).runtime;
  EXPECT_EQ(chosen.pinned_memory_bytes, 13 * kGiB);
  EXPECT_EQ(chosen.update_threads, 4u);
  machine.allowed_cpu_count = 4;  // the launcher bound them
  EXPECT_EQ(choose({}, machine).runtime.update_threads, 0u) << "all that the process may use";
}

// As docker run --cpus=3.5 has it: the process may run on every processor, but not at every time.
TEST(MachineChoice, UpdateThreadsStayBelowTheControlGroupsLimitOfCpuTime) {
  const auto threads = [](std::optional<double> limit, int processes, unsigned given = 0) {
    Machine machine = workstation();
    machine.cpu_limit = limit;
    machine.processes = processes;
    return choose({.update_threads = given}, machine).runtime.update_threads;
  };
  EXPECT_EQ(threads(3.5, 1), 3u);
  EXPECT_EQ(threads(0.5, 1), 1u);
  EXPECT_EQ(threads(16.0, 1), 0u) << "all of them";
  EXPECT_EQ(threads(8.0, 4), 2u);
  EXPECT_EQ(threads(64.0, 4), 4u);
  EXPECT_EQ(threads(3.5, 1, 12), 12u) << "a number in the file wins";
  Machine machine = workstation();
  machine.cpu_limit = 3.5;
  EXPECT_THAT(choose({}, machine).choices.back().reason, HasSubstr("3.5 CPUs"));
}

Machine server(int processes, int local_rank) {
  Machine machine = with_gpu();
  machine.processes = processes;
  machine.local_rank = local_rank;
  machine.nodes = platform::Topology::synthetic("numa:2 core:4 pu:2").nodes();
  machine.gpu_ordinal = local_rank % 2;
  machine.gpu_nodes = {1, 0};
  return machine;
}

TEST(MachineChoice, RanksThatHaveCountedThemselvesKnowBetterThanTheLauncher) {
  const Machine counted = this_machine({.local_ranks = 3, .local_rank = 2});
  EXPECT_EQ(counted.processes, 3);
  EXPECT_EQ(counted.local_rank, 2);
  EXPECT_EQ(choose({}, counted).runtime.local_rank, 2);
}

TEST(MachineChoice, MemoryAndUpdateThreadsAreBesideTheGpu) {
  const ChosenOptions chosen = choose({}, server(2, 0));
  EXPECT_EQ(chosen.runtime.memory_nodes, std::vector<int>{1});
  EXPECT_EQ(chosen.runtime.update_cpus, (std::vector<int>{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(chosen.runtime.update_threads, 8u);
  EXPECT_EQ(choose({}, server(2, 1)).runtime.memory_nodes, std::vector<int>{0});
  const auto nodes = std::ranges::find(chosen.choices, "NUMA nodes of pinned memory", &MachineChoice::key);
  ASSERT_NE(nodes, chosen.choices.end());
  EXPECT_EQ(nodes->value, "1");
  EXPECT_EQ(nodes->reason, "GPU 0 is on node 1");
  const auto cpus = std::ranges::find(chosen.choices, "CPUs of update threads", &MachineChoice::key);
  ASSERT_NE(cpus, chosen.choices.end());
  EXPECT_EQ(cpus->value, "8-15");
}

TEST(MachineChoice, IoThreadsOfRanksDivideTheDrivesNode) {
  using Places = std::vector<platform::IoPlace>;
  EXPECT_EQ(choose({}, server(2, 0)).runtime.io_places,
            (Places{{0, {0, 1, 2, 3, 4, 5, 6, 7}}, {1, {8, 9, 10, 11, 12, 13, 14, 15}}}));
  Machine four = server(4, 3);
  four.gpu_nodes = {0, 0, 1, 1};
  EXPECT_EQ(choose({}, four).runtime.io_places, (Places{{0, {4, 5, 6, 7}}, {1, {12, 13, 14, 15}}}));
  EXPECT_TRUE(choose({.numa_placement = false}, server(2, 0)).runtime.io_places.empty());
  EXPECT_EQ(choose({.io_places = {{1, {9}}}}, server(2, 0)).runtime.io_places, (Places{{1, {9}}}));
  EXPECT_TRUE(choose({}, workstation()).runtime.io_places.empty());
  // A launcher that has bound the process: the processors that it may use.
  Machine bound = server(2, 0);
  bound.allowed_cpu_count = 8;
  bound.nodes[1].cpus.clear();
  bound.nodes[1].cores.clear();
  EXPECT_EQ(choose({}, bound).runtime.io_places, (Places{{0, {0, 1, 2, 3, 4, 5, 6, 7}}}));
}

TEST(MachineChoice, OneProcessTakesMemoryFromAllNodesInTurn) {
  const RuntimeOptions chosen = choose({}, server(1, -1)).runtime;
  EXPECT_EQ(chosen.memory_nodes, (std::vector<int>{1, 0}));
  EXPECT_TRUE(chosen.update_cpus.empty());
  EXPECT_EQ(chosen.update_threads, 0u);
}

TEST(MachineChoice, PlacementIsLeftToTheLauncherAndToTheProgram) {
  Machine bound = server(2, 0);
  bound.allowed_cpu_count = 8;
  bound.nodes[1].cpus.clear();  // as hwloc shows it
  EXPECT_EQ(choose({}, bound).runtime.memory_nodes, std::vector<int>{0});
  EXPECT_TRUE(choose({}, bound).runtime.update_cpus.empty());

  const RuntimeOptions off = choose({.numa_placement = false}, server(2, 0)).runtime;
  EXPECT_TRUE(off.memory_nodes.empty());
  EXPECT_TRUE(off.update_cpus.empty());
  EXPECT_EQ(off.update_threads, 8u) << "processes divide the processors all the same";

  const RuntimeOptions own = choose({.memory_nodes = {0}, .update_cpus = {3}}, server(2, 0)).runtime;
  EXPECT_EQ(own.memory_nodes, std::vector<int>{0});
  EXPECT_EQ(own.update_cpus, std::vector<int>{3});
  EXPECT_EQ(own.update_threads, 1u);

  EXPECT_TRUE(choose({}, server(2, -1)).runtime.memory_nodes.empty()) << "nobody said which process this is";
}

TEST(MachineChoice, IsTheSameFromRunToRun) {
  Machine machine = workstation();
  const std::uint64_t first = choose({}, machine).runtime.pinned_memory_bytes;
  machine.host.free_bytes -= 700 * kMiB;  // a browser
  EXPECT_EQ(choose({}, machine).runtime.pinned_memory_bytes, first);
}

TEST(MachineChoice, SaysWhy) {
  Machine machine = workstation();
  machine.processes = 4;
  const ChosenOptions chosen = choose({}, machine);
  ASSERT_EQ(chosen.choices.size(), 3u);
  EXPECT_EQ(chosen.choices[0].key, "hoist.device");
  EXPECT_EQ(chosen.choices[0].value, "\"host\"");
  EXPECT_EQ(chosen.choices[1].value, "\"13312MiB\" together");
  EXPECT_THAT(chosen.choices[1].reason, HasSubstr("60.0 GiB of 64.0 GiB"));
  EXPECT_THAT(chosen.choices[1].reason, HasSubstr("4 processes divide the rest"));
  EXPECT_EQ(chosen.choices[2].key, "hoist.update_threads");
}

TEST(MachineChoice, NothingFreeIsABudgetThatIsRefusedNotAnError) {
  Machine machine = workstation();
  machine.host.free_bytes = kGiB;
  EXPECT_EQ(choose({}, machine).runtime.pinned_memory_bytes, kMiB);
}

// --- one budget for both memories ---------------------------------------------------------------------------------

ToySetup with_host_memory(std::uint64_t bytes, const std::string& directory) {
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory);
  setup.runtime.device_memory_bytes = setup.runtime.pinned_memory_bytes = setup.runtime.host_memory_bytes = bytes;
  return setup;
}

TEST(HostBudget, IsHardAndItsRefusalNamesTheSmallestThatWorks) {
  const auto refusal = [](std::uint64_t bytes) -> std::optional<BudgetError::Need> {
    const TempDirectory directory;
    const ToySetup setup = with_host_memory(bytes, directory / "store");
    ToyModel toy(setup);
    try {
      toy.initialize();
    } catch (const BudgetError& error) {
      return error.need;
    }
    toy.train(1, 2);
    EXPECT_LE(toy.runtime().device_budget().held_bytes() + toy.runtime().pinned_budget().held_bytes(), bytes);
    EXPECT_LE(toy.runtime().pinned_budget().common()->peak_bytes(), bytes);
    return {};
  };
  const std::uint64_t too_little = 256 * kKiB;
  const auto need = refusal(too_little);
  ASSERT_TRUE(need);
  EXPECT_EQ(need->tier, "host");
  EXPECT_EQ(need->have_bytes, too_little);
  EXPECT_FALSE(refusal(need->need_bytes));
  EXPECT_TRUE(refusal(need->need_bytes - kBlockAlignment));
}

TEST(HostBudget, IsPredicted) {
  const TempDirectory directory;
  for (const std::uint64_t bytes : {4 * kMiB, 32 * kMiB, kGiB}) {
    const ToySetup setup = with_host_memory(bytes, directory / std::to_string(bytes));
    ToyModel toy(setup);
    const Prediction prediction = predict(setup.runtime, setup.engine, toy.model(), 1);
    ASSERT_TRUE(prediction.fits()) << bytes;
    EXPECT_LE(prediction.device.bytes + prediction.pinned.bytes, bytes);
    toy.initialize();
    EXPECT_EQ(toy.runtime().device_budget().held_bytes(), prediction.device.bytes) << bytes;
    EXPECT_EQ(toy.runtime().pinned_budget().held_bytes(), prediction.pinned.bytes) << bytes;
  }
}

TEST(HostBudget, PlacementAndBudgetsChangeNoBit) {
  const TempDirectory directory;
  const auto digest = [](const ToySetup& setup) {
    ToyProgram toy(setup);
    toy.train(1, 3);
    return state_digest(toy.engine(), State::master);
  };
  const std::string expected = digest(toy_setup(Placement::device, Placement::device, ""));
  ToySetup open = toy_setup(Placement::nvme, Placement::nvme, directory / "open");
  open.runtime.device_memory_bytes = open.runtime.pinned_memory_bytes = 0;
  EXPECT_EQ(digest(open), expected);
  ToySetup as_much_as_fits = toy_setup(Placement::nvme, Placement::nvme, directory / "fraction");
  as_much_as_fits.runtime.device_memory_bytes = as_much_as_fits.runtime.pinned_memory_bytes = 0;
  as_much_as_fits.engine.optimizer_pinned_fraction.reset();
  EXPECT_EQ(digest(as_much_as_fits), expected);
}

// A process under `ulimit -v`: reserved addresses count, and pinned memory is mapped beside them.
TEST(HostBudget, AnAddressSpaceThatIsLimitedHoldsBothMemories) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need terabytes of addresses";
#endif
  const TempDirectory directory;
  const auto train = [&] {
    rlimit limit{};
    ::getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = 4 * kGiB;
    ::setrlimit(RLIMIT_AS, &limit);
    ToySetup open = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    open.runtime.device_memory_bytes = open.runtime.pinned_memory_bytes = 0;
    ToyProgram toy(open);
    toy.train(1, 2);
    return toy.runtime().options().host_memory_bytes < 2 * kGiB ? 0 : 1;
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(std::exit(train()), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace hoist::test::machine_test
