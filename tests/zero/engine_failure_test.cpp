// SPDX-License-Identifier: Apache-2.0
// Device and system calls that fail when the engine makes them: the engine fails but the process does not, no caller
// hangs, and a new engine in the same runtime resumes from the last commit.
#include <atomic>
#include <cerrno>

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <hoist/core/error.hpp>
#include <hoist/platform/update_arrays.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/forwarding_stream.hpp>
#include <hoist/tests/support/log_capture.hpp>

#include "toy_ranks.hpp"

namespace {

std::atomic<bool> threads_are_refused{false};

}  // namespace

// This definition replaces the C library's in this program.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                              void* argument) noexcept {
  static auto* const next = reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  return threads_are_refused ? EAGAIN : next(thread, attributes, body, argument);
}

namespace hoist::test::engine_failure_test {
namespace {

std::uint64_t held_bytes(Runtime& runtime) {
  return runtime.device_budget().held_bytes() + runtime.pinned_budget().held_bytes();
}

DeviceError launch_error() { return {"cudaLaunchKernel", 700, "an illegal memory access was encountered", "none"}; }

// --- the device's update ---------------------------------------------------------------------------------------------

enum class Breaks : std::uint8_t { updates, events_of_copies_up };

class BreakableStream final : public ForwardingStream {
 public:
  BreakableStream(std::unique_ptr<platform::Stream> inner, const std::atomic<bool>& broken, Breaks breaks)
      : ForwardingStream(*inner), inner_(std::move(inner)), broken_(broken), breaks_(breaks) {}
  void update(const UpdateFactors& factors, const platform::UpdateArrays& arrays) override {
    if (broken_ && breaks_ == Breaks::updates) throw launch_error();
    ForwardingStream::update(factors, arrays);
  }
  platform::StreamEvent record() override {
    if (broken_ && breaks_ == Breaks::events_of_copies_up && name() == "up") throw launch_error();
    return ForwardingStream::record();
  }

 private:
  const std::unique_ptr<platform::Stream> inner_;
  const std::atomic<bool>& broken_;
  const Breaks breaks_;
};

// A device whose updates, or events on one stream, fail to start while it is broken.
class BreakableDevice final : public platform::Device {
 public:
  BreakableDevice(const platform::DeviceOptions& options, const std::atomic<bool>& broken, Breaks breaks)
      : inner_(platform::Device::create(options)), broken_(broken), breaks_(breaks) {}
  platform::DeviceKind kind() const override { return inner_->kind(); }
  std::string description() const override { return inner_->description(); }
  std::span<std::byte> memory() override { return inner_->memory(); }
  bool host_accessible() const override { return inner_->host_accessible(); }
  void released(std::span<std::byte> bytes) override { inner_->released(bytes); }
  void acquired(std::span<std::byte> bytes) override { inner_->acquired(bytes); }
  std::unique_ptr<platform::Stream> create_stream(std::string name) override {
    return std::make_unique<BreakableStream>(inner_->create_stream(std::move(name)), broken_, breaks_);
  }
  std::unique_ptr<platform::Stream> borrow_stream(void* native, std::string name) override {
    return inner_->borrow_stream(native, std::move(name));
  }
  void register_host(std::span<std::byte> bytes) override { inner_->register_host(bytes); }
  void unregister_host(std::span<std::byte> bytes) noexcept override { inner_->unregister_host(bytes); }

 private:
  const std::unique_ptr<platform::Device> inner_;
  const std::atomic<bool>& broken_;
  const Breaks breaks_;
};

const ToyShape kShape{.matrices = {40000, 20000, 70001, 60000}};  // units 0 and 1 are updated by the device

class DeviceUpdate : public testing::TestWithParam<UpdateMode> {
 protected:
  ToySetup setup(const std::atomic<bool>& broken, Breaks breaks = Breaks::updates) const {
    ToySetup setup = toy_setup(Placement::device, Placement::nvme, directory_ / "store");
    setup.engine.optimizer_offload_ratio = 0.5;
    setup.engine.gradient_clipping = 0;
    setup.engine.update_mode = GetParam();
    setup.runtime.host_device.host_accessible = false;
    setup.runtime.comm_timeout = std::chrono::minutes(10);  // nobody waits that long
    setup.runtime.make_device = [&broken, breaks](const platform::DeviceOptions& options) {
      return std::make_unique<BreakableDevice>(options, broken, breaks);
    };
    return setup;
  }

