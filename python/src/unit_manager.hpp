// SPDX-License-Identifier: Apache-2.0
// python/src/unit_manager.hpp - the units of a PyTorch module, brought up and down as its hooks say. Start here.
//
// The hooks say "unit 3 is entered", "is left", "its backward pass begins", "this gradient is there"; this class turns
// that into gather, release, accumulate and finish of an Engine, which fetches each unit ahead of its next use. A unit
// has one address in a pass, so views that autograd saved in the forward pass are right in the backward pass.
//
// When a unit's last gradient has arrived, nothing uses its weights any more: whatever multiplies with a weight also
// makes its gradient. Frozen weights give no such sign; for units that have some, the hooks say when the gradient of
// the unit's input is there.
//
// Streams    CPU tensors: PyTorch computes on the calling thread, and hooks wait for weights. CUDA: it computes on its
//            current stream, which each hook asks for; that stream waits for weights, and the host does not. A unit has
//            a lease for each stream that uses it.
// Threading  One thread at a time, with the GIL held; it is released wherever the engine may wait.
// Memory     Takes as much of hoist.device_memory as the engine uses. A gradient tensor of the CPU is kept until it was
//            added up: of two units at most, if a backward pass goes from unit to unit. One of a stream is given back
//            as soon as that is enqueued: PyTorch reuses its memory in the stream's order. The engine has memory for
//            gradients of one or two units. Where more are under way at once, their tensors stay in PyTorch's memory
//            until the unit has all of its gradients.
// Errors     Those of the Engine.
// Main path  begin -> enter/leave... -> backward -> arrived... (finish) -> end_backward -> step.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <nanobind/nanobind.h>

#include <hoist/config/config.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/zero/engine.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "channel.hpp"

namespace hoist::python {

namespace nb = nanobind;

struct ManagedUnit {
  std::string name;
  std::vector<ParameterSpec> parameters;
  // Parameters of it are used by other modules too, so that gradients may come at any time of the backward pass.
  bool shared = false;
  std::vector<std::uint32_t> gathered_with{};  // earlier units that are up whenever this one is
  bool own_gradient_memory = false;            // UnitOptions::own_gradient_memory
};

// The units as a model of the engine's.
Model model_of(const std::vector<ManagedUnit>& units, const std::vector<GroupOptions>& groups);

// Serializes the Python threads that call one engine. A call may run Python, as for the values of a unit, and so a
// signal handler of the program; if that one called the engine, the thread would wait for itself.
class EngineMutex {
 public:
  // Errors: UsageError in the thread that has it.
  void lock();
  void unlock();
  bool is_mine() const { return owner_ == std::this_thread::get_id(); }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
};

// A caller's turn at the engine: without the GIL, which the thread that has the mutex may be waiting for. Take it
// before UnitManager::engine(): another thread may end the engine.
class EngineTurn {
 public:
  explicit EngineTurn(EngineMutex& engine_mutex) : lock_(engine_mutex) {}

 private:
  nb::gil_scoped_release release_;
  std::lock_guard<EngineMutex> lock_;
};

// PyTorch's side. The callables may be called wherever a hook is.
struct TorchSide {
  nb::object bind;    // (unit, DLPack array of bytes): the unit's memory is there from now on
  nb::object open;    // (unit): the unit is up
  nb::object close;   // (unit): it is not, until it is opened again
  nb::object unbind;  // (): no unit has memory any more
  // () -> the calling thread's current stream: a cudaStream_t as an integer, or a HostStream. None: PyTorch computes on
  // the calling thread.
  nb::object current_stream;
  std::int32_t dlpack_device_type = 0;  // of the units' memory
  std::int32_t dlpack_device_id = 0;
};

struct UnitManagerOptions {
  Config config;
  std::vector<GroupOptions> groups{};  // beside group 0, which has the configuration's settings
  std::vector<ManagedUnit> units{};
  // Ranks that the program brings along: makes a channel over all of them. None: those that the configuration names.
  MakeChannel make_channel{};
  int world_size = 0;  // of that channel
  // Over all ranks of the job, where it has several sharding groups (Runtime::Groups).
  MakeChannel make_job_channel{};
};

class UnitManager {
 public:
  // Errors: those of a Runtime.
  explicit UnitManager(UnitManagerOptions options);
  ~UnitManager();
  UnitManager(const UnitManager&) = delete;
  UnitManager& operator=(const UnitManager&) = delete;

