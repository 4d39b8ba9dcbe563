// SPDX-License-Identifier: Apache-2.0
// `hoist doctor` about GPUs, CUDA, and the needs of several ranks.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/subprocess.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/platform/free_memory.hpp>

#include "gpus.hpp"

namespace hoist::cli {

namespace fs = std::filesystem;

namespace {

#ifdef HOIST_HAVE_CUDA
constexpr bool kBuiltWithCuda = true;
#else
constexpr bool kBuiltWithCuda = false;
#endif

Finding driver(const MachineSources& machine, const std::vector<PciGpu>& gpus) {
  const auto version = first_line(machine.sys + "/module/nvidia/version");
  Finding finding{.subject = "NVIDIA driver", .found = version ? "version " + *version : "not loaded"};
  finding.data = {{"version", version.value_or("")}, {"gpus", gpus.size()}};
  if (version || gpus.empty()) return finding;
  return finding.lacks(Verdict::missing, counted(gpus.size(), "NVIDIA GPU") + " in this machine cannot be used",
                       "sudo apt install nvidia-driver   (or the data-center driver from NVIDIA), then reboot");
}

Finding usable_devices(const std::vector<PciGpu>& gpus) {
  std::string why;
  const int count = platform::cuda_device_count(&why);
  Finding finding{.subject = "CUDA devices",
                  .found = count == 0 ? fmt::format("none ({})", why) : fmt::format("{}", count)};
  finding.data = {{"count", count}, {"built_with_cuda", kBuiltWithCuda}};
  std::vector<std::string> names, failed;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    try {
      names.push_back(
          platform::Device::create({.kind = platform::DeviceKind::cuda, .memory_bytes = kMiB, .ordinal = ordinal})
              ->description());
    } catch (const Error& error) {
      failed.push_back(fmt::format("device {}: {}", ordinal, error.what()));
    }
  }
  if (!failed.empty())
    finding.lacks(Verdict::missing, counted(failed.size(), "device") + " cannot be trained on",
                  fmt::format("{}", fmt::join(failed, "; ")));
  if (!names.empty()) finding.found = fmt::format("{}", fmt::join(names, "; "));
  if (count > 0) return finding;
  return finding.lacks(gpus.empty() ? Verdict::lacking : Verdict::missing,
                       "training runs on the CPU, with a device made of CPU memory",
                       !gpus.empty() && !kBuiltWithCuda ? "build again with -DHOIST_WITH_CUDA=ON, nvcc on the PATH"
                       : gpus.empty() ? "use a machine with an NVIDIA GPU; in a container: docker run --gpus all"
                                      : "load the driver, see above; in a container: docker run --gpus all");
}

// Says which bytes are the GPU's and which are the processors': budgets follow from it (zero/machine.hpp).
Finding memory_of_gpu(const MachineSources& machine, std::size_t ordinal, const platform::GpuMemoryFacts& facts) {
  const platform::GpuMemory memory = platform::gpu_memory(facts);
  Finding finding{.subject = fmt::format("memory of GPU {}", ordinal), .found = "its own, behind PCIe"};
  finding.data = {{"kind", platform::gpu_memory_name(memory)},
                  {"integrated", facts.is_integrated},
                  {"uses_host_page_tables", facts.uses_host_page_tables}};
  if (memory == platform::GpuMemory::integrated)
    finding.found =
        "the processors' own: one budget limits hoist.device_memory and hoist.pinned_memory together, and a copy reads "
        "and writes the same memory";
  if (memory != platform::GpuMemory::coherent) return finding;
  const std::uint64_t total = field_bytes(machine.proc + "/meminfo", "MemTotal").value_or(0);
  const std::uint64_t host = platform::memory_of_processors({.total_bytes = total}, machine.sys).total_bytes;
  finding.found = fmt::format(
      "its own, which the processors reach through their page tables: of {} that the kernel counts, {} are the "
      "processors', and hoist.pinned_memory is of these",
      format_bytes(total), format_bytes(host));
  finding.data["machine_bytes"] = total;
  finding.data["processor_bytes"] = host;
  return finding;
}

Finding toolkit() {
  const std::string compiler = measure::find_program("nvcc");
  Finding finding{
      .subject = "CUDA toolkit",
      .found = fmt::format("{}; this build was made {} it", compiler.empty() ? "no nvcc on the PATH" : compiler,
                           kBuiltWithCuda ? "with" : "without")};
  finding.data = {{"nvcc", compiler}, {"built_with_cuda", kBuiltWithCuda}};
  if (kBuiltWithCuda) return finding;
  return finding.lacks(Verdict::lacking, "GPUs cannot be used by this build",
                       compiler.empty() ? "sudo apt install nvidia-cuda-toolkit (non-free), then build again"
                                        : "build again with -DHOIST_WITH_CUDA=ON");
}

Finding gpu_link(const PciGpu& gpu) {
  const auto number = [](const auto& known) { return known ? fmt::format("{}", *known) : "unknown"; };
  Finding finding{.subject = "GPU " + gpu.address,
                  .found = fmt::format("NUMA node {}, {} of {} PCIe lanes", number(gpu.node), number(gpu.lanes),
                                       number(gpu.lanes_max))};
  finding.data = {{"address", gpu.address},
                  {"node", gpu.node.value_or(-1)},
                  {"lanes", gpu.lanes.value_or(0)},
                  {"lanes_max", gpu.lanes_max.value_or(0)}};
  if (!gpu.lanes || !gpu.lanes_max || *gpu.lanes >= *gpu.lanes_max) return finding;
  return finding.lacks(
      Verdict::lacking, "weights and gradients cross a narrower link than the GPU supports",
      "put the GPU into a slot with all its lanes; sudo lspci -vv -s " + gpu.address + " | grep LnkSta");
}

Finding nccl(std::size_t gpu_count) {
  Finding finding{.subject = "NCCL", .found = comm::have_nccl() ? "in this build" : "not in this build"};
  finding.data["built"] = comm::have_nccl();
  if (comm::have_nccl()) return finding;
  return finding.lacks(
      gpu_count > 1 ? Verdict::missing : Verdict::lacking, "several GPUs cannot train together",
      "sudo apt install libnccl-dev (NVIDIA's repository), then build again with -DHOIST_WITH_NCCL=ON");
}

Finding mpi() {
  int launched = 0;
  std::string launch_problem;
  try {
    launched = comm::mpi_size_of_launch();
  } catch (const CommError& error) {
    launch_problem = error.what();
  }
  const std::string launcher = measure::find_program("mpirun");
  Finding finding{.subject = "MPI",
                  .found = fmt::format("{}; {}", comm::have_mpi() ? "in this build" : "not in this build",
                                       launcher.empty() ? "no mpirun on the PATH" : launcher)};
  if (launched > 0) finding.found += fmt::format("; started with {}", counted(launched, "rank"));
  if (!launch_problem.empty()) finding.found += "; " + launch_problem;
  finding.data = {{"built", comm::have_mpi()}, {"mpirun", launcher}, {"ranks_launched", launched}};
  if (comm::have_mpi() && !launcher.empty()) return finding;
  return finding.lacks(launched > 1 && !comm::have_mpi() ? Verdict::missing : Verdict::lacking,
                       comm::have_mpi() ? "several ranks need another launcher (srun)"
                                        : "ranks of C++ programs need MPI (or NCCL, on GPUs); ranks of PyTorch do not",
                       comm::have_mpi() ? "sudo apt install openmpi-bin"
                                        : "sudo apt install libopenmpi-dev openmpi-bin, then build again");
}

}  // namespace