  const TempDirectory directory_;
};

TEST_P(DeviceUpdate, AnErrorEndsTheEngineAndANewOneGoesOn) {
  std::atomic<bool> broken{false};
  ToyProgram p(setup(broken), kShape);
  p.train(1, 2);
  p.engine().settle();
  broken = true;
  EXPECT_THROW(p.train(3, 3), DeviceError);
  EXPECT_THROW(p.pass(4), DeviceError);
  EXPECT_THROW(p.engine().settle(), DeviceError);
  broken = false;
  EXPECT_EQ(p.restore().step, 2u);
  p.losses.resize(2);
  p.train(3, 5);
  ToySetup undisturbed = toy_setup(Placement::pinned, Placement::pinned);
  undisturbed.engine.gradient_clipping = 0;
  EXPECT_EQ(digests_of(p), train_once(undisturbed, kShape, 5));
}

// In mode backward a unit's gradient is handed on once the copies of its weights have an event.
TEST_P(DeviceUpdate, AnEventThatTheDeviceRefusesInBackwardEndsTheEngineAndANewOneGoesOn) {
  std::atomic<bool> broken{false};
  ToyProgram p(setup(broken, Breaks::events_of_copies_up), kShape);
  p.train(1, 2);
  p.engine().settle();
  p.in_forward = [&](std::size_t unit) { broken = unit + 1 == kShape.matrices.size(); };
  EXPECT_THROW(p.train(3, 4), DeviceError);
  EXPECT_THROW(p.engine().settle(), DeviceError);
  p.in_forward = [](std::size_t) {};
  broken = false;
  p.close();
  EXPECT_GE(p.restore().step, 2u);
}

TEST_P(DeviceUpdate, AnErrorOfOneRankIsToldToTheOther) {
  std::array<std::atomic<bool>, 2> broken{};
  std::array<std::string, 2> errors;
  on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
    const auto index = static_cast<std::size_t>(rank);
    const ToySetup own = setup(broken[index]);
    ToyProgram model(own, join, kShape);
    model.train(1, 2);
    model.engine().settle();
    broken[index] = rank == 1;
    try {
      model.train(3, 6);
      model.engine().settle();
    } catch (const CommError& error) {
      errors[index] = std::string("by another: ") + error.what();
    } catch (const DeviceError& error) {
      errors[index] = error.what();
    }
  });
  EXPECT_THAT(errors[0], testing::AllOf(testing::HasSubstr("by another: "), testing::HasSubstr("rank 1"),
                                        testing::HasSubstr("illegal memory access")));
  EXPECT_THAT(errors[1], testing::StartsWith("cudaLaunchKernel"));
}

INSTANTIATE_TEST_SUITE_P(Modes, DeviceUpdate,
                         testing::Values(UpdateMode::step, UpdateMode::forward, UpdateMode::backward),
                         [](const auto& mode) {
                           return mode.param == UpdateMode::step      ? "step"
                                  : mode.param == UpdateMode::forward ? "forward"
                                                                      : "backward";
                         });

// --- the program's stream --------------------------------------------------------------------------------------------

class StreamThatAddsNothing final : public ForwardingStream {
 public:
  explicit StreamThatAddsNothing(platform::Stream& inner) : ForwardingStream(inner) {}
  void scale_into(std::byte*, DType, const std::byte*, DType, std::uint64_t, float, Combine) override {
    throw launch_error();
  }
};

class StreamThatClearsNothing final : public ForwardingStream {
 public:
  explicit StreamThatClearsNothing(platform::Stream& inner) : ForwardingStream(inner) {}
  void fill(std::byte*, std::uint8_t, std::uint64_t) override { throw launch_error(); }
};

