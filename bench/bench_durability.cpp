// SPDX-License-Identifier: Apache-2.0
// bench_durability - what it costs that every step is a commit, and that every byte is verified.
//
//   bench_durability [--smoke] [--path DIR] [--pairs N] [--layers N] [--elements N] [--steps-per-turn N]
//                    [--flush-ms N] [--json FILE]
//
// Two engines train the same model with everything on NVMe, one with durability `step`, one with `none`: equal bytes,
// since both write 12 bytes a parameter. They take turns, a step each or several (order alternating), and each turn is
// settled before the clock stops, so that nothing of one falls into the other's time. With one step a turn no flush is
// hidden under the next step; with eight, seven of eight may be. The ratio of each pair counts; `none` against itself
// is the control. With --flush-ms each flush takes so much longer.
//
// The passes do no mathematics: the drive is the limit, which makes the ratio the worst there is. Checksums: processor
// time of a tile's, as a share of such a step on the processors the update uses.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include <hoist/core/checksum.hpp>
#include <hoist/core/error.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/zero/engine.hpp>

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
};

// Holds every flush back for a while.
class SlowFlush final : public aio::Backend {
 public:
  SlowFlush(std::unique_ptr<aio::Backend> inner, Nanoseconds flush) : inner_(std::move(inner)), flush_(flush) {}
  std::string description() const override { return inner_->description(); }
  void submit(aio::Block& block) override {
    if (block.operation == aio::Operation::sync) {
      held_.push_back({&block, Clock::now() + flush_});
    } else {
      inner_->submit(block);
    }
  }
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override {
    while (!held_.empty() && held_.front().due <= Clock::now()) {
      inner_->submit(*held_.front().block);
      held_.pop_front();
    }
    if (!held_.empty())
      timeout = std::min(timeout, std::max(Nanoseconds(0), Nanoseconds(held_.front().due - Clock::now())));
    return inner_->reap(done, timeout);
  }
  void wake_up() override { inner_->wake_up(); }

 private:
  struct Held {
    aio::Block* block;
    TimePoint due;
  };
  const std::unique_ptr<aio::Backend> inner_;
  const Nanoseconds flush_;
  std::deque<Held> held_;
};

RuntimeOptions runtime_options(const Arguments& arguments) {
  const auto layer_bytes = static_cast<std::uint64_t>(arguments.elements) * 2;
  RuntimeOptions options;
  options.device_memory_bytes = 6 * layer_bytes + 8 * kMiB;
  options.pinned_memory_bytes = (arguments.layers + 6) * layer_bytes + 96 * kMiB;
  options.communicator = CommunicatorKind::self;
  if (arguments.flush_ms > 0) {
    options.make_aio_backend = [flush =
                                    std::chrono::milliseconds(arguments.flush_ms)](const aio::EngineOptions& engine) {
      return std::make_unique<SlowFlush>(aio::make_backend(engine), flush);
    };
  }
  return options;
}

EngineOptions engine_options(const std::string& store, tiers::Durability durability) {
  EngineOptions options;
  options.parameters = options.optimizer = Placement::nvme;
  options.store_directory = store;
  options.durability = durability;
  options.persistence_elements = 0;
  return options;
}

// A training whose passes only move what has to be moved.
class Training {
 public:
  Training(const Arguments& arguments, const std::string& store, tiers::Durability durability)
      : runtime_(runtime_options(arguments)),
        engine_(runtime_, engine_options(store, durability)),
        stream_(runtime_.device().create_stream("compute")) {
    for (unsigned layer = 0; layer < arguments.layers; ++layer) {
      const std::vector<ParameterSpec> specs{{.name = fmt::format("layer{}", layer), .shape = {arguments.elements}}};
      units_.push_back(engine_.add_unit(specs.front().name, specs));
    }
    engine_.initialize([](ParameterId, std::uint64_t first, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1e-3f * static_cast<float>((first + i) % 1000);
    });
    for (int i = 0; i < 3; ++i) turn(1);  // the first pass is recorded, the next one planned
  }

  double turn(unsigned steps) {
    const TimePoint begin = Clock::now();
    for (unsigned i = 0; i < steps; ++i) {
      {
        const PassScope pass = engine_.begin(Pass::train);
        for (const UnitId unit : units_) engine_.gather(unit, *stream_).release(*stream_);
        for (std::size_t u = units_.size(); u-- > 0;) {
          engine_.gather(units_[u], *stream_).release(*stream_);
          engine_.finish(units_[u], *stream_);
        }
      }
      engine_.step();
    }
    engine_.settle();
    return to_seconds(Clock::now() - begin) / steps;
  }

