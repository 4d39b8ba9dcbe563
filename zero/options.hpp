// SPDX-License-Identifier: Apache-2.0
// zero/options.hpp - what a Runtime and an Engine are built from. A program may fill these itself; config/ fills them
// from a DeepSpeed JSON file. Most defaults are DeepSpeed's; docs/config.md marks the others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <hoist/aio/backend_kind.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/optimizer.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/platform/numa_placement.hpp>
#include <hoist/tiers/durability.hpp>
#include <hoist/zero/update/learning_rate.hpp>
#include <hoist/zero/update/loss_scale.hpp>

namespace hoist {

class Model;

namespace aio {
class Backend;
struct DriveQueueOptions;
}  // namespace aio

enum class CommunicatorKind : std::uint8_t {
  // As the launcher started the ranks (docs/launchers.md). Several of mpirun or srun meet over MPI, on CUDA devices
  // with NCCL for the data; those of torchrun over NCCL, on CUDA devices only. Without a launcher, or with one rank:
  // `self`. A launcher that announces several ranks where MPI sees one is an error.
  automatic,
  self,
  mpi,
};

struct RuntimeOptions {
  // Empty, and budgets of 0: what this machine has (docs/decisions/0033-what-a-machine-has.md).
  std::optional<platform::DeviceKind> device{};
  // -1: the local rank, modulo the devices that the process sees.
  int device_ordinal = -1;
  platform::HostDeviceOptions host_device{};
  // Makes the device instead of Device::create. For tests.
  std::function<std::unique_ptr<platform::Device>(const platform::DeviceOptions&)> make_device{};
  std::uint64_t device_memory_bytes = 0;  // hard budget; key "hoist.device_memory"
  std::uint64_t pinned_memory_bytes = 0;  // hard budget; key "hoist.pinned_memory"
  // On the host device, and on a GPU without memory of its own: hard budget of both together. 0: none. Set where both
  // are chosen for this machine.
  std::uint64_t host_memory_bytes = 0;
  // Bytes of a GPU's budget that are taken at the start. The rest stays free, for PyTorch for example. 0: all of it.
  std::uint64_t device_arena_bytes = 0;
  int local_ranks = 0;  // processes that share this machine; 0: as many as the launcher says
  int local_rank = -1;  // which of them this is; -1: the one that the launcher says
  bool huge_pages = true;
  // Whether pinned memory, update threads and I/O threads are placed by NUMA node and divided among the processes of a
  // machine, as docs/launchers.md says. Key "hoist.numa_placement".
  bool numa_placement = true;
  std::vector<int> memory_nodes{};  // NUMA nodes of pinned memory, OS numbers; several: in turn. Empty: chosen
  std::vector<int> update_cpus{};   // processors of update threads, OS numbers. Empty: chosen
  // NUMA nodes of the buffers that weights arrive in from NVMe, OS numbers. Empty: the node of the store's drives,
  // where memory_nodes are known and all of the drives are on one node.
  std::vector<int> staging_nodes{};
  // Processors of I/O threads, by the node that their drive is on. With one entry, every drive is on its node. Empty:
  // chosen.
  std::vector<platform::IoPlace> io_places{};

  // NVMe transfers (the DeepSpeed section "aio").
  aio::BackendKind aio_backend = aio::BackendKind::automatic;
  std::uint64_t aio_block_bytes = kMiB;
  unsigned aio_queue_depth = 16;
  unsigned aio_threads = 4;  // of the `threads` backend
  // A drive that has work and answers nothing for this long has failed.
  Nanoseconds aio_answer_timeout = std::chrono::minutes(5);
  // Makes what carries the transfers instead of aio_backend, once for each drive. Null: aio_backend does. For tests.
  std::function<std::unique_ptr<aio::Backend>(const aio::DriveQueueOptions&)> make_aio_backend{};

  // A timeline of what every link, the optimizer and the program did, in Chrome's trace format (open it in Perfetto);
  // one file per rank, written when the runtime ends. Empty: none. Key "hoist.trace".
  std::string trace_path;

