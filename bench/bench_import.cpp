// SPDX-License-Identifier: Apache-2.0
// How fast a training run starts from safetensors files, against the drive alone: the same bytes read from the same
// files, and as many bytes written as the import writes.
//
//   bench_import [--path DIR] [--parameters N] [--pairs N] [--json FILE] [--smoke]
//
// The model has bf16 weights in the file, and weights and optimizer state on NVMe; an import reads 2 bytes a parameter
// and writes 12. It is timed from Runtime's construction until the first commit is durable. The drive's leg has the
// same block size and queue depth, in a file with reserved space that was never written, as a new store has it, and
// ends with a flush. The files are dropped from the page cache before each leg. Legs alternate; the control compares
// the drive with itself. "start-up" reads no file: an initializer makes the values, and its drive's leg only writes.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/dtype.hpp>
#include <hoist/core/units.hpp>
#include <hoist/interchange/import.hpp>
#include <hoist/interchange/safetensors_writer.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/platform/host_memory.hpp>
#include <hoist/zero/engine.hpp>

#include "options.hpp"
#include "pairs.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace hoist;
namespace fs = std::filesystem;

constexpr std::uint64_t kReadBytes = 2, kWrittenBytes = 12;  // a parameter
constexpr unsigned kUnits = 16;

enum class Moves : std::uint8_t { reads_and_writes, writes };

struct Arguments {
  std::string path = ".";
  std::uint64_t parameters = 160'000'000;
  unsigned pairs = 11;
  std::string json;
};

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  Arguments arguments;
  arguments.path = options.text("--path", arguments.path);
  arguments.parameters = options.number("--parameters", smoke ? 1'600'000 : arguments.parameters);
  arguments.pairs = options.number("--pairs", smoke ? 2 : arguments.pairs);
  arguments.json = options.text("--json");
  options.end();
  return arguments;
}

class Bench {
 public:
  explicit Bench(const Arguments& arguments)
      : arguments_(arguments),
        directory_(arguments.path, "hoist-bench-import"),
        weights_(directory_.path() + "/weights"),
        work_(directory_.path() + "/work"),
        model_(uniform_model(arguments.parameters, kUnits)) {
    write_weights();
  }

  double gigabytes(Moves moves) const {
    const std::uint64_t bytes = kWrittenBytes + (moves == Moves::writes ? 0 : kReadBytes);
    return static_cast<double>(bytes * arguments_.parameters) / 1e9;
  }

  double import() {
    drop_cache();
    return created(interchange::fill_from(weights_, model_.parameters()));
  }

