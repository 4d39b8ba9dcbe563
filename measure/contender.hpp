// SPDX-License-Identifier: Apache-2.0
// measure/contender.hpp - runs a leg by hoist or by another program: the same bytes of the same files.
//
// Threading  One leg at a time.
// Errors     UsageError if the program is missing; Error if it fails; Interrupted.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <hoist/measure/workload.hpp>

namespace hoist::measure {

// Every drive moves region.length_bytes, within the region of its file.
struct Leg {
  Pattern pattern = Pattern::read;
  Region region{};
  std::uint64_t seed = 0;
};

struct LegResult {
  std::uint64_t bytes = 0;
  double seconds = 0;            // first submission to last completion, on any drive
  double processor_seconds = 0;  // of the contender's own process
  double setup_seconds = 0;      // before the first submission, while the drive rests

  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};

class Contender {
 public:
  Contender() = default;
  virtual ~Contender() = default;
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  virtual std::string name() const = 0;
  // Its settings, for the report: version, buffers, options. The first leg may have changed them.
  virtual std::string description() const = 0;
  virtual LegResult run(const Leg& leg) = 0;
};

// hoist's own engine, on drives that stay set up between legs.
std::unique_ptr<Contender> make_engine_contender(std::span<Drive* const> drives, const StopFlag* stop);

// Errors: UsageError where there is no fio on the PATH.
void require_fio();
// fio's io_uring engine: same block size, depth, mix, direct, registered buffers and files, buffers on huge pages.
// Where io_uring is not available, its libaio engine; without registered buffers where the memlock limit has no room
// for them. Errors: UsageError when fio cannot be started.
std::unique_ptr<Contender> make_fio_contender(std::span<Drive* const> drives, const StopFlag* stop);

// A loop over Linux's older asynchronous interface in the manner of DeepSpeed's aio handle with overlap_events: one
// io_submit refills the queue for all blocks that are complete. Our own buffers, on huge pages. Errors: UsageError when
// this build has no libaio.
std::unique_ptr<Contender> make_libaio_contender(std::span<Drive* const> drives, const StopFlag* stop);
bool have_libaio();

}  // namespace hoist::measure