  unsigned update_threads = 0;  // of the CPU optimizer; 0: every CPU the process may use, or its part of them
  CommunicatorKind communicator = CommunicatorKind::automatic;
  // Device memory in which reductions are staged; used when there are several ranks.
  std::uint64_t comm_scratch_bytes = 4 * kMiB;
  std::chrono::milliseconds comm_timeout = std::chrono::minutes(10);
};

// Where a kind of state lives between uses.
enum class Placement : std::uint8_t {
  device,  // DeepSpeed's "none"
  pinned,  // "cpu"
  nvme,
};

const char* placement_name(Placement placement);  // "pinned memory", in texts
const char* placement_key(Placement placement);   // "cpu", in the configuration

// When optimizer states are updated. The result is the same, bit by bit.
enum class UpdateMode : std::uint8_t {
  automatic,  // forward, unless the optimizer's states are on the device: then step
  step,       // inside step(), which returns when all is computed
  forward,    // under the next pass, each unit just before its weights are needed; step() only decides
  // Under the pass that makes the gradients, each unit as soon as its own is final, which then takes no memory any
  // more; what is left at step() trails into the next pass. Nothing may change or veto a step then: there is no
  // clipping and no loss scaling; the learning rate is set before the pass's first finish(); a unit is not gathered
  // after its finish(), and nothing but step() follows the pass. A gradient that is not finite, or a pass that is left
  // after a finish(), ends the engine: the last commit is what to go back to.
  backward,
};

const char* update_mode_name(UpdateMode mode);  // "forward", as in the configuration

// The order in which a step runs its micro-batches.
enum class MicroBatchOrder : std::uint8_t {
  horizontal,  // one pass each; a layer's weights are gathered in each of them
  vertical,    // one pass: each layer with all micro-batches before the next layer
};

// Copies of finished commits in another directory: a network file system, another drive. A copy is a store like the
// first, of the newest commit that was copied; restore() continues from it where the store's drive was lost.
struct MirrorOptions {
  std::string directory;               // empty: none. Key "hoist.mirror.path", below which it is the directory hoist
  unsigned every = 1;                  // steps from one copy to the next, at least; 0: only those that save() asks for
  std::uint64_t bytes_per_second = 0;  // that are copied at most, on average; 0: as fast as the drives
};

struct EngineOptions {
  // ZeRO stage. 3: every unit's weights are gathered before each use and freed after it. Below: they stay on the
  // device, whole, and are gathered once after each step. Gradients and optimizer states are partitioned in either
  // case, also at 0 and 1, where DeepSpeed keeps more of them than needed. The result is the same, bit by bit; it may
  // change between runs.
  int stage = 3;
  Placement parameters = Placement::device;
  Placement optimizer = Placement::device;

  // With the optimizer on NVMe, the share of the offloaded states that lives in pinned memory nevertheless, from 0 to
  // 1: the first tiles of every unit's record, so that every unit's update finds the same mix. They are not read, and
  // written with commits only. Empty: as much as the pinned budget has room for beside the buffers that are asked for
  // below, in hundredths; each rank by its own budget. Key "hoist.optimizer_pinned_fraction", where "auto" is empty.
  std::optional<double> optimizer_pinned_fraction = 0.0;

  // With parameters on NVMe, the share of the weights that lives in pinned memory nevertheless, in the same way. If
  // both shares are left open, weights come first: a step reads them more than once, and states once. Key
  // "hoist.parameters_pinned_fraction".
  std::optional<double> parameters_pinned_fraction = 0.0;
  // At most so many elements of this rank's weights, whatever the share. Key offload_param.max_in_cpu.
  std::uint64_t parameters_pinned_elements_max = ~std::uint64_t{0};

  // How many units, the last ones, have their gradients on NVMe between backward and update, in scratch space of the
  // store's drives. This costs 2 bytes read and 2 written for each of their parameters, or 4 and 4 for each micro-batch
  // that is added up in fp32. Empty: as few as the pinned budget demands beside the buffers that are asked for below,
  // of which those beyond the defaults give way; each rank by its own budget. Not with update mode `backward`. Key
  // "hoist.gradient_spill": false is 0, true is empty.
  std::optional<std::uint32_t> gradient_spill_units = 0;

  // With an offloaded optimizer, the share of the trainable parameters whose states are, from 0 to 1. Those of the
  // others live in device memory and are updated there, their gradients stay there, and nothing of them crosses a link
  // in a step. Whole units, the first ones that fit into their share; where the CPU cannot read the device's memory,
  // weights must be there, too. May change from run to run. Key zero_optimization.offload_optimizer.ratio.
  double optimizer_offload_ratio = 1.0;

  // The store of records: where NVMe placements live, and what commits go to. Empty: none (no NVMe placement then,
  // and nothing can be saved).
  std::string store_directory;
  // Further drives: the store's data is spread over store_directory and these. Key nvme_path, as a list.
  std::vector<std::string> stripe_directories;
  // Whether steps of what lives on NVMe are committed. If nothing lives there, this has no effect: only Engine::save()
  // commits.
  tiers::Durability durability = tiers::Durability::step;
  // Steps from one commit to the next, with durability `step`: what lives on NVMe is written at every step all the
  // same, what lives in memory with each commit only. Key hoist.durability, as {"every": N}.
  unsigned commit_every = 1;
  // Steps that stay under the names that save() gave them, each for 12 bytes a parameter on NVMe, reserved at start;
  // the oldest goes for a new one. With 0 a save is a commit like a step's. At most 64. Key hoist.keep_steps.
  unsigned keep_steps = 0;
  // While a commit is being copied, its extents are not reused. The store reserves another 12 bytes a parameter for
  // this, as for a named checkpoint.
  MirrorOptions mirror{};
  // The room for each rank's caller state, at most 1 GiB. A call that passes more on one rank is a UsageError on all of
  // them.
  std::uint64_t caller_state_bytes_max = 64 * kKiB;
  Nanoseconds lock_timeout = std::chrono::seconds(10);

