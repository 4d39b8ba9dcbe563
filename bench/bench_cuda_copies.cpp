// SPDX-License-Identifier: Apache-2.0
// Copies between a GPU and the pinned pool, through hoist's streams, against one plain cudaMemcpyAsync from one big
// block of cudaHostAlloc: to the GPU, from it, and both at once.
//
//   bench_cuda_copies [--bytes N] [--piece N] [--pairs N] [--ordinal N] [--json FILE] [--smoke]
//
// Legs alternate, plain and pool, on the same device memory; a control compares the plain leg with itself. Both
// directions at once are compared with plain copies at once, and with the sum of both plain speeds of the same round:
// no link need reach that. Ends with 77 where there is no GPU. Aims: 0.97 of plain copies, 0.9 of the sum; an aim is
// missed if the whole interval, widened by half the width of the control's interval, lies below it.
#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/tiers/pinned_pool.hpp>

#include "options.hpp"
#include "pairs.hpp"

namespace {

using namespace hoist;
using platform::CopyKind;

constexpr int kNoGpu = 77;

struct Arguments {
  std::uint64_t bytes = 2 * kGiB;   // of a leg and direction
  std::uint64_t piece = 64 * kMiB;  // a unit's weights are copied in one go; this is a layer of 32 M parameters
  unsigned pairs = 31;
  int ordinal = 0;
  std::string json;
};

Arguments parse(int argc, char** argv) {
  bench::Options options(argc, argv);
  const bool smoke = options.flag("--smoke");
  Arguments arguments;
  arguments.piece = round_up(options.bytes("--piece", smoke ? 8 * kMiB : arguments.piece), kBlockAlignment);
  arguments.bytes = std::max(arguments.piece,
                             round_up(options.bytes("--bytes", smoke ? 64 * kMiB : arguments.bytes), arguments.piece));
  arguments.pairs = options.number("--pairs", smoke ? 3 : arguments.pairs);
  arguments.ordinal = options.number("--ordinal", 0, 0);
  arguments.json = options.text("--json");
  options.end();
  return arguments;
}

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorString(code)));
}

