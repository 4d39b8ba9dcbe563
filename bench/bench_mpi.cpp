// SPDX-License-Identifier: Apache-2.0
// A unit gathered and reduced over MPI: hoist's communicator, with its streams, time-outs and notices of failure,
// against the library's blocking calls in place, for the same bytes in the same memory.
//
//   mpirun -np N bench_mpi [--units 1MiB,8MiB,64MiB] [--pairs N] [--json FILE] [--smoke]
//
// Each round runs the blocking call, hoist, and the blocking call again. A ratio is hoist's time over the blocking
// call's, of the slowest rank; the control compares the two blocking legs. A late gather counts from the time at which
// the last rank comes, 100 ms after the others. Afterwards one rank is late for longer, and the others report how much
// of a core they use while they wait. Aims: a ratio of 1.2 from 8 MiB on, and 0.1 cores while waiting. A ratio's aim is
// missed if the whole interval, widened by half the width of the control's interval, lies above it.
#include <algorithm>
#include <climits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <mpi.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/platform/device.hpp>

#include "options.hpp"
#include "pairs.hpp"

namespace {

using namespace hoist;

constexpr double kRatioAim = 1.2;
constexpr std::uint64_t kAimedBytes = 8 * kMiB;  // smaller units are a stream's wake-up as much as a transfer
constexpr double kIdleAim = 0.1;
constexpr std::chrono::milliseconds kLate{100};
constexpr std::uint64_t kScratchBytes = 4 * kMiB;  // the default of hoist.comm_scratch

struct Arguments {
  std::vector<std::uint64_t> units{1 * kMiB, 8 * kMiB, 64 * kMiB};
  unsigned pairs = 31;
  std::chrono::milliseconds late{1000};
  std::uint64_t leg_bytes = 128 * kMiB;  // of a unit's repeated calls
  std::string json;
};

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  Arguments arguments;
  if (smoke) arguments = {{1 * kMiB}, 3, std::chrono::milliseconds(200), 8 * kMiB, {}};
  arguments.units = options.byte_counts("--units", arguments.units);
  arguments.pairs = options.number("--pairs", arguments.pairs);
  arguments.json = options.text("--json");
  options.end();
  return arguments;
}

struct Figure {
  const char* operation;
  std::uint64_t unit_bytes;
  std::vector<double> ratios, control, gigabytes_per_second;
};

class Bench {
 public:
  explicit Bench(const Arguments& arguments)
      : arguments_(arguments),
        device_(platform::Device::create(
            {.memory_bytes = round_up(*std::ranges::max_element(arguments.units), kBlockAlignment) + kScratchBytes})),
        stream_(device_->create_stream("bench")),
        ours_(comm::make_mpi({.scratch = device_->memory().first(kScratchBytes)})),
        memory_(device_->memory().subspan(kScratchBytes)) {
    MPI_Comm_dup(MPI_COMM_WORLD, &theirs_);
    std::ranges::fill(memory_, std::byte{0});
  }
  ~Bench() { MPI_Comm_free(&theirs_); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  int rank() const { return ours_->rank(); }
  int size() const { return ours_->size(); }

  std::vector<Figure> measure() {
    std::vector<Figure> figures;
    for (const std::uint64_t unit : arguments_.units) {
      const std::uint64_t shard = unit / static_cast<std::uint64_t>(size()) / 64 * 64;
      if (shard == 0 || shard > INT_MAX)
        throw UsageError(
            fmt::format("--units {}: a rank's part must be at least 64 B and less than 2 GiB", format_bytes(unit)));
      const auto blocking = [&] {
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, memory_.data(), static_cast<int>(shard), MPI_BYTE, theirs_);
      };
      const auto hoist = [&] {
        const comm::GatherPiece piece{memory_.data(), shard};
        ours_->all_gather({&piece, 1}, *stream_);
      };
      figures.push_back(compare("all-gather", shard, {}, blocking, hoist));
      figures.push_back(compare("late gather", shard, kLate, blocking, hoist));
      // Sums of fp32, which both know; of zeros, so that they stay what they are.
      const std::uint64_t elements = shard / sizeof(float);
      figures.push_back(compare(
          "reduce-scatter", shard, {},
          [&] {
            MPI_Reduce_scatter_block(MPI_IN_PLACE, memory_.data(), static_cast<int>(elements), MPI_FLOAT, MPI_SUM,
                                     theirs_);
          },
          [&] {
            const comm::ReducePiece piece{memory_.data(), DType::fp32, elements};
            ours_->reduce_scatter({&piece, 1}, *stream_);
          }));
    }
    return figures;
  }

  // The most that a rank uses of a core while the last one is late for a gather.
  double cores_while_waiting() {
    const comm::GatherPiece piece{memory_.data(), 4096};
    ours_->barrier();
    const TimePoint begin = Clock::now();
    const double before = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
    const bool late = rank() == size() - 1;
    if (late) std::this_thread::sleep_for(arguments_.late);
    ours_->all_gather({&piece, 1}, *stream_);
    stream_->synchronize();
    return max_over_ranks(
        late ? 0 : (processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - before) / to_seconds(Clock::now() - begin));
  }

