// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/processors.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/platform/numa_placement.hpp>
#include <hoist/zero/machine.hpp>

namespace hoist {

namespace {

using platform::DeviceKind;
using platform::MemorySize;
using platform::NumaPlace;

constexpr std::uint64_t kReserveLeast = kGiB;
constexpr std::uint64_t kReserveMost = 32 * kGiB;
constexpr std::uint64_t kUnlimitedBytes = std::uint64_t{1} << 50;

// Memory of which each of `shares` processes gets the same part.
struct Allowance {
  std::uint64_t bytes = 0;
  std::string reason;
};

Allowance allowance(const MemorySize& memory, int shares, const char* what) {
  const std::uint64_t reserve =
      std::min(std::clamp(memory.total_bytes / 10, kReserveLeast, kReserveMost), memory.total_bytes / 2);
  const std::uint64_t step = std::max(round_down(memory.total_bytes / 32, kBlockAlignment), kBlockAlignment);
  const std::uint64_t usable = round_down(left_of(memory.free_bytes, reserve), step);
  // At least 1 MiB, because 0 means that the budget is still to be chosen. An engine that needs more is refused.
  const std::uint64_t share = std::max(round_down(usable / static_cast<unsigned>(shares), kBlockAlignment), kMiB);
  std::string reason =
      fmt::format("{} of {} {} are free, of which hoist leaves {} unused", format_bytes(memory.free_bytes),
                  format_bytes(memory.total_bytes), what, format_bytes(reserve));
  if (shares > 1) reason += fmt::format("; {} processes divide the rest", shares);
  return {share, std::move(reason)};
}

// "0-3, 8"
std::string list_of(const std::vector<int>& ascending) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < ascending.size();) {
    std::size_t end = i + 1;
    while (end < ascending.size() && ascending[end] == ascending[end - 1] + 1) ++end;
    runs.push_back(end == i + 1 ? fmt::to_string(ascending[i])
                                : fmt::format("{}-{}", ascending[i], ascending[end - 1]));
    i = end;
  }
  return fmt::format("{}", fmt::join(runs, ", "));
}

std::string bytes_value(std::uint64_t bytes) { return fmt::format("\"{}MiB\"", bytes / kMiB); }

class Chooser {
 public:
  Chooser(const RuntimeOptions& options, const Machine& machine) : out_{options, {}}, machine_(machine) {}

  ChosenOptions run() && {
    out_.runtime.local_rank = machine_.local_rank;
    device();
    const bool has_own_memory =
        *out_.runtime.device == DeviceKind::cuda && machine_.gpu_memory != platform::GpuMemory::integrated;
    has_own_memory ? memory_of_gpu() : memory_of_host();
    numa();
    update_threads();
    return std::move(out_);
  }

 private:
  void say(const char* key, std::string value, std::string reason) {
    out_.choices.push_back({key, std::move(value), std::move(reason)});
  }

  void device() {
    RuntimeOptions& runtime = out_.runtime;
    if (runtime.device_ordinal < 0) runtime.device_ordinal = machine_.gpu_ordinal;
    if (runtime.device) return;
    runtime.device = machine_.gpu_count > 0 ? DeviceKind::cuda : DeviceKind::host;
    if (machine_.gpu_count > 0) {
      say("hoist.device", "\"cuda\"",
          machine_.gpu_count == 1 ? "there is a GPU" : fmt::format("there are {} GPUs", machine_.gpu_count));
    } else {
      say("hoist.device", "\"host\"", machine_.no_gpu.empty() ? "there is no GPU" : machine_.no_gpu);
    }
  }

  void memory_of_gpu() {
    RuntimeOptions& runtime = out_.runtime;
    if (runtime.device_memory_bytes == 0 && machine_.gpu_count == 0) {
      runtime.device_memory_bytes = kUnlimitedBytes;  // for predictions; opening the device is refused
      say("hoist.device_memory", "unlimited", "there is no GPU here");
    } else if (runtime.device_memory_bytes == 0) {
      const Allowance gpu = allowance(machine_.gpu, 1, "of GPU memory");
      runtime.device_memory_bytes = gpu.bytes;
      say("hoist.device_memory", bytes_value(gpu.bytes), gpu.reason);
    }
    if (runtime.pinned_memory_bytes == 0) {
      const Allowance host = allowance(machine_.host, machine_.processes, "of host memory");
      runtime.pinned_memory_bytes = host.bytes;
      say("hoist.pinned_memory", bytes_value(host.bytes), host.reason);
    }
  }

