// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <span>

#include <fmt/format.h>

#include <hoist/core/checksum.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/division.hpp>
#include <hoist/measure/kernels.hpp>
#include <hoist/measure/stream.hpp>
#include <hoist/optim_cpu/block_fp8.hpp>
#include <hoist/optim_cpu/update.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/platform/host_memory.hpp>
#include <hoist/platform/update_arrays.hpp>
#include <hoist/tiers/record_layout.hpp>

namespace hoist::measure {

namespace {

using optim::UpdateCoefficients;
using optim::UpdatePool;

constexpr std::size_t kTile = tiers::kTileElements;

// Makes every update use one instruction set during its lifetime.
class InstructionSet {
 public:
  explicit InstructionSet(const std::string& name) {
    if (!name.empty()) optim::force_instruction_set(name);
  }
  ~InstructionSet() { optim::force_instruction_set(""); }
  InstructionSet(const InstructionSet&) = delete;
  InstructionSet& operator=(const InstructionSet&) = delete;
};

// The arrays of `count` parameters, consecutive in one block.
class State {
 public:
  State(const KernelCase& what, std::size_t count)
      : what_(what),
        moments_(optim::moment_count(optim::state_of(what.optimizer))),
        memory_({.bytes = count * bytes_per_parameter(what) + 10 * kGap}) {
    std::byte* at = memory_.bytes().data();
    const auto take = [&](std::size_t width) {
      std::byte* const array = at;
      at += round_up(count * width, 64) + kGap;
      return array;
    };
    arrays_.count = count;
    arrays_.master[0] = take(what.master == DType::bf16 ? 2 : 4);
    arrays_.remainder_bytes = remainder_bytes(what.optimizer.remainder);
    if (what.master == DType::bf16) arrays_.master[1] = take(arrays_.remainder_bytes);
    if (what.master == DType::fp16) arrays_.weight = take(2);
    arrays_.moment_count = moments_;
    const MomentType type = optim::state_form(what.optimizer).moments;
    arrays_.moment_bytes = type == MomentType::fp8 ? 1 : moment_bytes(type, 1);
    for (unsigned i = 0; i < moments_; ++i) {
      arrays_.moments[i] = take(arrays_.moment_bytes);
      if (arrays_.moment_bytes == 1) arrays_.scales[i] = reinterpret_cast<std::uint8_t*>(take(1));
    }
    arrays_.gradient_bytes = dtype_bytes(what.gradient);
    arrays_.gradient = take(arrays_.gradient_bytes);
  }

  static std::size_t bytes_per_parameter(const KernelCase& what) {
    const optim::StateForm form = optim::state_form(what.optimizer);
    const unsigned moments = optim::moment_count(form.state);
    // For fp8: a byte for the element, and a second one of which an eighth is used.
    const std::size_t moment = form.moments == MomentType::fp8 ? 2 : moment_bytes(form.moments, 1);
    return 4 + (what.master == DType::fp16 ? 2 : 0) + moments * moment + dtype_bytes(what.gradient);
  }

  void fill(std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < first + count; ++i) {
      const auto master = static_cast<float>(0.1 * (random_uniform(1, i) - 0.5));
      if (what_.master != DType::bf16) {
        static_cast<float*>(arrays_.master[0])[i] = master;
        if (arrays_.weight != nullptr) static_cast<std::uint16_t*>(arrays_.weight)[i] = 0;  // its page is there
      } else {
        const SplitMaster split = split_master(arrays_.remainder_bytes == 1 ? to_master24(master) : master);
        static_cast<bf16*>(arrays_.master[0])[i] = split.weight;
        if (arrays_.remainder_bytes == 1)
          static_cast<std::int8_t*>(arrays_.master[1])[i] = static_cast<std::int8_t>(split.remainder / 256);
        if (arrays_.remainder_bytes == 2) static_cast<std::int16_t*>(arrays_.master[1])[i] = split.remainder;
      }
      for (unsigned m = 0; m < moments_; ++m) {
        const bool is_second = is_second_moment(m);
        const auto moment =
            static_cast<float>(is_second ? 1e-6 * random_uniform(3, i) : 1e-3 * (random_uniform(2, i) - 0.5));
        if (arrays_.moment_bytes == 2) static_cast<bf16*>(arrays_.moments[m])[i] = to_bf16(moment);
        if (arrays_.moment_bytes == 4) static_cast<float*>(arrays_.moments[m])[i] = moment;
        if (arrays_.moment_bytes == 1) put_fp8(m, i, moment);
      }
      put_gradient(i, static_cast<float>(1e-3 * (random_uniform(4, i) - 0.5)));
    }
  }

