// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <memory>

#include <fmt/format.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/measure/fill.hpp>
#include <hoist/measure/scratch_file.hpp>
#include <hoist/measure/streamed_step.hpp>
#include <hoist/measure/workload.hpp>
#include <hoist/zero/engine.hpp>

namespace hoist::measure {

namespace {

constexpr std::uint64_t kUnits = 16;
constexpr unsigned kUncountedSteps = 2;

// A temporary directory that did not exist before.
class Directory {
 public:
  explicit Directory(std::string path) : path_(std::move(path)) {
    std::error_code failed;
    if (std::filesystem::create_directory(path_, failed)) return;
    refuse_existing(path_);
    throw IoError({.operation = "mkdir", .path = path_, .code = failed.value()},
                  "name a directory on a drive to measure");
  }
  ~Directory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    if (error) log_warning("{} stays: {}", path_, error.message());
  }
  static std::string below(const std::string& parent) {
    return (std::filesystem::path(parent) / "hoist-bench-optimizer").string();
  }
  static void refuse_existing(const std::string& path) {
    std::error_code unknown;
    if (std::filesystem::exists(path, unknown))
      throw UsageError(fmt::format("{} exists: another run is using it, or was killed; remove it", path));
  }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
};

RuntimeOptions runtime_options(const StreamedStepOptions& options) {
  RuntimeOptions runtime{.device = platform::DeviceKind::host};
  const std::uint64_t unit_bytes = 2 * divide_up(options.parameters, kUnits);
  runtime.device_memory_bytes = round_up(8 * unit_bytes + 16 * kMiB, kMiB);
  runtime.pinned_memory_bytes = options.pinned_bytes;
  runtime.aio_block_bytes = options.block_bytes;
  runtime.aio_queue_depth = options.queue_depth;
  runtime.communicator = CommunicatorKind::self;
  return runtime;
}

DriveOptions mixed_options(const StreamedStepOptions& options) {
  return {.block_bytes = options.mixed_block_bytes > 0 ? options.mixed_block_bytes : options.block_bytes,
          .queue_depth = options.mixed_queue_depth > 0 ? options.mixed_queue_depth : options.queue_depth};
}

EngineOptions engine_options(const StreamedStepOptions& options, const std::string& directory) {
  EngineOptions engine;
  engine.parameters = Placement::nvme;
  engine.optimizer = Placement::nvme;
  engine.store_directory = directory;
  engine.update_mode = UpdateMode::step;
  engine.sub_group_elements = options.piece_parameters;
  engine.update_buffer_count = options.buffer_count;
  engine.optimizer_defaults = options.optimizer;
  return engine;
}

// Layers whose gradient is a thousandth of their weights, so that computation takes no time.
class Layers {
 public:
  Layers(Runtime& runtime, const EngineOptions& options, std::uint64_t parameters)
      : model_(uniform_model(parameters, kUnits)),
        engine_(Engine::create(runtime, options, model_,
                               [](ParameterId parameter, std::uint64_t first, std::span<float> out) {
                                 for (std::size_t i = 0; i < out.size(); ++i)
                                   out[i] =
                                       static_cast<float>(0.1 * (random_uniform(parameter.index, first + i) - 0.5));
                               })),
        stream_(runtime.device().create_stream("compute")) {}
  ~Layers() { stream_->synchronize(); }
  Layers(const Layers&) = delete;
  Layers& operator=(const Layers&) = delete;

  Engine& engine() { return engine_; }

  void pass() {
    const PassScope scope = engine_.begin(Pass::train);
    for (std::uint32_t u = 0; u < model_.units().size(); ++u) {
      const UnitId unit{u};
      const ParameterId parameter = model_.units()[u].parameters.front();
      Lease lease = engine_.gather(unit, *stream_);
      const GradientLease gradients = engine_.gradients(unit, *stream_);
      const TensorView weights = lease.view(parameter);
      const TensorView gradient = gradients.view(parameter);
      stream_->scale_into(static_cast<std::byte*>(gradient.data), gradient.dtype,
                          static_cast<const std::byte*>(weights.data), weights.dtype, weights.element_count(), 1e-3f,
                          platform::Stream::Combine::add);
      lease.release(*stream_);
      engine_.finish(unit, *stream_);
    }
  }