  // Micro-batches that a step may be made of (gradient_accumulation_steps). With more than one, horizontally: gradients
  // are added up in fp32 where they live, 4 bytes a parameter instead of 2. Vertically: in fp32 in the gradient buffers
  // on the device, which take 6 bytes a parameter of the largest unit instead of 2; nothing is added up on the host,
  // and weights and gradients move once a step. The program then keeps the activations of all micro-batches.
  unsigned micro_batches_max = 1;
  MicroBatchOrder micro_batch_order = MicroBatchOrder::horizontal;  // key "hoist.micro_batch_order"
  UpdateMode update_mode = UpdateMode::automatic;                   // key "hoist.update_mode"
  // Elements read, updated and written as one piece; rounded to whole tiles, and made smaller (and said so) where the
  // pinned budget is. 256 Ki: 2.5-3 MiB a buffer, so that the drive has enough to do while one of them is updated, and
  // all of them stay a small, cycled footprint. DeepSpeed: 1e9.
  std::uint64_t sub_group_elements = 256 << 10;
  unsigned update_buffer_count = 8;   // pieces in flight, at least 3
  unsigned staging_buffer_count = 5;  // units whose weights may be on their way from NVMe

  // Prefetch (stage3_prefetch_bucket_size, stage3_max_live_parameters, stage3_max_reuse_distance,
  // stage3_param_persistence_threshold), all in elements.
  std::uint64_t prefetch_elements = 50'000'000;
  std::uint64_t live_elements_max = 1'000'000'000;
  std::uint64_t reuse_distance_elements = 1'000'000'000;
  std::uint64_t persistence_elements = 100'000;

  // Ranks of a group, of consecutive ones, that gathers a unit among itself once all ranks have gathered it (ZeRO++
  // hpZ): every rank keeps 1/ranks of it until the weights change, in pinned memory, or on the device where weights
  // live there. Backward then stays off the links between groups. Divides the world size; 1, or no fewer than that:
  // none. Key zero_hpz_partition_size.
  int secondary_shard_ranks = 1;

  // One line of JSON a step (numbers of that step: norm, learning rate, bytes and waits), appended by rank 0 of the
  // job, and beside it a text file for Prometheus with the latest. Empty: none. Key "hoist.metrics".
  std::string metrics_path;

  double gradient_clipping = 1.0;  // global norm; 0: none
  // The program has averaged the gradients over the ranks itself, so that accumulate() gets equal ones on every rank.
  // Each rank then takes its shard of its own gradients, and nothing is reduced.
  bool gradients_are_reduced = false;
  // The type of 16-bit trainable parameters. Empty: as each is declared. fp16: at least one parameter must be fp16.
  // fp32: there may be no 16-bit ones. Set by the keys fp16.enabled and bf16.enabled.
  std::optional<DType> weights_dtype{};
  LossScaleOptions loss_scale{};  // section "fp16"; Engine::loss_scale() is what losses are multiplied by
  optim::OptimizerOptions optimizer_defaults{};   // of group 0
  LearningRateSchedule learning_rate_schedule{};  // of every group, by the number of steps applied; section "scheduler"

  bool uses_nvme() const { return parameters == Placement::nvme || optimizer == Placement::nvme; }
  // Whether steps end in commits, without a call of save().
  bool commits_steps() const { return uses_nvme() && durability == tiers::Durability::step; }
  UpdateMode resolved_update_mode() const;             // never `automatic`
  std::vector<std::string> drive_directories() const;  // store_directory, then stripe_directories
};

// A rule between two options that these options break.
struct OptionProblem {
  std::string key, problem;
  std::string other_key;  // the rule is about this key, or this section, too
};
// Those of update mode, gradient spill and commits. check() refuses the first; config/ names the line of each.
std::vector<OptionProblem> problems_between(const EngineOptions& options);
// ConfigError, with the key, for options that no runtime is built with.
void check(const RuntimeOptions& options);
// ConfigError, with the key and the remedy, for options that no engine of so many ranks is built with, for any model.
void check(const EngineOptions& options, const RuntimeOptions& runtime, int world_size);
// ConfigError for a parameter group that no engine with these options would be built with.
void check(const optim::OptimizerOptions& group, const EngineOptions& options, const RuntimeOptions& runtime);
// UsageError or ConfigError, with the remedy, for a model that no engine with these options trains.
void check(const Model& model, const EngineOptions& options);
// Writes the options' paths from the root on: they stay right when the program changes its directory. IoError where a
// path is relative and the working directory is gone.
void make_paths_absolute(RuntimeOptions& options);
void make_paths_absolute(EngineOptions& options);
// When steps are committed, and what stays: "every step; named checkpoints that stay: 2".
std::string describe_commits(const EngineOptions& options);

}  // namespace hoist