  StreamArrays part(std::size_t first, std::size_t count) const {
    StreamArrays part = arrays_;
    const auto advance = [&](auto*& array, std::size_t width) {
      if (array != nullptr)
        array = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array))) + first * width;
    };
    advance(part.master[0], part.is_split() ? 2 : 4);
    advance(part.master[1], part.remainder_bytes);
    advance(part.weight, 2);
    for (void*& moment : part.moments) advance(moment, part.moment_bytes);
    for (std::uint8_t*& scales : part.scales)
      if (scales != nullptr) scales += first / kMomentBlock;
    advance(part.gradient, part.gradient_bytes);
    part.count = count;
    return part;
  }

  bool update(const UpdateCoefficients& c, std::size_t first, std::size_t count) const {
    const StreamArrays a = part(first, count);
    const bool has_first = optim::has_moment1(optim::state_of(what_.optimizer));
    const optim::TileState state{.moment1 = has_first ? a.moments[0] : nullptr,
                                 .moment2 = has_first ? a.moments[1] : a.moments[0],
                                 .gradient = a.gradient,
                                 .gradient_dtype = what_.gradient,
                                 .count = count,
                                 .moment_type = optim::state_form(what_.optimizer).moments,
                                 .rounding = {.key = 1, .first = static_cast<std::uint32_t>(first)},
                                 .scale1 = has_first ? a.scales[0] : nullptr,
                                 .scale2 = has_first ? a.scales[1] : a.scales[0]};
    if (a.is_split()) {
      optim::SplitTile tile{state, static_cast<bf16*>(a.master[0])};
      if (a.remainder_bytes == 1)
        tile.remainder8 = static_cast<std::int8_t*>(a.master[1]);
      else
        tile.remainder = static_cast<std::int16_t*>(a.master[1]);
      return optim::update_tile(c, tile);
    }
    auto* const master = static_cast<float*>(a.master[0]);
    if (a.weight == nullptr) return optim::update_tile(c, optim::WholeTile{state, master});
    return optim::update_tile(c, optim::Fp16Tile{state, static_cast<std::uint16_t*>(a.weight), master});
  }

  // Checksum of the bytes that a step writes, while they are in cache.
  std::uint64_t checksum(std::size_t first, std::size_t count) const {
    const StreamArrays a = part(first, count);
    std::uint64_t sum = 0;
    const auto add = [&](const void* array, std::size_t width) {
      if (array != nullptr) sum ^= hoist::checksum({static_cast<const std::byte*>(array), count * width});
    };
    add(a.master[0], a.is_split() ? 2 : 4);
    add(a.master[1], a.remainder_bytes);
    add(a.weight, 2);
    for (unsigned i = 0; i < a.moment_count; ++i) add(a.moments[i], a.moment_bytes);
    for (const std::uint8_t* scales : a.scales)
      if (scales != nullptr) sum ^= hoist::checksum(std::as_bytes(std::span(scales, count / kMomentBlock)));
    return sum;
  }

  double traffic_bytes() const { return arrays_.traffic_bytes(); }

 private:
  static constexpr std::size_t kGap = 4096 + 192;  // arrays at one offset within a page would evict each other

  bool is_second_moment(unsigned m) const { return m == 1 || !optim::has_moment1(optim::state_of(what_.optimizer)); }

  // One exponent for all blocks, about that of a typical largest element.
  void put_fp8(unsigned m, std::size_t i, float value) {
    const bool second = is_second_moment(m);
    const std::array<float, 2> beside{second ? 1e-6f : 5e-4f, value};
    std::array<std::uint8_t, 2> codes{};
    (void)optim::encode_block(beside, std::span(optim::kAllNearest).first<2>(),
                              second ? optim::Moment::second : optim::Moment::first, codes.data(),
                              arrays_.scales[m][i / kMomentBlock]);
    static_cast<std::uint8_t*>(arrays_.moments[m])[i] = codes[1];
  }

  void put_gradient(std::size_t i, float value) {
    void* const gradient = const_cast<void*>(arrays_.gradient);
    if (what_.gradient == DType::bf16) static_cast<bf16*>(gradient)[i] = to_bf16(value);
    if (what_.gradient == DType::fp16) static_cast<std::uint16_t*>(gradient)[i] = float_to_fp16(value);
    if (what_.gradient == DType::fp32) static_cast<float*>(gradient)[i] = value;
  }

  const KernelCase& what_;
  unsigned moments_;
  platform::HostMemory memory_;
  StreamArrays arrays_;
};

