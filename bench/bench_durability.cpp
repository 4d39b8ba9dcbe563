// SPDX-License-Identifier: Apache-2.0
// bench_durability - what it costs that every step is a commit, and that every byte is verified.
//
//   bench_durability [--smoke] [--path DIR] [--pairs N] [--layers N] [--elements N] [--steps-per-turn N]
//                    [--flush-ms N] [--compute-ms N] [--json FILE]
//
// 1. One store, alternating by step. An engine that commits every fourth step, everything on NVMe. It compares a step
//    with a commit to the step before or after it. The same bytes, the same files, the same places in them.
//    All writes of a step are done before its clock stops. Two of the steps without a commit are the control.
// 2. Durability `step` against `none`: two engines take turns, a step each or several (order alternating), each turn
//    settled before the clock stops. `none` against itself is the control. The two stores lie at different places of
//    the drive, which may weigh more than the commits: 1 is the honest figure where flushes are fast. The passes do no
//    mathematics here: the drive is the limit, which makes the ratio the worst there is.
//
// 3. Checksums. One store: steps that compute the checksum of every tile twice, against steps as they are. The
//    first computation costs as much as the second one adds. It also prints how long the checksums of a step's bytes
//    take from cache, divided by the process's processors, as a share of a step with durability `none`.
//
// With --compute-ms or --flush-ms only measurement 2 runs. With --compute-ms each pass takes at least so long on the
// device, a third of it forward, and flushes can hide under the passes. Training continues meanwhile: the clock starts
// at the end of one step and stops at the end of the turn's last step. With --flush-ms each flush takes so much longer.
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <hoist/core/checksum.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/tiers/record_layout.hpp>
#include <hoist/zero/engine.hpp>

#include "bare_pass.hpp"
#include "checksum_twice.hpp"
#include "held_backend.hpp"
#include "options.hpp"
#include "pairs.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace hoist;

struct Arguments {
  std::string path = ".";
  std::string json;
  unsigned pairs = 31;
  unsigned layers = 4;
  std::int64_t elements = 4 << 20;  // of a layer
  unsigned flush_ms = 0;
  unsigned steps_per_turn = 1;
  unsigned compute_ms = 0;  // of a pass
};

RuntimeOptions runtime_options(const Arguments& arguments) {
  const auto layer_bytes = static_cast<std::uint64_t>(arguments.elements) * 2;
  RuntimeOptions options{.device = platform::DeviceKind::host};
  options.device_memory_bytes = 6 * layer_bytes + 8 * kMiB;
  options.pinned_memory_bytes = (arguments.layers + 6) * layer_bytes + 96 * kMiB;
  options.communicator = CommunicatorKind::self;
  if (arguments.flush_ms > 0) {
    const auto slow = bench::with_flushes_of(std::chrono::milliseconds(arguments.flush_ms));
    options.make_aio_backend = [slow](const aio::DriveQueueOptions& engine) {
      return std::make_unique<bench::HeldBackend>(aio::make_backend(engine), slow);
    };
  }
  return options;
}

EngineOptions engine_options(const std::string& store, tiers::Durability durability, unsigned commit_every) {
  EngineOptions options;
  options.parameters = options.optimizer = Placement::nvme;
  options.store_directory = store;
  options.durability = durability;
  options.commit_every = commit_every;
  options.persistence_elements = 0;
  return options;
}

Model model_of(const Arguments& arguments) {
  return uniform_model(static_cast<std::uint64_t>(arguments.elements) * arguments.layers, arguments.layers);
}

// A training whose passes only move what has to be moved, and take their time.
class Training {
 public:
  Training(const Arguments& arguments, const std::string& store, tiers::Durability durability,
           unsigned commit_every = 1)
      : arguments_(arguments),
        runtime_(runtime_options(arguments)),
        engine_(Engine::create(runtime_, engine_options(store, durability, commit_every), model_of(arguments),
                               [](ParameterId, std::uint64_t first, std::span<float> values) {
                                 for (std::size_t i = 0; i < values.size(); ++i)
                                   values[i] = 1e-3f * static_cast<float>((first + i) % 1000);
                               })),
        stream_(runtime_.device().create_stream("compute")) {
    for (std::uint32_t u = 0; u < arguments.layers; ++u) units_.push_back(UnitId{u});
    // The first pass is recorded, the next one planned; then to the beginning of a cycle of commits.
    for (unsigned i = 0; i < 4; ++i) step();
    engine_.settle();
  }

