// SPDX-License-Identifier: Apache-2.0
// bench/bench_checksum.cpp - verifying bytes, and verifying and copying them, beside memcpy of as many bytes.
//
//   bench_checksum [--bytes N] [--pairs N] [--threads N] [--json FILE] [--smoke]
//
// Each round verifies all tiles of an array, copies the array with verification, tile by tile, and runs memcpy of the
// same tiles twice, in an order that changes from round to round, on every processor. A ratio is memcpy's time over
// ours; the second memcpy over the first is the control. It does so for each instruction set of the machine.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/checksum.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/optim_cpu/update.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/platform/host_memory.hpp>

#include "options.hpp"
#include "pairs.hpp"

namespace {

using namespace hoist;

constexpr std::size_t kTileBytes = 160 << 10;  // the states of AdamW in a tile of 16384 parameters

struct Arguments {
  std::size_t bytes = 512 * kMiB;
  unsigned pairs = 31;
  unsigned threads = 0;
  std::string json;
};

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  Arguments arguments;
  arguments.bytes = options.bytes("--bytes", smoke ? 8 * kMiB : arguments.bytes);
  arguments.pairs = options.number("--pairs", smoke ? 2 : arguments.pairs);
  arguments.threads = options.number("--threads", arguments.threads, 0);
  arguments.json = options.text("--json");
  options.end();
  return arguments;
}

enum Leg : std::size_t { first_copy, second_copy, verify, verify_and_copy, legs };

class Legs {
 public:
  explicit Legs(const Arguments& arguments)
      : pool_({.threads = arguments.threads}),
        tiles_(std::max<std::size_t>(1, arguments.bytes / kTileBytes)),
        from_({.bytes = tiles_ * kTileBytes}),
        to_({.bytes = tiles_ * kTileBytes}) {
    std::size_t i = 0;
    for (std::byte& byte : from_.bytes()) byte = static_cast<std::byte>(i++ * 0x9E3779B97F4A7C15u >> 56);
  }

  double seconds(Leg leg) {
    std::atomic<std::uint64_t> sums{0};
    const auto work = [&](std::size_t k) {
      const auto source = from_.bytes().subspan(k * kTileBytes, kTileBytes);
      if (leg == verify || leg == verify_and_copy)
        sums.fetch_xor(tile_checksum({.tile = static_cast<std::uint32_t>(k)}, source), std::memory_order_relaxed);
      if (leg != verify) std::memcpy(to_.bytes().data() + k * kTileBytes, source.data(), kTileBytes);
    };
    const double seconds = seconds_of([&] { pool_.run(tiles_, work); });
    sink_ = sums.load();
    return seconds;
  }
  unsigned threads() const { return pool_.threads(); }

 private:
  optim::UpdatePool pool_;
  std::size_t tiles_;
  platform::HostMemory from_, to_;
  volatile std::uint64_t sink_ = 0;
};

int run(const Arguments& arguments) {
  Legs work(arguments);
  std::vector<std::string> rows;
  fmt::print("memcpy's time over ours: {}, {} rounds, {} threads\n", format_bytes(arguments.bytes), arguments.pairs,
             work.threads());
  for (const std::string& name : optim::supported_instruction_sets()) {
    optim::force_instruction_set(name);
    for (std::size_t leg = 0; leg < legs; ++leg) (void)work.seconds(static_cast<Leg>(leg));
    std::vector<double> verified, copied, control;
    for (unsigned round = 0; round < arguments.pairs; ++round) {
      std::array<double, legs> seconds{};
      for (std::size_t k = 0; k < legs; ++k) {  // turned, and backwards in every other round
        const std::size_t leg = ((round % 2 == 0 ? k : legs - 1 - k) + round / 2) % legs;
        seconds[leg] = work.seconds(static_cast<Leg>(leg));
      }
      verified.push_back(seconds[first_copy] / seconds[verify]);
      copied.push_back(seconds[first_copy] / seconds[verify_and_copy]);
      control.push_back(seconds[first_copy] / seconds[second_copy]);
    }
    fmt::print("  {:6} verify {}, verify and copy {}, control {}\n", name, measure::median_text(verified),
               measure::median_text(copied), measure::median_text(control));
    rows.push_back(fmt::format(R"({{"instruction_set":"{}","verify":{{{}}},"verify_and_copy":{{{}}},"control":{{{}}},)"
                               R"("pairs":{},"threads":{}}})",
                               name, bench::ratio_json(verified), bench::ratio_json(copied), bench::ratio_json(control),
                               arguments.pairs, work.threads()));
  }
  optim::force_instruction_set("");
  bench::write_json(arguments.json, fmt::format("[{}]", fmt::join(rows, ",")));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
