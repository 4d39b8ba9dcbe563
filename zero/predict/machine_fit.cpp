// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>

#include <fmt/format.h>

#include <hoist/core/units.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/predict/machine_fit.hpp>

namespace hoist {

namespace {

namespace fs = std::filesystem;

// Free bytes of the file system that holds the directory, or would hold it.
std::uint64_t free_space(fs::path directory) {
  std::error_code error;
  while (!fs::exists(directory, error) && directory.has_relative_path()) directory = directory.parent_path();
  const fs::space_info space = fs::space(directory.empty() ? "." : directory, error);
  return error ? 0 : space.available;
}

bool has_files(const fs::path& directory) {
  std::error_code error;
  return fs::exists(directory, error) && !fs::is_empty(directory, error);
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
  // A store that is there has its space; scratch is reserved at every start.
  const bool has_store = !drive_bytes && has_files(engine.store_directory);
  const std::uint64_t nvme_bytes = has_store ? p.scratch_bytes : p.nvme_bytes;
  if (nvme_bytes > 0) {
    std::uint64_t free = drive_bytes ? *drive_bytes : free_space(engine.store_directory);
    if (!drive_bytes)
      for (const std::string& directory : engine.stripe_directories) free += free_space(directory);
    fit.memories.push_back({"NVMe at " + engine.store_directory, ranks * nvme_bytes, ranks * nvme_bytes, free,
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