  void memory_of_host() {
    RuntimeOptions& runtime = out_.runtime;
    const bool both = runtime.device_memory_bytes == 0 && runtime.pinned_memory_bytes == 0;
    if (runtime.device_memory_bytes != 0 && runtime.pinned_memory_bytes != 0) return;
    const bool on_gpu = *runtime.device == DeviceKind::cuda;
    const Allowance host = allowance(machine_.host, machine_.processes,
                                     on_gpu ? "of the memory that GPU and processors share" : "of host memory");
    if (both) {
      runtime.device_memory_bytes = runtime.pinned_memory_bytes = runtime.host_memory_bytes = host.bytes;
      say("hoist.device_memory and hoist.pinned_memory", bytes_value(host.bytes) + " together", host.reason);
      return;
    }
    const bool device_given = runtime.device_memory_bytes != 0;
    const std::uint64_t given = device_given ? runtime.device_memory_bytes : runtime.pinned_memory_bytes;
    const std::uint64_t rest = std::max(round_down(left_of(host.bytes, given), kBlockAlignment), kMiB);
    (device_given ? runtime.pinned_memory_bytes : runtime.device_memory_bytes) = rest;
    say(device_given ? "hoist.pinned_memory" : "hoist.device_memory", bytes_value(rest),
        fmt::format("{}; {} are for {}", host.reason, format_bytes(given),
                    device_given ? "hoist.device_memory" : "hoist.pinned_memory"));
  }

  // A launcher that binds each process to processors of its own has divided them.
  bool is_bound() const { return machine_.allowed_cpu_count < machine_.cpu_count; }

  void numa() {
    RuntimeOptions& runtime = out_.runtime;
    if (!runtime.numa_placement || machine_.nodes.empty()) return;
    const bool unknown = machine_.processes > 1 && machine_.local_rank < 0;
    if (unknown || machine_.local_rank >= machine_.processes) return;
    std::vector<NumaPlace> places{platform::place_bound_process(machine_.nodes)};
    if (!is_bound()) places = platform::place_processes(machine_.nodes, machine_.gpu_nodes, machine_.processes);
    const auto own = is_bound() ? 0 : static_cast<std::size_t>(std::max(machine_.local_rank, 0));
    if (runtime.io_places.empty()) runtime.io_places = platform::place_io_threads(machine_.nodes, places, own);
    NumaPlace& place = places[own];
    if (runtime.memory_nodes.empty() && !place.memory_nodes.empty()) {
      runtime.memory_nodes = std::move(place.memory_nodes);
      say("NUMA nodes of pinned memory", fmt::format("{}", fmt::join(runtime.memory_nodes, ", ")), reason_of_nodes());
    }
    if (runtime.update_cpus.empty() && !place.cpus.empty()) {
      runtime.update_cpus = std::move(place.cpus);
      say("CPUs of update threads", list_of(runtime.update_cpus),
          fmt::format("{} processes divide the cores of their NUMA nodes", machine_.processes));
    }
  }

  std::string reason_of_nodes() const {
    if (is_bound()) return "this process is bound to processors there";
    const auto ordinal = static_cast<std::size_t>(std::max(out_.runtime.device_ordinal, 0));
    const bool known = *out_.runtime.device == DeviceKind::cuda && ordinal < machine_.gpu_nodes.size() &&
                       machine_.gpu_nodes[ordinal].has_value();
    if (known) return fmt::format("GPU {} is on node {}", ordinal, *machine_.gpu_nodes[ordinal]);
    return machine_.processes == 1 ? "its update threads run on all of them"
                                   : fmt::format("{} processes divide the nodes", machine_.processes);
  }

  void update_threads() {
    RuntimeOptions& runtime = out_.runtime;
    if (runtime.update_threads != 0) return;
    const auto processes = static_cast<unsigned>(machine_.processes);
    unsigned threads = static_cast<unsigned>(runtime.update_cpus.size());
    std::string reason;
    if (threads == 0 && processes > 1 && !is_bound()) {
      threads = std::max(machine_.cpu_count / processes, 1u);
      reason = fmt::format("{} processes divide {} CPUs", processes, machine_.cpu_count);
    }
    // The kernel stops all threads for the rest of each period when more of them have used up the time together.
    const unsigned most = threads == 0 ? machine_.allowed_cpu_count : threads;
    if (machine_.cpu_limit && *machine_.cpu_limit / processes < most) {
      threads = std::max(static_cast<unsigned>(*machine_.cpu_limit / processes), 1u);
      reason = fmt::format("the control group's limit is the time of {:.1f} CPUs", *machine_.cpu_limit);
      if (processes > 1) reason += fmt::format(" for {} processes", processes);
    }
    runtime.update_threads = threads;
    if (!reason.empty()) say("hoist.update_threads", fmt::to_string(threads), reason);
  }

