// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <thread>

#include <hoist/core/assert.hpp>
#include <hoist/measure/comparison.hpp>

namespace hoist::measure {

namespace {

constexpr Nanoseconds kRestMax = std::chrono::seconds(1);

class Match {
 public:
  Match(Contender& ours, Contender& theirs, std::span<Drive* const> drives, const ComparisonOptions& options)
      : ours_(ours), theirs_(theirs), drives_(drives), options_(options) {}

  ComparisonResult run() {
    result_.tool = theirs_.name();
    prepare();
    result_.description = theirs_.description();
    for (unsigned pair = 0; pair < options_.pairs; ++pair) {
      play(pair);
      if (pair % 2 == 1) control(pair);
      if (options_.progress) options_.progress(pair + 1);
    }
    return std::move(result_);
  }

 private:
  // The length of legs, and the time that the contender takes before its first block. The drive rests during that time,
  // which some drives reward, so hoist rests as long before each of its legs.
  void prepare() {
    file_bytes_ = drives_.front()->file().bytes();
    for (const Drive* drive : drives_) file_bytes_ = std::min(file_bytes_, drive->file().bytes());
    const std::uint64_t block_bytes = drives_.front()->options().block_bytes;
    result_.leg_bytes = round_down(std::min(file_bytes_, std::max(kTrialBytes, block_bytes)), block_bytes);
    const double speed = leg(ours_, 0).bytes_per_second() / static_cast<double>(drives_.size());
    const auto wanted = static_cast<std::uint64_t>(speed * to_seconds(options_.leg));
    result_.leg_bytes = std::clamp(round_down(wanted, block_bytes), block_bytes, round_down(file_bytes_, block_bytes));
    rest_ = std::min<Nanoseconds>(
        kRestMax, std::chrono::nanoseconds(static_cast<std::int64_t>(leg(theirs_, 0).setup_seconds * 1e9)));
  }

  void play(unsigned pair) {
    LegResult our, their;
    if (pair % 2 == 0) {
      our = rested_leg(pair);
      their = leg(theirs_, pair);
    } else {
      their = leg(theirs_, pair);
      our = rested_leg(pair);
    }
    result_.ratios.push_back(our.bytes_per_second() / their.bytes_per_second());
    result_.our_bytes_per_second.push_back(our.bytes_per_second());
    result_.their_bytes_per_second.push_back(their.bytes_per_second());
    result_.our_processor_seconds_per_gb.push_back(our.processor_seconds / (static_cast<double>(our.bytes) / 1e9));
    result_.their_processor_seconds_per_gb.push_back(their.processor_seconds /
                                                     (static_cast<double>(their.bytes) / 1e9));
  }

  void control(unsigned pair) {
    const LegResult first = rested_leg(pair);
    const LegResult second = rested_leg(pair);
    result_.control_ratios.push_back(first.bytes_per_second() / second.bytes_per_second());
  }

  LegResult rested_leg(unsigned pair) {
    std::this_thread::sleep_for(rest_);
    return leg(ours_, pair);
  }

  // Pairs move over the files, so that no lower cache learns them. Everything that a leg wrote is flushed before the
  // next one.
  LegResult leg(Contender& contender, unsigned pair) {
    throw_if_stopped(options_.stop);
    for (const Drive* drive : drives_) drive->queue().sync(drive->file().file()).wait();
    const std::uint64_t places = std::max<std::uint64_t>(1, file_bytes_ / result_.leg_bytes);
    const Region region{.offset_bytes = pair % places * result_.leg_bytes, .length_bytes = result_.leg_bytes};
    const LegResult result = contender.run({.pattern = options_.pattern, .region = region, .seed = pair});
    HOIST_ASSERT(result.bytes > 0 && result.seconds > 0, "{}: {} bytes in {} s", contender.name(), result.bytes,
                 result.seconds);
    return result;
  }

  static constexpr std::uint64_t kTrialBytes = 256 * kMiB;

  Contender& ours_;
  Contender& theirs_;
  const std::span<Drive* const> drives_;
  const ComparisonOptions& options_;
  std::uint64_t file_bytes_ = 0;
  Nanoseconds rest_{0};
  ComparisonResult result_;
};

}  // namespace

ComparisonResult compare(Contender& ours, Contender& theirs, std::span<Drive* const> drives,
                         const ComparisonOptions& options) {
  return Match(ours, theirs, drives, options).run();
}

}  // namespace hoist::measure
