// SPDX-License-Identifier: Apache-2.0
// zero/types.hpp - the words of the public face: parameters, units, passes, steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/completion.hpp>
#include <hoist/core/dtype.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/strong_id.hpp>
#include <hoist/optim_cpu/optimizer.hpp>
#include <hoist/platform/stream.hpp>
#include <hoist/zero/update/loss_scale.hpp>

namespace hoist {

using UnitId = StrongId<struct UnitTag>;
using ParameterId = StrongId<struct ParameterTag>;
using GroupId = StrongId<struct GroupTag>;
using platform::StreamRef;

// Borrowed memory on the device (or host, device -1), dense and row-major; maps one to one to DLPack.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::bf16;
  std::span<const std::int64_t> shape{};
  int device = 0;

  std::uint64_t element_count() const {
    std::uint64_t count = 1;
    for (const std::int64_t extent : shape) count *= static_cast<std::uint64_t>(extent);
    return count;
  }
};

// Parameters that share an optimizer setting. Group 0 exists from the start, with EngineOptions::optimizer_defaults.
using GroupOptions = optim::OptimizerOptions;

struct ParameterSpec {
  std::string name;                 // unique within the engine
  std::vector<std::int64_t> shape;  // every extent at least 1; empty for a scalar
  DType dtype = DType::bf16;        // bf16 (its fp32 master is split), fp16 (whole beside it) or fp32
  bool trainable = true;            // false: weights only, no gradient and no optimizer state
  GroupId group{};
  bool counts_in_norm = true;  // false for a replica that another rank already counts
};

struct UnitOptions {
  // Every gather of this unit yields the same address: it has device memory of its own.
  bool stable_address = false;
  // Every gather of this unit in one pass yields the same address. Views of its weights that the program keeps from one
  // gather to the next then stay right. If the memory is held by another lease, gather() refuses instead of moving it.
  bool stable_in_pass = false;
  // The unit's gradient may begin before, and end after, those of other units: it has device memory of its own for it.
  // A unit that owns a tied parameter has that anyway.
  bool own_gradient_memory = false;
  // Units that the program gathers together with this one. They never take turns with it in device memory.
  std::vector<UnitId> gathered_with{};
};

enum class Pass : std::uint8_t { train, evaluate, generate };

// In horizontal order a pass is one micro-batch of a step, in vertical order (EngineOptions::micro_batch_order) it
// holds them all: between gather and release of a unit the program does that unit's work of every micro-batch, and
// between gradients() and finish() likewise. The step takes the mean over micro-batches in either order.
struct PassOptions {
  int micro_batch = 0;  // of micro_batches, counted from 0; 0 for a pass that holds them all
  int micro_batches = 1;
};

// The state that read() and write() address. `master` is the fp32 value whatever the parameter's type.
enum class State : std::uint8_t { master, moment1, moment2, gradient };

// Where a parameter lies in its unit's gathered memory.
struct ParameterPlace {
  UnitId unit{};
  std::uint64_t offset_bytes = 0;
  std::uint64_t unit_bytes = 0;  // of the whole unit
};

// New values of elements [first_element, first_element + values.size()) of one parameter's state.
struct StateChange {
  ParameterId parameter{};
  State state = State::master;
  std::uint64_t first_element = 0;
  std::span<const float> values;
  // Empty: all values are written. Otherwise one entry for each value, which is not 0 if that value is written. The
  // others keep their bits; moments of 8 bits that share a block with a written one are rounded again.
  std::span<const std::uint8_t> chosen{};
};

// Returns new values for parameters of `unit`. The spans stay valid until the next call. Calls for one unit return the
// same.
using UnitChanges = std::function<std::vector<StateChange>(UnitId unit)>;

// Writes the initial fp32 values of elements [first_element, first_element + out.size()) of a parameter, flattened
// row-major. A pure function of its arguments: it is asked for this rank's shard only, in pieces of any size.
using Initializer = std::function<void(ParameterId parameter, std::uint64_t first_element, std::span<float> out)>;

// The same for a moment that the optimizer keeps of a trainable parameter (Engine::keeps).
using MomentInitializer =
    std::function<void(ParameterId parameter, State moment, std::uint64_t first_element, std::span<float> out)>;

