// SPDX-License-Identifier: Apache-2.0
// measure/workload.hpp - keeps a queue of blocks in flight on one or several drives and measures their speed. Start
// here.
//
// Each drive has an engine, and with it an I/O thread, of its own; the next block is submitted on that thread when one
// has finished, so no other thread takes part. Time runs from the first submission until the last block has come back
// (the drain included); a flush of written data is timed apart.
//
// Threading  run_workload blocks its caller; progress is called on the caller's thread.
// Memory     A Drive owns buffers for `queue_depth` blocks, on huge pages where there are any. They are cycled through:
//            a larger footprint is slower.
// Errors     IoError of the first transfer that fails; Interrupted.
// Main path  run_workload -> Pump::begin (I/O thread) -> issue -> finished -> issue ... -> WorkloadResult.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/measure/fill.hpp>
#include <hoist/measure/interruption.hpp>
#include <hoist/measure/latency_histogram.hpp>
#include <hoist/platform/host_memory.hpp>

namespace hoist::measure {

enum class Pattern : std::uint8_t {
  read,
  write,
  mixed,  // each block is a read or a write at random, as with fio's rwmixread=50
};
const char* pattern_name(Pattern pattern);

struct DriveOptions {
  aio::BackendKind backend = aio::BackendKind::automatic;
  std::uint64_t block_bytes = kMiB;
  unsigned queue_depth = 32;
  unsigned thread_count = 4;  // of the backend `threads`
  std::vector<int> cpus{};    // where the I/O thread runs; empty: anywhere
};

// Buffers with random content; made once for many engines in turn.
class BlockBuffers {
 public:
  // `numa_node` negative: anywhere.
  BlockBuffers(std::uint64_t bytes, int numa_node);
  platform::PageKind page_kind() const { return memory_.page_kind(); }
  std::span<std::byte> bytes() const { return memory_.bytes(); }

 private:
  platform::HostMemory memory_;
};

// A file with a queue and buffers, ready to run.
class Drive {
 public:
  // Pre: `buffers` hold queue_depth blocks; file and buffers outlive the drive.
  Drive(const ScratchFile& file, const BlockBuffers& buffers, const DriveOptions& options);

  const ScratchFile& file() const { return file_; }
  const DriveOptions& options() const { return options_; }
  aio::DriveQueue& queue() const { return *queue_; }
  std::span<std::byte> slot(unsigned index) const;

 private:
  const ScratchFile& file_;
  const BlockBuffers& buffers_;
  const DriveOptions options_;
  std::unique_ptr<aio::DriveQueue> queue_;
};

// The part of each file that is used: reads and writes each go through it in order, from its start, again and again.
struct Region {
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;  // rounded down to whole blocks
};

struct WorkloadOptions {
  Pattern pattern = Pattern::read;
  Region region{};
  std::uint64_t bytes_max = 0;  // of each drive; 0: no limit
  Nanoseconds duration{0};      // 0: no limit. One of the two limits must be given.
  std::uint64_t seed = 0;       // seed of the random choice
  const StopFlag* stop = nullptr;
  ProgressFunction progress{};
};

struct DriveResult {
  std::uint64_t read_bytes = 0;
  std::uint64_t written_bytes = 0;
  double seconds = 0;         // from its first submission to its last completion
  double thread_seconds = 0;  // processor time of its I/O thread
  LatencyHistogram latency;   // from submission to completion of one block

  std::uint64_t bytes() const { return read_bytes + written_bytes; }
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes()) / seconds : 0; }
};

struct WorkloadResult {
  std::vector<DriveResult> drives;
  double seconds = 0;            // from the first submission on any drive to the last completion on any
  double flush_seconds = 0;      // fdatasync of all files afterwards; 0 after reads
  double processor_seconds = 0;  // of the whole process, while the drives ran

  std::uint64_t bytes() const;
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes()) / seconds : 0; }
  double processor_seconds_per_gb() const;
  LatencyHistogram latency() const;
};

WorkloadResult run_workload(std::span<Drive* const> drives, const WorkloadOptions& options);

// Seconds until a flush of all drives ends, after a burst of writes: the median of some. Pre: the files have 16 MiB.
double seconds_of_flush(std::span<Drive* const> drives, const StopFlag* stop = nullptr);

}  // namespace hoist::measure
