// SPDX-License-Identifier: Apache-2.0
// The section "hoist": settings that DeepSpeed does not have.
#include <hoist/config/detail/key_rows.hpp>
#include <hoist/core/units.hpp>

namespace hoist::config::detail {

namespace {

std::chrono::milliseconds milliseconds_of(const Value& seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(as_number(seconds)));
}

std::vector<KeyRow> memory_rows() {
  return {
      {.path = "hoist.device",
       .type = ValueType::choice,
       .choices = {"host", "cuda"},
       .meaning = "host: a device made of CPU memory, for machines without a GPU; cuda: a GPU. Default, and auto: cuda "
                  "if there is a GPU.",
       .apply =
           [](Draft& d, const Value& v) {
             d.runtime.device = as_text(v) == "cuda" ? platform::DeviceKind::cuda : platform::DeviceKind::host;
           }},
      {.path = "hoist.device_ordinal",
       .type = ValueType::integer,
       .range = {.max = 1023},
       .meaning = "Which GPU. Default: the local rank, modulo the number of visible GPUs. "
                  "hoist.torch first takes the GPU that the model is on, or that torch.cuda.set_device() chose.",
       .apply = [](Draft& d, const Value& v) { d.runtime.device_ordinal = static_cast<int>(as_count(v)); }},
      {.path = "hoist.device_memory",
       .type = ValueType::bytes,
       .range = {.min = 4096},
       .meaning =
           "Hard budget of device memory, with what a C++ program takes from Runtime::device_arena(); PyTorch's "
           "activations do not count. Rounded down to 4 KiB. Default, "
           "and auto: what is free, less a tenth of all (at least 1 GiB, at most 32 GiB, never more than half of "
           "all), rounded down to a 32nd of all; with device host, together with pinned_memory. hoist check "
           "prints it.",
       .apply = [](Draft& d,
                   const Value& v) { d.runtime.device_memory_bytes = round_down(as_count(v), kBlockAlignment); }},
      {.path = "hoist.pinned_memory",
       .type = ValueType::bytes,
       .range = {.min = 4096},
       .meaning =
           "Hard budget of pinned host memory per rank; rounded down to 4 KiB. Default, and auto: what is free, "
           "less a tenth of all (at least 1 GiB, at most 32 GiB, never more than half of all), rounded down to a "
           "32nd of all and divided by the ranks of the machine.",
       .apply = [](Draft& d,
                   const Value& v) { d.runtime.pinned_memory_bytes = round_down(as_count(v), kBlockAlignment); }},
      {.path = "hoist.huge_pages",
       .type = ValueType::boolean,
       .default_value = "true",
       .meaning = "Uses huge pages for pinned memory if the system has them.",
       .apply = [](Draft& d, const Value& v) { d.runtime.huge_pages = as_bool(v); }},
      {.path = "hoist.comm_scratch",
       .type = ValueType::bytes,
       .default_value = "\"4MiB\"",
       .range = {.min = 65536, .max = 1099511627776.0},
       .meaning = "Device memory for staging reductions; used only with several ranks.",
       .apply = [](Draft& d,
                   const Value& v) { d.runtime.comm_scratch_bytes = round_up(as_count(v), kBlockAlignment); }},
      {.path = "hoist.chaos_seed",
       .type = ValueType::integer,
       .default_value = "0",
       .meaning = "Delays the host device's streams at random by this seed, to find missing waits. 0: off.",
       .apply = [](Draft& d, const Value& v) { d.runtime.host_device.chaos_seed = as_count(v); }},
      {.path = "hoist.host_link_bytes_per_second",
       .type = ValueType::bytes,
       .default_value = "0",
       .range = {.min = 0, .max = 1e15},
       .meaning = "The speed that the host device's copies between pinned and device memory have at most, in each "
                  "direction, to see how training hides the link of a GPU. 0: that of memory.",
       .apply = [](Draft& d, const Value& v) { d.runtime.host_device.link_bytes_per_second = as_count(v); }},
  };
}

std::vector<KeyRow> durability_rows() {
  return {
      {.path = "hoist.durability",
       .type = ValueType::cadence,
       .range = {.min = 1, .max = 1e9},
       .choices = {"none", "step"},
       .meaning =
           "step: each step is committed, and a killed run resumes. {\"every\": N}: each N-th step is committed, and "
           "state in memory is written only then. none: nothing is committed. Default: step if state lives on NVMe.",
       .apply =
           [](Draft& d, const Value& v) {
             const auto* every = std::get_if<std::int64_t>(&v);
             d.durability =
                 every != nullptr || as_text(v) == "step" ? tiers::Durability::step : tiers::Durability::none;
             if (every != nullptr) d.engine.commit_every = static_cast<unsigned>(*every);
           }},
      {.path = "hoist.checkpoint_path",
       .type = ValueType::path,
       .meaning =
           "Directory that Engine::save commits to if nothing lives on NVMe; the store is its subdirectory hoist.",
       .apply = [](Draft& d, const Value& v) { d.checkpoint_path = as_text(v); }},
      {.path = "hoist.caller_state_max",
       .type = ValueType::bytes,
       .default_value = "\"64KiB\"",
       .range = {.min = 0, .max = 1073741824.0},
       .meaning =
           "Largest number of the program's own bytes in a commit. A run that is resumed with a larger number than "
           "its store has room for continues in a new store, with a new one in its mirror: both drives need room for "
           "two until these are whole. If the mirror's drive lacks this room, training continues without new copies.",
       .apply = [](Draft& d, const Value& v) { d.engine.caller_state_bytes_max = as_count(v); }},
      {.path = "hoist.lock_timeout_seconds",
       .type = ValueType::number,
       .default_value = "10.0",
       .range = {.max = 1e6},
       .meaning = "How long opening a store waits for another process to release it.",
       .apply = [](Draft& d, const Value& v) { d.engine.lock_timeout = milliseconds_of(v); }},
      {.path = "hoist.keep_steps",
       .type = ValueType::integer,
       .default_value = "0",
       .range = {.max = 64},
       .meaning = "Named checkpoints that stay beside the newest commit; a new one replaces the oldest. Each takes 12 "
                  "bytes per parameter on NVMe, reserved at the start.",
       .apply = [](Draft& d, const Value& v) { d.engine.keep_steps = static_cast<unsigned>(as_count(v)); }},
      section_row("hoist.mirror", "Copies of commits that outlive the store's drive and machine."),
      {.path = "hoist.mirror.path",
       .type = ValueType::path,
       .meaning = "Finished commits are copied to the subdirectory hoist of this directory, on another drive or a "
                  "network file system, while training goes on; a restart on a machine whose own drives are empty goes "
                  "on from there. The copy takes 24 bytes per parameter on that drive, and a commit that is being "
                  "copied 12 on NVMe beside the newest; both are reserved at the start. A run that goes on from the "
                  "mirror or with another number of ranks needs the 24 bytes twice, until its first copy is whole; "
                  "with less it copies nothing, and warns.",
       .apply = [](Draft& d, const Value& v) { d.mirror_path = as_text(v); }},
      {.path = "hoist.mirror.every",
       .type = ValueType::integer,
       .default_value = "1",
       .range = {.max = 1e9},
       .meaning = "Steps from one copy to the next, at least, also over restarts: a copy begins when the one before it "
                  "is done on every rank. With nothing on NVMe, saves are copied. 0: only what save() is asked to "
                  "copy.",
       .apply = [](Draft& d, const Value& v) { d.engine.mirror.every = static_cast<unsigned>(as_count(v)); }},
      {.path = "hoist.mirror.bytes_per_second",
       .type = ValueType::bytes,
       .default_value = "0",
       .range = {.min = 0, .max = 1e15},
       .meaning = "Most bytes that a rank copies to the mirror in a second, on average. 0: as fast as the drives.",
       .apply = [](Draft& d, const Value& v) { d.engine.mirror.bytes_per_second = as_count(v); }},
      {.path = "hoist.gradient_spill",
       .type = ValueType::boolean,
       .default_value = "false",
       .meaning =
           "Gradients that do not fit hoist.pinned_memory go to scratch space on NVMe until their update; the "
           "result is the same. hoist chooses the last units of the model, and no more of them than it must to make "
           "room for its buffers. For each of their parameters, a step writes and reads 2 more bytes, or 4 and "
           "4 for each micro-batch in horizontal order. "
           "Needs optimizer state or weights on nvme; refused in update mode backward.",
       .apply =
           [](Draft& d, const Value& v) {
             d.engine.gradient_spill_units = as_bool(v) ? std::nullopt : std::optional<std::uint32_t>(0);
           }},
  };
}

std::vector<KeyRow> engine_rows() {
  return {
      {.path = "hoist.update_mode",
       .type = ValueType::choice,
       .default_value = "\"auto\"",
       .choices = {"auto", "step", "forward", "backward"},
       .meaning = "When parameters are updated; the result is the same. step: inside Engine::step. forward: under the "
                  "next pass, each unit before its weights are needed. backward: each unit as soon as its gradient is "
                  "final. In mode backward, pinned memory for the largest unit's gradient is enough (for all gradients "
                  "with several micro-batches in horizontal order), weights on NVMe are read once more a step than in "
                  "forward, clipping and loss scaling are refused, and a gradient that is not finite ends the run, "
                  "while the other modes skip the step. auto: forward, unless optimizer state is on the device.",
       .apply =
           [](Draft& d, const Value& v) {
             d.engine.update_mode = as_text(v) == "step"       ? UpdateMode::step
                                    : as_text(v) == "forward"  ? UpdateMode::forward
                                    : as_text(v) == "backward" ? UpdateMode::backward
                                                               : UpdateMode::automatic;
           }},
      {.path = "hoist.micro_batch_order",
       .type = ValueType::choice,
       .default_value = "\"horizontal\"",
       .choices = {"horizontal", "vertical"},
       .meaning =
           "Order of a step's micro-batches. horizontal: one pass for each. vertical: one pass, in which each "
           "layer works through all micro-batches before the next layer. Weights and gradients then move once a "
           "step and nothing is added up in pinned memory, but the activations of all micro-batches stay on the "
           "device, and gradient buffers take 6 bytes a parameter instead of 2. A C++ program must be written for "
           "it, as hoist-gpt is; hoist.torch does it in engine.train_batch().",
       .apply =
           [](Draft& d, const Value& v) {
             d.engine.micro_batch_order =
                 as_text(v) == "vertical" ? MicroBatchOrder::vertical : MicroBatchOrder::horizontal;
           }},
      {.path = "hoist.optimizer_pinned_fraction",
       .type = ValueType::number,
       .default_value = "0.0",
       .range = {.max = 1},
       .choices = {"auto"},
       .meaning = "With offload_optimizer on nvme: the share of optimizer state that lives in pinned memory. A step "
                  "does not read it, and only commits write it; the result is the same. auto: as much as fits "
                  "hoist.pinned_memory beside everything else.",
       .apply =
           [](Draft& d, const Value& v) {
             const auto* share = std::get_if<double>(&v);
             d.engine.optimizer_pinned_fraction = share == nullptr ? std::nullopt : std::optional(*share);
           }},
      {.path = "hoist.parameters_pinned_fraction",
       .type = ValueType::number,
       .default_value = "0.0",
       .range = {.max = 1},
       .choices = {"auto"},
       .meaning = "With offload_param on nvme: the share of the weights that lives in pinned memory. A fetch does not "
                  "read it from NVMe, and only commits write it; the result is the same. auto: as much as fits "
                  "hoist.pinned_memory beside everything else, before optimizer_pinned_fraction, since a step reads "
                  "weights more than once. With offload_param.max_in_cpu: at most so many elements of each rank.",
       .apply =
           [](Draft& d, const Value& v) {
             const auto* share = std::get_if<double>(&v);
             d.engine.parameters_pinned_fraction = share == nullptr ? std::nullopt : std::optional(*share);
           }},
      {.path = "hoist.moments_dtype",
       .type = ValueType::choice,
       .default_value = "\"fp32\"",
       .choices = {"fp32", "bf16", "fp8"},
       .meaning = "Type of the stored moments. bf16: half the bytes; the second moment is rounded stochastically. fp8: "
                  "little more than a quarter, in blocks that share an exponent; both are rounded stochastically "
                  "(docs/optimizers.md). A store must be read with the type it was written with.",
       .apply =
           [](Draft& d, const Value& v) {
             d.engine.optimizer_defaults.moments = as_text(v) == "bf16"  ? MomentType::bf16
                                                   : as_text(v) == "fp8" ? MomentType::fp8
                                                                         : MomentType::fp32;
           }},
      {.path = "hoist.remainder_dtype",
       .type = ValueType::choice,
       .default_value = "\"int16\"",
       .choices = {"int16", "int8"},
       .meaning = "Type of the remainder that completes a bf16 weight to its fp32 master. int16: the master is exact. "
                  "int8: the master has 24 bits, rounded stochastically (docs/optimizers.md). No effect on fp16 and "
                  "fp32 weights, whose masters are whole. A store must be read with the type it was written with.",
       .apply =
           [](Draft& d, const Value& v) {
             d.engine.optimizer_defaults.remainder = as_text(v) == "int8" ? RemainderType::int8 : RemainderType::int16;
           }},
      {.path = "hoist.moments_seed",
       .type = ValueType::integer,
       .default_value = "0",
       .meaning = "Seed of the stochastic rounding of moments and masters. The same seed gives the same bits on any "
                  "number of threads.",
       .apply = [](Draft& d, const Value& v) { d.engine.optimizer_defaults.rounding_seed = as_count(v); }},
      {.path = "hoist.update_threads",
       .type = ValueType::integer,
       .default_value = "0",
       .range = {.max = 4096},
       .meaning = "Threads of the CPU optimizer. 0: every CPU the process may use, or its part of them if several "
                  "ranks share the machine, and no more than a control group's limit of CPU time.",
       .apply = [](Draft& d, const Value& v) { d.runtime.update_threads = as_unsigned(v); }},
      {.path = "hoist.numa_placement",
       .type = ValueType::boolean,
       .default_value = "true",
       .meaning =
           "Binds memory and threads to NUMA nodes: pinned memory and update threads to the GPU's node (without "
           "a GPU, the machine's processes divide the nodes), staging buffers and I/O threads to the drives' node.",
       .apply = [](Draft& d, const Value& v) { d.runtime.numa_placement = as_bool(v); }},
      {.path = "hoist.io_engine",
       .type = ValueType::choice,
       .default_value = "\"auto\"",
       .choices = {"auto", "io_uring", "threads"},
       .meaning = "Interface to the drives. auto: io_uring if the system allows it, else threads.",
       .apply =
           [](Draft& d, const Value& v) {
             using aio::BackendKind;
             d.runtime.aio_backend = as_text(v) == "io_uring"  ? BackendKind::io_uring
                                     : as_text(v) == "threads" ? BackendKind::threads
                                                               : BackendKind::automatic;
           }},
      {.path = "hoist.io_answer_timeout_seconds",
       .type = ValueType::number,
       .default_value = "300.0",
       .range = {.min = 0.001, .max = 1e6},
       .meaning =
           "A drive that has work and does not answer for this long is given up: the run ends with an error, "
           "the last commit is intact, and the drive's buffers are never used again. The mirror's drive is given up "
           "alone: training goes on without further copies until the program is started again. Time in which the "
           "process itself was stopped does not count.",
       .apply = [](Draft& d, const Value& v) { d.runtime.aio_answer_timeout = milliseconds_of(v); }},
      {.path = "hoist.communicator",
       .type = ValueType::choice,
       .default_value = "\"auto\"",
       .choices = {"auto", "self", "mpi"},
       .meaning = "How ranks find each other. auto: the ranks that mpirun, srun or torchrun started (torchrun: GPUs "
                  "only), else only this process. On GPUs data goes over NCCL.",
       .apply =
           [](Draft& d, const Value& v) {
             d.runtime.communicator = as_text(v) == "self"  ? CommunicatorKind::self
                                      : as_text(v) == "mpi" ? CommunicatorKind::mpi
                                                            : CommunicatorKind::automatic;
           }},
      {.path = "hoist.comm_timeout_seconds",
       .type = ValueType::number,
       .default_value = "600.0",
       .range = {.min = 0.001, .max = 1e6},
       .meaning = "A collective that a rank does not join within this time is an error.",
       .apply = [](Draft& d, const Value& v) { d.runtime.comm_timeout = milliseconds_of(v); }},
      {.path = "hoist.metrics",
       .type = ValueType::path,
       .meaning = "A file that gets one line of JSON for each step; beside it, a text file for Prometheus has the "
                  "latest step.",
       .apply = [](Draft& d, const Value& v) { d.engine.metrics_path = as_text(v); }},
      {.path = "hoist.trace",
       .type = ValueType::path,
       .meaning = "A Chrome trace of the work of each link, the optimizer and the program; one file for each rank.",
       .apply = [](Draft& d, const Value& v) { d.runtime.trace_path = as_text(v); }},
  };
}

// Measurements of `hoist tune`. Only predictions depend on them.
std::vector<KeyRow> measured_rows() {
  return {
      section_row("hoist.measured", "Bandwidths of all drives together, for predictions. `hoist tune` writes them."),
      {.path = "hoist.measured.read_bytes_per_second",
       .type = ValueType::integer,
       .range = {.min = 1},
       .meaning = "Reading alone.",
       .apply = [](Draft& d, const Value& v) { d.measured.read_bytes_per_second = as_count(v); }},
      {.path = "hoist.measured.write_bytes_per_second",
       .type = ValueType::integer,
       .range = {.min = 1},
       .meaning = "Writing alone.",
       .apply = [](Draft& d, const Value& v) { d.measured.write_bytes_per_second = as_count(v); }},
      {.path = "hoist.measured.mixed_bytes_per_second",
       .type = ValueType::integer,
       .range = {.min = 1},
       .meaning = "Both directions added up, in the mix of an optimizer step.",
       .apply = [](Draft& d, const Value& v) { d.measured.mixed_bytes_per_second = as_count(v); }},
  };
}

}  // namespace

std::vector<KeyRow> hoist_rows() {
  std::vector<KeyRow> rows{{.path = "$schema",
                            .type = ValueType::string,
                            .meaning = "Location of this file's schema, for editors; hoist does not read it.",
                            .apply = [](Draft&, const Value&) { /* for editors */ }},
                           section_row("hoist", "hoist's own settings.")};
  return joined(std::move(rows), {memory_rows, durability_rows, engine_rows, measured_rows});
}

}  // namespace hoist::config::detail