 private:
  template <typename Blocking, typename Hoist>
  Figure compare(const char* operation, std::uint64_t shard, std::chrono::milliseconds late, const Blocking& blocking,
                 const Hoist& hoist) {
    Figure figure{operation, shard * static_cast<std::uint64_t>(size()), {}, {}, {}};
    const std::uint64_t calls =
        late.count() > 0 ? 1 : std::max<std::uint64_t>(1, arguments_.leg_bytes / figure.unit_bytes);
    // Each leg returns when its last call ended.
    const auto repeated = [&] {
      for (std::uint64_t i = 0; i < calls; ++i) blocking();
      return Clock::now();
    };
    // The calls follow each other in stream order, and so does the reading of the clock: a rank that is done waits for
    // the others on a core, and the thread that waits for the stream may have to wait for that core.
    const auto streamed = [&] {
      TimePoint end;
      for (std::uint64_t i = 0; i < calls; ++i) hoist();
      stream_->launch("the clock", [&] { end = Clock::now(); });
      stream_->synchronize();
      return end;
    };
    leg(late, repeated);
    leg(late, streamed);
    for (unsigned pair = 0; pair < arguments_.pairs; ++pair) {
      const double first = leg(late, repeated);
      const double ours = leg(late, streamed);
      const double again = leg(late, repeated);
      figure.ratios.push_back(2 * ours / (first + again));
      figure.control.push_back(first / again);
      figure.gigabytes_per_second.push_back(static_cast<double>(calls * figure.unit_bytes) / ours / 1e9);
    }
    return figure;
  }

  // Seconds of the slowest rank, from the time on at which the last one begins.
  template <typename Calls>
  double leg(std::chrono::milliseconds late, const Calls& calls) {
    MPI_Barrier(theirs_);
    const TimePoint begin = Clock::now();
    if (late.count() > 0 && rank() == size() - 1) std::this_thread::sleep_for(late);
    const Nanoseconds slept = Clock::now() - begin;
    const TimePoint end = calls();
    return max_over_ranks(to_seconds(end - begin)) - max_over_ranks(to_seconds(slept));
  }

  double max_over_ranks(double mine) {
    double all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, theirs_);
    return all;
  }

  const Arguments& arguments_;
  std::unique_ptr<platform::Device> device_;
  std::unique_ptr<platform::Stream> stream_;
  std::unique_ptr<comm::Communicator> ours_;
  std::span<std::byte> memory_;
  MPI_Comm theirs_ = MPI_COMM_NULL;
};

void print(const Figure& figure) {
  const bool reached = measure::is_at_most(kRatioAim, figure.ratios, figure.control);
  fmt::print("{:<14} {:>8}  {:6.2f} GB/s   {} of the blocking call's time, itself {}{}\n", figure.operation,
             format_bytes(figure.unit_bytes), measure::median(figure.gigabytes_per_second),
             measure::median_text(figure.ratios, 2), measure::median_text(figure.control, 2),
             figure.unit_bytes < kAimedBytes ? std::string()
                                             : fmt::format("   aim {}: {}", kRatioAim, reached ? "reached" : "missed"));
}

std::string json_of(const Figure& figure) {
  return fmt::format(R"({{"operation":"{}","unit_bytes":{},{},"control":{},"gigabytes_per_second":{}}})",
                     figure.operation, figure.unit_bytes, bench::ratio_json(figure.ratios),
                     bench::interval_json(figure.control), measure::median(figure.gigabytes_per_second));
}

void report(const Arguments& arguments, int ranks, const std::vector<Figure>& figures, double cores) {
  fmt::print("{} ranks, {} pairs; GB/s of a unit's bytes through hoist\n", ranks, arguments.pairs);
  std::string json;
  for (const Figure& figure : figures) {
    print(figure);
    json += (json.empty() ? "" : ",") + json_of(figure);
  }
  fmt::print("waiting for a rank that is {} ms late takes {:.3f} cores   aim {}: {}\n", arguments.late.count(), cores,
             kIdleAim, cores <= kIdleAim ? "reached" : "missed");
  bench::write_json(arguments.json,
                    fmt::format(R"({{"ranks":{},"cores_while_waiting":{},"results":[{}]}})", ranks, cores, json));
}

int run(const Arguments& arguments) {
  Bench bench(arguments);
  if (bench.size() < 2)
    throw UsageError("bench_mpi measures waits between ranks and needs at least 2: start it with mpirun -np 2 or more");
  const std::vector<Figure> figures = bench.measure();
  const double cores = bench.cores_while_waiting();
  if (bench.rank() == 0) report(arguments, bench.size(), figures, cores);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
