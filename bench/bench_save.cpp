// SPDX-License-Identifier: Apache-2.0
// How long Engine::save() keeps a training program waiting: its call, and how much longer the step after it takes.
//
//   bench_save [--path DIR] [--parameters N] [--saves N] [--json FILE] [--smoke]
//
// A model without mathematics takes steps; after every second one its state is saved under a name. For state on NVMe
// and for state in memory it prints the call's median, 99th percentile and maximum, how long a save takes until it is
// durable, and the ratio of step times with and without a save before them, with its interval.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <hoist/core/clock.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/zero/engine.hpp>

#include "bare_pass.hpp"
#include "options.hpp"
#include "pairs.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace hoist;

struct Arguments {
  std::string path = ".";
  std::uint64_t parameters = 40'000'000;
  unsigned saves = 100;
  std::string json;
};

struct Figures {
  std::string placement;
  double call_median_ms = 0, call_p99_ms = 0, call_max_ms = 0;
  double durable_median_ms = 0;
  std::vector<double> step_ratios;
};

constexpr unsigned kUnits = 8;

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  Arguments arguments;
  arguments.path = options.text("--path", arguments.path);
  arguments.parameters = options.number("--parameters", smoke ? 400'000 : arguments.parameters);
  arguments.saves = options.number("--saves", smoke ? 6 : arguments.saves);
  arguments.json = options.text("--json");
  options.end();
  return arguments;
}

double milliseconds(Nanoseconds time) { return 1e3 * to_seconds(time); }

// The nearest rank.
double quantile(std::vector<double> values, double share) {
  std::ranges::sort(values);
  const double rank = std::ceil(share * static_cast<double>(values.size()));
  return values[static_cast<std::size_t>(std::max(1.0, rank)) - 1];
}

class Program {
 public:
  Program(const Arguments& arguments, Placement placement, const std::string& directory)
      : arguments_(arguments),
        runtime_(runtime_options(arguments)),
        engine_(
            Engine::create(runtime_, options(placement, directory), uniform_model(arguments.parameters, kUnits),
                           [](ParameterId, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 0.5f); })) {
    for (std::uint32_t u = 0; u < kUnits; ++u) units_.push_back(UnitId{u});
  }

  Figures measure() {
    for (int i = 0; i < 4; ++i) step();  // extents are written once, and the pass is planned
    std::vector<double> calls, ratios, durable;
    double plain_seconds = step();
    for (unsigned i = 0; i < arguments_.saves; ++i) {
      const TimePoint begin = Clock::now();
      const Completion saved = engine_.save(fmt::format("save {}", i), {});
      calls.push_back(milliseconds(Clock::now() - begin));
      ratios.push_back(step() / plain_seconds);
      saved.wait();
      durable.push_back(milliseconds(Clock::now() - begin));
      plain_seconds = step();
    }
    return {.call_median_ms = measure::median(calls),
            .call_p99_ms = quantile(calls, 0.99),
            .call_max_ms = quantile(calls, 1),
            .durable_median_ms = measure::median(durable),
            .step_ratios = ratios};
  }

 private:
  static RuntimeOptions runtime_options(const Arguments& arguments) {
    RuntimeOptions options{.device = platform::DeviceKind::host};
    options.device_memory_bytes = 8 * arguments.parameters + 64 * kMiB;
    options.pinned_memory_bytes = 20 * arguments.parameters + 128 * kMiB;
    options.communicator = CommunicatorKind::self;
    return options;
  }

  static EngineOptions options(Placement placement, const std::string& directory) {
    EngineOptions options;
    options.parameters = options.optimizer = placement;
    options.store_directory = directory;
    options.keep_steps = 2;
    return options;
  }

  double step() {
    const TimePoint begin = Clock::now();
    bench::bare_pass(engine_, units_, *stream_, [](double) {});
    engine_.step();
    return to_seconds(Clock::now() - begin);
  }

  const Arguments& arguments_;
  Runtime runtime_;
  Engine engine_;
  std::unique_ptr<platform::Stream> stream_ = runtime_.device().create_stream("program");
  std::vector<UnitId> units_;
};

Figures measured(const Arguments& arguments, Placement placement, const char* name) {
  const bench::TemporaryDirectory directory(arguments.path, "hoist-bench-save");
  Figures figures = Program(arguments, placement, directory.path()).measure();
  figures.placement = name;
  fmt::print("{:8}  {:8.2f} {:8.2f} {:8.2f}  {:10.1f}   {}\n", name, figures.call_median_ms, figures.call_p99_ms,
             figures.call_max_ms, figures.durable_median_ms, measure::median_text(figures.step_ratios));
  std::fflush(stdout);
  return figures;
}

int run(const Arguments& arguments) {
  fmt::print(
      "{} parameters, {} saves; milliseconds of the call: median, 99th percentile, most; until durable; the step "
      "after a save to one without\n",
      arguments.parameters, arguments.saves);
  std::vector<Figures> all;
  all.push_back(measured(arguments, Placement::nvme, "nvme"));
  all.push_back(measured(arguments, Placement::pinned, "pinned"));
  std::string json;
  for (const Figures& f : all)
    json += fmt::format(R"({}{{"placement":"{}","call_ms":{{"median":{},"p99":{},"max":{}}},"durable_ms":{},)"
                        R"("step_ratio":{},"interval":{}}})",
                        json.empty() ? "" : ",", f.placement, f.call_median_ms, f.call_p99_ms, f.call_max_ms,
                        f.durable_median_ms, measure::median(f.step_ratios), bench::interval_json(f.step_ratios));
  bench::write_json(arguments.json, fmt::format("[{}]", json));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
