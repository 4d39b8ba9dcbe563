// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include <hoist/core/assert.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/measure/workload.hpp>

namespace hoist::measure {

namespace {

constexpr std::chrono::milliseconds kProgressInterval{50};
constexpr std::uint64_t kBufferSeed = 0x9d5f;

// Keeps one drive busy. Everything after start() happens on the drive's I/O thread, until done() completes.
class Pump {
 public:
  Pump(const Drive& drive, const WorkloadOptions& options, std::uint64_t drive_index)
      : drive_(drive),
        options_(options),
        block_bytes_(drive.options().block_bytes),
        region_bytes_(round_down(options.region.length_bytes, block_bytes_)),
        coin_(options.seed * 1024 + drive_index) {
    HOIST_ASSERT(region_bytes_ > 0 && options.region.offset_bytes + region_bytes_ <= drive.file().bytes(),
                 "region {}+{} of {}", options.region.offset_bytes, options.region.length_bytes, drive.file().bytes());
    HOIST_ASSERT(options.bytes_max > 0 || options.duration.count() > 0, "a workload without an end");
    for (unsigned i = 0; i < drive.options().queue_depth; ++i) slots_.push_back({this, drive.slot(i), {}, false});
  }
  Pump(const Pump&) = delete;
  Pump& operator=(const Pump&) = delete;

  // Flushes first, so that this run does not pay for an earlier run's writes, and so that its continuation runs on the
  // I/O thread. If the flush was done before the continuation was attached, flushes again: a queue that has failed
  // begins with its error.
  void start() {
    bool came_too_late = true;
    while (came_too_late) {
      came_too_late = false;
      const auto caller = std::this_thread::get_id();
      drive_.queue().sync(drive_.file().file()).then([this, caller, &came_too_late](const std::exception_ptr& error) {
        if (!error && std::this_thread::get_id() == caller)
          came_too_late = true;
        else
          begin(error);
      });
    }
  }

  const Completion& done() const { return done_; }
  const std::exception_ptr& error() const { return error_; }  // once done
  std::uint64_t bytes_so_far() const { return bytes_so_far_.load(std::memory_order_relaxed); }
  const DriveResult& result() const { return result_; }
  TimePoint begun() const { return begun_; }
  TimePoint ended() const { return ended_; }

 private:
  struct Slot {
    Pump* pump;
    std::span<std::byte> buffer;
    TimePoint begun;
    bool write;
  };

  void begin(const std::exception_ptr& error) {
    thread_seconds_ = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
    begun_ = ended_ = Clock::now();
    error_ = error;
    for (Slot& slot : slots_) {
      if (!more(begun_)) break;
      ++in_flight_;
      issue(slot, begun_);
    }
    if (in_flight_ == 0) finish();
  }

  bool more(TimePoint now) const {
    if (error_) return false;
    if (options_.stop != nullptr && options_.stop->load(std::memory_order_relaxed)) return false;
    if (options_.bytes_max > 0 && issued_bytes_ + block_bytes_ > options_.bytes_max) return false;
    return options_.duration.count() == 0 || now - begun_ < options_.duration;
  }

  bool next_is_write() {
    if (options_.pattern == Pattern::mixed) return (coin_.bits() & 1) != 0;
    return options_.pattern == Pattern::write;
  }

  void issue(Slot& slot, TimePoint now) {
    slot.begun = now;
    slot.write = next_is_write();
    std::uint64_t& cursor = slot.write ? write_at_ : read_at_;
    const std::uint64_t offset = options_.region.offset_bytes + cursor;
    cursor = (cursor + block_bytes_) % region_bytes_;
    issued_bytes_ += block_bytes_;
    aio::DriveQueue& queue = drive_.queue();
    const aio::File& file = drive_.file().file();
    const Completion completion = slot.write ? queue.write(file, offset, slot.buffer, aio::Priority::foreground)
                                             : queue.read(file, offset, slot.buffer, aio::Priority::foreground);
    completion.then([&slot](const std::exception_ptr& error) { slot.pump->finished(slot, error); });
  }

  void finished(Slot& slot, const std::exception_ptr& error) {
    const TimePoint now = Clock::now();
    if (error) {
      if (!error_) error_ = error;
    } else {
      (slot.write ? result_.written_bytes : result_.read_bytes) += block_bytes_;
      result_.latency.record(now - slot.begun);
      bytes_so_far_.store(result_.bytes(), std::memory_order_relaxed);
    }
    if (more(now)) return issue(slot, now);
    if (--in_flight_ > 0) return;
    ended_ = now;
    finish();
  }

  void finish() {
    result_.seconds = to_seconds(ended_ - begun_);
    result_.thread_seconds = processor_seconds(CLOCK_THREAD_CPUTIME_ID) - thread_seconds_;
    // Moved out first, because the waiting thread may destroy this object as soon as the promise is fulfilled.
    Promise promise = std::move(promise_);
    promise.complete();
  }

