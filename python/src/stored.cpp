// SPDX-License-Identifier: Apache-2.0
// A store read without the program that trained it: what hoist.store is built on.
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <hoist/core/error.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "bindings.hpp"
#include "tensor.hpp"

namespace hoist::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::shape<-1>, nb::device::cpu, nb::c_contig>;

// A StoredModel that any thread of Python may ask, and that can be given up before Python collects it.
class Stored {
 public:
  Stored(const std::string& directory, std::optional<std::uint64_t> step, const std::string& checkpoint)
      : model_(std::make_unique<StoredModel>(directory, StoredModelOptions{.step = step, .from = checkpoint}), kStore) {
  }

  void close() {
    if (!process_.is_this()) return;
    const std::lock_guard lock(mutex_);
    model_ = {nullptr, kStore};
  }
  // Without the GIL: a thread that holds the lock may wait for it.
  template <typename Question>
  auto ask(const Question& question) {
    process_.require_this(kStore);
    if (asking_ == std::this_thread::get_id())
      throw UsageError("a signal handler asks a store that this thread is in the middle of reading");
    const std::lock_guard lock(mutex_);
    const Asking asking(asking_);
    if (model_.get() == nullptr) throw UsageError("the store was closed");
    return question(*model_);
  }

 private:
  static constexpr const char* kStore = "this view of the store";  // in errors

  struct Asking {
    explicit Asking(std::atomic<std::thread::id>& asking) : thread(asking) { thread = std::this_thread::get_id(); }
    ~Asking() { thread = std::thread::id(); }
    std::atomic<std::thread::id>& thread;
  };

  const OwningProcess process_;
  std::mutex mutex_;
  std::atomic<std::thread::id> asking_;  // the thread that holds the lock in ask()
  InOneProcess<StoredModel> model_;
};

std::vector<std::pair<std::uint64_t, std::string>> steps_of(const std::vector<tiers::CommitHeader>& commits) {
  std::vector<std::pair<std::uint64_t, std::string>> steps;
  for (const tiers::CommitHeader& commit : commits) steps.emplace_back(commit.step, commit.name);
  return steps;
}

nb::bytes caller_state(Stored& stored) {
  std::vector<std::byte> state;
  {
    const nb::gil_scoped_release release;
    stored.ask([&](StoredModel& model) {
      const std::span<const std::byte> bytes = model.caller_state(0);
      state.assign(bytes.begin(), bytes.end());
    });
  }
  return nb::bytes(state.data(), state.size());
}

// Control-C ends what takes long.
void look_for_signals(std::uint64_t, std::uint64_t) {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Verifies a store and describes the damage, also of named checkpoints' slots. Errors: StoreError if there is none in
// what could be verified, but not all could.
std::vector<std::string> verify(const std::string& directory, std::uint64_t bytes_per_second) {
  std::vector<std::string> damage, not_done;
  const auto found =
      verify_job(std::vector{directory}, {.bytes_per_second = bytes_per_second, .progress = look_for_signals});
  for (const Verification& commit : found) {
    if (!commit.not_done.empty() && !commit.retired) not_done.push_back(commit.not_done);
    for (const CorruptionError& error : commit.damage)
      damage.push_back(error.what() + (commit.name.empty() ? "" : " (checkpoint '" + commit.name + "')"));
  }
  for (const StoreSummary& look : all_stores(look_at_job(std::vector{directory}))) {
    const StoreSummary store = without_passing_damage(look);
    for (const StoreSummary::Rank& rank : store.ranks)
      for (const tiers::ManifestDamage& part : rank.damage)
        if (part.is_of_checkpoint) damage.push_back(part.text);
  }
  if (damage.empty() && !not_done.empty()) throw StoreError(not_done.front());
  damage.insert(damage.end(), not_done.begin(), not_done.end());
  return damage;
}

}  // namespace

