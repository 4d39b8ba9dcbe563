// SPDX-License-Identifier: Apache-2.0
// hoist doctor: what this machine and this build offer.
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <hoist/aio/engine.hpp>
#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/adam.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/platform/topology.hpp>

#include "commands.hpp"
#include "output.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Finding {
  std::string subject;
  std::string found;
  std::string remedy;  // empty: nothing is missing
};

std::string first_line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// A field of /proc/meminfo, in its own unit; empty when there is none.
std::string memory_field(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name + ":")) continue;
    const auto start = line.find_first_not_of(" \t", name.size() + 1);
    return start == std::string::npos ? std::string{} : line.substr(start);
  }
  return {};
}

void add_devices(std::vector<Finding>& findings) {
  const auto host = platform::Device::create({.kind = platform::DeviceKind::host, .memory_bytes = kMiB});
  findings.push_back({"host device", host->description(), ""});
  std::string why;
  const int count = platform::cuda_device_count(&why);
  if (count == 0) {
    findings.push_back({"CUDA devices", fmt::format("none ({})", why), ""});
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Finding finding{fmt::format("CUDA device {}", ordinal), "", ""};
    try {
      finding.found =
          platform::Device::create({.kind = platform::DeviceKind::cuda, .memory_bytes = kMiB, .ordinal = ordinal})
              ->description();
    } catch (const Error& error) {
      finding.found = "cannot be opened";
      finding.remedy = error.what();
    }
    findings.push_back(std::move(finding));
  }
}

void add_topology(std::vector<Finding>& findings) {
  const platform::Topology topology = platform::Topology::detect();
  findings.push_back({"processors",
                      fmt::format("{} cores, {} logical, {} memory node{}", topology.core_count(), topology.cpu_count(),
                                  topology.nodes().size(), topology.nodes().size() == 1 ? "" : "s"),
                      ""});
  findings.push_back({"instruction sets", fmt::format("{}", fmt::join(optim::supported_instruction_sets(), ", ")), ""});
}

// Registers memory as training does, since the memlock limit shows only then.
void add_disk(std::vector<Finding>& findings) {
  alignas(4096) static std::byte probe[4096];
  Finding finding{"io engine", "", ""};
  aio::EngineOptions options;
  options.registered_memory = {std::span(probe)};
  finding.found = aio::Engine(options).description();
  if (!finding.found.starts_with("io_uring")) {
    finding.remedy =
        "threads give the same results at more CPU; allow the io_uring system calls (containers: a seccomp "
        "profile that has them; kernel.io_uring_disabled=0)";
  }
  findings.push_back(std::move(finding));
}

void add_limits(std::vector<Finding>& findings) {
  rlimit limit{};
  Finding locked{"locked memory limit", "unknown", ""};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    locked.found = limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur);
    if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < kGiB) {
      locked.remedy =
          "io_uring may not register buffers beyond it, unless the process has CAP_IPC_LOCK; `ulimit -l "
          "unlimited`, or memlock in /etc/security/limits.conf";
    }
  }
  findings.push_back(std::move(locked));
  findings.push_back({"reserved huge pages",
                      fmt::format("{} of {} free, {} each", memory_field("HugePages_Free"),
                                  memory_field("HugePages_Total"), memory_field("Hugepagesize")),
                      ""});
  Finding transparent{"transparent huge pages", first_line_of("/sys/kernel/mm/transparent_hugepage/enabled"), ""};
  const bool reserved = memory_field("HugePages_Free") != "0" && !memory_field("HugePages_Free").empty();
  if (transparent.found.empty()) transparent.found = "not offered by this kernel";
  if (transparent.found.find("[never]") != std::string::npos || transparent.found.starts_with("not")) {
    if (!reserved) {
      transparent.remedy =
          "transfers lose a third of the drive's speed on small pages; `echo madvise > "
          "/sys/kernel/mm/transparent_hugepage/enabled`, or reserve pages with vm.nr_hugepages";
    }
  }
  findings.push_back(std::move(transparent));
  findings.push_back({"available memory", memory_field("MemAvailable"), ""});
}

void add_build(std::vector<Finding>& findings) {
  findings.push_back({"MPI", comm::have_mpi() ? "in this build" : "not in this build",
                      comm::have_mpi() ? "" : "several ranks need it; install libopenmpi-dev and build again"});
  findings.push_back({"NCCL", comm::have_nccl() ? "in this build" : "not in this build", ""});
  const int launched = comm::mpi_size_of_launch();
  if (launched > 0) findings.push_back({"launcher", fmt::format("started as one of {} ranks", launched), ""});
}

int doctor(const std::string& json_path) {
  std::vector<Finding> findings;
  add_devices(findings);
  add_topology(findings);
  add_disk(findings);
  add_limits(findings);
  add_build(findings);

  Json json{{"version", HOIST_VERSION}, {"findings", Json::array()}};
  std::vector<std::vector<std::string>> rows;
  for (const Finding& finding : findings) {
    json["findings"].push_back({{"subject", finding.subject}, {"found", finding.found}, {"remedy", finding.remedy}});
    rows.push_back({finding.subject, finding.found});
    if (!finding.remedy.empty()) rows.push_back({"", "-> " + finding.remedy});
  }
  write_json(json_path, json);
  fmt::print("hoist {}\n\n{}", HOIST_VERSION, columns(rows));
  return kOk;
}

}  // namespace

Command add_doctor(CLI::App& app) {
  CLI::App* command = app.add_subcommand("doctor", "Say what this machine and this build offer");
  auto json = std::make_shared<std::string>();
  command->add_option("--json", *json, "Write the same as JSON to this file");
  command->footer("Example: hoist doctor --json machine.json");
  return {command, [json] { return doctor(*json); }};
}

}  // namespace hoist::cli