  void step() {
    bench::bare_pass(engine_, units_, *stream_, [this](double share) { compute(share); });
    engine_.step();
  }

  // Seconds of a step.
  double turn(unsigned steps) {
    const bool goes_on = arguments_.compute_ms > 0;
    if (goes_on) step();  // whose commit is the first that a step of this turn waits for
    const TimePoint begin = Clock::now();
    for (unsigned i = 0; i < steps; ++i) step();
    if (!goes_on) engine_.settle();
    const double seconds = to_seconds(Clock::now() - begin) / steps;
    engine_.settle();
    return seconds;
  }

  // Seconds of a step whose writes are all done, committed or not.
  double written_step() {
    const TimePoint begin = Clock::now();
    step();
    engine_.settle();  // waits for the writes of a step that is not committed, too
    return to_seconds(Clock::now() - begin);
  }

  std::uint64_t moved_bytes() {
    return runtime_.ledger().totals(Link::nvme_read).bytes + runtime_.ledger().totals(Link::nvme_write).bytes;
  }
  StepBytes formula() const { return engine_.formula_bytes(); }

 private:
  void compute(double share) {
    const std::chrono::duration<double, std::milli> time(share * arguments_.compute_ms);
    if (time.count() > 0) stream_->launch("compute", [time] { std::this_thread::sleep_for(time); });
  }

  const Arguments& arguments_;
  Runtime runtime_;
  Engine engine_;
  std::unique_ptr<platform::Stream> stream_;
  std::vector<UnitId> units_;
};

struct Ratios {
  std::vector<double> cost, control;
  void print(const std::string& what) const {
    fmt::print("{}: {}, control {}, {} pairs\n", what, measure::median_text(cost, 4), measure::median_text(control, 4),
               cost.size());
    std::fflush(stdout);
  }
  std::string json() const {
    return fmt::format(R"({{{},"control":{},"pairs":{}}})", bench::ratio_json(cost), bench::interval_json(control),
                       cost.size());
  }
};

// One store, committed every fourth step.
Ratios with_and_without_commit(const Arguments& arguments, const std::string& store) {
  constexpr unsigned kCycle = 4;
  Training training(arguments, store, tiers::Durability::step, kCycle);
  Ratios ratios;
  training.written_step();
  for (unsigned pair = 0; pair < arguments.pairs; ++pair) {
    const double second = training.written_step(), third = training.written_step(), committed = training.written_step();
    const double next = training.written_step();  // the first of the next cycle
    const bool even = pair % 2 == 0;
    ratios.cost.push_back(committed / (even ? third : next));
    ratios.control.push_back(even ? second / third : third / second);
  }
  return ratios;
}

// One store without commits: a step with two checksums a tile, between two as they are.
Ratios with_checksums_twice(const Arguments& arguments, const std::string& store) {
  Training training(arguments, store, tiers::Durability::none);
  Ratios ratios;
  training.written_step();
  for (unsigned pair = 0; pair < arguments.pairs; ++pair) {
    const double before = training.written_step();
    bench::set_checksum_twice(true);
    const double twice = training.written_step();
    bench::set_checksum_twice(false);
    const double after = training.written_step();
    const bool even = pair % 2 == 0;
    ratios.cost.push_back(twice / (even ? before : after));
    ratios.control.push_back(even ? before / after : after / before);
  }
  return ratios;
}

// Computes the checksums of one tile after another in cache, as in the update.
double checksum_ns_per_byte() {
  std::vector<std::byte> tile(tiers::kTileElements * 10, std::byte{0x5A});
  constexpr int kRounds = 400;
  std::uint64_t sum = 0;
  std::vector<double> all;
  for (int sample = 0; sample < 9; ++sample) {
    const TimePoint begin = Clock::now();
    for (int i = 0; i < kRounds; ++i) sum ^= tile_checksum({.tile = static_cast<std::uint32_t>(i)}, tile);
    all.push_back(static_cast<double>((Clock::now() - begin).count()) / (kRounds * static_cast<double>(tile.size())));
  }
  if (sum == 1) std::puts("");  // used
  return measure::median(all);
}