class KernelComparison {
 public:
  KernelComparison(const KernelCase& what, const KernelOptions& options)
      : what_(what),
        pool_({.threads = options.threads}),
        tiles_(std::max<std::size_t>(pool_.threads(), options.state_bytes / State::bytes_per_parameter(what) / kTile)),
        state_(what, tiles_ * kTile) {
    pool_.run(tiles_, [&](std::size_t k) { state_.fill(k * kTile, kTile); });
    choose_stream();
    (void)update();
  }

  double update() {
    const UpdateCoefficients coefficients(what_.optimizer, ++step_, 0.9);
    std::atomic<std::uint64_t> sums{0};
    const double seconds = seconds_of([&] {
      pool_.run(tiles_, [&](std::size_t k) {
        if (!state_.update(coefficients, k * kTile, kTile)) committable_ = false;
        if (what_.checksum) sums.fetch_xor(state_.checksum(k * kTile, kTile), std::memory_order_relaxed);
      });
    });
    sink_ = sums.load();
    return seconds;
  }
  double stream() { return stream(prefetch_); }

  // Seconds that the same number of updates takes with every tile in its core's cache. The moments change, so that the
  // arithmetic stays typical.
  double update_in_cache() {
    const std::size_t rounds = std::max<std::size_t>(1, std::min<std::size_t>(tiles_, 4096) / pool_.threads());
    constexpr std::size_t kCached = kTile / 4;  // 4096 parameters, 56 KiB of AdamW: within an L2
    const UpdateCoefficients coefficients(what_.optimizer, ++step_, 0.9);
    const auto repeat = [&](std::size_t count) {
      pool_.run(pool_.threads(), [&](std::size_t k) {
        std::uint64_t sums = 0;
        for (std::size_t i = 0; i < count; ++i) {
          if (!state_.update(coefficients, k * kTile, kCached)) committable_ = false;
          if (what_.checksum) sums ^= state_.checksum(k * kTile, kCached);
        }
        sink_.fetch_xor(sums, std::memory_order_relaxed);
      });
    };
    repeat(4);
    double best = std::numeric_limits<double>::max();
    for (int i = 0; i < 5; ++i) best = std::min(best, seconds_of([&] { repeat(4 * rounds); }));
    return best * static_cast<double>(tiles_) / static_cast<double>(rounds * pool_.threads());
  }

