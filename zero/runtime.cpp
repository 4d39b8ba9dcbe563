// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/deadline.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/zero/machine.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist {

namespace {

constexpr const char* kDeviceKey = "hoist.device_memory";
constexpr const char* kPinnedKey = "hoist.pinned_memory";
constexpr const char* kHostKeys = "hoist.device_memory and hoist.pinned_memory";

// The launch that the options have hoist take part in.
comm::Launch launch_of(const RuntimeOptions& options) {
  if (options.communicator == CommunicatorKind::self) return {};
  comm::Launch launch = comm::launch_of_process();
  if (options.communicator == CommunicatorKind::mpi && launch.launcher != comm::Launcher::slurm)
    launch.launcher = comm::Launcher::mpi;
  return launch;
}

bool is_alone(const RuntimeOptions& options, const comm::Launch& launch) {
  return options.communicator != CommunicatorKind::mpi && launch.size == 1;
}

std::unique_ptr<comm::Communicator> join_mpi(const RuntimeOptions& options, const comm::CommunicatorOptions& comm) {
  if (options.device == platform::DeviceKind::host) return comm::make_mpi(comm);
  return comm::make_nccl_over(comm::make_mpi({.timeout = comm.timeout}), comm);
}

std::unique_ptr<comm::Communicator> join_torchrun(const RuntimeOptions& options, const comm::Launch& launch,
                                                  const comm::CommunicatorOptions& comm) {
  if (options.device == platform::DeviceKind::host) {
    throw CommError(fmt::format(
        "torchrun's {} ranks have no way to each other on the host device: it starts processes, and the only "
        "library that connects CPUs here, MPI, needs its own launcher; start with {}, or hand over a channel of the "
        "program's own "
        "(comm/transport.hpp; hoist.torch does, over torch.distributed)",
        launch.size, comm::mpirun_line(launch.size)));
  }
  if (launch.master_address.empty() || launch.master_port == 0)
    throw CommError(
        "RANK and WORLD_SIZE are in the environment, but MASTER_ADDR is missing or MASTER_PORT is not a port from 1 to "
        "65535: start with torchrun");
  // torchrun's own store listens on MASTER_PORT.
  return comm::make_nccl_at(fmt::format("{}:{}", launch.master_address, launch.master_port + 1), launch.rank,
                            launch.size, comm);
}

std::unique_ptr<comm::Communicator> join_launch(const RuntimeOptions& options, const comm::CommunicatorOptions& comm) {
  const comm::Launch launch = launch_of(options);
  if (is_alone(options, launch)) return comm::make_self(comm);
  return launch.launcher == comm::Launcher::torchrun ? join_torchrun(options, launch, comm) : join_mpi(options, comm);
}

// More than any machine has processors; each takes memory before it is known that it has nothing to do.
constexpr unsigned kUpdateThreadsMax = 4096;

ChosenOptions chosen(const RuntimeOptions& options) {
  check(options);
  if (options.update_threads > kUpdateThreadsMax)
    throw ConfigError("hoist.update_threads", fmt::format("{} is more than {}; 0 is one for each processor",
                                                          options.update_threads, kUpdateThreadsMax));
  ChosenOptions chosen = choose_for_this_machine(options);
  divide_shared_memory(chosen);
  make_paths_absolute(chosen.runtime);
  return chosen;
}

// Once in a process, however many runtimes it has.
void say_choices(const std::vector<MachineChoice>& choices) {
  static Mutex mutex;
  static std::set<std::string> said;
  const MutexLock lock(mutex);
  for (const auto& [key, value, reason] : choices)
    if (said.insert(key).second) log_info("{}: {}, because {}", key, value, reason);
}

std::shared_ptr<platform::Device> make_device(const RuntimeOptions& options, std::shared_ptr<Trace> trace,
                                              std::shared_ptr<Ledger> ledger) {
  const std::uint64_t arena_bytes = options.device_arena_bytes == 0
                                        ? options.device_memory_bytes
                                        : std::min(options.device_arena_bytes, options.device_memory_bytes);
  const platform::DeviceOptions device{.kind = *options.device,
                                       .memory_bytes = round_down(arena_bytes, kBlockAlignment),
                                       .ordinal = options.device_ordinal,
                                       .host = options.host_device,
                                       .numa_nodes = options.memory_nodes,
                                       .touch_cpus = options.update_cpus,
                                       .ledger = ledger.get()};
  auto made = options.make_device ? options.make_device(device) : platform::Device::create(device);
  if (!made) throw UsageError("RuntimeOptions::make_device returned no device");
  return {made.release(),
          [trace = std::move(trace), ledger = std::move(ledger)](platform::Device* ended) { delete ended; }};
}

}  // namespace

