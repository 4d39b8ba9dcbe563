// SPDX-License-Identifier: Apache-2.0
// bench_optimizer - AdamW against the memory's speed.
//
// Each round runs three legs on the same arrays, in an order that changes from round to round: the update and twice the
// best stream kernel of the same traffic (plain or prefetching, chosen first). The update is reported as a percentage
// of the stream, with the interval of its median; the second stream leg against the first is the control that says how
// much of that is noise.
//
//   bench_optimizer [--smoke] [--json FILE] [Google Benchmark's options]
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/optim_cpu/update.hpp>
#include <hoist/optim_cpu/update_pool.hpp>

#include "stream.hpp"

namespace hoist::bench {
namespace {

using measure::Interval;
using measure::median;
using measure::median_interval;
using optim::UpdateCoefficients;
using optim::SplitTile;
using optim::UpdatePool;
using optim::WholeTile;

struct Scale {
  std::size_t parameters;
  int rounds;
};
constexpr Scale kFull{std::size_t{80} << 20, 31};  // over 1 GB of state; 31 pairs, as claims nearer than 10 % need
constexpr Scale kSmoke{std::size_t{1} << 20, 3};
constexpr std::size_t kTile = 65536;

// Memory of the kind the engine uses: huge pages where the system has them.
template <typename T>
class Array {
 public:
  explicit Array(std::size_t count) : bytes_(count * sizeof(T)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
      std::perror("bench_optimizer: mmap");
      std::exit(1);
    }
    madvise(at, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<T*>(at);
  }
  ~Array() { munmap(data_, bytes_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() const { return data_; }

 private:
  std::size_t bytes_;
  T* data_;
};

struct SplitState {
  using Tile = SplitTile;
  static constexpr std::size_t kTrafficBytes = 26;  // reads 2 + 2 + 4 + 4 + gradient 2, writes 2 + 2 + 4 + 4

  explicit SplitState(std::size_t n) : weight(n), remainder(n), moment1(n), moment2(n), gradient(n) {}
  void fill(std::size_t i) {
    const SplitMaster master = split_master(static_cast<float>(0.1 * (random_uniform(1, i) - 0.5)));
    weight.data()[i] = master.weight;
    remainder.data()[i] = master.remainder;
    moment1.data()[i] = static_cast<float>(1e-3 * (random_uniform(2, i) - 0.5));
    moment2.data()[i] = static_cast<float>(1e-6 * random_uniform(3, i));
    gradient.data()[i] = to_bf16(static_cast<float>(1e-3 * (random_uniform(4, i) - 0.5)));
  }
  SplitTile tile(std::size_t first, std::size_t count) const {
    return {weight.data() + first,
            remainder.data() + first,
            moment1.data() + first,
            moment2.data() + first,
            gradient.data() + first,
            DType::bf16,
            count};
  }
  Array<bf16> weight;
  Array<std::int16_t> remainder;
  Array<float> moment1, moment2;
  Array<bf16> gradient;
};

struct WholeState {
  using Tile = WholeTile;
  static constexpr std::size_t kTrafficBytes = 28;  // reads 4 x 4, writes 3 x 4

  explicit WholeState(std::size_t n) : weight(n), moment1(n), moment2(n), gradient(n) {}
  void fill(std::size_t i) {
    weight.data()[i] = static_cast<float>(0.1 * (random_uniform(1, i) - 0.5));
    moment1.data()[i] = static_cast<float>(1e-3 * (random_uniform(2, i) - 0.5));
    moment2.data()[i] = static_cast<float>(1e-6 * random_uniform(3, i));
    gradient.data()[i] = static_cast<float>(1e-3 * (random_uniform(4, i) - 0.5));
  }
  WholeTile tile(std::size_t first, std::size_t count) const {
    return {weight.data() + first,
            moment1.data() + first,
            moment2.data() + first,
            gradient.data() + first,
            DType::fp32,
            count};
  }
  Array<float> weight, moment1, moment2, gradient;
};

double seconds_of(const std::function<void()>& leg) {
  const TimePoint begin = Clock::now();
  leg();
  return to_seconds(Clock::now() - begin);
}

template <class State>
class Comparison {
 public:
  Comparison(std::size_t parameters, unsigned threads)
      : parameters_(parameters), pool_({.threads = threads}), state_(parameters) {
    pool_.run(tiles(), [&](std::size_t k) {
      for (std::size_t i = k * kTile; i < (k + 1) * kTile; ++i) state_.fill(i);
    });
    choose_stream();
    (void)update();
  }

  double update() {
    const UpdateCoefficients coefficients({.learning_rate = 1e-5}, ++step_, 0.9);
    return seconds_of([&] {
      pool_.run(tiles(), [&](std::size_t k) {
        if (!optim::update_tile(coefficients, state_.tile(k * kTile, kTile))) committable_ = false;
      });
    });
  }
  double stream() { return stream(prefetch_); }
  bool committable() const { return committable_; }
  Prefetch prefetch() const { return prefetch_; }

 private:
  std::size_t tiles() const { return parameters_ / kTile; }
  double stream(Prefetch prefetch) {
    return seconds_of([&] {
      pool_.run(tiles(),
                [&](std::size_t k) { benchmark::DoNotOptimize(stream_tile(state_.tile(k * kTile, kTile), prefetch)); });
    });
  }
  void choose_stream() {
    double best[2] = {1e9, 1e9};
    for (int round = 0; round < 5; ++round) {
      best[0] = std::min(best[0], stream(Prefetch::none));
      best[1] = std::min(best[1], stream(Prefetch::ahead));
    }
    prefetch_ = best[1] < best[0] ? Prefetch::ahead : Prefetch::none;
  }

  std::size_t parameters_;
  UpdatePool pool_;
  State state_;
  std::uint64_t step_ = 0;
  Prefetch prefetch_ = Prefetch::none;
  std::atomic<bool> committable_{true};
};

template <class State>
void run(benchmark::State& state, std::size_t parameters, unsigned threads) {
  Comparison<State> comparison(parameters, threads);
  std::vector<double> percent, control, update_seconds;
  unsigned round = 0;
  for (auto _ : state) {
    // Legs 0 and 1 are the stream, 2 the update; six orders in turn.
    static constexpr std::array<std::array<int, 3>, 6> kOrders{
        {{0, 2, 1}, {2, 1, 0}, {1, 0, 2}, {0, 1, 2}, {2, 0, 1}, {1, 2, 0}}};
    double seconds[3];
    for (const int leg : kOrders[round % 6]) {
      seconds[static_cast<std::size_t>(leg)] = leg == 2 ? comparison.update() : comparison.stream();
    }
    ++round;
    percent.push_back(100 * seconds[0] / seconds[2]);
    control.push_back(100 * seconds[0] / seconds[1]);
    update_seconds.push_back(seconds[2]);
    state.SetIterationTime(seconds[2]);
  }
  if (!comparison.committable()) {
    state.SkipWithError("the update produced state that may not be committed");
    return;
  }
  const Interval interval = median_interval(percent);
  const Interval noise = median_interval(control);
  state.counters["percent_of_stream"] = median(percent);
  state.counters["percent_low"] = interval.low;
  state.counters["percent_high"] = interval.high;
  state.counters["control_low"] = noise.low;
  state.counters["control_high"] = noise.high;
  state.counters["stream_prefetches"] = comparison.prefetch() == Prefetch::ahead ? 1 : 0;
  state.counters["gigabytes_per_second"] =
      static_cast<double>(parameters * State::kTrafficBytes) / median(update_seconds) / 1e9;
}

// One line per comparison, the percentage first.
class Lines : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override {
    std::printf("AdamW as a percentage of a stream of the same traffic; instruction set %s\n",
                optim::active_instruction_set().c_str());
#ifndef NDEBUG
    std::printf("warning: this is not an optimised build\n");
#endif
    return true;
  }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& r : runs) {
      if (r.error_occurred) {
        failed_ = true;
        std::printf("%s: FAILED: %s\n", r.run_name.function_name.c_str(), r.error_message.c_str());
        continue;
      }
      const auto value = [&](const char* name) { return r.counters.at(name).value; };
      fmt::print("{:<32} {:6.1f} %  [{:.1f}, {:.1f}]  control [{:.1f}, {:.1f}]  {} pairs, {} stream, {:.1f} GB/s\n",
                 r.run_name.function_name, value("percent_of_stream"), value("percent_low"), value("percent_high"),
                 value("control_low"), value("control_high"), r.iterations,
                 value("stream_prefetches") != 0 ? "prefetching" : "plain", value("gigabytes_per_second"));
      std::fflush(stdout);
    }
  }
  bool failed() const { return failed_; }