  // Carries out the last step, and ends: the store is free for others, and no tensor has memory any more. Does nothing
  // in a process that was forked later, as the destructor: other calls are UsageErrors there.
  void close();
  // The same for a program that cannot go on, while other ranks may wait for it: once the step that was decided has
  // been carried out, they stop with a CommError that names this rank and `why`. Does nothing without other ranks.
  void abandon(const std::string& why) noexcept;

  // [C] Makes the engine of a new run.
  void initialize(const InitialState& state, std::span<const std::byte> caller_state = {});
  enum class Among : std::uint8_t { sharding_group, job };
  // [C] Whether every rank passes the same.
  bool same_on_all(std::string_view text, Among among = Among::sharding_group);
  // [C] After work that single ranks do: every rank passes what its own work failed with, or "". Returns the first of
  // them and the rank, or "". Pre: an EngineTurn.
  std::string first_problem(std::string_view mine, Among among = Among::sharding_group);
  // [C] Gives every rank the bytes of the first one, wherever another rank has others. Returns where that was so.
  // Pre: as many values of the same lengths on each rank.
  std::vector<bool> overwrite_with_rank_0(std::span<const std::span<std::byte>> values);
  // [C] Continues from the commit or named checkpoint, at the start or later. An engine that is there ends first, with
  // whatever made it fail, and a new one is made.
  RestoreReport restore(const std::string& from);
  // [C] Before anything is given up for a commit, or a named checkpoint, that is not there. Waits for those under way.
  // If the engine has failed, the search may fail with it, and only logs that: restoring then refuses by itself. Pre:
  // an EngineTurn. Errors: StoreError, naming what there is; UsageError without a store.
  void require_commit(const std::string& from);
  // [C] Commits the present state, with `caller_state`, and gives back memory, threads and the store; restore() or
  // wake() makes them anew. Until then other calls are UsageErrors. Pre: as of Engine::save(). Errors: those of it, and
  // nothing has changed then.
  void sleep(std::span<const std::byte> caller_state);
  // [C] Goes on where sleep() ended. Errors: those of restore(), among them that memory is lacking, and StoreError
  // where the store is no longer at the step of sleep(): it sleeps on then.
  void wake();
  bool is_asleep() const { return life_ == Life::asleep; }
  // [C] What the stores hold. Changes nothing.
  std::optional<std::uint64_t> find_commit();
  std::vector<NamedCheckpoint> find_checkpoints();
  bool is_alive() const { return engine_.has_value(); }
  bool has_begun_step() const { return engine_ && engine_->has_begun_step(); }
  bool is_open() const { return life_ != Life::closed; }

  // Errors: UsageError without a runtime: it was closed, sleeps, is being restored, or could not be.
  void require_awake() const {
    if (!runtime_) refuse();
  }

  const Model& model() const { return model_; }
  const ParameterPlace& place(ParameterId parameter) const { return places_[parameter.index]; }
  Runtime& runtime() {
    require_awake();
    return *runtime_;
  }
  // The launcher's if it is known, else which of the processes on this machine this is.
  int local_rank();
  Engine& engine() {
    if (!runtime_ || !engine_) refuse();
    return *engine_;
  }
  // Errors: UsageError in a process that was forked later.
  void require_process() const { process_.require_this(kEngine); }
  // Errors: as require_process(): the thread that holds the mutex may not exist in another process.
  EngineMutex& engine_mutex() {
    require_process();
    return mutex_;
  }

  // --- a pass
  void begin(Pass pass, PassOptions options);
  void end();  // every unit goes down
  void discard();
  // Ends a pass under way as Engine::discard_pass does.
  bool discard_pass();
  std::optional<Pass> pass() const { return pass_; }
  // Whether every unit that was up in this pass stays there: nothing would be gained by ending it.
  bool keeps_all_up() const { return keeps_all_up_; }

  // Between the calls of a pass: closes the tensors of the units that nobody holds, until open() or their next use,
  // since what the program changed in them would be lost. Those of at most EngineOptions::persistence_elements stay
  // open.
  void close_unheld() noexcept;
  void open();  // the tensors of all units that are up

