// SPDX-License-Identifier: Apache-2.0
// How fast an engine takes its memory at the start, against threads that fill as much fresh memory by memset.
//
//   bench_start [--bytes N] [--pairs N] [--drives N] [--json FILE] [--smoke]
//
// pinned: memory is taken, touched, and registered with the device and with a transfer queue for each of N drives.
// device: without a GPU, device memory is taken and filled with NaN. Legs alternate with the memset, and a control
// compares the memset with itself. The memset maps its memory with huge pages, and has a thread on each processor.
// Giving memory back is not timed. The last line is memory that was touched before, for comparison.
//
// Exit code 1: the whole interval of a ratio, widened by half the width of the control's interval, is below 0.6.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <sys/mman.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/tiers/pinned_pool.hpp>

#include "options.hpp"
#include "pairs.hpp"

namespace {

using namespace hoist;

constexpr double kLeastRatio = 0.6;

struct Arguments {
  std::uint64_t bytes = 4 * kGiB;
  unsigned pairs = 31;
  unsigned drives = 1;
  bool smoke = false;
  std::string json;
};

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  Arguments arguments;
  arguments.smoke = smoke;
  arguments.bytes = round_up(options.bytes("--bytes", smoke ? 64 * kMiB : arguments.bytes), kBlockAlignment);
  arguments.pairs = options.number("--pairs", smoke ? 3 : arguments.pairs);
  arguments.drives = options.number("--drives", arguments.drives, 0);
  arguments.json = options.text("--json");
  options.end();
  return arguments;
}

// The threads take chunks in turn, which is the fastest way on a machine that does other things, too.
void fill(std::span<std::byte> bytes) {
  constexpr std::uint64_t kChunk = 8 * kMiB;
  std::atomic<std::uint64_t> next{0};
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < platform::processor_count(); ++i) {
    threads.emplace_back([&] {
      for (std::uint64_t at = 0; (at = next.fetch_add(kChunk)) < bytes.size();)
        std::memset(bytes.data() + at, 1, std::min<std::uint64_t>(kChunk, bytes.size() - at));
    });
  }
}

class Fresh {
 public:
  explicit Fresh(std::uint64_t bytes) : mapped_bytes_(bytes + 2 * kMiB) {
    mapped_ = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    ::madvise(mapped_, mapped_bytes_, MADV_HUGEPAGE);
    const auto address = reinterpret_cast<std::uintptr_t>(mapped_);
    bytes_ = {static_cast<std::byte*>(mapped_) + (round_up(address, 2 * kMiB) - address), bytes};
  }
  ~Fresh() { ::munmap(mapped_, mapped_bytes_); }
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  void* mapped_ = nullptr;
  std::uint64_t mapped_bytes_;
  std::span<std::byte> bytes_;
};

double memset_seconds(std::uint64_t bytes) {
  std::optional<Fresh> fresh;
  return seconds_of([&] {
    fresh.emplace(bytes);
    fill(fresh->bytes());
  });
}

// As Memory and Drives of an engine do it.
class Pinned {
 public:
  Pinned(const Arguments& arguments, platform::Device& device)
      : arguments_(arguments), device_(device), budget_("pinned", "--bytes", arguments.bytes) {}

  double seconds() {
    std::unique_ptr<tiers::PinnedPool> pool;
    std::vector<std::unique_ptr<aio::DriveQueue>> queues;
    const double taking = seconds_of([&] {
      pool = std::make_unique<tiers::PinnedPool>(budget_, platform::HostMemoryOptions{.bytes = arguments_.bytes});
    });
    const std::span<std::byte> memory = pool->memory().bytes();
    const double registering = seconds_of([&] {
      device_.register_host(memory);
      for (unsigned d = 0; d < arguments_.drives; ++d)
        queues.push_back(
            std::make_unique<aio::DriveQueue>(aio::DriveQueueOptions{.registered_memory = pool->memory().slices()}));
    });
    description_ = queues.empty() ? "no drive" : queues.front()->description();
    registering_.push_back(registering / (taking + registering));
    queues.clear();
    device_.unregister_host(memory);
    return taking + registering;
  }

