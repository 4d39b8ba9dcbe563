// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/kernel_files.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/memory/drives.hpp>
#include <hoist/zero/predict/machine_fit.hpp>

namespace hoist {

namespace {

namespace fs = std::filesystem;

const char* drive_remedy(const EngineOptions& engine) {
  return engine.uses_nvme() ? "name a larger drive, or several, in nvme_path"
                            : "name a larger drive in hoist.checkpoint_path";
}

// What keeps this process from making the directory, or files in it. `key`: of the configuration, that names it.
std::optional<std::string> directory_problem(const std::string& directory, const char* key) {
  const std::string existing = detail::existing_part(directory);
  const bool exists = existing == absolute_path(directory);
  const std::string cannot = exists ? "" : directory + " cannot be made: ";
  if (!fs::is_directory(existing)) return fmt::format("{}: {}{} is not a directory", key, cannot, existing);
  if (::access(existing.c_str(), W_OK | X_OK) == 0) return std::nullopt;
  return fmt::format("{}: {}{} cannot be written to: {}; {}, or name another directory", key, cannot, existing,
                     errno_text(errno), exists ? "change its owner" : "mount the drive");
}

std::uint64_t free_space(const fs::path& directory) {
  std::error_code error;
  const fs::space_info space = fs::space(directory, error);
  return error ? 0 : space.available;
}

// A file system that has directories of the store, of its mirror, or of both.
struct StoreFileSystem {
  std::string key;   // file_system_key()
  std::string name;  // "NVMe at /data/hoist and mirror at /data/mirror/hoist"
  std::uint64_t free_bytes = 0;
  std::uint64_t needed_bytes = 0;  // beside what files of the store have already
  std::string remedy;
};

std::uint64_t bytes_on_disk(const std::string& directory) {
  std::uint64_t bytes = 0;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    struct stat status {};
    const bool is_of_store = entry->path().filename().string().starts_with("rank-");
    if (is_of_store && ::stat(entry->path().c_str(), &status) == 0)
      bytes += static_cast<std::uint64_t>(status.st_blocks) * 512;  // POSIX: blocks of 512 bytes
  }
  return bytes;
}

// Adds a store of `bytes` to what each file system must have free. Each directory is given the same share, although a
// new store divides its bytes by the measured speeds of the drives.
void add_store(const std::vector<std::string>& directories, std::uint64_t bytes, const char* name, const char* remedy,
               std::vector<StoreFileSystem>& all) {
  std::uint64_t reserved = 0;
  for (const std::string& directory : directories) reserved += bytes_on_disk(directory);
  const std::uint64_t share = divide_up(left_of(bytes, reserved), std::max<std::size_t>(directories.size(), 1));
  if (share == 0) return;
  std::vector<std::string> named;  // each file system once
  for (const std::string& directory : directories) {
    const fs::path existing = detail::existing_part(directory);
    const std::string key = file_system_key(existing);
    if (key.empty()) continue;
    auto found = std::ranges::find(all, key, &StoreFileSystem::key);
    if (found == all.end()) found = all.insert(all.end(), {.key = key, .name = {}, .free_bytes = free_space(existing)});
    if (found->needed_bytes <= found->free_bytes) found->remedy = remedy;  // of what first does not fit
    found->needed_bytes += share;
    if (std::ranges::find(named, key) != named.end()) continue;
    named.push_back(key);
    found->name += fmt::format("{}{} at {}", found->name.empty() ? "" : " and ", name, directory);
  }
}

void add_drives(const EngineOptions& engine, std::uint64_t bytes, std::uint64_t mirror_bytes, MachineFit& fit) {
  for (std::string& problem : directory_problems(engine)) fit.problems.push_back(std::move(problem));
  std::vector<StoreFileSystem> all;
  add_store(engine.drive_directories(), bytes, "NVMe", drive_remedy(engine), all);
  add_store({engine.mirror.directory}, mirror_bytes, "mirror", "name another drive in hoist.mirror.path", all);
  for (const StoreFileSystem& files : all)
    fit.memories.push_back({files.name, files.needed_bytes, files.needed_bytes, files.free_bytes, files.remedy});
}

constexpr const char* kMoreRanks = "more ranks on more machines need less each";

// What leaves the memory of a GPU for another.
std::string remedy_on_gpu(const EngineOptions& engine) {
  if (engine.optimizer == Placement::device) return "offload_optimizer with device \"cpu\" or \"nvme\" needs less";
  if (engine.parameters != Placement::device) return kMoreRanks;
  if (engine.stage < 3) return "stage 3 with offload_param needs less";
  return "offload_param with device \"cpu\" or \"nvme\" needs less";
}

// What leaves the host's memory for the drives. `without_gpu`: state on the device is there, too.
std::string remedy_on_host(const EngineOptions& engine, bool without_gpu) {
  const auto asks_for = [](Placement placement, const std::optional<double>& share) {
    return placement == Placement::nvme && share.value_or(0) > 0;
  };
  const auto is_here = [&](Placement placement) {
    return placement == Placement::pinned || (without_gpu && placement == Placement::device);
  };
  if (asks_for(engine.optimizer, engine.optimizer_pinned_fraction))
    return std::string("a smaller hoist.optimizer_pinned_fraction, or \"auto\", needs less") +
           (is_here(engine.parameters) && engine.stage == 3 ? "; so does offload_param with device \"nvme\"" : "");
  if (asks_for(engine.parameters, engine.parameters_pinned_fraction))
    return "a smaller hoist.parameters_pinned_fraction, or \"auto\", needs less";
  if (is_here(engine.optimizer)) return "offload_optimizer with device \"nvme\" needs less";
  if (is_here(engine.parameters))
    return engine.stage < 3 ? "stage 3 with offload_param and device \"nvme\" needs less"
                            : "offload_param with device \"nvme\" needs less";
  if (detail::may_spill_gradients(engine)) return "hoist.gradient_spill needs less";
  return kMoreRanks;
}

// No placement of the engine's state leaves room for a program that does not fit by itself. `program`: what each of
// `ranks` takes of this memory.
std::string remedy_beside(const ProgramMemory& program, std::uint64_t ranks, std::uint64_t free_bytes,
                          std::string remedy) {
  const std::uint64_t program_bytes = ranks * (program.device_bytes + program.pinned_bytes);
  if (program_bytes <= free_bytes) return remedy;
  std::vector<const char*> keys;
  if (program.device_bytes > 0) keys.push_back("program_device_bytes");
  if (program.pinned_bytes > 0) keys.push_back("program_pinned_bytes");
  return fmt::format("the program's own memory is {} of it: use more memory, or a smaller {}",
                     format_bytes(program_bytes), fmt::join(keys, " or "));
}

// All of this budget is taken when a runtime is created, however little of it the model needs.
void add_start_problem(const RuntimeOptions& runtime, std::uint64_t ranks, const MachineFit::Memory& memory,
                       MachineFit& fit) {
  if (runtime.device_arena_bytes != 0 || ranks * runtime.device_memory_bytes <= memory.free_bytes) return;
  const std::string each = ranks == 1 ? "" : fmt::format(" for each of {} ranks", ranks);
  fit.problems.push_back(
      fmt::format("{}: hoist.device_memory is {}{}, all of it taken at the start, and {} is free; "
                  "lower it, or leave it out",
                  memory.name, format_bytes(runtime.device_memory_bytes), each, format_bytes(memory.free_bytes)));
}

// The machine has the least, but not what the budgets let an engine hold. `memory`: the host's, of all ranks;
// `is_shared`: device memory is a part of it.
void add_held_problem(const Prediction& p, const RuntimeOptions& runtime, const Machine& machine, bool is_shared,
                      const MachineFit::Memory& memory, MachineFit& fit) {
  if (memory.bytes <= memory.free_bytes) return;
  RuntimeOptions open = runtime;
  open.pinned_memory_bytes = 0;
  if (is_shared) open.device_memory_bytes = 0;
  const RuntimeOptions chosen = choose(open, machine).runtime;
  const std::uint64_t offered = is_shared ? chosen.host_memory_bytes : chosen.pinned_memory_bytes;
  const std::uint64_t least = p.pinned.least_bytes + (is_shared ? p.device.least_bytes : 0);
  fit.problems.push_back(
      fmt::format("{}: {} would be held, and {} is free; lower {} to {}MiB", memory.name, format_bytes(memory.bytes),
                  format_bytes(memory.free_bytes),
                  is_shared ? "hoist.device_memory and hoist.pinned_memory together" : "hoist.pinned_memory",
                  divide_up(std::max(offered, least), kMiB)));
}

void add_budget_problem(const char* key, const Prediction::Tier& tier, MachineFit& fit) {
  if (tier.fits()) return;
  fit.problems.push_back(fmt::format("a rank needs {}, and {} is {}: raise it", format_bytes(tier.least_bytes), key,
                                     format_bytes(tier.budget_bytes)));
}

}  // namespace

