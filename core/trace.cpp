// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/trace.hpp>

namespace hoist {

namespace {

std::size_t index(TraceRow row) { return static_cast<std::size_t>(row); }

// Viewers sort threads by number: rows in their order, lanes within.
constexpr int kLanesMax = 1000;
int thread_number(TraceRow row, std::size_t lane) {
  return static_cast<int>(index(row)) * kLanesMax + static_cast<int>(std::min<std::size_t>(lane, kLanesMax - 1));
}

std::string json_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    // A name that is cut inside a character, or has a control character, would not be JSON.
    const auto code = static_cast<unsigned char>(c);
    out += code < 0x20 || code >= 0x7f ? '?' : c;
  }
  return out;
}

double microseconds(Nanoseconds duration) { return static_cast<double>(duration.count()) / 1000; }

}  // namespace

const char* trace_row_name(TraceRow row) {
  constexpr std::array<const char*, kTraceRowCount> kNames{"program",    "optimizer",      "NVMe read",
                                                           "NVMe write", "host to device", "device to host",
                                                           "wire",       "commit",         "waiting"};
  return kNames[index(row)];
}

Trace::Trace(std::size_t events_max) : events_(std::max<std::size_t>(events_max, 1)) {}

void Trace::add(TraceRow row, std::string_view name, TimePoint begin, TimePoint end, std::uint64_t bytes) {
  Event event{.begin = begin, .end = end, .bytes = bytes, .row = row, .name_bytes = 0, .name = {}};
  event.name_bytes = static_cast<std::uint8_t>(std::min(name.size(), sizeof(event.name)));
  std::memcpy(event.name, name.data(), event.name_bytes);
  const MutexLock lock(mutex_);
  events_[count_++ % events_.size()] = event;
}

std::uint64_t Trace::dropped() const {
  const MutexLock lock(mutex_);
  return count_ > events_.size() ? count_ - events_.size() : 0;
}

std::vector<Trace::Event> Trace::in_order() const {
  std::vector<Event> events;
  {
    const MutexLock lock(mutex_);
    events.assign(events_.begin(),
                  events_.begin() + static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(count_, events_.size())));
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) { return a.begin < b.begin; });
  return events;
}

namespace {

constexpr const char* kRemedy = "choose another place for hoist.trace";

// The temporary name of a trace until it is complete.
std::string draft_of(const std::string& path) {
  struct stat info {};
  const bool is_file = ::stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode);
  return is_file ? path + ".partial" : path;
}

}  // namespace

void Trace::check(const std::string& path) {
  const std::string draft = draft_of(path);
  const std::unique_ptr<std::FILE, CloseFile> file(open_output_file(draft, OutputMode::append));
  if (!file) throw IoError({"open", path, 0, 0, errno}, kRemedy);
  if (draft != path) ::unlink(draft.c_str());
}

void Trace::write_events(std::FILE* file, const std::string& process) const {
  fmt::print(file, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  fmt::print(file, R"({{"ph":"M","pid":0,"name":"process_name","args":{{"name":"{}"}}}})", json_text(process));
  std::array<std::vector<TimePoint>, kTraceRowCount> lanes;  // by row and lane: when its last event ended
  for (const Event& event : in_order()) {
    std::vector<TimePoint>& ends = lanes[index(event.row)];
    std::size_t lane = 0;
    while (lane < ends.size() && ends[lane] > event.begin) ++lane;
    if (lane == ends.size()) {
      ends.emplace_back();
      fmt::print(file,
                 ",\n"
                 R"({{"ph":"M","pid":0,"tid":{},"name":"thread_name","args":{{"name":"{}{}"}}}})",
                 thread_number(event.row, lane), trace_row_name(event.row),
                 lane == 0 ? "" : fmt::format(" {}", lane + 1));
    }
    ends[lane] = event.end;
    fmt::print(file,
               ",\n"
               R"({{"ph":"X","pid":0,"tid":{},"name":"{}","ts":{:.3f},"dur":{:.3f})",
               thread_number(event.row, lane), json_text({event.name, event.name_bytes}),
               microseconds(event.begin - origin_), microseconds(event.end - event.begin));
    if (event.bytes != 0) fmt::print(file, R"(,"args":{{"bytes":{}}})", event.bytes);
    fmt::print(file, "}}");
  }
  fmt::print(file, "\n]}}\n");
}

void Trace::write(const std::string& path, const std::string& process) const {
  const std::string partial = draft_of(path);
  const std::unique_ptr<std::FILE, CloseFile> file(open_output_file(partial, OutputMode::replace));
  const auto fail = [&](const char* what) {
    const int code = errno;
    if (partial != path) ::unlink(partial.c_str());
    throw IoError({what, path, 0, 0, code}, kRemedy);
  };
  if (!file) fail("open");
  try {
    write_events(file.get(), process);
  } catch (const std::system_error& error) {  // fmt's
    errno = error.code().value();
    fail("write");
  } catch (...) {
    if (partial != path) ::unlink(partial.c_str());
    throw;
  }
  if (std::fflush(file.get()) != 0) fail("write");
  if (partial != path && std::rename(partial.c_str(), path.c_str()) != 0) fail("rename");
}

}  // namespace hoist