  // Seconds that the divisions and square roots of as many updates take; 0 if the formula has none.
  double divisions() {
    const unsigned divisions = divisions_of(UpdateCoefficients(what_.optimizer, 1, 1.0).formula);
    if (divisions == 0) return 0;
    constexpr std::size_t kCount = 64 * kTile;
    double best = std::numeric_limits<double>::max();
    for (int i = 0; i < 5; ++i) {
      best = std::min(best, seconds_of([&] {
                        pool_.run(pool_.threads(), [&](std::size_t) {
                          if (divide(divisions, kCount) == 0) sink_ = 0;
                        });
                      }));
    }
    return best * static_cast<double>(tiles_ * kTile) / static_cast<double>(kCount * pool_.threads());
  }

  bool committable() const { return committable_; }
  void describe(KernelResult& result) const {
    result.instruction_set = optim::active_instruction_set();
    result.parameters = tiles_ * kTile;
    result.threads = pool_.threads();
    result.traffic_bytes = state_.traffic_bytes();
    result.stream_prefetches = prefetch_ == Prefetch::ahead;
  }

 private:
  double stream(Prefetch prefetch) {
    std::atomic<unsigned> sums{0};
    const double seconds = seconds_of([&] {
      pool_.run(tiles_, [&](std::size_t k) {
        sums.fetch_xor(measure::stream(state_.part(k * kTile, kTile), prefetch), std::memory_order_relaxed);
      });
    });
    sink_ = sums.load();
    return seconds;
  }

  void choose_stream() {
    double best[2] = {1e9, 1e9};
    for (int round = 0; round < 5; ++round) {
      best[0] = std::min(best[0], stream(Prefetch::none));
      best[1] = std::min(best[1], stream(Prefetch::ahead));
    }
    prefetch_ = best[1] < best[0] ? Prefetch::ahead : Prefetch::none;
  }

  const KernelCase& what_;
  UpdatePool pool_;
  std::size_t tiles_;
  State state_;
  std::uint64_t step_ = 0;
  Prefetch prefetch_ = Prefetch::none;
  std::atomic<bool> committable_{true};
  std::atomic<std::uint64_t> sink_{0};
};

}  // namespace

double KernelResult::gigabytes_per_second() const {
  return static_cast<double>(parameters) * traffic_bytes / median(update_seconds) / 1e9;
}

const char* KernelResult::limit() const {
  if (in_cache_ratio >= 1 || median(ratios) >= 1) return "memory";
  return division_ratio > 0 && in_cache_ratio / division_ratio > 0.8 ? "division" : "instructions";
}

KernelResult compare_kernel(const KernelCase& what, const KernelOptions& options) {
  const InstructionSet instruction_set(what.instruction_set);
  KernelComparison comparison(what, options);
  KernelResult result;
  comparison.describe(result);
  std::vector<double> stream_seconds;
  for (unsigned round = 0; round < options.pairs; ++round) {
    throw_if_stopped(options.stop);
    // Legs 0 and 1 are the stream, 2 the update; six orders in turn.
    static constexpr std::array<std::array<std::size_t, 3>, 6> kOrders{
        {{0, 2, 1}, {2, 1, 0}, {1, 0, 2}, {0, 1, 2}, {2, 0, 1}, {1, 2, 0}}};
    std::array<double, 3> seconds{};
    for (const std::size_t leg : kOrders[round % 6])
      seconds[leg] = leg == 2 ? comparison.update() : comparison.stream();
    result.ratios.push_back(seconds[0] / seconds[2]);
    result.control_ratios.push_back(seconds[0] / seconds[1]);
    result.update_seconds.push_back(seconds[2]);
    stream_seconds.push_back(seconds[0]);
    if (options.progress) options.progress(round + 1);
  }
  result.in_cache_ratio = median(stream_seconds) / comparison.update_in_cache();
  if (const double seconds = comparison.divisions(); seconds > 0)
    result.division_ratio = median(stream_seconds) / seconds;
  if (!comparison.committable())
    throw Error(fmt::format("{} produced state that may not be committed", optim::optimizer_name(what.optimizer.kind)));
  return result;
}

}  // namespace hoist::measure