void bind_stored(nb::module_& module) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<StoredParameter>(module, "StoredParameter")
      .def_ro("name", &StoredParameter::name)
      .def_ro("unit", &StoredParameter::unit)
      .def_ro("shape", &StoredParameter::shape)
      .def_ro("dtype", &StoredParameter::dtype)
      .def_ro("trainable", &StoredParameter::trainable);

  module.def("checkpoint_name_problem", &tiers::checkpoint_name_problem, "name"_a,
             "The problem with a checkpoint's name, or nothing.");
  module.def("has_store", &has_store, "directory"_a, no_gil);
  module.def(
      "steps_in_store",
      [](const std::string& directory) {
        const StoredJob job = look_at_job(std::vector{directory});
        // Without a commit, it would pass for a run that was never begun.
        if (const std::string gap = incomplete_text(job); !gap.empty()) throw StoreError(gap);
        return std::make_pair(steps_of(job.commits), steps_of(job.checkpoints));
      },
      "directory"_a, no_gil,
      "(commits that every rank has, newest first; named checkpoints, oldest first), each as (step, name). Also "
      "of a store in use. Errors: StoreError if the newest store is incomplete, and an older one is not.");

  nb::class_<Stored>(module, "StoredModel", "One commit of a store, read without the program that trained it.")
      .def(nb::init<const std::string&, std::optional<std::uint64_t>, const std::string&>(), "directory"_a,
           "step"_a = nb::none(), "checkpoint"_a = "", no_gil)
      .def("close", &Stored::close, no_gil)
      .def_prop_ro(
          "step", [](Stored& s) { return s.ask([](StoredModel& model) { return model.step(); }); }, no_gil)
      .def_prop_ro(
          "world_size", [](Stored& s) { return s.ask([](StoredModel& model) { return model.world_size(); }); }, no_gil)
      .def_prop_ro(
          "parameters",
          [](Stored& s) {
            return s.ask(
                [](StoredModel& model) { return std::vector(model.parameters().begin(), model.parameters().end()); });
          },
          no_gil)
      .def_prop_ro(
          "loss_scale",
          [](Stored& s) -> std::optional<std::tuple<double, std::uint64_t, std::uint32_t>> {
            const auto scaler = s.ask([](StoredModel& model) { return model.loss_scaler(); });
            if (!scaler) return std::nullopt;
            return std::make_tuple(scaler->scale, scaler->steps_without_overflow, scaler->hysteresis_left);
          },
          no_gil,
          "(scale, steps without an overflow, overflows until it is lowered); None without a dynamic loss scale.")
      .def("caller_state", &caller_state, "As rank 0 of the program gave it to step() or save().")
      .def(
          "read",
          [](Stored& s, std::size_t parameter, State state, std::uint64_t first, const FloatArray& out) {
            const nb::gil_scoped_release release;
            s.ask([&](StoredModel& model) { model.read(parameter, state, first, {out.data(), out.size()}); });
          },
          "parameter"_a, "state"_a, "first_element"_a, "out"_a.noconvert())
      .def(
          "read_weights",
          [](Stored& s, std::size_t parameter, std::uint64_t first, const Bytes& out) {
            const nb::gil_scoped_release release;
            s.ask([&](StoredModel& model) {
              model.read_weights(parameter, first, std::as_writable_bytes(std::span(out.data(), out.size())));
            });
          },
          "parameter"_a, "first_element"_a, "out"_a.noconvert())
      .def(
          "copy",
          [](Stored& s, const std::vector<std::string>& directories, std::uint64_t bytes_per_second) {
            s.ask([&](StoredModel& model) {
              model.copy(
                  {.directories = directories, .bytes_per_second = bytes_per_second, .progress = look_for_signals});
            });
          },
          "directories"_a, "bytes_per_second"_a = 0, no_gil,
          "Into another store, its data spread over the directories.");

  module.def("verify_store", &verify, "directory"_a, "bytes_per_second"_a = 0, no_gil,
             "Reads the newest commit and every named checkpoint: what is not as it was written, in words. Also of a "
             "store in use.");
}

}  // namespace hoist::python
