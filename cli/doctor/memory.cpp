// SPDX-License-Identifier: Apache-2.0
// `hoist doctor` about memory, huge pages and processors.
#include <cstdlib>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/update.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/platform/topology.hpp>

#include "finding.hpp"

namespace hoist::cli {

namespace {

Finding available_memory(const MachineSources& machine) {
  const std::string meminfo = machine.proc + "/meminfo";
  const auto total = field_bytes(meminfo, "MemTotal");
  const auto available = field_bytes(meminfo, "MemAvailable");
  Finding finding{.subject = "memory", .found = "unknown: " + meminfo + " cannot be read"};
  if (!total) return finding;
  finding.found =
      fmt::format("{} of {} available", available ? format_bytes(*available) : "unknown", format_bytes(*total));
  finding.data = {{"total_bytes", *total}, {"available_bytes", available.value_or(0)}};
  return finding;
}

Finding memory_limit(const MachineSources& machine, const platform::ControlGroupLimits& limits) {
  Finding finding{.subject = "cgroup memory limit", .found = "none"};
  if (!limits.memory) return finding;
  finding.found = fmt::format("{} ({})", format_bytes(limits.memory->bytes), limits.memory->file);
  finding.data = {{"bytes", limits.memory->bytes}, {"file", limits.memory->file}};
  const auto total = field_bytes(machine.proc + "/meminfo", "MemTotal");
  if (!total || limits.memory->bytes >= *total) return finding;
  return finding.lacks(
      Verdict::lacking,
      "hoist.pinned_memory of all ranks and the programs themselves must fit below it, or the kernel kills them",
      "give the container more (docker run --memory=..., Slurm --mem=...), or keep hoist.pinned_memory below it");
}

// Direct transfers of 1 MiB need 256 segments on small pages, more than most drives take at once; huge pages need one.
Finding huge_pages(const MachineSources& machine) {
  const std::string meminfo = machine.proc + "/meminfo";
  const std::uint64_t reserved = std::strtoull(field_of(meminfo, "HugePages_Free").value_or("0").c_str(), nullptr, 10);
  const auto page = field_bytes(meminfo, "Hugepagesize").value_or(2 * kMiB);
  const std::string setting = machine.sys + "/kernel/mm/transparent_hugepage/enabled";
  const std::string transparent = first_line(setting).value_or("");
  const bool offered = transparent.find('[') != std::string::npos;
  const std::string chosen = offered ? chosen_of(transparent) : "not offered";
  Finding finding{
      .subject = "huge pages",
      .found = fmt::format("{} reserved and free ({} each); transparent: {}", reserved, format_bytes(page), chosen)};
  finding.data = {{"reserved_free", reserved}, {"page_bytes", page}, {"transparent", chosen}};
  if (reserved > 0 || chosen == "always" || chosen == "madvise") return finding;
  return finding.lacks(Verdict::lacking,
                       "every transfer is cut into more requests: slower transfers that take more CPU time",
                       !offered ? "sudo sysctl -w vm.nr_hugepages=N, N pages for hoist.pinned_memory"
                                : fmt::format("echo madvise | sudo tee {}", setting));
}

Finding nodes(const platform::Topology& topology) {
  std::vector<std::string> parts;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const platform::Topology::Node& node : topology.nodes()) {
    parts.push_back(
        fmt::format("node {}: {}, {} CPUs", node.os_index, format_bytes(node.memory_bytes), node.cpus.size()));
    list.push_back({{"node", node.os_index}, {"memory_bytes", node.memory_bytes}, {"cpus", node.cpus.size()}});
  }
  Finding finding{.subject = "NUMA nodes", .found = fmt::format("{}", fmt::join(parts, "; "))};
  finding.data["nodes"] = list;
  return finding;
}

Finding cpu_limit(const platform::ControlGroupLimits& limits, unsigned cpu_count) {
  Finding finding{.subject = "cgroup CPU limit", .found = "none"};
  if (!limits.cpu) return finding;
  finding.found = fmt::format("{:.2f} of {} CPUs ({})", limits.cpu->count, cpu_count, limits.cpu->file);
  finding.data = {{"cpus", limits.cpu->count}, {"file", limits.cpu->file}};
  if (limits.cpu->count >= cpu_count) return finding;
  return finding.lacks(
      Verdict::lacking,
      "the process is stopped for the rest of each period once it has used its share: updates and transfers stall",
      "give the container more (docker run --cpus=..., Slurm --cpus-per-task=...)");
}

}  // namespace

Section look_at_memory(const MachineSources& machine) {
  return {"memory",
          {available_memory(machine), memory_limit(machine, platform::control_group_limits(machine.proc)),
           huge_pages(machine)}};
}

Section look_at_processors(const MachineSources& machine) {
  Section section{"processors", {}};
  unsigned cpu_count = 0;
  try {
    const platform::Topology topology = platform::Topology::detect_with_sysfs(machine.sys);
    cpu_count = topology.cpu_count();
    section.findings.push_back(
        {.subject = "CPUs",
         .found = fmt::format("{} cores, {} logical, that this process may use", topology.core_count(), cpu_count)});
    section.findings.back().data = {{"cores", topology.core_count()}, {"logical", cpu_count}};
    section.findings.push_back(nodes(topology));
  } catch (const Error& error) {
    section.findings.push_back({.subject = "CPUs", .found = fmt::format("unknown: {}", error.what())});
  }
  if (cpu_count > 0) section.findings.push_back(cpu_limit(platform::control_group_limits(machine.proc), cpu_count));
  section.findings.push_back({.subject = "instruction sets",
                              .found = fmt::format("{}", fmt::join(optim::supported_instruction_sets(), ", "))});
  return section;
}

}  // namespace hoist::cli