// options_ is set, with what was chosen for this machine, before the group is joined.
Runtime::Runtime(const RuntimeOptions& options)
    : Runtime(options,
              Groups{.sharding = [this](const comm::CommunicatorOptions& comm) { return join_launch(options_, comm); },
                     .norm = {}},
              is_alone(options, launch_of(options))) {}

Runtime::Runtime(const RuntimeOptions& options, const MakeCommunicator& join)
    : Runtime(options, Groups{.sharding = join, .norm = {}}) {}

Runtime::Runtime(const RuntimeOptions& options, const Groups& groups)
    : Runtime(options, groups, /*alone=*/!groups.sharding) {}

Runtime::Runtime(const RuntimeOptions& options, const Groups& groups, bool alone)
    : Runtime(chosen(options), groups, alone) {}

Runtime::Runtime(const ChosenOptions& chosen, const Groups& groups, bool alone)
    : options_(chosen.runtime), parts_(std::make_unique<Parts>(options_), "the runtime") {
  Parts& parts = *parts_;
  parts.ledger->trace_to(parts.trace.get());
  // Only several ranks stage reductions, but how many there are is known after joining.
  if (!alone && options_.comm_scratch_bytes == 0)
    throw UsageError("several ranks need comm_scratch_bytes (hoist.comm_scratch), to reduce gradients in");
  if (!alone) parts.comm_scratch = parts.arena->allocate(options_.comm_scratch_bytes, "staging of collectives");
  comm::CommunicatorOptions comm{.scratch = parts.comm_scratch.bytes(),
                                 .ledger = parts.ledger.get(),
                                 .timeout = std::min(options_.comm_timeout, Deadline::kLimitMax),
                                 .device_ordinal = options_.device_ordinal};
  const auto made_by = [&comm](const MakeCommunicator& join) {
    auto communicator = join(comm);
    if (!communicator) throw UsageError("the function that joins a group of ranks returned no communicator");
    return communicator;
  };
  parts.communicator = groups.sharding ? made_by(groups.sharding) : comm::make_self(comm);
  if (world_size() == 1) parts.comm_scratch = {};
  if (rank() == 0) say_choices(chosen.choices);
  if (parts.trace) Trace::check(trace_file());  // now, not when the run is over
  if (!groups.norm) return;
  comm.scratch = {};
  parts.norm_group = made_by(groups.norm);
  if (parts.norm_group->size() < world_size()) {
    throw UsageError(fmt::format("the norm group has {}, the sharding group {}: it must hold that one whole",
                                 counted(parts.norm_group->size(), "rank"), world_size()));
  }
}

Runtime::~Runtime() { write_trace(); }

Runtime::Parts::Parts(const RuntimeOptions& options)
    : trace(options.trace_path.empty() ? nullptr : std::make_shared<Trace>()),
      ledger(std::make_shared<Ledger>()),
      host_budget(options.host_memory_bytes == 0
                      ? nullptr
                      : std::make_unique<tiers::Budget>("host", kHostKeys, options.host_memory_bytes)),
      device_budget("device", kDeviceKey, options.device_memory_bytes, host_budget.get()),
      pinned_budget("pinned", kPinnedKey, options.pinned_memory_bytes, host_budget.get()),
      device(make_device(options, trace, ledger)),
      arena(std::make_unique<tiers::DeviceArena>(*device, device_budget)),
      update_pool(std::make_unique<optim::UpdatePool>(
          optim::UpdatePoolOptions{.threads = options.update_threads, .processors = options.update_cpus})) {}

Runtime::Parts::~Parts() = default;

bool Runtime::has_several_groups() const { return job_ranks().size() > world_size(); }
int Runtime::rank() const { return parts_.get()->communicator->rank(); }
int Runtime::world_size() const { return parts_.get()->communicator->size(); }

const comm::Communicator& Runtime::job_ranks() const {
  const Parts& parts = *parts_.get();
  return parts.norm_group ? *parts.norm_group : *parts.communicator;
}

std::string Runtime::trace_file() const {
  const comm::Communicator& job = job_ranks();
  std::filesystem::path path = options_.trace_path;
  if (job.size() > 1)
    path.replace_filename(fmt::format("{}.rank-{}{}", path.stem().string(), job.rank(), path.extension().string()));
  return path.string();
}

void Runtime::write_trace() const noexcept {
  if (!parts_.is_usable() || !parts_->trace) return;
  try {
    const std::string path = trace_file();
    const Trace& trace = *parts_->trace;
    trace.write(path, fmt::format("rank {}", job_ranks().rank()));
    if (trace.dropped() != 0)
      log_info("{} holds the end of the run: {} earlier events did not fit", path, trace.dropped());
  } catch (const std::exception& error) {
    log_error("the trace could not be written: {}", error.what());
  }
}

}  // namespace hoist