  void enter(std::uint32_t unit);
  void leave(std::uint32_t unit);
  // Gradients of the unit may come at any time of the backward pass from now on.
  void share(std::uint32_t unit) { units_[unit].shared = true; }
  bool is_up(std::uint32_t unit) const { return units_[unit].is_up(); }
  // Whether a call or a backward pass needs the unit now; its memory may have gone to another unit meanwhile.
  bool is_held(std::uint32_t unit) const { return units_[unit].holds > 0; }
  void bring_back(std::uint32_t unit) { load(units_[unit]); }
  // While this is true, a unit that is up for its backward pass may give way to another one: whoever set it brings the
  // unit back when it is read.
  void watch_backward(bool watched) { watched_ = watched; }
  // Whether one did in this pass, or in the one that ended last.
  bool gave_way() const { return gave_way_; }

  // --- the backward pass
  void backward(std::uint32_t unit);  // the gradient of its output is there
  // A forward call of the unit will have a backward pass of its own; false for a recomputation within the unit's.
  bool backward_of_call(std::uint32_t unit);
  // The gradient of an input of one such call is there. What made the input decides what that says of the call.
  enum class Input : std::uint8_t {
    // Another part of the model: the call's backward work is done, because autograd runs newer nodes first (but see
    // walks_again()).
    computed,
    // A recomputation, whose graph begins with the input. The call is done when the gradients of all its weights have
    // come, and either those of all such inputs or the end of the recomputed part's backward pass.
    recomputed,
    // The program. The call may use the input last, and weights before: only the gradients of all its weights show that
    // the call is done.
    given,
  };
  void input_arrived(std::uint32_t unit, Input input);
  // A call of a unit that is made once more, for a backward pass.
  struct Recomputation {
    std::uint32_t unit;
    std::int64_t task;  // the graph task of autograd that makes the call
    const void* call;   // tells calls apart
    bool operator==(const Recomputation&) const = default;
  };
  // The same of one of its inputs: the gradients of `inputs_left` others may still come.
  void recomputed_input_arrived(const Recomputation& recomputation, std::size_t inputs_left);
  // Ends the recomputations that have gradients of some of their inputs, and whose backward pass is over: the graph
  // task under way is the one that made them, or one around it.
  void end_recomputations();
  // The graph of this pass will be walked (again): forward() or torch.autograd.grad() has ended. If it was walked
  // before, it may have nodes of that walk's gradients. Those made on autograd's own thread are numbered apart from
  // forward's, so an input's gradient may come before them. A unit is then done only when all its weights' gradients
  // have come.
  void walks_again() { walks_again_ = walked_; }
  // This walk of the graph makes another graph (create_graph=True), whose walk needs the weights again.
  void walk_is_recorded() { walks_again_ = true; }
  // Takes the `grad` of a parameter's tensor, and sets it to None.
  void arrived(ParameterId parameter, nb::handle tensor);
  // In vertical order, where calls and gradients do not tell when a unit is done: a part of one micro-batch's backward
  // pass is; and all micro-batches' backward passes of one round of the unit's calls are. `is_complete`: no further
  // call of the unit has a backward pass to come.
  void end_part();
  void end_unit(std::uint32_t unit, bool is_complete);
  // Finishes all units, and ends the pass: one micro-batch is done, or, in vertical order, all of a step.
  void end_backward();
  bool has_gradients() const { return arrived_count_ > 0; }

  // PyTorch computes on the calling thread, and not on streams.
  bool computes_on_host() const { return torch_.current_stream.is_none(); }
  // Streams that PyTorch's work is ordered by, on the calling thread. Pre: the GIL is held.
  platform::StreamRef stream_of_weights();
  platform::StreamRef stream_of_gradients();

  void connect(TorchSide torch) { torch_ = std::move(torch); }

 private:
  // Changes with the GIL held. Only `training` has an engine; `asleep` and `closed` have no runtime.
  enum class Life : std::uint8_t { fresh, training, restoring, failed, asleep, closed };

