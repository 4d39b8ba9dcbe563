// SPDX-License-Identifier: Apache-2.0
// P1: where state lives, how it is cut and by whom it is moved never changes a bit.
#include <array>
#include <cfenv>
#include <cstring>
#include <ostream>

#include <gtest/gtest.h>

#include "toy_model.hpp"

namespace hoist::test::placement_test {
namespace {

struct Cell {
  const char* name;
  Placement parameters = Placement::nvme;
  Placement optimizer = Placement::nvme;
  tiers::Durability durability = tiers::Durability::step;
  aio::BackendKind backend = aio::BackendKind::automatic;
  std::uint64_t block_bytes = kMiB;
  std::uint64_t sub_group = 20000;
  unsigned update_buffers = 4;
  unsigned staging_buffers = 5;
  unsigned threads = 2;
  std::uint64_t chaos_seed = 0;
  std::uint64_t device_bytes = 4 * kMiB;
  std::uint64_t persistence = 0;
  std::uint64_t prefetch = 50'000'000;
  std::uint64_t reuse = 1'000'000'000;
  double pinned_fraction = 0, pinned_weights = 0;
  bool host_accessible = true;
  double offload_ratio = 1;
  std::optional<std::uint32_t> spilled = 0;
  // Where memory and threads are: of the machine that the tests run on, its first node and processor, and ones that it
  // does not have.
  std::vector<int> memory_nodes{}, staging_nodes{};
  std::vector<platform::IoPlace> io_places{};
};

std::ostream& operator<<(std::ostream& out, const Cell& cell) { return out << cell.name; }

// Weights of fp16 with a loss scale that moves both ways, so that some steps are skipped.
ToyShape shape_of(DType dtype) { return {.dtype = dtype}; }
void choose(ToySetup& setup, DType dtype) {
  setup.engine.weights_dtype = dtype;
  if (dtype == DType::fp16) setup.engine.loss_scale = toy_loss_scale();
}
constexpr std::array kDTypes{DType::bf16, DType::fp16};

ToySetup setup_of(const Cell& cell, const std::string& directory, DType dtype) {
  const bool nvme = cell.parameters == Placement::nvme || cell.optimizer == Placement::nvme;
  ToySetup setup = toy_setup(cell.parameters, cell.optimizer, nvme ? directory : "");
  setup.runtime.aio_backend = cell.backend;
  setup.runtime.aio_block_bytes = cell.block_bytes;
  setup.runtime.update_threads = cell.threads;
  setup.runtime.host_device.chaos_seed = cell.chaos_seed;
  setup.runtime.host_device.host_accessible = cell.host_accessible;
  setup.runtime.device_memory_bytes = cell.device_bytes;
  setup.engine.durability = cell.durability;
  setup.engine.sub_group_elements = cell.sub_group;
  setup.engine.update_buffer_count = cell.update_buffers;
  setup.engine.staging_buffer_count = cell.staging_buffers;
  setup.engine.persistence_elements = cell.persistence;
  setup.engine.prefetch_elements = cell.prefetch;
  setup.engine.reuse_distance_elements = cell.reuse;
  setup.engine.optimizer_pinned_fraction = cell.pinned_fraction;
  setup.engine.parameters_pinned_fraction = cell.pinned_weights;
  setup.engine.optimizer_offload_ratio = cell.offload_ratio;
  setup.engine.gradient_spill_units = cell.spilled;
  setup.runtime.memory_nodes = cell.memory_nodes;
  setup.runtime.staging_nodes = cell.staging_nodes;
  setup.runtime.io_places = cell.io_places;
  choose(setup, dtype);
  return setup;
}

constexpr Placement kDevice = Placement::device, kPinned = Placement::pinned, kNvme = Placement::nvme;
constexpr auto kNone = tiers::Durability::none;

const std::vector<Cell>& cells() {
  static const std::vector<Cell> kCells{
      {.name = "device_device", .parameters = kDevice, .optimizer = kDevice},
      {.name = "device_device_apart", .parameters = kDevice, .optimizer = kDevice, .host_accessible = false},
      {.name = "device_cpu", .parameters = kDevice, .optimizer = kPinned},
      {.name = "device_nvme", .parameters = kDevice},
      {.name = "cpu_device", .parameters = kPinned, .optimizer = kDevice},
      {.name = "cpu_cpu", .parameters = kPinned, .optimizer = kPinned},
      {.name = "cpu_nvme", .parameters = kPinned},
      {.name = "cpu_nvme_not_durable", .parameters = kPinned, .durability = kNone},
      {.name = "nvme_device", .optimizer = kDevice},
      {.name = "nvme_cpu", .optimizer = kPinned},
      {.name = "nvme_nvme"},
      {.name = "nvme_nvme_not_durable", .durability = kNone},
      {.name = "threads_backend", .backend = aio::BackendKind::threads},
      {.name = "tiny_blocks", .block_bytes = 4096},
      {.name = "odd_blocks_tiny_subgroup", .block_bytes = 20480, .sub_group = 1},
      {.name = "subgroup_larger_than_model", .sub_group = 1'000'000'000},
      {.name = "fewest_buffers", .update_buffers = 3, .staging_buffers = 1},
      {.name = "many_buffers", .update_buffers = 9, .staging_buffers = 4},
      {.name = "half_pinned", .pinned_fraction = 0.5},
      {.name = "quarter_pinned_cpu_nvme_one_tile", .parameters = kPinned, .sub_group = 1, .pinned_fraction = 0.25},
      {.name = "all_pinned_device_nvme", .parameters = kDevice, .pinned_fraction = 1},
      {.name = "half_pinned_not_durable", .durability = kNone, .pinned_fraction = 0.5},
      {.name = "half_of_the_weights_pinned", .pinned_weights = 0.5},
      {.name = "third_of_the_weights_two_thirds_of_the_state_pinned_one_tile",
       .sub_group = 1,
       .staging_buffers = 1,
       .chaos_seed = 19,
       .device_bytes = kMiB,
       .pinned_fraction = 0.67,
       .pinned_weights = 0.33},
      {.name = "most_weights_pinned_nvme_cpu_not_durable",
       .optimizer = kPinned,
       .durability = kNone,
       .chaos_seed = 20,
       .reuse = 0,
       .pinned_weights = 0.8},
      {.name = "all_weights_pinned_of_nvme", .chaos_seed = 21, .device_bytes = kMiB, .pinned_weights = 1},
      {.name = "half_of_the_weights_pinned_ratio_half", .pinned_weights = 0.5, .offload_ratio = 0.5},
      {.name = "device_cpu_ratio_0", .parameters = kDevice, .optimizer = kPinned, .offload_ratio = 0},
      {.name = "device_cpu_ratio_3_tenths", .parameters = kDevice, .optimizer = kPinned, .offload_ratio = 0.3},
      {.name = "device_cpu_ratio_half_apart",
       .parameters = kDevice,
       .optimizer = kPinned,
       .chaos_seed = 16,
       .host_accessible = false,
       .offload_ratio = 0.5},
      {.name = "device_cpu_ratio_0_apart",
       .parameters = kDevice,
       .optimizer = kPinned,
       .host_accessible = false,
       .offload_ratio = 0},
      {.name = "cpu_cpu_ratio_half", .parameters = kPinned, .optimizer = kPinned, .offload_ratio = 0.5},
      {.name = "nvme_cpu_ratio_3_tenths", .optimizer = kPinned, .chaos_seed = 17, .offload_ratio = 0.3},
      {.name = "device_nvme_ratio_3_tenths_apart",
       .parameters = kDevice,
       .chaos_seed = 18,
       .host_accessible = false,
       .offload_ratio = 0.3},
      {.name = "device_nvme_ratio_half_apart_not_durable",
       .parameters = kDevice,
       .durability = kNone,
       .host_accessible = false,
       .offload_ratio = 0.5},
      {.name = "nvme_nvme_ratio_half", .pinned_fraction = 0.5, .offload_ratio = 0.5},
      {.name = "staging_on_the_drives_node", .chaos_seed = 23, .memory_nodes = {0}, .staging_nodes = {0}},
      {.name = "staging_and_io_apart_threads_backend",
       .backend = aio::BackendKind::threads,
       .staging_buffers = 1,
       .chaos_seed = 24,
       .staging_nodes = {0},
       .io_places = {{0, {0}}}},
      {.name = "staging_and_io_on_nodes_that_are_not_there",
       .staging_buffers = 3,
       .memory_nodes = {0},
       .staging_nodes = {900},
       .io_places = {{900, {70000}}}},
      {.name = "all_gradients_spilled_chaos", .chaos_seed = 22, .spilled = 99},
      {.name = "one_gradient_spilled_cpu_nvme_one_tile",
       .parameters = kPinned,
       .sub_group = 1,
       .update_buffers = 3,
       .spilled = 1},
      {.name = "all_gradients_spilled_nvme_cpu_not_durable",
       .optimizer = kPinned,
       .durability = kNone,
       .chaos_seed = 23,
       .spilled = 99},
      {.name = "two_gradients_spilled_half_pinned_ratio_half",
       .chaos_seed = 24,
       .pinned_fraction = 0.5,
       .pinned_weights = 0.5,
       .offload_ratio = 0.5,
       .spilled = 2},
      {.name = "one_thread", .threads = 1},
      {.name = "small_device", .device_bytes = kMiB},
      {.name = "chaos", .chaos_seed = 11},
      {.name = "chaos_small_device", .chaos_seed = 12, .device_bytes = kMiB},
      {.name = "chaos_cpu", .parameters = kPinned, .optimizer = kPinned, .chaos_seed = 13},
      {.name = "chaos_device", .parameters = kDevice, .optimizer = kPinned, .chaos_seed = 14},
      {.name = "everything_persistent", .persistence = 1'000'000},
      {.name = "no_prefetch_no_reuse", .prefetch = 0, .reuse = 0},
      {.name = "chaos_some_persistent", .chaos_seed = 15, .device_bytes = kMiB + kMiB / 4, .persistence = 17000},
  };
  return kCells;
}

constexpr std::uint64_t kSteps = 6;

const Digests& reference(DType dtype) {
  static const auto train = [](DType d) {
    ToySetup simplest = toy_setup(kPinned, kPinned);
    simplest.engine.update_mode = UpdateMode::step;
    choose(simplest, d);
    return train_once(simplest, shape_of(d), kSteps);
  };
  static const Digests kBf16 = train(DType::bf16), kFp16 = train(DType::fp16);
  return dtype == DType::bf16 ? kBf16 : kFp16;
}

class PlacementTest : public testing::TestWithParam<Cell> {};

TEST_P(PlacementTest, EndsInTheSameBits) {
  for (const DType dtype : kDTypes) {
    for (const UpdateMode mode : {UpdateMode::automatic, UpdateMode::step}) {
      const TempDirectory directory;
      ToySetup setup = setup_of(GetParam(), (directory / "store"), dtype);
      setup.engine.update_mode = mode;
      EXPECT_EQ(train_once(setup, shape_of(dtype), kSteps), reference(dtype))
          << dtype_name(dtype) << ", mode " << static_cast<int>(mode);
    }
  }
}

TEST_P(PlacementTest, StoppedAndResumedInTheMiddle) {
  const Cell& cell = GetParam();
  const bool nvme = cell.parameters == kNvme || cell.optimizer == kNvme;
  if (nvme && cell.durability == kNone) GTEST_SKIP() << "a store with durability none cannot be resumed, by definition";
  for (const DType dtype : kDTypes) {
    const TempDirectory directory;
    ToySetup setup = setup_of(cell, (directory / "store"), dtype);
    setup.engine.store_directory = (directory / "store");
    std::vector<double> losses;
    std::uint64_t applied = 0;
    {
      ToyProgram model(setup, shape_of(dtype));
      model.train(1, kSteps / 2);
      const std::uint64_t step = kSteps / 2;
      if (!nvme) model.engine().save("middle", std::as_bytes(std::span(&step, 1))).wait();
      losses = model.losses;
      applied = model.engine().step_count();
    }
    EXPECT_EQ(applied < kSteps / 2, dtype == DType::fp16) << "some of fp16 are skipped, none of bf16";
    ToyModel model(setup, shape_of(dtype));
    ASSERT_EQ(model.find_commit(), applied);
    const RestoreReport report = model.restore();
    EXPECT_EQ(report.step, applied);
    std::uint64_t state = 0;  // the last attempt that was applied; those after it are made again
    ASSERT_EQ(report.caller_state.size(), sizeof(state));
    std::memcpy(&state, report.caller_state.data(), sizeof(state));
    EXPECT_TRUE(state == kSteps / 2 || dtype == DType::fp16) << state;
    losses.resize(state);
    model.losses = losses;
    model.train(state + 1, kSteps);
    EXPECT_EQ(digests_of(model), reference(dtype)) << dtype_name(dtype);
  }
}

INSTANTIATE_TEST_SUITE_P(Cells, PlacementTest, testing::ValuesIn(cells()),
                         [](const auto& cell) { return std::string(cell.param.name); });

// A placement is compared with more than itself: the reference must move, clip and depend on the seed.
TEST(PlacementReference, ClipsEveryStepAndDependsOnTheSeed) {
  ToyProgram model(toy_setup(kPinned, kPinned));
  model.train(1, kSteps);
  for (const StepReport& report : model.reports) EXPECT_LT(report.clip_factor, 1.0);
  EXPECT_NE(model.losses.front(), model.losses.back());
  EXPECT_NE(train_once(toy_setup(kPinned, kPinned), ToyShape{.seed = 2}, 2).master,
            train_once(toy_setup(kPinned, kPinned), ToyShape{}, 2).master);
}

// The thread that calls step() may round as it likes, as one of interval arithmetic does.
TEST(PlacementReference, TheRoundingModeOfTheProgramIsItsOwn) {
  const ToySetup setup = toy_setup(kPinned, kPinned);
  const auto reports_with = [&](int rounding, Digests& digests) {
    ToyProgram model(setup);
    std::vector<StepReport> reports;
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      model.pass(step);
      std::fesetround(rounding);
      reports.push_back(model.engine().step());
      EXPECT_EQ(std::fegetround(), rounding);
      std::fesetround(FE_TONEAREST);
    }
    digests = digests_of(model);
    return reports;
  };
  Digests nearest, upward;
  const auto expected = reports_with(FE_TONEAREST, nearest), found = reports_with(FE_UPWARD, upward);
  EXPECT_EQ(upward, nearest);
  for (std::size_t i = 0; i < kSteps; ++i) {
    EXPECT_EQ(found[i].gradient_norm, expected[i].gradient_norm);
    EXPECT_EQ(found[i].clip_factor, expected[i].clip_factor);
  }
}

}  // namespace
}  // namespace hoist::test::placement_test
