// SPDX-License-Identifier: Apache-2.0
#include <filesystem>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <hoist/core/error.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist {

namespace {

constexpr const char* kDeviceKey = "hoist.device_memory";
constexpr const char* kPinnedKey = "hoist.pinned_memory";

// Whether the configuration leads to several ranks under MPI.
bool wants_mpi(const RuntimeOptions& options) {
  if (options.communicator == CommunicatorKind::mpi) return true;
  return options.communicator == CommunicatorKind::automatic && comm::mpi_size_of_launch() > 1;
}

std::unique_ptr<comm::Communicator> default_communicator(const RuntimeOptions& options,
                                                         const comm::CommunicatorOptions& comm) {
  return wants_mpi(options) ? comm::make_mpi(comm) : comm::make_self(comm);
}

}  // namespace

Runtime::Runtime(const RuntimeOptions& options)
    : Runtime(
          options, [&](const comm::CommunicatorOptions& comm) { return default_communicator(options, comm); },
          /*alone=*/!wants_mpi(options)) {}

Runtime::Runtime(const RuntimeOptions& options, const MakeCommunicator& join)
    : Runtime(options, join, /*alone=*/false) {}

Runtime::Runtime(const RuntimeOptions& options, const MakeCommunicator& join, bool alone)
    : options_(options),
      trace_(options.trace_path.empty() ? nullptr : std::make_unique<Trace>()),
      device_budget_("device", kDeviceKey, options.device_memory_bytes),
      pinned_budget_("pinned", kPinnedKey, options.pinned_memory_bytes),
      device_(platform::Device::create({.kind = options.device,
                                        .memory_bytes = round_down(options.device_memory_bytes, kBlockAlignment),
                                        .ordinal = options.device_ordinal,
                                        .host = options.host_device,
                                        .ledger = &ledger_})),
      arena_(std::make_unique<tiers::DeviceArena>(*device_, device_budget_)),
      update_pool_(std::make_unique<optim::UpdatePool>(optim::UpdatePoolOptions{.threads = options.update_threads})) {
  ledger_.trace_to(trace_.get());
  // Only several ranks stage reductions, but how many there are is known after joining.
  if (!alone) comm_scratch_ = arena_->allocate(options.comm_scratch_bytes, "staging of collectives");
  communicator_ = join({.scratch = comm_scratch_.bytes(), .ledger = &ledger_, .timeout = options.comm_timeout});
  if (communicator_->size() == 1) comm_scratch_ = {};
}

Runtime::~Runtime() { write_trace(); }

void Runtime::write_trace() const noexcept {
  if (!trace_) return;
  try {
    const int rank = communicator_->rank();
    std::filesystem::path path = options_.trace_path;
    if (communicator_->size() > 1)
      path.replace_filename(fmt::format("{}.rank-{}{}", path.stem().string(), rank, path.extension().string()));
    trace_->write(path.string(), fmt::format("rank {}", rank));
    if (trace_->dropped() != 0)
      spdlog::info("{} holds the end of the run: {} earlier events did not fit", path.string(), trace_->dropped());
  } catch (const std::exception& error) {
    spdlog::error("the trace could not be written: {}", error.what());
  }
}

}  // namespace hoist