 private:
  const Model model_;
  Engine engine_;
  std::unique_ptr<platform::Stream> stream_;
};

struct Counted {
  std::uint64_t read, written;
  Nanoseconds updating;
};
Counted counted(const Ledger& ledger) {
  return {ledger.totals(Link::nvme_read).bytes, ledger.totals(Link::nvme_write).bytes,
          ledger.waited(WaitCause::optimizer)};
}

class StepComparison {
 public:
  explicit StepComparison(const StreamedStepOptions& options)
      : options_(options),
        mixed_options_(mixed_options(options)),
        directory_(Directory::below(options.directory)),
        runtime_(runtime_options(options)),
        layers_(runtime_, engine_options(options, directory_.path()), options.parameters),
        engine_(layers_.engine()) {
    result_.parameters = options.parameters;
    result_.mixed_block_bytes = mixed_options_.block_bytes;
    result_.mixed_queue_depth = mixed_options_.queue_depth;
    for (unsigned i = 0; i < kUncountedSteps; ++i) step();
    result_.step_seconds.clear();
    result_.update_seconds.clear();
    result_.description = engine_.describe();
    const std::uint64_t file_bytes = round_up(result_.bytes_written, mixed_options_.block_bytes);
    file_ = std::make_unique<ScratchFile>(options.directory, file_bytes);
    buffers_ = std::make_unique<BlockBuffers>(mixed_options_.queue_depth * mixed_options_.block_bytes, -1);
    drive_ = std::make_unique<Drive>(*file_, *buffers_, mixed_options_);
    ScratchFile* const files[] = {file_.get()};
    fill_files(files, options.stop, [](std::uint64_t) {});
  }

  // Seconds from the call until the commit.
  double step() {
    layers_.pass();
    engine_.settle();  // the ledger has the bytes that the pass moved
    const Counted before = counted(runtime_.ledger());
    const TimePoint begin = Clock::now();
    const StepReport report = engine_.step();
    report.committed.wait();
    const double seconds = to_seconds(Clock::now() - begin);
    engine_.settle();
    const Counted after = counted(runtime_.ledger());
    result_.bytes_read = after.read - before.read;
    result_.bytes_written = after.written - before.written;
    result_.step_seconds.push_back(seconds);
    result_.update_seconds.push_back(to_seconds(after.updating - before.updating));
    return seconds;
  }

  // Seconds for as many bytes, half reads and half writes.
  double mixed() {
    Drive* const drives[] = {drive_.get()};
    const std::uint64_t bytes = round_up(result_.bytes_read + result_.bytes_written, mixed_options_.block_bytes);
    const WorkloadResult mixed = run_workload(drives, {.pattern = Pattern::mixed,
                                                       .region = {0, file_->bytes()},
                                                       .bytes_max = bytes,
                                                       .seed = ++seed_,
                                                       .stop = options_.stop});
    // A step flushes, too.
    return mixed.seconds + mixed.flush_seconds;
  }

  StreamedStepResult& result() { return result_; }

 private:
  const StreamedStepOptions& options_;
  const DriveOptions mixed_options_;
  Directory directory_;
  Runtime runtime_;
  Layers layers_;
  Engine& engine_;
  std::unique_ptr<ScratchFile> file_;
  std::unique_ptr<BlockBuffers> buffers_;
  std::unique_ptr<Drive> drive_;
  StreamedStepResult result_;
  std::uint64_t seed_ = 0;
};

}  // namespace

double StreamedStepResult::bytes_read_per_parameter() const {
  return static_cast<double>(bytes_read) / static_cast<double>(parameters);
}
double StreamedStepResult::bytes_written_per_parameter() const {
  return static_cast<double>(bytes_written) / static_cast<double>(parameters);
}

void check_streamed_step(const std::string& directory, std::uint64_t parameters) {
  // Two extents of at most 12 bytes per parameter, and the file of the mixed legs.
  check_scratch_directory(directory);
  check_scratch_space({&directory, 1}, 36 * parameters + 64 * kMiB);
  Directory::refuse_existing(Directory::below(directory));
}

StreamedStepResult compare_streamed_step(const StreamedStepOptions& options) {
  check_streamed_step(options.directory, options.parameters);
  StepComparison comparison(options);
  StreamedStepResult& result = comparison.result();
  for (unsigned round = 0; round < options.pairs; ++round) {
    throw_if_stopped(options.stop);
    // The mixed leg that is compared comes before the step and after it in turn; the control's follows.
    double step = 0, mixed = 0;
    if (round % 2 == 0) {
      mixed = comparison.mixed();
      step = comparison.step();
    } else {
      step = comparison.step();
      mixed = comparison.mixed();
    }
    result.ratios.push_back(step / mixed);
    result.control_ratios.push_back(comparison.mixed() / mixed);
    if (options.progress) options.progress(round + 1);
  }
  return result;
}

}  // namespace hoist::measure