// If the engine did not fail, step() would update the unit with an incomplete gradient.
TEST(EngineFailure, AGradientThatTheDeviceDidNotAddEndsTheEngine) {
  ToyProgram p(toy_setup(Placement::device, Placement::device));
  StreamThatAddsNothing broken(p.stream());
  const std::vector<std::int64_t> shape{97};
  const ParameterId norm = p.engine().parameter("unit2.norm");
  const tiers::DeviceBlock gradient = p.runtime().device_arena().allocate(4096, "gradient");
  p.stream().fill(gradient.data(), 0, 4096);
  const TensorView view{.data = gradient.data(), .dtype = DType::fp32, .shape = shape};
  {
    const PassScope pass = p.engine().begin(Pass::train);
    p.engine().accumulate(norm, view, p.stream());
    EXPECT_THROW(p.engine().accumulate(norm, view, broken), DeviceError);
    EXPECT_THROW(p.engine().finish(p.unit(2), p.stream()), DeviceError);
  }
  EXPECT_THROW(p.engine().step(), DeviceError);
  EXPECT_THROW(p.engine().begin(Pass::evaluate), DeviceError);
  p.stream().synchronize();  // it reads `gradient`
}

// clear() records an event on the stream of a buffer that is in use.
TEST(EngineFailure, AGradientBufferThatTheDeviceDidNotClearIsGivenBack) {
  ToyProgram p(toy_setup(Placement::device, Placement::device));
  StreamThatClearsNothing broken(p.stream());
  {
    const PassScope pass = p.engine().begin(Pass::train);
    EXPECT_THROW((void)p.engine().gradients(p.unit(2), broken), DeviceError);
  }
  p.engine().discard();
  EXPECT_THROW(p.engine().begin(Pass::evaluate), DeviceError);
}

// --- threads ---------------------------------------------------------------------------------------------------------

class NoThreads {
 public:
  NoThreads() { threads_are_refused = true; }
  ~NoThreads() { threads_are_refused = false; }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;
};

TEST(EngineFailure, WithoutAThreadForASaveTheLastOneIsGoneBackTo) {
  const TempDirectory directory;
  ToyProgram p(toy_setup(Placement::pinned, Placement::pinned, directory / "store"));
  p.train(1, 2);
  p.engine().save("", {}).wait();
  p.train(3, 3);
  {
    const NoThreads none;
    EXPECT_THROW(p.engine().save("", {}), Error);
  }
  EXPECT_THROW(p.engine().settle(), Error);
  EXPECT_EQ(p.restore().step, 2u);
  p.train(3, 4);
  EXPECT_EQ(state_digests(p), digests_by_step(1, 4)[4]);
}

// The program does not settle, so that no call of it is left to throw.
TEST(EngineFailure, AStepThatIsLostAtTheEndIsLogged) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.update_mode = UpdateMode::forward;
  const auto faults = std::make_shared<Faults>(1);
  setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
  const LogCapture log;
  {
    ToyProgram program(setup);
    program.train(1, 2);
    program.engine().settle();
    faults->add({.operation = aio::Operation::write, .path_contains = "rank-", .count = Faults::kForever});
    program.train(3, 3);
  }
  EXPECT_THAT(log.text(), testing::AllOf(testing::HasSubstr("for step 3 failed: "),
                                         testing::HasSubstr("the last commit is step 2")));
}

TEST(EngineFailure, WithoutThreadsAnEngineIsRefusedAndHoldsNothing) {
  const TempDirectory directory;
  ToyModel p(toy_setup(Placement::nvme, Placement::nvme, directory / "store"));
  {
    const NoThreads none;
    EXPECT_THROW(p.initialize(), Error);
  }
  EXPECT_EQ(held_bytes(p.runtime()), 0u);
  p.initialize();
  p.train(1, 1);
}

}  // namespace
}  // namespace hoist::test::engine_failure_test