std::vector<platform::GpuMemoryFacts> cuda_memories() {
  std::vector<platform::GpuMemoryFacts> memories;
  for (int ordinal = 0; ordinal < platform::cuda_device_count(); ++ordinal)
    memories.push_back(platform::cuda_memory_facts(ordinal));
  return memories;
}

std::vector<PciGpu> find_gpus(const MachineSources& machine) {
  std::vector<PciGpu> gpus;
  std::error_code failed;
  const fs::path bus = fs::path(machine.sys) / "bus/pci/devices";
  for (fs::directory_iterator entry(bus, failed), end; !failed && entry != end; entry.increment(failed)) {
    const std::string base = entry->path().string();
    const std::string device_class = first_line(base + "/class").value_or("");
    const bool display = device_class.starts_with("0x0300") || device_class.starts_with("0x0302");
    if (!display || first_line(base + "/vendor").value_or("") != "0x10de") continue;
    const auto node = number_in(base + "/numa_node");  // "-1" means unknown
    gpus.push_back({.address = entry->path().filename().string(),
                    .node = node ? std::optional(static_cast<int>(*node)) : std::nullopt,
                    .lanes = number_in(base + "/current_link_width"),
                    .lanes_max = number_in(base + "/max_link_width")});
  }
  std::ranges::sort(gpus, {}, &PciGpu::address);
  return gpus;
}

Section look_at_devices(const MachineSources& machine) {
  const std::vector<PciGpu> gpus = find_gpus(machine);
  Section section{"GPUs and ranks", {driver(machine, gpus), usable_devices(gpus), toolkit()}};
  const std::vector<platform::GpuMemoryFacts> memories = machine.gpu_memories();
  for (std::size_t ordinal = 0; ordinal < memories.size(); ++ordinal)
    section.findings.push_back(memory_of_gpu(machine, ordinal, memories[ordinal]));
  for (const PciGpu& gpu : gpus) section.findings.push_back(gpu_link(gpu));
  section.findings.push_back(nccl(gpus.size()));
  section.findings.push_back(mpi());
  return section;
}

}  // namespace hoist::cli
