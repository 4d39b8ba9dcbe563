// SPDX-License-Identifier: Apache-2.0
// bench_aio_overhead - what the queue itself costs: CPU time of the whole process for each block of 1 MiB, over the
// backend that completes everything at once and moves nothing.
//
//   bench_aio_overhead [--smoke] [--limit-ns N] [--json FILE]
//
// Exit code 1 when a steady shape costs more than the limit (1000 ns).
#include <algorithm>
#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <sys/mman.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/measure/statistics.hpp>

#include "options.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace hoist;

constexpr std::uint64_t kBlock = kMiB;
constexpr std::uint64_t kMemoryBytes = 256 * kBlock;
constexpr std::size_t kInFlight = 64;

// Addresses only: the null backend touches nothing, and neither may anything else.
std::span<std::byte> untouchable_memory() {
  void* memory = ::mmap(nullptr, kMemoryBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<std::byte*>(memory), kMemoryBytes};
}

class Bench {
 public:
  Bench(aio::DriveQueue& queue, const aio::File& file) : queue_(queue), file_(file) {}

  // Long transfers, as of a whole record: the price of a block alone.
  void long_transfers(std::uint64_t blocks) {
    for (std::uint64_t done = 0; done < blocks; done += kMemoryBytes / kBlock) read(0, kMemoryBytes).wait();
  }

  // Transfers of one block, many in flight: a block, its completion and its share of wake-ups.
  void pipeline(std::uint64_t blocks) {
    std::array<Completion, kInFlight> ring;
    for (std::uint64_t i = 0; i < blocks; ++i) {
      Completion& place = ring[i % kInFlight];
      place.wait();
      place = read(i % (kMemoryBytes / kBlock) * kBlock, kBlock);
    }
    for (const Completion& completion : ring) completion.wait();
  }

  // Each started when the one before has ended: two threads wake each other up for every block, which is the slow way,
  // for comparison.
  void one_at_a_time(std::uint64_t blocks) {
    for (std::uint64_t i = 0; i < blocks; ++i) read(0, kBlock).wait();
  }

 private:
  Completion read(std::uint64_t offset, std::uint64_t bytes) {
    return queue_.read(file_, offset, memory_.subspan(offset, bytes), aio::Priority::foreground);
  }

  aio::DriveQueue& queue_;
  const aio::File& file_;
  const std::span<std::byte> memory_ = untouchable_memory();
};

struct Shape {
  const char* name;
  void (Bench::*run)(std::uint64_t blocks);
  std::uint64_t blocks;
  bool steady;  // the limit counts
};

constexpr std::array kShapes{Shape{"long transfers", &Bench::long_transfers, 1 << 20, true},
                             Shape{"1 MiB transfers, 64 in flight", &Bench::pipeline, 1 << 18, true},
                             Shape{"1 MiB transfers, one at a time", &Bench::one_at_a_time, 1 << 15, false}};

struct Result {
  double median_ns = 0;
  double lowest_ns = 0;
  double highest_ns = 0;
};

Result measure(Bench& bench, const Shape& shape, bool smoke) {
  const std::uint64_t blocks = smoke ? shape.blocks / 16 : shape.blocks;
  std::vector<double> rounds;
  (bench.*shape.run)(blocks / 4);
  for (int round = 0; round < (smoke ? 3 : 15); ++round) {
    const double start = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
    (bench.*shape.run)(blocks);
    rounds.push_back((processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - start) * 1e9 / static_cast<double>(blocks));
  }
  const auto [lowest, highest] = std::ranges::minmax(rounds);
  return {measure::median(rounds), lowest, highest};
}

struct Arguments {
  bool smoke = false;
  double limit_ns = 1000;
  std::string json;
};

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  Arguments arguments;
  arguments.smoke = options.flag("--smoke");
  arguments.limit_ns = options.number("--limit-ns", 1000);
  arguments.json = options.text("--json");
  options.end();
  return arguments;
}

int run(const Arguments& arguments) {
  const bench::TemporaryDirectory directory(std::filesystem::temp_directory_path(), "hoist-bench-aio");
  // Any file does: it is never read.
  const aio::File file(directory.path() + "/file", {.mode = aio::OpenMode::create, .direct = false});
  aio::DriveQueue queue({.backend = aio::BackendKind::null, .block_bytes = kBlock, .queue_depth = 32});
  Bench bench(queue, file);
  bool holds = true;
  std::string json;
  fmt::print(
      "CPU time of the process for each block of 1 MiB, backend null, queue depth 32 (median; lowest to highest)\n");
  for (const Shape& shape : kShapes) {
    const Result result = measure(bench, shape, arguments.smoke);
    const bool within = !shape.steady || result.median_ns <= arguments.limit_ns;
    holds = holds && within;
    fmt::print("  {:<32} {:8.0f} ns  ({:.0f} to {:.0f}){}\n", shape.name, result.median_ns, result.lowest_ns,
               result.highest_ns,
               !shape.steady ? ""
               : within      ? "  within the limit"
                             : "  OVER THE LIMIT");
    json += fmt::format("{}{{\"shape\":\"{}\",\"ns_per_block\":{:.1f},\"lowest\":{:.1f},\"highest\":{:.1f}}}",
                        json.empty() ? "" : ",", shape.name, result.median_ns, result.lowest_ns, result.highest_ns);
  }
  bench::write_json(arguments.json, fmt::format("{{\"limit_ns\":{},\"results\":[{}]}}", arguments.limit_ns, json));
  return holds ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