// The state that a run begins with. A fresh run has masters only. A run that another program began also has the moments
// of that program's optimizer: the engine then continues with the step after `step`.
struct InitialState {
  Initializer masters{};
  MomentInitializer moments{};  // empty: they begin at zero
  std::uint64_t step = 0;       // steps applied so far, by which bias correction and the learning-rate schedule count
  // The state of a dynamic loss scale (EngineOptions::loss_scale). Empty: it begins as the options say.
  std::optional<LossScaler::State> loss_scale{};
};

struct StepOptions {
  // Kept in the commit of this step and given back by restore(): data position, random state, schedules. Worth giving
  // between commits, too: a write() commits the step it finds. At most EngineOptions::caller_state_bytes_max; equal on
  // all ranks or not, each rank gets its own back.
  std::span<const std::byte> caller_state{};
  // The step's gradients are scaled down to this global norm where theirs is larger, as by
  // EngineOptions::gradient_clipping, if that is not lower. Equal on all ranks. Not in update mode `backward`.
  double gradient_norm_max = std::numeric_limits<double>::infinity();
};

// A step of update mode `backward` was given up when units were being updated for it. Nothing of it is committed, the
// commits before it stay, and the engine has ended.
class StepUndoneError : public Error {
 public:
  using Error::Error;
};

struct StepReport {
  std::uint64_t step = 0;    // counted from 1; unchanged when not applied
  bool applied = true;       // false: a gradient was not finite and every rank skipped
  double gradient_norm = 0;  // global, without the loss scale, before clipping
  double clip_factor = 1;    // what gradients without the loss scale were multiplied by
  double loss_scale = 1;     // what this step's losses were multiplied by; Engine::loss_scale() is the next one's
  double learning_rate = 0;  // by the schedule, of the first group that trains a parameter
  // Done when the step is durable at all ranks; at once without durability, and for a step that is not committed
  // (EngineOptions::commit_every): Engine::committed_step() says what is. Before you wait for it, call settle(): the
  // update waits for the next pass, which says in which order it wants the units, and goes on without it after 5 s.
  Completion committed;
};

// A step that Engine::save() keeps under a name.
struct NamedCheckpoint {
  std::string name;
  std::uint64_t step = 0;
};

struct SaveOptions {
  // The commit is also copied to EngineOptions::mirror. Waits for the copy under way, if there is one; the completion
  // is done, or failed, when this one is.
  bool mirror = false;
};

struct MirrorReport {
  std::optional<std::uint64_t> step{};  // the newest that this engine knows to be whole in the mirror
  std::uint64_t copied_bytes = 0;       // by this rank, since the engine was made; also of copies that failed
};

struct RestoreReport {
  std::uint64_t step = 0;
  // As this rank gave it. Where the number of ranks has changed: as the rank of the same number did, or rank 0.
  std::vector<std::byte> caller_state;
  int world_size = 1;    // of the run that made the commit
  std::string mirror{};  // the directory of the mirror that it comes from; empty: the run's own store
};

struct RestoreOptions {
  std::string from{};  // the name of a named checkpoint; empty: the newest commit that every rank has
  // Called on each rank with what was found, before anything changes. restore() throws what it throws.
  std::function<void(const RestoreReport&)> accept{};
};

// Bytes one step moves over each link, on this rank.
struct StepBytes {
  std::uint64_t nvme_read = 0;
  std::uint64_t nvme_write = 0;
  std::uint64_t host_to_device = 0;
  std::uint64_t device_to_host = 0;
  std::uint64_t wire = 0;
  std::uint64_t wire_in_group = 0;  // of `wire`: within the group of EngineOptions::secondary_shard_ranks

  StepBytes& operator+=(const StepBytes& other) {
    nvme_read += other.nvme_read;
    nvme_write += other.nvme_write;
    host_to_device += other.host_to_device;
    device_to_host += other.device_to_host;
    wire += other.wire;
    wire_in_group += other.wire_in_group;
    return *this;
  }
  StepBytes operator/(std::uint64_t parts) const {
    return {.nvme_read = nvme_read / parts,
            .nvme_write = nvme_write / parts,
            .host_to_device = host_to_device / parts,
            .device_to_host = device_to_host / parts,
            .wire = wire / parts,
            .wire_in_group = wire_in_group / parts};
  }
};

// A step's work on one unit.
struct UnitStep {
  StepBytes forward_fetch;  // of all passes, as is what follows
  StepBytes backward_fetch;
  StepBytes gradient;
  StepBytes update;
  std::uint64_t resident_write_bytes = 0;  // of update.nvme_write: from where it lives in memory
};

}  // namespace hoist
