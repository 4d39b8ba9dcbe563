// SPDX-License-Identifier: Apache-2.0
// A process that the program forks: it has the engine's memory, and none of its threads.
#include <cstdlib>
#include <optional>

#include <gtest/gtest.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/forked.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "toy_model.hpp"

namespace hoist::test::fork_test {
namespace {

template <typename Call>
bool is_refused(Call call) {
  try {
    call();
  } catch (const UsageError& error) {
    return std::string(error.what()).find("forked") != std::string::npos;
  }
  return false;
}

class Fork : public ::testing::Test {
 protected:
  TempDirectory directory_;
  std::optional<ToyProgram> training_{std::in_place, toy_setup(Placement::nvme, Placement::nvme, directory_ / "store")};
};

TEST_F(Fork, CallsAreUsageErrorsAndTheParentContinues) {
  training_->train(1, 1);
  Engine& engine = training_->engine();
  Runtime& runtime = engine.runtime();
  const ParameterId matrix = training_->matrix(0);
  const int code = exit_code_of_fork([&] {
    float value = 0;
    return is_refused([&] { const PassScope pass = engine.begin(Pass::train); }) &&
                   is_refused([&] { engine.step({}); }) && is_refused([&] {
                     engine.read(matrix, State::master, 0, {&value, 1});
                   }) &&
                   is_refused([&] { engine.save("", {}).wait(); }) && is_refused([&] { engine.settle(); }) &&
                   is_refused([&] { engine.committed_step(); }) && is_refused([&] { runtime.device(); }) &&
                   is_refused([&] { runtime.communicator().barrier(); })
               ? 0
               : 1;
  });
  EXPECT_EQ(code, 0);
  training_->train(2, 3);
  EXPECT_EQ(engine.step_count(), 3u);
}

TEST_F(Fork, DestructorsDoNothingAlsoInThePassUnderWay) {
  training_->train(1, 1);
  Engine& engine = training_->engine();
  std::optional<PassScope> pass(engine.begin(Pass::evaluate));
  std::optional<Lease> lease(engine.gather(training_->unit(0), training_->stream()));
  const int code = exit_code_of_fork([&] {
    const bool refused = is_refused([&] { lease->view(training_->matrix(0)); });
    lease.reset();
    pass.reset();
    { const Engine ended = std::move(engine); }
    { const Engine gone = std::move(engine); }
    return refused ? 0 : 1;
  });
  EXPECT_EQ(code, 0);
  EXPECT_NO_THROW(lease->view(training_->matrix(0)));
  lease.reset();
  pass.reset();
  training_->train(2, 2);
  EXPECT_EQ(engine.step_count(), 2u);
}

TEST_F(Fork, NorDoThoseOfARuntimeAndOfWhatAProgramHasOfIt) {
  training_->train(1, 1);
  auto runtime = std::make_unique<Runtime>(toy_setup(Placement::pinned, Placement::pinned).runtime);
  tiers::DeviceBlock block = runtime->device_arena().allocate(4096, "program");
  auto stream = runtime->device().create_stream("program");
  stream->fill(block.data(), 0, 4096);
  stream->synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // its worker waits for work
  EXPECT_EQ(exit_code_of_fork([&] {
              stream.reset();
              block = {};
              runtime.reset();
              return 0;
            }),
            0);
  stream.reset();
  block = {};
  runtime.reset();
}

}  // namespace
}  // namespace hoist::test::fork_test
