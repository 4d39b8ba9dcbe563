// SPDX-License-Identifier: Apache-2.0
// Copies between a card and the pinned pool, through hoist's streams, against one plain cudaMemcpyAsync from one big
// block of cudaHostAlloc: to the card, from it, and both at once.
//
//   bench_cuda_copies [--bytes N] [--piece N] [--pairs N] [--ordinal N] [--json FILE] [--smoke]
//
// Legs alternate, plain and pool, on the same device memory; a control compares the plain leg with itself. Both
// directions at once are compared with the sum of both plain speeds of the same round. Ends with 77 where there is no
// card. Aims: 0.97 in either direction, 0.9 for both at once.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <hoist/core/clock.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/tiers/pinned_pool.hpp>

namespace {

using namespace hoist;
using platform::CopyKind;

constexpr int kNoCard = 77;

struct Arguments {
  std::uint64_t bytes = 2 * kGiB;   // of a leg and direction
  std::uint64_t piece = 64 * kMiB;  // a unit's weights are copied in one go; this is a layer of 32 M parameters
  unsigned pairs = 31;
  int ordinal = 0;
  std::string json;
};

std::uint64_t bytes_of(const std::string& text) {
  const auto bytes = parse_bytes(text);
  if (!bytes) throw std::runtime_error(fmt::format("'{}' is not a number of bytes; 64MiB is one", text));
  return *bytes;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::string(argv[++i]) : std::string(); };
    if (option == "--bytes") arguments.bytes = bytes_of(value());
    if (option == "--piece") arguments.piece = bytes_of(value());
    if (option == "--pairs") arguments.pairs = static_cast<unsigned>(std::stoul(value()));
    if (option == "--ordinal") arguments.ordinal = std::stoi(value());
    if (option == "--json") arguments.json = value();
    if (option == "--smoke") {
      arguments.bytes = 64 * kMiB;
      arguments.piece = 8 * kMiB;
      arguments.pairs = 3;
    }
  }
  arguments.piece = round_up(arguments.piece, kBlockAlignment);
  arguments.bytes = std::max(arguments.piece, round_up(arguments.bytes, arguments.piece));
  return arguments;
}

void check(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", call, cudaGetErrorString(code)));
}