 private:
  bool failed_ = false;
};

void register_comparisons(const Scale& scale) {
  std::vector<unsigned> widths{1};
  if (const unsigned all = UpdatePool().threads(); all > 1) widths.push_back(all);
  for (const unsigned threads : widths) {
    const auto add = [&](const char* name, void (*function)(benchmark::State&, std::size_t, unsigned)) {
      benchmark::RegisterBenchmark(fmt::format("{}/threads:{}", name, threads).c_str(),
                                   [=](benchmark::State& state) { function(state, scale.parameters, threads); })
          ->Iterations(scale.rounds)
          ->UseManualTime();
    };
    add("adamw_split_bf16", run<SplitState>);
    add("adamw_whole_fp32", run<WholeState>);
  }
}

}  // namespace
}  // namespace hoist::bench

int main(int argc, char** argv) {
  hoist::bench::Scale scale = hoist::bench::kFull;
  std::vector<std::string> arguments{argv[0]};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--smoke") {
      scale = hoist::bench::kSmoke;
    } else if (argument == "--json" && i + 1 < argc) {
      arguments.push_back(std::string("--benchmark_out=") + argv[++i]);
      arguments.push_back("--benchmark_out_format=json");
    } else {
      arguments.push_back(argument);
    }
  }
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  int count = static_cast<int>(pointers.size());
  benchmark::Initialize(&count, pointers.data());
  if (benchmark::ReportUnrecognizedArguments(count, pointers.data())) return 2;
  hoist::bench::register_comparisons(scale);
  hoist::bench::Lines lines;
  benchmark::RunSpecifiedBenchmarks(&lines);
  return lines.failed() ? 1 : 0;
}