std::vector<std::string> directory_problems(const EngineOptions& engine) {
  std::vector<std::string> problems;
  const auto look = [&](const std::string& directory, const char* key) {
    if (auto problem = directory_problem(directory, key)) problems.push_back(std::move(*problem));
  };
  if (engine.store_directory.empty()) return problems;
  for (const std::string& directory : engine.drive_directories())
    look(directory, engine.uses_nvme() ? "nvme_path" : "hoist.checkpoint_path");
  if (!engine.mirror.directory.empty()) look(engine.mirror.directory, "hoist.mirror.path");
  return problems;
}

MachineFit machine_fit(const Prediction& p, const RuntimeOptions& runtime, const EngineOptions& engine,
                       const Machine& machine, std::optional<std::uint64_t> drive_bytes) {
  MachineFit fit{.ranks = machine.processes};
  const auto ranks = static_cast<std::uint64_t>(machine.processes);
  const bool on_gpu = runtime.device == platform::DeviceKind::cuda;
  const bool has_own_memory = on_gpu && machine.gpu_memory != platform::GpuMemory::integrated;
  const std::uint64_t device_part = has_own_memory ? 0 : 1;
  if (on_gpu && machine.gpu_count == 0) fit.problems.emplace_back("hoist.device is \"cuda\", and there is no GPU");
  const std::uint64_t per_gpu = divide_up(ranks, static_cast<std::uint64_t>(std::max(machine.gpu_count, 1)));
  const ProgramMemory on_host{.device_bytes = device_part * p.program.device_bytes,
                              .pinned_bytes = p.program.pinned_bytes};
  const std::string host_remedy = remedy_on_host(engine, !has_own_memory);
  if (has_own_memory && machine.gpu.total_bytes > 0) {
    fit.memories.push_back({"memory of a GPU", per_gpu * p.device.least_bytes, per_gpu * p.device.bytes,
                            machine.gpu.free_bytes,
                            remedy_beside({.device_bytes = p.program.device_bytes}, per_gpu, machine.gpu.free_bytes,
                                          remedy_on_gpu(engine))});
  }
  fit.memories.push_back({on_gpu && !has_own_memory ? "memory of GPU and processors" : "host memory",
                          ranks * (p.pinned.least_bytes + device_part * p.device.least_bytes),
                          ranks * (p.pinned.bytes + device_part * p.device.bytes), machine.host.free_bytes,
                          remedy_beside(on_host, ranks, machine.host.free_bytes, host_remedy)});
  const MachineFit::Memory device_memory = fit.memories.front(), host_memory = fit.memories.back();
  const bool memory_fits = fit.problems.empty() && device_memory.fits() && host_memory.fits();
  if (p.nvme_bytes > 0) {
    const std::uint64_t bytes = ranks * p.nvme_bytes;
    if (drive_bytes) {
      fit.memories.push_back({"NVMe at " + engine.store_directory, bytes, bytes, *drive_bytes, drive_remedy(engine)});
      fit.mirror_bytes = ranks * p.mirror_bytes;
    } else {
      add_drives(engine, bytes, ranks * p.mirror_bytes, fit);
    }
  }
  for (const MachineFit::Memory& memory : fit.memories) {
    if (memory.fits()) continue;
    fit.problems.push_back(fmt::format("{}: {} needed, {} free; {}", memory.name, format_bytes(memory.least_bytes),
                                       format_bytes(memory.free_bytes), memory.remedy));
  }
  if (!memory_fits) return fit;  // no budget helps
  const std::size_t of_drives = fit.problems.size();
  if (!has_own_memory || machine.gpu.total_bytes > 0)
    add_start_problem(runtime, has_own_memory ? per_gpu : ranks, device_memory, fit);
  add_budget_problem("hoist.device_memory", p.device, fit);
  add_budget_problem("hoist.pinned_memory", p.pinned, fit);
  add_held_problem(p, runtime, machine, !has_own_memory, host_memory, fit);
  if (fit.problems.size() == of_drives && !p.fits()) {
    fit.problems.push_back(fmt::format("host memory: {} needed by a rank, {} left beside the reserve; {}",
                                       format_bytes(p.device.least_bytes + p.pinned.least_bytes),
                                       format_bytes(p.host_budget_bytes),
                                       remedy_beside(on_host, 1, p.host_budget_bytes, host_remedy)));
  }
  return fit;
}

}  // namespace hoist