// The copies that a program without hoist would make: one block and one stream for each direction.
class Plain {
 public:
  explicit Plain(std::uint64_t bytes) : bytes_(bytes) {
    for (Leg& leg : legs_) {
      check(cudaStreamCreateWithFlags(&leg.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
      check(cudaHostAlloc(&leg.block, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    }
  }
  ~Plain() {
    for (const Leg& leg : legs_) {
      cudaFreeHost(leg.block);
      cudaStreamDestroy(leg.stream);
    }
  }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;

  // Up to `upper`, down from `lower`; a direction whose place is null is left out.
  double seconds(std::byte* upper, const std::byte* lower) {
    const auto& [up, down] = legs_;
    const TimePoint begin = Clock::now();
    if (upper != nullptr)
      check(cudaMemcpyAsync(upper, up.block, bytes_, cudaMemcpyHostToDevice, up.stream), "cudaMemcpyAsync");
    if (lower != nullptr)
      check(cudaMemcpyAsync(down.block, lower, bytes_, cudaMemcpyDeviceToHost, down.stream), "cudaMemcpyAsync");
    for (const Leg& leg : legs_) check(cudaStreamSynchronize(leg.stream), "cudaStreamSynchronize");
    return to_seconds(Clock::now() - begin);
  }

 private:
  struct Leg {
    cudaStream_t stream = nullptr;
    void* block = nullptr;
  };
  const std::uint64_t bytes_;
  std::array<Leg, 2> legs_;
};

class Pool {
 public:
  explicit Pool(const Arguments& a)
      : piece_(a.piece),
        device_(platform::Device::create(
            {.kind = platform::DeviceKind::cuda, .memory_bytes = 2 * a.bytes, .ordinal = a.ordinal})),
        budget_("pinned", "--bytes", 2 * a.bytes),
        pool_(budget_, {.bytes = 2 * a.bytes}),
        up_(device_->create_stream("up")),
        down_(device_->create_stream("down")),
        pieces_(a.bytes / a.piece) {
    device_->register_host(pool_.memory().bytes());
  }
  ~Pool() { device_->unregister_host(pool_.memory().bytes()); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::string description() const { return device_->description(); }
  std::byte* upper() { return device_->memory().data(); }                     // where copies go up to
  std::byte* lower() { return device_->memory().data() + pieces_ * piece_; }  // where they come down from

  double seconds(bool up, bool down) {
    std::byte* const from = pool_.memory().bytes().data();  // for copies up
    std::byte* const into = from + pieces_ * piece_;        // for copies down
    const TimePoint begin = Clock::now();
    for (std::uint64_t i = 0; i < pieces_; ++i) {
      if (up) up_->copy(upper() + i * piece_, from + i * piece_, piece_, CopyKind::host_to_device);
      if (down) down_->copy(into + i * piece_, lower() + i * piece_, piece_, CopyKind::device_to_host);
    }
    if (up) up_->synchronize();
    if (down) down_->synchronize();
    return to_seconds(Clock::now() - begin);
  }

 private:
  const std::uint64_t piece_;
  std::unique_ptr<platform::Device> device_;
  tiers::Budget budget_;
  tiers::PinnedPool pool_;
  std::unique_ptr<platform::Stream> up_, down_;
  const std::uint64_t pieces_;
};

struct Figure {
  const char* name;
  const char* base;  // of the ratios
  double aim;
  std::vector<double> ratios, control, gigabytes_per_second;
};

std::vector<Figure> measured(const Arguments& a) {
  check(cudaSetDevice(a.ordinal), "cudaSetDevice");
  Pool pool(a);
  Plain plain(a.bytes);
  fmt::print("{}; {} a leg, pieces of {}, {} pairs\n", pool.description(), format_bytes(a.bytes), format_bytes(a.piece),
             a.pairs);
  std::vector<Figure> figures{{.name = "host to device", .base = "plain", .aim = 0.97},
                              {.name = "device to host", .base = "plain", .aim = 0.97},
                              {.name = "both at once", .base = "plain", .aim = 0.97},
                              {.name = "both at once", .base = "both alone, added up", .aim = 0.9}};
  const double gigabytes = static_cast<double>(a.bytes) / 1e9;
  for (unsigned round = 0; round < a.pairs + 1; ++round) {
    double sum = 0, sum_again = 0;  // the plain speeds of either direction alone
    for (std::size_t kind = 0; kind < 3; ++kind) {
      const bool up = kind != 1, down = kind != 0;
      std::byte* const upper = up ? pool.upper() : nullptr;
      std::byte* const lower = down ? pool.lower() : nullptr;
      const double first = plain.seconds(upper, lower);
      const double ours = pool.seconds(up, down);
      const double again = plain.seconds(upper, lower);
      const double speed = (up && down ? 2 : 1) * gigabytes / ours;
      if (round == 0) continue;  // pages, clocks and the first use of everything
      figures[kind].ratios.push_back((first + again) / 2 / ours);
      figures[kind].control.push_back(first / again);
      figures[kind].gigabytes_per_second.push_back(speed);
      if (kind < 2) {
        sum += gigabytes / first;
        sum_again += gigabytes / again;
        continue;
      }
      figures[3].ratios.push_back(speed / sum);
      figures[3].control.push_back(sum_again / sum);
      figures[3].gigabytes_per_second.push_back(speed);
    }
  }
  return figures;
}

std::string json_of(const Figure& figure) {
  return fmt::format(R"({{"copy":"{}","base":"{}",{},"control":{},"aim":{},"gigabytes_per_second":{}}})", figure.name,
                     figure.base, bench::ratio_json(figure.ratios), bench::interval_json(figure.control), figure.aim,
                     measure::median(figure.gigabytes_per_second));
}

void print(const Figure& figure) {
  const bool reached = measure::is_at_least(figure.aim, figure.ratios, figure.control);
  fmt::print("{:15} {:7.2f} GB/s   {} of {}   aim {:.2f}: {}   (plain against itself {})\n", figure.name,
             measure::median(figure.gigabytes_per_second), measure::median_text(figure.ratios), figure.base, figure.aim,
             reached ? "reached" : "missed", measure::median_text(figure.control));
}

int run(const Arguments& arguments) {
  std::string why;
  if (platform::cuda_device_count(&why) == 0) {
    fmt::print("skipped: no CUDA GPU ({})\n", why);
    return kNoGpu;
  }
  const std::vector<Figure> figures = measured(arguments);
  for (const Figure& figure : figures) print(figure);
  std::vector<std::string> rows;
  for (const Figure& figure : figures) rows.push_back(json_of(figure));
  bench::write_json(arguments.json, fmt::format("[{}]", fmt::join(rows, ",")));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::run_main([&] { return run(parse(argc, argv)); });
}
