// SPDX-License-Identifier: Apache-2.0
// Linux's older asynchronous interface, used as DeepSpeed's aio handle uses it: one thread for each file, which refills
// the queue with a single io_submit and then waits for at least one block.
#include <algorithm>
#include <cerrno>

#include <libaio.h>

#include <hoist/core/rng.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/measure/contender.hpp>

namespace hoist::measure {

namespace {

IoError aio_error(const char* operation, const Drive& drive, long code) {
  return IoError({.operation = operation, .path = drive.file().path(), .code = static_cast<int>(-code)});
}

// One file's share of a leg; run() on a thread of its own.
class Loop {
 public:
  Loop(const Drive& drive, const Leg& leg, const StopFlag* stop, std::uint64_t index)
      : drive_(drive),
        leg_(leg),
        stop_(stop),
        block_bytes_(drive.options().block_bytes),
        coin_(leg.seed * 1024 + index),
        blocks_(drive.options().queue_depth),
        events_(drive.options().queue_depth) {
    const int code = ::io_setup(static_cast<int>(drive.options().queue_depth), &context_);
    if (code != 0) throw aio_error("io_setup", drive, code);
    for (iocb& block : blocks_) free_.push_back(&block);
  }
  ~Loop() { ::io_destroy(context_); }  // waits for what is in flight
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void run() {
    const double before = hoist::processor_seconds(CLOCK_THREAD_CPUTIME_ID);
    begun_ = Clock::now();
    while (top_up() || in_flight_ > 0) collect();
    ended_ = Clock::now();
    processor_seconds_ = hoist::processor_seconds(CLOCK_THREAD_CPUTIME_ID) - before;
  }

  TimePoint begun() const { return begun_; }
  TimePoint ended() const { return ended_; }
  double processor_seconds() const { return processor_seconds_; }

 private:
  bool more() const {
    return issued_bytes_ + block_bytes_ <= leg_.region.length_bytes &&
           (stop_ == nullptr || !stop_->load(std::memory_order_relaxed));
  }

  // False if nothing was left to submit.
  bool top_up() {
    batch_.clear();
    while (!free_.empty() && more()) {
      batch_.push_back(free_.back());
      free_.pop_back();
      prepare(*batch_.back());
    }
    for (std::size_t at = 0; at < batch_.size();) {
      const int taken = ::io_submit(context_, static_cast<long>(batch_.size() - at), batch_.data() + at);
      if (taken == -EAGAIN || taken == -EINTR) continue;
      if (taken <= 0) throw aio_error("io_submit", drive_, taken);
      at += static_cast<std::size_t>(taken);
      in_flight_ += static_cast<unsigned>(taken);
    }
    return !batch_.empty();
  }

  void prepare(iocb& block) {
    const bool write = leg_.pattern == Pattern::mixed ? (coin_.bits() & 1) != 0 : leg_.pattern == Pattern::write;
    std::uint64_t& cursor = write ? write_at_ : read_at_;
    const auto offset = static_cast<long long>(leg_.region.offset_bytes + cursor);
    cursor += block_bytes_;
    issued_bytes_ += block_bytes_;
    std::byte* data = drive_.slot(static_cast<unsigned>(&block - blocks_.data())).data();
    const int file = drive_.file().file().descriptor();
    if (write) {
      ::io_prep_pwrite(&block, file, data, block_bytes_, offset);
    } else {
      ::io_prep_pread(&block, file, data, block_bytes_, offset);
    }
  }

  void collect() {
    const int count = ::io_getevents(context_, 1, static_cast<long>(in_flight_), events_.data(), nullptr);
    if (count == -EINTR) return;
    if (count < 0) throw aio_error("io_getevents", drive_, count);
    for (int i = 0; i < count; ++i) {
      const io_event& event = events_[static_cast<std::size_t>(i)];
      const auto moved = static_cast<long>(event.res);
      if (moved != static_cast<long>(block_bytes_)) throw aio_error("transfer", drive_, std::min(moved, 0l));
      free_.push_back(event.obj);
    }
    in_flight_ -= static_cast<unsigned>(count);
  }

  const Drive& drive_;
  const Leg& leg_;
  const StopFlag* stop_;
  const std::uint64_t block_bytes_;
  Rng coin_;
  io_context_t context_ = nullptr;
  std::vector<iocb> blocks_;  // the block at an index uses the buffer at that index
  std::vector<io_event> events_;
  std::vector<iocb*> free_, batch_;
  std::uint64_t read_at_ = 0;
  std::uint64_t write_at_ = 0;
  std::uint64_t issued_bytes_ = 0;
  unsigned in_flight_ = 0;
  TimePoint begun_{};
  TimePoint ended_{};
  double processor_seconds_ = 0;
};

class LibaioContender final : public Contender {
 public:
  LibaioContender(std::span<Drive* const> drives, const StopFlag* stop)
      : drives_(drives.begin(), drives.end()), stop_(stop) {}

  std::string name() const override { return "libaio"; }
  std::string description() const override {
    return "io_submit of every free block, then io_getevents of at least one, as DeepSpeed's handle does with "
           "overlap_events; one thread for each path, buffers on huge pages";
  }

  LegResult run(const Leg& leg) override {
    std::vector<std::unique_ptr<Loop>> loops;
    for (std::size_t i = 0; i < drives_.size(); ++i)
      loops.push_back(std::make_unique<Loop>(*drives_[i], leg, stop_, i));
    run_on_threads("hoist-libaio", loops.size(), [&](std::size_t i) { loops[i]->run(); });
    throw_if_stopped(stop_);
    return sum(loops, leg);
  }

 private:
  LegResult sum(const std::vector<std::unique_ptr<Loop>>& loops, const Leg& leg) const {
    LegResult result;
    TimePoint begin = TimePoint::max();
    TimePoint end = TimePoint::min();
    for (const auto& loop : loops) {
      begin = std::min(begin, loop->begun());
      end = std::max(end, loop->ended());
      result.processor_seconds += loop->processor_seconds();
    }
    result.bytes = leg.region.length_bytes * drives_.size();
    result.seconds = to_seconds(end - begin);
    return result;
  }

  const std::vector<Drive*> drives_;
  const StopFlag* stop_;
};

}  // namespace

bool have_libaio() { return true; }

std::unique_ptr<Contender> make_libaio_contender(std::span<Drive* const> drives, const StopFlag* stop) {
  return std::make_unique<LibaioContender>(drives, stop);
}

}  // namespace hoist::measure