  struct Gradient {
    ParameterId parameter{};
    nb::object tensor;
    platform::Stream* stream = nullptr;  // of PyTorch's, that it was made on
  };
  struct StreamUse {
    platform::Stream* stream;
    Lease lease;
  };
  struct Unit {
    UnitId id{};
    std::vector<StreamUse> uses;  // empty: the unit is down
    bool is_up() const { return !uses.empty(); }
    bool is_used_on(platform::StreamRef stream) const {
      return std::ranges::any_of(uses, [&](const StreamUse& use) { return use.stream == &*stream; });
    }
    std::byte* memory = nullptr;  // where PyTorch looks for its weights
    bool is_shown = false;
    bool stays_up = false;  // in a pass in which it was up: its memory is its own
    int holds = 0;          // who needs it up now
    int entered = 0;
    std::uint64_t loaded_at = 0;
    bool in_backward = false;
    bool has_frozen = false;
    bool is_small = false;  // at most EngineOptions::persistence_elements
    bool shared = false;
    bool finished = false;            // all gradients of it have come; they are added up, or wait for memory
    bool in_gradient_memory = false;  // some of its gradients are, and the engine was not told yet that they are all
    std::vector<Gradient> waiting;    // those that are not
    unsigned trainable = 0;
    unsigned arrived = 0;
    unsigned calls = 0;  // in the pass, that will have a backward pass
    unsigned calls_done = 0;
  };
  struct PendingGradients {
    std::vector<nb::object> tensors;
    platform::StreamEvent added;
  };

  comm::Communicator& ranks_of(Among among);
  void take_memory();
  [[noreturn]] void refuse() const;  // says why there is no engine
  void fall_asleep(std::uint64_t step) noexcept;
  void open_runtime();
  void begin_with(Engine engine);
  void await_others();
  void lay_out_units();
  int world_size_at_start() const;
  void hold(Unit& unit);
  void load(Unit& unit);
  void gather(Unit& unit, platform::StreamRef stream);
  bool give_way();
  void unload(Unit& unit);
  platform::StreamRef current_stream();
  bool is_vertical() const { return options_.config.engine.micro_batch_order == MicroBatchOrder::vertical; }
  void await_gradients();
  void show(Unit& unit);
  void hide(Unit& unit) noexcept;
  void unbind() noexcept;
  bool may_wait_in_gradient_memory() const;
  template <typename Use>
  bool takes_gradient_memory(const Unit& unit, const std::string& name, Use use);
  bool add_up(Unit& unit);
  void add(const Gradient& gradient);
  void note_refusal(const std::string& parameter);
  void complete(Unit& unit);
  bool try_to_finish(Unit& unit);
  void finish(Unit& unit);
  void end_use(Unit& unit);
  template <typename EndPass>
  void leave_pass(EndPass end_pass);
  void forget_pass();
  void end_engine(Life next, const std::string* why_for_others = nullptr) noexcept;
  DType type_of_gradient(nb::handle gradient, ParameterId parameter) const;

  static constexpr const char* kEngine = "the engine";  // in errors

  const OwningProcess process_;
  UnitManagerOptions options_;
  int local_rank_ = -1;  // known once the job's ranks have met; -1: they have not
  Model model_;
  std::vector<ParameterPlace> places_;  // by parameter
  EngineMutex mutex_;                   // taken without the GIL
  std::vector<Unit> units_;
  std::vector<bool> has_arrived_;  // by parameter
  Life life_ = Life::fresh;
  std::unique_ptr<Runtime> runtime_;
  // For PyTorch on the host; apart from each other, so that who waits for weights does not wait for gradients.
  InOneProcess<platform::Stream> weights_stream_{nullptr, kEngine};
  InOneProcess<platform::Stream> gradients_stream_{nullptr, kEngine};
  std::map<std::uintptr_t, InOneProcess<platform::Stream>> borrowed_streams_;  // PyTorch's, by cudaStream_t
  std::optional<Engine> engine_;
  std::uint64_t asleep_at_ = 0;  // the step that sleep() committed
  std::optional<PassScope> scope_;
  std::optional<Pass> pass_;
  bool keeps_all_up_ = false;
  bool learning_ = true;
  bool watched_ = false;
  bool gave_way_ = false;
  std::uint64_t clock_ = 0;
  TorchSide torch_;
  std::uint64_t arrived_count_ = 0;
  bool walked_ = false;  // in this pass, by a backward pass or torch.autograd.grad()
  bool walks_again_ = false;
  std::vector<Recomputation> recomputations_;  // that have gradients of some of their inputs
  PendingGradients collecting_;                // of the unit whose gradients are coming in
  std::deque<PendingGradients> adding_;        // of those before, oldest first
  std::deque<std::uint32_t> complete_;         // units that wait for gradient memory, and then are finished
  // The number of units for whose gradients the engine has memory, and how many use it now. Known after the first
  // refusal.
  std::optional<unsigned> gradient_places_;
  unsigned gradient_places_taken_ = 0;
  nb::object fp32_, bf16_, fp16_;  // torch.float32 and so on, to tell gradients' types by
};

}  // namespace hoist::python
