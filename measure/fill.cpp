// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/fill.hpp>
#include <hoist/platform/host_memory.hpp>

namespace hoist::measure {

namespace {

constexpr std::uint64_t kFillBlockBytes = kMiB;
constexpr std::size_t kFillDepth = 16;
constexpr Nanoseconds kProgressInterval = std::chrono::milliseconds(50);

void fill_file(const ScratchFile& scratch, std::uint64_t seed, const StopFlag* stop, std::atomic<std::uint64_t>& done) {
  const platform::HostMemory memory({.bytes = kFillDepth * kFillBlockBytes});
  std::vector<Completion> slots(kFillDepth);
  aio::DriveQueue queue(
      {.block_bytes = kFillBlockBytes, .queue_depth = kFillDepth, .registered_memory = memory.slices()});
  for (std::uint64_t at = 0, i = 0; at < scratch.bytes(); at += kFillBlockBytes, ++i) {
    throw_if_stopped(stop);
    Completion& slot = slots[i % kFillDepth];
    slot.wait();
    const std::uint64_t length = std::min(kFillBlockBytes, scratch.bytes() - at);
    const auto block = memory.bytes().subspan(i % kFillDepth * kFillBlockBytes, length);
    fill_random(block, seed, at / sizeof(std::uint64_t));
    slot = queue.write(scratch.file(), at, block, aio::Priority::foreground);
    done.fetch_add(length, std::memory_order_relaxed);
  }
  for (const Completion& slot : slots) slot.wait();
  queue.sync(scratch.file()).wait();
}

}  // namespace

void fill_random(std::span<std::byte> memory, std::uint64_t seed, std::uint64_t first_index) {
  HOIST_ASSERT(memory.size() % sizeof(std::uint64_t) == 0, "{} bytes", memory.size());
  for (std::size_t at = 0; at < memory.size(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random_bits(seed, first_index++);
    std::memcpy(memory.data() + at, &word, sizeof word);
  }
}

void fill_files(std::span<ScratchFile* const> files, const StopFlag* stop, const ProgressFunction& progress) {
  std::atomic<std::uint64_t> done{0};
  const auto report = [&] {
    std::this_thread::sleep_for(kProgressInterval);
    if (progress) progress(done.load(std::memory_order_relaxed));
  };
  run_on_threads(
      "hoist-fill", files.size(), [&](std::size_t i) { fill_file(*files[i], i, stop, done); }, report);
}

}  // namespace hoist::measure
