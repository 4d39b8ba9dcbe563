// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <hoist/aio/io_uring_probe.hpp>
#include <hoist/measure/contender.hpp>
#include <hoist/measure/subprocess.hpp>

namespace hoist::measure {

namespace {

// Makes glibc use huge pages. With 4 KiB pages fio's 1 MiB buffers are 256 segments each, and the kernel would split
// every block.
constexpr const char* kHugePages = "glibc.malloc.hugetlb=1";

std::string tunables() {
  const char* variable = std::getenv("GLIBC_TUNABLES");
  const std::string others = variable == nullptr ? "" : std::string(variable) + ":";
  return "GLIBC_TUNABLES=" + others + kHugePages;
}

const char* rw_of(Pattern pattern) { return pattern == Pattern::mixed ? "rw" : pattern_name(pattern); }

// hoist's own descriptor: some characters of a path, such as a colon, mean something else to fio.
std::string name_for_fio(const Drive& drive) {
  return fmt::format("/proc/{}/fd/{}", ::getpid(), drive.file().file().descriptor());
}

// What fio says before its report.
std::string complaint_of(const SubprocessResult& fio) {
  return fio.errors + fio.output.substr(0, std::min(fio.output.find('{'), fio.output.size()));
}

// The line of a complaint that has the cause.
std::string cause_in(const std::string& complaint) {
  const std::size_t error = complaint.find("error=");
  const std::size_t before = error == std::string::npos ? std::string::npos : complaint.rfind('\n', error);
  const std::size_t begin = before == std::string::npos ? 0 : before + 1;
  return complaint.substr(begin, complaint.find('\n', begin) - begin);
}

class FioContender final : public Contender {
 public:
  FioContender(std::span<Drive* const> drives, const StopFlag* stop)
      : drives_(drives.begin(), drives.end()), stop_(stop) {
    require_fio();
    version_ = run_subprocess({.command = {"fio", "--version"}, .environment = {}}, stop).output;
    while (!version_.empty() && version_.back() == '\n') version_.pop_back();
  }

  std::string name() const override { return "fio"; }
  std::string description() const override {
    return fmt::format("{}, {}, direct={}, one thread for each path, buffers on huge pages ({})", version_,
                       !has_io_uring_   ? "libaio (io_uring is not available)"
                       : fixed_buffers_ ? "io_uring, fixedbufs, registerfiles"
                                        : "io_uring, registerfiles, no fixedbufs (the memlock limit forbids them)",
                       direct() ? 1 : 0, tunables());
  }

  LegResult run(const Leg& leg) override {
    const TimePoint begin = Clock::now();
    const SubprocessResult process = run_subprocess({.command = command(leg), .environment = {tunables()}}, stop_);
    const double wall_seconds = to_seconds(Clock::now() - begin);
    if (process.exit_code != 0) {
      const std::string complaint = complaint_of(process);
      const bool lacks_memory = complaint.find(std::strerror(ENOMEM)) != std::string::npos;
      if (!lacks_memory || !fixed_buffers_)
        throw Error(fmt::format("fio ended with code {}: {}", process.exit_code, cause_in(complaint)));
      fixed_buffers_ = false;
      return run(leg);
    }
    LegResult result = parse(process.output, leg);
    result.setup_seconds = std::max(0.0, wall_seconds - result.seconds);
    return result;
  }

 private:
  bool direct() const { return drives_.front()->file().file().is_direct(); }

  std::vector<std::string> command(const Leg& leg) const {
    const DriveOptions& options = drives_.front()->options();
    // Turns off a default that costs fio time: altering buffers before each write.
    std::vector<std::string> words{"fio",
                                   "--output-format=json",
                                   has_io_uring_ ? "--ioengine=io_uring" : "--ioengine=libaio",
                                   "--thread=1",
                                   "--invalidate=0",
                                   "--fallocate=none",
                                   "--allow_file_create=0",
                                   "--refill_buffers=0",
                                   "--scramble_buffers=0",
                                   fmt::format("--direct={}", direct() ? 1 : 0),
                                   fmt::format("--rw={}", rw_of(leg.pattern)),
                                   "--rwmixread=50",
                                   fmt::format("--randseed={}", leg.seed + 1),
                                   fmt::format("--bs={}", options.block_bytes),
                                   fmt::format("--iodepth={}", options.queue_depth),
                                   fmt::format("--offset={}", leg.region.offset_bytes),
                                   fmt::format("--size={}", leg.region.length_bytes),
                                   fmt::format("--io_size={}", leg.region.length_bytes)};
    if (has_io_uring_) words.push_back("--registerfiles=1");
    if (fixed_buffers_) words.push_back("--fixedbufs=1");
    for (std::size_t i = 0; i < drives_.size(); ++i) {
      words.push_back(fmt::format("--name=drive{}", i));
      words.push_back("--filename=" + name_for_fio(*drives_[i]));
    }
    return words;
  }

  // fio rounds its run time up to whole milliseconds; half of one is subtracted in its favour.
  static constexpr double kRoundingSeconds = 0.0005;

  LegResult parse(const std::string& output, const Leg& leg) const {
    LegResult result;
    try {
      // fio may print notes before the JSON.
      const auto report = nlohmann::json::parse(output.substr(std::min(output.find('{'), output.size())));
      for (const auto& job : report.at("jobs")) {
        double job_seconds = 0;
        for (const char* direction : {"read", "write"}) {
          result.bytes += job.at(direction).at("io_bytes").get<std::uint64_t>();
          job_seconds = std::max(job_seconds, job.at(direction).at("runtime").get<double>() / 1e3);
        }
        result.processor_seconds +=
            job_seconds * (job.at("usr_cpu").get<double>() + job.at("sys_cpu").get<double>()) / 100;
        result.seconds = std::max(result.seconds, job_seconds - kRoundingSeconds);
      }
    } catch (const nlohmann::json::exception& error) {
      throw Error(fmt::format("fio's report cannot be read ({}): {}", error.what(), output.substr(0, 400)));
    }
    const std::uint64_t expected_bytes = leg.region.length_bytes * drives_.size();
    if (result.bytes != expected_bytes)
      throw Error(fmt::format("fio moved {} bytes instead of {}", result.bytes, expected_bytes));
    return result;
  }

  const std::vector<Drive*> drives_;
  const StopFlag* stop_;
  std::string version_;
  const bool has_io_uring_ = aio::probe_io_uring().available;
  bool fixed_buffers_ = has_io_uring_;  // until it is known that the memlock limit has no room for them
};

}  // namespace

void require_fio() {
  if (find_program("fio").empty())
    throw UsageError("--compare fio: there is no fio on the PATH; install it (apt install fio)");
}

std::unique_ptr<Contender> make_fio_contender(std::span<Drive* const> drives, const StopFlag* stop) {
  return std::make_unique<FioContender>(drives, stop);
}

}  // namespace hoist::measure