  ChosenOptions out_;
  const Machine& machine_;
};

// The host device reserves addresses for its whole budget, and pinned memory is mapped beside it: an address space that
// is limited must have room for both.
MemorySize mappable_twice(const MemorySize& memory) {
  const MemorySize addresses = platform::address_space();
  return {std::min(memory.total_bytes, addresses.total_bytes / 2),
          std::min(memory.free_bytes, addresses.free_bytes / 2)};
}

}  // namespace

Machine this_machine(const RuntimeOptions& options) {
  comm::Launch launch;
  try {
    launch = comm::launch_of_process();
  } catch (const CommError&) {  // The launch is invalid. A runtime that joins it reports that.
  }
  const platform::ControlGroupLimits limits = platform::control_group_limits();
  Machine machine{.host = mappable_twice(platform::host_memory(limits)),
                  .processes = options.local_ranks > 0 ? options.local_ranks : launch.local_size,
                  .local_rank = options.local_rank >= 0 ? options.local_rank : launch.local_rank,
                  .cpu_count = platform::processor_count(limits),
                  .allowed_cpu_count = static_cast<unsigned>(current_processors().size())};
  if (limits.cpu) machine.cpu_limit = limits.cpu->count;
  // Reading the topology takes milliseconds: only where there is something to choose.
  std::optional<platform::Topology> topology;
  if (options.numa_placement && (machine.processes > 1 || platform::may_have_several_nodes())) {
    topology = platform::Topology::detect();
    machine.nodes = topology->nodes();
  }
  if (options.device == DeviceKind::host) return machine;
  machine.gpu_count = platform::cuda_device_count(&machine.no_gpu);
  if (machine.gpu_count == 0) return machine;
  for (int gpu = 0; topology && gpu < machine.gpu_count; ++gpu)
    machine.gpu_nodes.push_back(topology->node_of_pci(platform::cuda_bus_id(gpu)));
  const int local_rank = options.communicator == CommunicatorKind::self ? 0 : std::max(machine.local_rank, 0);
  machine.gpu_ordinal = options.device_ordinal >= 0 ? options.device_ordinal : local_rank % machine.gpu_count;
  machine.gpu_memory = platform::gpu_memory(platform::cuda_memory_facts(machine.gpu_ordinal));
  if (machine.gpu_memory == platform::GpuMemory::coherent)
    machine.host = mappable_twice(platform::host_memory_beside_gpus(limits));
  // On an integrated GPU the CUDA runtime leaves out the file cache, which the kernel would free: the host's number
  // counts.
  machine.gpu =
      machine.gpu_memory == platform::GpuMemory::integrated ? machine.host : platform::cuda_memory(machine.gpu_ordinal);
  return machine;
}

DeviceKind device_kind(const RuntimeOptions& options) {
  if (options.device) return *options.device;
  return platform::cuda_device_count() > 0 ? DeviceKind::cuda : DeviceKind::host;
}

void divide_shared_memory(ChosenOptions& chosen) {
  RuntimeOptions& runtime = chosen.runtime;
  if (runtime.device != DeviceKind::cuda || runtime.host_memory_bytes == 0) return;
  if (runtime.device_arena_bytes == 0) {
    runtime.device_arena_bytes =
        std::max(round_down(std::min(runtime.device_memory_bytes, runtime.host_memory_bytes / 2), kBlockAlignment),
                 kBlockAlignment);
    chosen.choices.push_back({"memory that the GPU takes at the start", bytes_value(runtime.device_arena_bytes),
                              "it is half of what GPU and processors share; hoist.device_memory sets it"});
  }
  runtime.pinned_memory_bytes =
      std::min(runtime.pinned_memory_bytes, left_of(runtime.host_memory_bytes, runtime.device_arena_bytes));
}

ChosenOptions choose(const RuntimeOptions& options, const Machine& machine) { return Chooser(options, machine).run(); }

ChosenOptions choose_for_this_machine(const RuntimeOptions& options) { return choose(options, this_machine(options)); }

}  // namespace hoist
