// SPDX-License-Identifier: Apache-2.0
#include "timed_steps.hpp"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <thread>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/zero/engine.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "bare_pass.hpp"
#include "held_backend.hpp"

namespace hoist::bench {

namespace {

constexpr double kDriveBytesPerSecond = 400e6;
// As `hoist tune` chooses for a drive that reaches its full speed with little in flight. A read then waits behind at
// most 4 blocks, 1 MiB.
constexpr std::uint64_t kBlockBytes = 256 * kKiB;
constexpr unsigned kQueueDepth = 4;
constexpr unsigned kUnits = 16;
constexpr std::int64_t kElements = 128 * 1024;
constexpr unsigned kWindow = 4;  // steps that are timed together

// Seconds that this process's threads have run or have waited for a processor, as the kernel counts them.
double running_seconds() {
  double nanoseconds = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    double ran = 0, delayed = 0;
    std::ifstream(task.path() / "schedstat") >> ran >> delayed;
    nanoseconds += ran + delayed;
  }
  return nanoseconds * 1e-9;
}

class Steps {
 public:
  Steps(const TimedCell& cell, const std::filesystem::path& directory)
      : compute_(std::chrono::milliseconds(cell.compute_ms)),
        model_(uniform_model(kUnits * kElements, kUnits)),
        runtime_options_(runtime_options()),
        options_(engine_options(cell, directory)),
        runtime_(with_pinned_memory(cell.pinned)),
        prediction_(predict(runtime_options_, options_, model_, 1)),
        engine_(Engine::create(
            runtime_, options_, model_,
            [](ParameterId, std::uint64_t, std::span<float> values) { std::ranges::fill(values, 0.5f); })),
        stream_(runtime_.device().create_stream("compute")) {
    for (const ModelUnit& unit : model_.units()) units_.push_back(model_.unit_of(unit.parameters.front()));
  }

  const Prediction& prediction() const { return prediction_; }
  void settle() { engine_.settle(); }
  void synchronize() { stream_->synchronize(); }

  void step() {
    bare_pass(engine_, units_, *stream_, [this](double share) { kernel(share * compute_); });
    engine_.step();
  }

  double explained_seconds() {
    Nanoseconds all{kernel_ns_};
    for (std::size_t cause = 0; static_cast<WaitCause>(cause) != WaitCause::none; ++cause)
      all += runtime_.ledger().waited(static_cast<WaitCause>(cause));
    return to_seconds(all);
  }

 private:
  static RuntimeOptions runtime_options() {
    RuntimeOptions options{
        .device = platform::DeviceKind::host, .device_memory_bytes = 16 * kMiB, .pinned_memory_bytes = 32 * kMiB};
    options.communicator = CommunicatorKind::self;
    options.aio_block_bytes = kBlockBytes;
    options.aio_queue_depth = kQueueDepth;
    options.make_aio_backend = [](const aio::DriveQueueOptions& drive) {
      return std::make_unique<HeldBackend>(aio::make_backend(drive), at_speed(kDriveBytesPerSecond));
    };
    return options;
  }

  static EngineOptions engine_options(const TimedCell& cell, const std::filesystem::path& directory) {
    EngineOptions options{
        .parameters = cell.parameters, .optimizer = Placement::nvme, .store_directory = directory / "store"};
    options.update_mode = cell.mode;
    if (cell.mode == UpdateMode::backward) options.gradient_clipping = 0;  // as it has to be
    options.persistence_elements = 0;
    options.reuse_distance_elements = 0;
    options.sub_group_elements = kElements;
    return options;
  }

  const RuntimeOptions& with_pinned_memory(PinnedMemory pinned) {
    if (pinned == PinnedMemory::least) {
      runtime_options_.pinned_memory_bytes =
          round_up(predict(runtime_options_, options_, model_, 1).pinned.least_bytes, kBlockAlignment);
    }
    return runtime_options_;
  }

  void kernel(std::chrono::duration<double, std::nano> time) {
    stream_->launch("kernel", [time, this] {
      const TimePoint begin = Clock::now();
      std::this_thread::sleep_for(time);
      kernel_ns_ += (Clock::now() - begin).count();
    });
  }

  Nanoseconds compute_;
  Model model_;
  RuntimeOptions runtime_options_;
  EngineOptions options_;
  Runtime runtime_;
  Prediction prediction_;
  Engine engine_;
  std::vector<UnitId> units_;
  std::atomic<std::int64_t> kernel_ns_{0};
  std::unique_ptr<platform::Stream> stream_;
};

}  // namespace

TimedSteps time_steps(const TimedCell& cell, const std::filesystem::path& directory, int windows,
                      double flush_seconds) {
  Steps steps(cell, directory);
  for (int i = 0; i < 2; ++i) steps.step();  // recorded, then planned
  steps.synchronize();
  const StepSpeeds speeds{.nvme_read = kDriveBytesPerSecond,
                          .nvme_write = kDriveBytesPerSecond,
                          .nvme_mixed = kDriveBytesPerSecond,
                          .nvme_flush = flush_seconds,
                          .compute_seconds = cell.compute_ms * 1e-3};
  TimedSteps timed{.seconds = 1e9, .predicted = predict_time(steps.prediction(), speeds)};
  for (int window = 0; window < windows; ++window) {
    const double running = running_seconds();
    const double explained = steps.explained_seconds();
    const TimePoint begin = Clock::now();
    for (unsigned i = 0; i < kWindow; ++i) steps.step();
    const double seconds = to_seconds(Clock::now() - begin);
    const double now_explained = steps.explained_seconds() - explained;
    timed.seconds = std::min(timed.seconds, seconds / kWindow);
    timed.explained = std::max(timed.explained, now_explained / seconds);
    timed.explained_or_running =
        std::max(timed.explained_or_running, (now_explained + running_seconds() - running) / seconds);
  }
  // The first steps of a window may use records that were read before it, and the last writes may end after it.
  const Prediction& prediction = steps.prediction();
  const auto buffers = static_cast<double>(prediction.update_buffers * prediction.update_buffer_bytes);
  timed.outside_seconds = 2 * buffers / kDriveBytesPerSecond / kWindow;
  steps.settle();
  return timed;
}

}  // namespace hoist::bench