  std::uint64_t moved_bytes() {
    return runtime_.ledger().totals(Link::nvme_read).bytes + runtime_.ledger().totals(Link::nvme_write).bytes;
  }
  StepBytes formula() const { return engine_.formula_bytes(); }

 private:
  Runtime runtime_;
  Engine engine_;
  std::unique_ptr<platform::Stream> stream_;
  std::vector<UnitId> units_;
};

// Of one tile after another that is in cache, as the update has it.
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
  std::string pattern = arguments.path + "/hoist-durability-XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) throw IoError({"mkdtemp", pattern, 0, 0, errno}, "");
  struct Removal {
    const std::string& path;
    ~Removal() { std::filesystem::remove_all(path); }
  } const removal{pattern};

  std::vector<double> ratios, control, seconds;
  double per_step_bytes = 0;
  {
    Training step(arguments, pattern + "/step", tiers::Durability::step);
    Training none(arguments, pattern + "/none", tiers::Durability::none);
    const unsigned steps = arguments.steps_per_turn;
    const std::uint64_t before = none.moved_bytes(), before_step = step.moved_bytes();
    for (unsigned pair = 0; pair < arguments.pairs; ++pair) {
      double a = 0, b = 0;
      if (pair % 2 == 0) {
        a = step.turn(steps);
        b = none.turn(steps);
      } else {
        b = none.turn(steps);
        a = step.turn(steps);
      }
      ratios.push_back(a / b);
      seconds.push_back(b);
    }
    const double taken = static_cast<double>(arguments.pairs) * steps;
    per_step_bytes = static_cast<double>(none.moved_bytes() - before) / taken;
    const double step_bytes = static_cast<double>(step.moved_bytes() - before_step) / taken;
    fmt::print("bytes of a step: {:.0f} with durability step, {:.0f} with none\n", step_bytes, per_step_bytes);
    for (unsigned pair = 0; pair < arguments.pairs / 2; ++pair) control.push_back(none.turn(steps) / none.turn(steps));
  }
  const auto cost = measure::median_interval(ratios);
  const auto noise = measure::median_interval(control);
  fmt::print("durability step / none{}: {:.4f} [{:.4f}, {:.4f}], control {:.4f} [{:.4f}, {:.4f}], {} pairs\n",
             arguments.flush_ms == 0 ? "" : fmt::format(", {} ms a flush", arguments.flush_ms), measure::median(ratios),
             cost.low, cost.high, measure::median(control), noise.low, noise.high, arguments.pairs);
  const double ns = checksum_ns_per_byte();
  fmt::print("a step of none: {:.1f} ms, {:.2f} GB/s\n", 1e3 * measure::median(seconds),
             1e-9 * per_step_bytes / measure::median(seconds));
  const double threads = static_cast<double>(std::max(1u, std::thread::hardware_concurrency()));
  const double share = ns * 1e-9 * per_step_bytes / threads / measure::median(seconds);
  fmt::print("checksums: {:.4f} ns a byte; {:.2f} % of the time of a step on {:.0f} processors\n", ns, 100 * share,
             threads);
  if (!arguments.json.empty()) {
    std::ofstream(arguments.json) << fmt::format(
        "{{\"ratio\": {}, \"interval\": [{}, {}], \"control\": [{}, {}], \"pairs\": {}, \"flush_ms\": {}, "
        "\"checksum_ns_per_byte\": {}, \"checksum_share\": {}}}\n",
        measure::median(ratios), cost.low, cost.high, noise.low, noise.high, arguments.pairs, arguments.flush_ms, ns,
        share);
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string_view key = words[i];
    if (key == "--smoke") {
      arguments.pairs = 2;
      arguments.elements = 1 << 17;
      continue;
    }
    const char* const value = i + 1 < count ? words[++i] : "";
    if (key == "--path") arguments.path = value;
    if (key == "--json") arguments.json = value;
    if (key == "--pairs") arguments.pairs = static_cast<unsigned>(std::atoi(value));
    if (key == "--layers") arguments.layers = static_cast<unsigned>(std::atoi(value));
    if (key == "--elements") arguments.elements = std::atoll(value);
    if (key == "--steps-per-turn") arguments.steps_per_turn = static_cast<unsigned>(std::atoi(value));
    if (key == "--flush-ms") arguments.flush_ms = static_cast<unsigned>(std::atoi(value));
  }
  try {
    return run(arguments);
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