  const Drive& drive_;
  const WorkloadOptions& options_;
  const std::uint64_t block_bytes_;
  const std::uint64_t region_bytes_;
  Rng coin_;
  std::vector<Slot> slots_;
  std::uint64_t read_at_ = 0;  // in the region
  std::uint64_t write_at_ = 0;
  std::uint64_t issued_bytes_ = 0;
  unsigned in_flight_ = 0;
  std::atomic<std::uint64_t> bytes_so_far_{0};
  TimePoint begun_{};
  TimePoint ended_{};
  double thread_seconds_ = 0;
  DriveResult result_;
  std::exception_ptr error_;
  Promise promise_;
  const Completion done_ = promise_.completion();
};

using Pumps = std::vector<std::unique_ptr<Pump>>;

// Waits for every pump even if one fails, because their buffers must be at rest before the function returns.
void wait_for(const Pumps& pumps, const WorkloadOptions& options) {
  for (const auto& pump : pumps) {
    while (!pump->done().wait_for(kProgressInterval)) {
      if (!options.progress) continue;
      std::uint64_t bytes = 0;
      for (const auto& each : pumps) bytes += each->bytes_so_far();
      options.progress(bytes);
    }
  }
  for (const auto& pump : pumps) {
    if (pump->error()) std::rethrow_exception(pump->error());
  }
}

double flush(std::span<Drive* const> drives) {
  const TimePoint begin = Clock::now();
  std::vector<Completion> flushes;
  for (const Drive* drive : drives) flushes.push_back(drive->queue().sync(drive->file().file()));
  for (const Completion& completion : flushes) completion.wait();
  return to_seconds(Clock::now() - begin);
}

}  // namespace

const char* pattern_name(Pattern pattern) {
  static constexpr std::array kNames{"read", "write", "mixed"};
  return kNames[static_cast<std::size_t>(pattern)];
}

BlockBuffers::BlockBuffers(std::uint64_t bytes, int numa_node)
    : memory_({.bytes = bytes, .numa_nodes = numa_node < 0 ? std::vector<int>{} : std::vector<int>{numa_node}}) {
  fill_random(memory_.bytes(), kBufferSeed);
}

Drive::Drive(const ScratchFile& file, const BlockBuffers& buffers, const DriveOptions& options)
    : file_(file), buffers_(buffers), options_(options) {
  const std::uint64_t used_bytes = options.queue_depth * options.block_bytes;
  HOIST_ASSERT(used_bytes <= buffers.bytes().size(), "{} bytes of buffers for {}", buffers.bytes().size(), used_bytes);
  aio::DriveQueueOptions engine{.backend = options.backend,
                                .block_bytes = options.block_bytes,
                                .queue_depth = options.queue_depth,
                                .thread_count = options.thread_count,
                                .cpus = options.cpus};
  // Pieces of at most 1 GiB that no block straddles.
  const std::uint64_t slice_bytes = round_down(platform::HostMemory::kSliceBytes, options.block_bytes);
  for (std::uint64_t at = 0; at < used_bytes; at += slice_bytes)
    engine.registered_memory.push_back(buffers.bytes().subspan(at, std::min(slice_bytes, used_bytes - at)));
  queue_ = std::make_unique<aio::DriveQueue>(engine);
}

std::span<std::byte> Drive::slot(unsigned index) const {
  return buffers_.bytes().subspan(index * options_.block_bytes, options_.block_bytes);
}

std::uint64_t WorkloadResult::bytes() const {
  std::uint64_t bytes = 0;
  for (const DriveResult& drive : drives) bytes += drive.bytes();
  return bytes;
}

double WorkloadResult::processor_seconds_per_gb() const {
  return bytes() > 0 ? processor_seconds / (static_cast<double>(bytes()) / 1e9) : 0;
}

LatencyHistogram WorkloadResult::latency() const {
  LatencyHistogram all;
  for (const DriveResult& drive : drives) all.add(drive.latency);
  return all;
}

WorkloadResult run_workload(std::span<Drive* const> drives, const WorkloadOptions& options) {
  Pumps pumps;
  for (std::size_t i = 0; i < drives.size(); ++i) pumps.push_back(std::make_unique<Pump>(*drives[i], options, i));
  WorkloadResult result;
  const double before = processor_seconds(CLOCK_PROCESS_CPUTIME_ID);
  for (const auto& pump : pumps) pump->start();
  wait_for(pumps, options);
  result.processor_seconds = processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - before;
  throw_if_stopped(options.stop);
  if (options.pattern != Pattern::read) result.flush_seconds = flush(drives);
  TimePoint begin = TimePoint::max();
  TimePoint end = TimePoint::min();
  for (const auto& pump : pumps) {
    result.drives.push_back(pump->result());
    begin = std::min(begin, pump->begun());
    end = std::max(end, pump->ended());
  }
  result.seconds = to_seconds(end - begin);
  return result;
}

double seconds_of_flush(std::span<Drive* const> drives, const StopFlag* stop) {
  constexpr int kBursts = 15;
  constexpr std::uint64_t kBurstBytes = 16 * kMiB;
  std::vector<double> seconds;
  for (int i = 0; i < kBursts; ++i) {
    const WorkloadOptions burst{
        .pattern = Pattern::write, .region = {0, kBurstBytes}, .bytes_max = kBurstBytes, .stop = stop};
    seconds.push_back(run_workload(drives, burst).flush_seconds);
  }
  return median(seconds);
}

}  // namespace hoist::measure
