// SPDX-License-Identifier: Apache-2.0
// State in device memory that the CPU cannot read, beside state on NVMe: reading and writing it between a pass and
// step() leaves the records alone that the engine is reading ahead for that step.
#include <array>
#include <limits>

#include <gtest/gtest.h>

#include <hoist/tests/support/faulty_backend.hpp>

#include "toy_model.hpp"

namespace hoist::test::record_io_test {
namespace {

// With half of the optimizer offloaded, units 0 and 1 are on the device and units 2 and 3 on NVMe.
const ToyShape kShape{.matrices = {40000, 20000, 70001, 60000}};

ToySetup divided(bool host_accessible, const std::string& directory) {
  ToySetup setup = toy_setup(Placement::device, Placement::nvme, directory);
  setup.engine.optimizer_offload_ratio = 0.5;
  setup.engine.update_mode = UpdateMode::forward;
  setup.runtime.host_device.host_accessible = host_accessible;
  return setup;
}

// The program's calls between the pass of step 4 and step().
using Between = std::function<void(ToyModel& p, std::vector<float>& seen)>;

struct Case {
  const char* name;
  Between between;
};

std::vector<float> read(ToyModel& p, ParameterId parameter, State state, std::size_t count = 1000) {
  std::vector<float> values(count);
  p.engine().read(parameter, state, 0, values);
  return values;
}

const std::array<Case, 6> kCases{{
    {"reads_a_master", [](ToyModel& p, std::vector<float>& seen) { seen = read(p, p.matrix(0), State::master); }},
    {"reads_a_gradient", [](ToyModel& p, std::vector<float>& seen) { seen = read(p, p.matrix(0), State::gradient); }},
    {"writes_a_frozen_parameter",
     [](ToyModel& p, std::vector<float>& seen) {
       const ParameterId frozen = p.engine().parameter("unit1.frozen");
       p.engine().write(frozen, State::master, 0, std::vector<float>(1000, 0.5f));
       seen = read(p, frozen, State::master, 3000);
     }},
    {"writes_a_master",
     [](ToyModel& p, std::vector<float>& seen) {
       p.engine().write(p.matrix(1), State::master, 0, std::vector<float>(1000, 0.5f));
       seen = read(p, p.matrix(1), State::master, 2000);
     }},
    {"reads_after_a_discarded_pass",
     [](ToyModel& p, std::vector<float>& seen) {
       p.engine().discard();
       seen = read(p, p.matrix(0), State::master);
       p.pass(4);
     }},
    {"reads_after_a_skipped_step",
     [](ToyModel& p, std::vector<float>& seen) {
       p.engine().discard();
       p.gradient_scale = std::numeric_limits<float>::infinity();
       p.pass(4);
       EXPECT_FALSE(p.engine().step().applied);
       p.gradient_scale = 1;
       seen = read(p, p.matrix(0), State::master);
       p.pass(4);
     }},
}};

class DeviceOnlyState : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(BetweenPassAndStep, DeviceOnlyState, testing::ValuesIn(kCases),
                         [](const auto& each) { return std::string(each.param.name); });

struct Outcome {
  Digests digests;
  std::vector<float> seen;
};

Outcome run(const ToySetup& setup, const Between& between) {
  ToyProgram p(setup, kShape);
  p.train(1, 3);
  p.engine().settle();
  Outcome outcome;
  p.pass(4);
  between(p, outcome.seen);
  p.engine().step();
  p.train(5, 5);
  p.engine().settle();
  outcome.digests = digests_of(p);
  return outcome;
}

TEST_P(DeviceOnlyState, IsReadAndWrittenWithoutTouchingWhatIsReadAhead) {
  const TempDirectory directory;
  const Outcome expected = run(divided(true, directory / "readable"), GetParam().between);
  const Outcome found = run(divided(false, directory / "device_only"), GetParam().between);
  EXPECT_EQ(found.seen, expected.seen);
  EXPECT_EQ(found.digests, expected.digests);
}

// A slow drive writes into its buffer while values of the device pass through memory of the host.
TEST(DeviceOnly, IsReadRightWhileTheDriveIsSlow) {
  const ToyShape shape{.matrices = {1000000, 70001, 900000}, .norm = 97, .frozen = false, .tied = false};
  for (const int milliseconds : {4, 10}) {
    const TempDirectory directory;
    ToySetup setup = divided(false, directory / "store");
    setup.runtime.device_memory_bytes = 64 * kMiB;
    setup.runtime.pinned_memory_bytes = 128 * kMiB;
    setup.engine.optimizer_offload_ratio = 0.4;  // unit 0 is on the device
    setup.engine.sub_group_elements = 32768;
    const auto faults = std::make_shared<Faults>(1);
    setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
    ToyProgram p(setup, shape);
    p.train(1, 3);
    p.engine().settle();
    const std::vector<float> expected = read(p, p.matrix(0), State::moment1, 1000000);
    faults->add({.kind = Fault::Kind::delay,
                 .operation = aio::Operation::read,
                 .path_contains = ".data",
                 .count = Faults::kForever,
                 .delay = std::chrono::milliseconds(milliseconds)});
    p.pass(4);
    EXPECT_EQ(read(p, p.matrix(0), State::moment1, 1000000), expected) << milliseconds << " ms";
    faults->clear();
    EXPECT_NO_THROW(p.engine().step());
    EXPECT_NO_THROW(p.engine().settle());
  }
}

// write() commits a frozen parameter on the device as it was, but for the elements written.
TEST(DeviceOnly, IsCommittedAsItWasWritten) {
  constexpr std::int64_t kFrozen = 1000000;
  Model model;
  const std::array units{model.add_unit("a", {{.name = "a.w", .shape = {40000}},
                                              {.name = "a.frozen", .shape = {kFrozen}, .trainable = false}}),
                         model.add_unit("b", {{.name = "b.w", .shape = {60000}}})};
  for (const int milliseconds : {2, 8}) {
    const TempDirectory directory;
    ToySetup setup = divided(false, directory / "store");
    setup.runtime.device_memory_bytes = 64 * kMiB;
    setup.runtime.pinned_memory_bytes = 128 * kMiB;
    setup.engine.sub_group_elements = 32768;
    const auto faults = std::make_shared<Faults>(1);
    setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
    std::vector<float> expected(kFrozen, 1.0f), found(kFrozen);
    std::fill(expected.begin(), expected.begin() + 16, 2.0f);
    {
      Runtime runtime(setup.runtime);
      Engine engine =
          Engine::create(runtime, setup.engine, model,
                         [](ParameterId, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 1.0f); });
      const auto stream = runtime.device().create_stream("program");
      const auto pass = [&] {
        const PassScope scope = engine.begin(Pass::train);
        for (const UnitId unit : units) engine.gather(unit, *stream).release(*stream);
        for (std::size_t u = units.size(); u-- > 0;) {
          engine.gather(units[u], *stream).release(*stream);
          engine.gradients(units[u], *stream);
          engine.finish(units[u], *stream);
        }
      };
      for (int step = 0; step < 2; ++step) {
        pass();
        engine.step();
      }
      engine.settle();
      faults->add({.kind = Fault::Kind::delay,
                   .operation = aio::Operation::read,
                   .path_contains = ".data",
                   .count = Faults::kForever,
                   .delay = std::chrono::milliseconds(milliseconds)});
      pass();
      engine.write(engine.parameter("a.frozen"), State::master, 0, std::span<const float>(expected).first(16));
      faults->clear();
      engine.discard();
      engine.read(engine.parameter("a.frozen"), State::master, 0, found);
      EXPECT_EQ(found, expected) << "on the device, " << milliseconds << " ms";
    }
    Runtime runtime(setup.runtime);
    Engine engine = Engine::restore(runtime, setup.engine, model);
    engine.read(engine.parameter("a.frozen"), State::master, 0, found);
    EXPECT_EQ(found, expected) << "as committed, " << milliseconds << " ms";
  }
}

}  // namespace
}  // namespace hoist::test::record_io_test