  double start_up() {
    return created([](ParameterId, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 0.5f); });
  }

  // Median over the engines created since the last call.
  double processor_seconds_since_last() { return measure::median(std::exchange(processor_seconds_, {})); }

  double drive(Moves moves) {
    drop_cache();
    const double seconds = seconds_of([&] { move_bytes(moves); });
    clear();
    return seconds;
  }

 private:
  double created(const Initializer& initializer) {
    const TimePoint begin = Clock::now();
    const double processor_begin = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
    double seconds = 0;
    {
      Runtime runtime(runtime_options());
      Engine engine = Engine::create(runtime, engine_options(), model_, initializer);
      engine.settle();
      seconds = to_seconds(Clock::now() - begin);
      processor_seconds_.push_back(processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - processor_begin);
    }
    clear();
    return seconds;
  }

  RuntimeOptions runtime_options() const {
    RuntimeOptions options{.device = platform::DeviceKind::host};
    options.device_memory_bytes = 4 * arguments_.parameters + 64 * kMiB;
    options.pinned_memory_bytes = 4 * arguments_.parameters + 128 * kMiB;
    options.communicator = CommunicatorKind::self;
    return options;
  }

  EngineOptions engine_options() const {
    EngineOptions options;
    options.parameters = options.optimizer = Placement::nvme;
    options.store_directory = work_;
    return options;
  }

  void clear() const { fs::remove_all(work_); }

  void write_weights() {
    std::vector<interchange::TensorSpec> tensors;
    for (const ParameterSpec& spec : model_.parameters()) {
      tensors.push_back({.name = spec.name, .type = interchange::TensorType::bf16, .shape = {}});
      for (const std::int64_t side : spec.shape) tensors.back().shape.push_back(static_cast<std::uint64_t>(side));
    }
    interchange::SafetensorsWriter writer({.directory = weights_}, tensors);
    const std::vector<std::uint16_t> values(kMiB, to_bf16(0.5f).bits);
    for (std::uint64_t left = writer.data_bytes(); left > 0;) {
      const std::uint64_t bytes = std::min<std::uint64_t>(left, 2 * kMiB);
      writer.write(std::as_bytes(std::span(values)).first(bytes));
      left -= bytes;
    }
    writer.finish();
    for (const std::string& file : writer.files())
      if (file.ends_with(".safetensors")) files_.push_back(file);
  }

  void drop_cache() const {
    for (const std::string& file : files_) {
      const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
      if (descriptor < 0 || ::fdatasync(descriptor) != 0 || ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED) != 0)
        throw std::runtime_error(file + " stays in the page cache");
      ::close(descriptor);
    }
  }

  // Transfers of one block each, both directions in proportion, in as many buffers as the engine has in flight.
  void move_bytes(Moves moves) {
    const RuntimeOptions defaults;
    const std::uint64_t block = defaults.aio_block_bytes;
    const unsigned depth = 2 * defaults.aio_queue_depth;
    const platform::HostMemory memory({.bytes = depth * block});
    aio::DriveQueue queue(
        {.block_bytes = block, .queue_depth = defaults.aio_queue_depth, .registered_memory = memory.slices()});
    std::vector<aio::File> sources;
    if (moves == Moves::reads_and_writes) {
      for (const std::string& file : files_)
        sources.emplace_back(file, aio::FileOptions{.mode = aio::OpenMode::read_only});
    }
    fs::create_directories(work_);
    const std::uint64_t to_write = round_up(kWrittenBytes * arguments_.parameters, block);
    aio::File target(work_ + "/target", {.mode = aio::OpenMode::create, .reserve_bytes = to_write});
    std::vector<Completion> ring(depth);
    std::size_t slot = 0;
    std::uint64_t read = 0, source_offset = 0, written = 0;
    std::size_t source = 0;
    const auto next_buffer = [&] {
      ring[slot % depth].wait();
      return memory.bytes().subspan(slot % depth * block, block);
    };
    while (written < to_write || source < sources.size()) {
      const bool reads =
          source < sources.size() && (written >= to_write || read * kWrittenBytes <= written * kReadBytes);
      const std::span<std::byte> buffer = next_buffer();
      if (reads) {
        const std::uint64_t left = round_down(fs::file_size(files_[source]) - source_offset, kBlockAlignment);
        const std::uint64_t bytes = std::min(left, block);
        if (bytes > 0)
          ring[slot++ % depth] =
              queue.read(sources[source], source_offset, buffer.first(bytes), aio::Priority::foreground);
        source_offset += bytes;
        read += bytes;
        if (bytes == left) source_offset = 0, ++source;
      } else {
        ring[slot++ % depth] = queue.write(target, written, buffer, aio::Priority::background);
        written += block;
      }
    }
    for (const Completion& completion : ring) completion.wait();
    queue.sync(target).wait();
  }

  const Arguments& arguments_;
  const bench::TemporaryDirectory directory_;
  const std::string weights_, work_;
  const Model model_;
  std::vector<std::string> files_;
  std::vector<double> processor_seconds_;
};

struct Result {
  std::string name;
  std::vector<double> ratios;
  double seconds, drive_seconds, processor_seconds;
};

Result compare(const std::string& name, const Arguments& arguments, Bench& bench, Moves moves,
               const std::function<double()>& leg) {
  const auto [drive, ours, ratios] = bench::alternate(
      arguments.pairs, [&] { return bench.drive(moves); }, leg);
  const Result result{.name = name,
                      .ratios = ratios,
                      .seconds = measure::median(ours),
                      .drive_seconds = measure::median(drive),
                      .processor_seconds = bench.processor_seconds_since_last()};
  fmt::print("{:<9} {}  {:.3f} s, drive {:.3f} s ({:.2f} GB/s)", name, measure::median_text(ratios), result.seconds,
             result.drive_seconds, bench.gigabytes(moves) / result.drive_seconds);
  if (result.processor_seconds > 0) fmt::print(", {:.3f} s of processors", result.processor_seconds);
  fmt::print("\n");
  std::fflush(stdout);
  return result;
}

int run(const Arguments& arguments) {
  Bench bench(arguments);
  constexpr Moves kBoth = Moves::reads_and_writes;
  fmt::print("{} parameters, {} pairs: {:.2f} GB read and written\nspeed beside the drive's: median [95 %]\n",
             arguments.parameters, arguments.pairs, bench.gigabytes(kBoth));
  const std::vector<Result> results{
      compare("control", arguments, bench, kBoth, [&] { return bench.drive(kBoth); }),
      compare("import", arguments, bench, kBoth, [&] { return bench.import(); }),
      compare("start-up", arguments, bench, Moves::writes, [&] { return bench.start_up(); })};
  std::string json = fmt::format(R"({{"parameters":{})", arguments.parameters);
  for (const Result& result : results)
    json +=
        fmt::format(R"(,"{}":{{{},"seconds":{},"drive_seconds":{},"processor_seconds":{}}})", result.name,
                    bench::ratio_json(result.ratios), result.seconds, result.drive_seconds, result.processor_seconds);
  bench::write_json(arguments.json, json + "}");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
