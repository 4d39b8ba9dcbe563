// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <set>
#include <vector>

#include <fmt/format.h>
#include <sys/stat.h>

#include <hoist/core/units.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/predict/machine_fit.hpp>

namespace hoist {

namespace {

namespace fs = std::filesystem;

// The directory, or that above it which exists.
fs::path nearest_existing(fs::path directory) {
  std::error_code error;
  while (!fs::exists(directory, error) && directory.has_relative_path()) directory = directory.parent_path();
  return directory.empty() ? "." : directory;
}

std::uint64_t free_space(const fs::path& directory) {
  std::error_code error;
  const fs::space_info space = fs::space(directory, error);
  return error ? 0 : space.available;
}

// The drives' share of a store.
struct DriveSpace {
  std::uint64_t free_bytes = 0;      // of each file system once, however many of the directories it has
  std::uint64_t reserved_bytes = 0;  // that files of a store have already
};

DriveSpace drive_space(const EngineOptions& engine) {
  DriveSpace space;
  std::vector<std::string> directories{engine.store_directory};
  directories.insert(directories.end(), engine.stripe_directories.begin(), engine.stripe_directories.end());
  std::set<dev_t> file_systems;
  for (const std::string& directory : directories) {
    struct stat status {};
    const fs::path existing = nearest_existing(directory);
    if (::stat(existing.c_str(), &status) == 0 && file_systems.insert(status.st_dev).second)
      space.free_bytes += free_space(existing);
    std::error_code error;
    for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
      const bool is_of_store = entry->path().filename().string().starts_with("rank-");
      if (is_of_store && ::stat(entry->path().c_str(), &status) == 0)
        space.reserved_bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;  // POSIX: blocks of 512 bytes
    }
  }
  return space;
}

std::string placement_remedy(const EngineOptions& engine) {
  if (engine.optimizer == Placement::device) return "offload_optimizer with device \"cpu\" or \"nvme\" needs less";
  if (engine.optimizer == Placement::pinned) return "offload_optimizer with device \"nvme\" needs less";
  if (engine.parameters == Placement::pinned) return "offload_param with device \"nvme\" needs less";
  if (detail::may_spill_gradients(engine)) return "hoist.gradient_spill needs less";
  return "more ranks on more machines need less each";
}

void add_budget_problem(const char* key, const Prediction::Tier& tier, MachineFit& fit) {
  if (tier.fits()) return;
  fit.problems.push_back(fmt::format("a rank needs {}, and {} is {}: raise it", format_bytes(tier.least_bytes), key,
                                     format_bytes(tier.budget_bytes)));
}

}  // namespace

MachineFit machine_fit(const Prediction& p, const RuntimeOptions& runtime, const EngineOptions& engine,
                       const Machine& machine, std::optional<std::uint64_t> drive_bytes) {
  MachineFit fit{.ranks = machine.processes};
  const auto ranks = static_cast<std::uint64_t>(machine.processes);
  const bool on_gpu = runtime.device == platform::DeviceKind::cuda;
  const bool has_own_memory = on_gpu && machine.gpu_memory != platform::GpuMemory::integrated;
  const std::uint64_t device_part = has_own_memory ? 0 : 1;
  if (on_gpu && machine.gpu_count == 0) fit.problems.emplace_back("hoist.device is \"cuda\", and there is no GPU");
  if (has_own_memory && machine.gpu.total_bytes > 0) {
    const std::uint64_t per_gpu = divide_up(ranks, static_cast<std::uint64_t>(std::max(machine.gpu_count, 1)));
    fit.memories.push_back({"memory of a GPU", per_gpu * p.device.least_bytes, per_gpu * p.device.bytes,
                            machine.gpu.free_bytes, placement_remedy(engine)});
  }
  fit.memories.push_back({on_gpu && !has_own_memory ? "memory of GPU and processors" : "host memory",
                          ranks * (p.pinned.least_bytes + device_part * p.device.least_bytes),
                          ranks * (p.pinned.bytes + device_part * p.device.bytes), machine.host.free_bytes,
                          placement_remedy(engine)});
  if (p.nvme_bytes > 0) {
    const DriveSpace space = drive_bytes ? DriveSpace{.free_bytes = *drive_bytes} : drive_space(engine);
    const std::uint64_t bytes = ranks * p.nvme_bytes - std::min(ranks * p.nvme_bytes, space.reserved_bytes);
    if (bytes > 0)
      fit.memories.push_back({"NVMe at " + engine.store_directory, bytes, bytes, space.free_bytes,
                              "name a larger drive, or several, in nvme_path"});
  }
  for (const MachineFit::Memory& memory : fit.memories) {
    if (memory.fits()) continue;
    fit.problems.push_back(fmt::format("{}: {} needed, {} free; {}", memory.name, format_bytes(memory.least_bytes),
                                       format_bytes(memory.free_bytes), memory.remedy));
  }
  if (!fit.problems.empty()) return fit;
  add_budget_problem("hoist.device_memory", p.device, fit);
  add_budget_problem("hoist.pinned_memory", p.pinned, fit);
  if (fit.problems.empty() && !p.fits()) {
    fit.problems.push_back(fmt::format("host memory: {} needed by a rank, {} left beside the reserve; {}",
                                       format_bytes(p.device.least_bytes + p.pinned.least_bytes),
                                       format_bytes(p.host_budget_bytes), placement_remedy(engine)));
  }
  return fit;
}

}  // namespace hoist
