// SPDX-License-Identifier: Apache-2.0
// core/trace.hpp - a timeline of the links, the processors and the program, for a trace viewer.
//
// Threading  add() from any thread; write() after the last add(), or at any time for the events so far.
// Memory     All of it at construction: 56 bytes an event. If it is full, new events replace the oldest.
// Errors     check(), write(): IoError.
// Main path  something ends -> add(row, name, begin, end) -> write(path): Chrome's JSON, which Perfetto opens.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/core/clock.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist {

// Overlapping events of one row are drawn on its lanes.
enum class TraceRow : std::uint8_t {
  program,    // passes and steps
  optimizer,  // updates of pieces
  nvme_read,  // transfers of the store, from submission to completion
  nvme_write,
  host_to_device,
  device_to_host,
  wire,     // collectives
  commit,   // flushes and manifests
  waiting,  // waits of the program or its stream
};
inline constexpr std::size_t kTraceRowCount = 9;
const char* trace_row_name(TraceRow row);

class Trace {
 public:
  explicit Trace(std::size_t events_max = 1 << 18);  // 14 MiB
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // `name` is cut to 30 bytes. `bytes` moved; 0 if that has no meaning.
  void add(TraceRow row, std::string_view name, TimePoint begin, TimePoint end, std::uint64_t bytes = 0);

  std::uint64_t dropped() const;  // events that were replaced
  // Checks, before a long run, that write() can probably write there. Errors: IoError.
  static void check(const std::string& path);
  // `process` names the timeline, such as "rank 0". The file gets its name when it is complete. Devices such as
  // /dev/null are written directly.
  void write(const std::string& path, const std::string& process) const;

 private:
  struct Event {
    TimePoint begin;
    TimePoint end;
    std::uint64_t bytes;
    TraceRow row;
    std::uint8_t name_bytes;
    char name[30];
  };
  std::vector<Event> in_order() const;
  void write_events(std::FILE* file, const std::string& process) const;

  const TimePoint origin_ = Clock::now();
  mutable Mutex mutex_;
  std::vector<Event> events_ HOIST_GUARDED_BY(mutex_);  // a ring once it is full
  std::uint64_t count_ HOIST_GUARDED_BY(mutex_) = 0;    // ever added
};

// Adds an event that lasts as long as this object. Does nothing without a trace.
class TraceSpan {
 public:
  TraceSpan(Trace* trace, TraceRow row, std::string_view name)
      : trace_(trace), row_(row), name_(name), begin_(trace == nullptr ? TimePoint{} : Clock::now()) {}
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->add(row_, name_, begin_, Clock::now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* const trace_;
  const TraceRow row_;
  const std::string_view name_;
  const TimePoint begin_;
};

}  // namespace hoist