int run(const Arguments& arguments) {
  const bench::TemporaryDirectory directory(arguments.path, "hoist-durability");

  Ratios one_store, checksums;
  if (arguments.flush_ms == 0 && arguments.compute_ms == 0) {
    one_store = with_and_without_commit(arguments, directory.path() + "/one");
    one_store.print("a step with its commit / without, one store");
    std::filesystem::remove_all(directory.path() + "/one");
    checksums = with_checksums_twice(arguments, directory.path() + "/twice");
    checksums.print("a step with every checksum computed twice / once, one store");
    std::filesystem::remove_all(directory.path() + "/twice");
  }

  Ratios ratios;
  std::vector<double> seconds;
  double per_step_bytes = 0;
  {
    Training step(arguments, directory.path() + "/step", tiers::Durability::step);
    Training none(arguments, directory.path() + "/none", tiers::Durability::none);
    const unsigned steps = arguments.steps_per_turn;
    const std::uint64_t before = none.moved_bytes(), before_step = step.moved_bytes();
    const bench::Pairs pairs = bench::alternate(
        arguments.pairs, [&] { return step.turn(steps); }, [&] { return none.turn(steps); });
    ratios.cost = pairs.ratios;
    seconds = pairs.second;
    const double taken = static_cast<double>(arguments.pairs) * (steps + (arguments.compute_ms > 0 ? 1 : 0));
    per_step_bytes = static_cast<double>(none.moved_bytes() - before) / taken;
    const double step_bytes = static_cast<double>(step.moved_bytes() - before_step) / taken;
    fmt::print("bytes of a step: {:.0f} with durability step, {:.0f} with none\n", step_bytes, per_step_bytes);
    for (unsigned pair = 0; pair < std::max(2u, arguments.pairs / 2); ++pair) {
      const double a = none.turn(steps);
      ratios.control.push_back(a / none.turn(steps));
    }
  }
  ratios.print(fmt::format("durability step / none{}{}",
                           arguments.flush_ms == 0 ? "" : fmt::format(", {} ms a flush", arguments.flush_ms),
                           arguments.compute_ms == 0 ? "" : fmt::format(", {} ms a pass", arguments.compute_ms)));
  const double ns = checksum_ns_per_byte();
  fmt::print("a step of none: {:.1f} ms, {:.2f} GB/s\n", 1e3 * measure::median(seconds),
             1e-9 * per_step_bytes / measure::median(seconds));
  const double threads = static_cast<double>(platform::processor_count());
  const double share = ns * 1e-9 * per_step_bytes / threads / measure::median(seconds);
  fmt::print("checksums: {:.4f} ns a byte; {:.2f} % of the time of a step on {:.0f} processors\n", ns, 100 * share,
             threads);
  bench::write_json(arguments.json,
                    fmt::format("{{\"one_store\": {}, \"step_to_none\": {}, \"flush_ms\": {}, \"compute_ms\": {}, "
                                "\"checksums_twice\": {}, \"checksum_ns_per_byte\": {}, \"checksum_share\": {}}}",
                                one_store.cost.empty() ? "null" : one_store.json(), ratios.json(), arguments.flush_ms,
                                arguments.compute_ms, checksums.cost.empty() ? "null" : checksums.json(), ns, share));
  return 0;
}

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  Arguments arguments;
  arguments.path = options.text("--path", arguments.path);
  arguments.json = options.text("--json");
  arguments.pairs = options.number("--pairs", smoke ? 2 : arguments.pairs);
  arguments.layers = options.number("--layers", arguments.layers);
  arguments.elements = options.number("--elements", smoke ? 1 << 17 : arguments.elements);
  arguments.steps_per_turn = options.number("--steps-per-turn", arguments.steps_per_turn);
  arguments.compute_ms = options.number("--compute-ms", arguments.compute_ms, 0);
  arguments.flush_ms = options.number("--flush-ms", arguments.flush_ms, 0);
  options.end();
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