// The copy that a program without hoist would make.
class Plain {
 public:
  explicit Plain(std::uint64_t bytes) : bytes_(bytes) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaHostAlloc(&block_, bytes, cudaHostAllocPortable), "cudaHostAlloc");
  }
  ~Plain() {
    cudaFreeHost(block_);
    cudaStreamDestroy(stream_);
  }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;

  double seconds(std::byte* device, CopyKind kind) {
    const TimePoint begin = Clock::now();
    const bool up = kind == CopyKind::host_to_device;
    check(cudaMemcpyAsync(up ? device : block_, up ? block_ : device, bytes_,
                          up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return to_seconds(Clock::now() - begin);
  }

 private:
  const std::uint64_t bytes_;
  cudaStream_t stream_ = nullptr;
  void* block_ = nullptr;
};

class Pool {
 public:
  explicit Pool(const Arguments& a)
      : piece_(a.piece),
        device_(platform::Device::create(
            {.kind = platform::DeviceKind::cuda, .memory_bytes = 2 * a.bytes, .ordinal = a.ordinal})),
        budget_("pinned", "--bytes", 2 * plan(a).bytes()),
        pool_(budget_, {.bytes = plan(a).bytes()}),
        up_(device_->create_stream("up")),
        down_(device_->create_stream("down")),
        pieces_(a.bytes / a.piece) {
    device_->register_host(pool_.memory().bytes());
    for (std::uint64_t i = 0; i < 2 * pieces_; ++i) host_.push_back(pool_.carve(a.piece, "a piece").data());
  }
  ~Pool() { device_->unregister_host(pool_.memory().bytes()); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::string description() const { return device_->description(); }
  std::byte* upper() { return device_->memory().data(); }                     // where copies go up to
  std::byte* lower() { return device_->memory().data() + pieces_ * piece_; }  // where they come down from

  double seconds(bool up, bool down) {
    const TimePoint begin = Clock::now();
    for (std::uint64_t i = 0; i < pieces_; ++i) {
      if (up) up_->copy(upper() + i * piece_, host_[i], piece_, CopyKind::host_to_device);
      if (down) down_->copy(host_[pieces_ + i], lower() + i * piece_, piece_, CopyKind::device_to_host);
    }
    if (up) up_->synchronize();
    if (down) down_->synchronize();
    return to_seconds(Clock::now() - begin);
  }

 private:
  static tiers::PinnedPlan plan(const Arguments& a) {
    tiers::PinnedPlan plan;
    for (std::uint64_t i = 0; i < 2 * (a.bytes / a.piece); ++i) plan.add(a.piece);
    return plan;
  }

  const std::uint64_t piece_;
  std::unique_ptr<platform::Device> device_;
  tiers::Budget budget_;
  tiers::PinnedPool pool_;
  std::unique_ptr<platform::Stream> up_, down_;
  const std::uint64_t pieces_;
  std::vector<std::byte*> host_;
};

struct Figure {
  const char* name;
  double aim;
  std::vector<double> ratios, control, gigabytes_per_second;
};

std::array<Figure, 3> measured(const Arguments& a) {
  check(cudaSetDevice(a.ordinal), "cudaSetDevice");
  Pool pool(a);
  Plain plain(a.bytes);
  fmt::print("{}; {} a leg, pieces of {}, {} pairs\n", pool.description(), format_bytes(a.bytes), format_bytes(a.piece),
             a.pairs);
  std::array<Figure, 3> figures{Figure{"host to device", 0.97, {}, {}, {}}, Figure{"device to host", 0.97, {}, {}, {}},
                                Figure{"both at once", 0.9, {}, {}, {}}};
  const double gigabytes = static_cast<double>(a.bytes) / 1e9;
  for (unsigned round = 0; round < a.pairs + 1; ++round) {
    double speed = 0;  // of both plain legs
    for (const bool up : {true, false}) {
      std::byte* const device = up ? pool.upper() : pool.lower();
      const CopyKind kind = up ? CopyKind::host_to_device : CopyKind::device_to_host;
      const double first = plain.seconds(device, kind);
      const double ours = pool.seconds(up, !up);
      const double again = plain.seconds(device, kind);
      speed += gigabytes / first;
      if (round == 0) continue;  // pages, clocks and the first use of everything
      Figure& figure = figures[up ? 0 : 1];
      figure.ratios.push_back((first + again) / 2 / ours);
      figure.control.push_back(first / again);
      figure.gigabytes_per_second.push_back(gigabytes / ours);
    }
    const double both = 2 * gigabytes / pool.seconds(true, true);
    if (round == 0) continue;
    figures[2].ratios.push_back(both / speed);
    figures[2].gigabytes_per_second.push_back(both);
  }
  return figures;
}

std::string json_of(const Figure& figure) {
  const measure::Interval interval = measure::median_interval(figure.ratios);
  return fmt::format(R"({{"copy":"{}","ratio":{},"interval":[{},{}],"aim":{},"gigabytes_per_second":{}}})", figure.name,
                     measure::median(figure.ratios), interval.low, interval.high, figure.aim,
                     measure::median(figure.gigabytes_per_second));
}

void print(const Figure& figure) {
  const measure::Interval interval = measure::median_interval(figure.ratios);
  const double ratio = measure::median(figure.ratios);
  fmt::print("{:15} {:7.2f} GB/s   {:.3f} [{:.3f}, {:.3f}] of plain   aim {:.2f}: {}", figure.name,
             measure::median(figure.gigabytes_per_second), ratio, interval.low, interval.high, figure.aim,
             ratio >= figure.aim ? "reached" : "missed");
  if (!figure.control.empty()) {
    const measure::Interval control = measure::median_interval(figure.control);
    fmt::print("   (plain against itself [{:.3f}, {:.3f}])", control.low, control.high);
  }
  fmt::print("\n");
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments = parse(argc, argv);
  std::string why;
  if (platform::cuda_device_count(&why) == 0) {
    fmt::print("skipped: no CUDA card ({})\n", why);
    return kNoCard;
  }
  const std::array<Figure, 3> figures = measured(arguments);
  for (const Figure& figure : figures) print(figure);
  if (arguments.json.empty()) return 0;
  std::ofstream file(arguments.json);
  file << fmt::format("[{},{},{}]\n", json_of(figures[0]), json_of(figures[1]), json_of(figures[2]));
  return file.good() ? 0 : 1;
} catch (const std::exception& error) {
  fmt::print(stderr, "{}\n", error.what());
  return 1;
}