  std::string about() const {
    return fmt::format("{:.1f} % of it registers; {}", 100 * measure::median(registering_), description_);
  }

 private:
  const Arguments& arguments_;
  platform::Device& device_;
  tiers::Budget budget_;
  std::vector<double> registering_;
  std::string description_;
};

double device_seconds(std::uint64_t bytes) {
  tiers::Budget budget("device", "--bytes", bytes);
  const auto device = platform::Device::create({.kind = platform::DeviceKind::host, .memory_bytes = bytes});
  tiers::DeviceArena arena(*device, budget);
  tiers::DeviceBlock block;
  return seconds_of([&] { block = arena.allocate(bytes, "everything"); });
}

struct Result {
  std::string name;
  std::vector<double> ratios;
  double gb_per_s;
  double memset_gb_per_s;
};

// `leg` returns the seconds of `bytes`. Ratios of speeds.
Result compare(const std::string& name, const Arguments& arguments, const std::function<double()>& leg) {
  leg();
  const auto [theirs, ours, ratios] = bench::alternate(
      arguments.pairs, [&] { return memset_seconds(arguments.bytes); }, leg);
  const double gigabytes = static_cast<double>(arguments.bytes) / 1e9;
  return {name, ratios, gigabytes / measure::median(ours), gigabytes / measure::median(theirs)};
}

void print(const Result& result, const std::string& about) {
  fmt::print("{:<8} {}  {:6.2f} GB/s, memset {:6.2f} GB/s  {}\n", result.name, measure::median_text(result.ratios),
             result.gb_per_s, result.memset_gb_per_s, about);
  std::fflush(stdout);
}

std::string json_of(const Arguments& arguments, const std::vector<Result>& results, double warm) {
  std::string json =
      fmt::format(R"({{"bytes":{},"drives":{},"touched_memory_gb_per_s":{})", arguments.bytes, arguments.drives, warm);
  for (const Result& result : results)
    json += fmt::format(R"(,"{}":{{{},"gb_per_s":{},"memset_gb_per_s":{}}})", result.name,
                        bench::ratio_json(result.ratios), result.gb_per_s, result.memset_gb_per_s);
  return json + "}";
}

int run(const Arguments& arguments) {
  const bool has_gpu = platform::cuda_device_count() > 0;
  const auto device = platform::Device::create(
      {.kind = has_gpu ? platform::DeviceKind::cuda : platform::DeviceKind::host, .memory_bytes = kMiB, .ordinal = 0});
  fmt::print("{} on {} processors, {} pairs, {}\nspeed beside memset of fresh memory: median [95 %]\n",
             format_bytes(arguments.bytes), platform::processor_count(), arguments.pairs, device->description());
  std::vector<Result> results{compare("control", arguments, [&] { return memset_seconds(arguments.bytes); })};
  print(results.back(), "");
  Pinned pinned(arguments, *device);
  results.push_back(compare("pinned", arguments, [&] { return pinned.seconds(); }));
  print(results.back(), pinned.about());
  if (!has_gpu) {
    results.push_back(compare("device", arguments, [&] { return device_seconds(arguments.bytes); }));
    print(results.back(), "the host device, filled with NaN");
  }
  const Fresh touched(arguments.bytes);
  fill(touched.bytes());
  std::vector<double> seconds;
  for (unsigned i = 0; i < std::min(arguments.pairs, 9u); ++i)
    seconds.push_back(seconds_of([&] { fill(touched.bytes()); }));
  const double warm = static_cast<double>(arguments.bytes) / 1e9 / measure::median(seconds);
  fmt::print("memset of memory that was touched before: {:.2f} GB/s\n", warm);
  bench::write_json(arguments.json, json_of(arguments, results, warm));
  const auto is_contradicted = [&](const Result& result) {
    return !measure::is_at_least(kLeastRatio, result.ratios, results.front().ratios);
  };
  return !arguments.smoke && std::ranges::any_of(results, is_contradicted) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
