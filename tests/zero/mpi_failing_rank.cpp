// SPDX-License-Identifier: Apache-2.0
// Started by mpirun: rank 1 fails for a reason of its own in the third step, and the others stop at once with its
// words. Its own program for each kind of failure, since MPI may be beyond use afterwards and processes end without
// MPI_Finalize.
//   mpirun -np 3 mpi_failing_rank read|write|sync|kernel|budget|mirror
// mirror: a read of the store fails while rank 2 copies a step to the mirror and the others, whose copies are done,
// wait for it. The error is exchanged, so that all engines end soon and can be restored in these processes.
#include <cstdio>
#include <filesystem>
#include <string>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/meeting.hpp>

#include "toy_ranks.hpp"

using namespace hoist;
using namespace hoist::test;

namespace {

constexpr int kFails = 1, kCopiesSlowly = 2;
constexpr std::chrono::minutes kTimeout{10};
constexpr std::chrono::seconds kAtOnce{40};  // updates that nobody asks for begin after 5 s

struct Ending {
  std::string error = "none";
  bool by_others = false;
};

aio::Operation operation_of(const std::string& mode) {
  if (mode == "read" || mode == "mirror") return aio::Operation::read;
  return mode == "write" ? aio::Operation::write : aio::Operation::sync;
}

void fail_in(const std::string& mode, ToyModel& model, Faults& faults) {
  if (mode == "kernel") {
    model.in_backward = [&model](std::size_t unit) {
      if (unit == 1) model.stream().launch("kernel", [] { throw Error("illegal instruction of kernel 7"); });
    };
  } else if (mode == "budget") {
    const PassScope scope = model.engine().begin(Pass::train);
    std::vector<Lease> leases;
    for (std::size_t unit = 0; unit < 4; ++unit)
      leases.push_back(model.engine().gather(model.unit(unit), model.stream()));
  } else {
    faults.add({.operation = operation_of(mode), .path_contains = "/store", .count = Faults::kForever});
  }
}

const char* words_of(const std::string& mode) {
  if (mode == "kernel") return "illegal instruction of kernel 7";
  return mode == "budget" ? "hoist.device_memory" : "Input/output error";
}

Ending train_until_it_fails(const std::string& mode, Runtime& runtime, const EngineOptions& options, Faults& faults) {
  Ending ending;
  try {
    ToyModel model(runtime, options);
    Engine& engine = model.initialize();
    model.train(1, 2);
    if (mode == "mirror") {
      if (runtime.rank() == kCopiesSlowly)
        faults.add({.kind = Fault::Kind::delay,
                    .operation = aio::Operation::write,
                    .path_contains = "/mirror",
                    .count = Faults::kForever,
                    .delay = std::chrono::milliseconds(500)});
      engine.save("", {}, {.mirror = true});
      model.pass(3);  // so that the update reads next
    }
    if (runtime.rank() == kFails) fail_in(mode, model, faults);
    if (mode == "mirror") engine.step();
    model.train(3, 8);
    engine.settle();
  } catch (const CommError& error) {
    ending = {error.what(), true};
  } catch (const std::exception& error) {
    ending = {error.what(), false};
  }
  return ending;
}

// The step that the engine can be restored at; -1: it cannot.
std::int64_t restored_step(Runtime& runtime, const EngineOptions& options) {
  try {
    ToyModel model(runtime, options);
    return static_cast<std::int64_t>(model.restore().step);
  } catch (const std::exception& error) {
    fmt::print("{}\n", error.what());
    return -1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "read";
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme);
  setup.runtime.communicator = CommunicatorKind::mpi;
  setup.runtime.comm_timeout = kTimeout;
  if (mode == "budget") {  // two of the four units fit
    setup.runtime.comm_scratch_bytes = 64 * kKiB;
    setup.runtime.device_memory_bytes = 480 * kKiB;
  }
  const auto faults = std::make_shared<Faults>(1);
  setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
  Runtime runtime(setup.runtime);
  std::optional<TempDirectory> directory(std::in_place);
  char name[512] = {};
  std::snprintf(name, sizeof name, "%s", (*directory / "store").c_str());
  runtime.communicator().broadcast_host(std::as_writable_bytes(std::span(name)), 0);
  setup.engine.store_directory = name;
  if (mode == "mirror") {
    setup.engine.update_mode = UpdateMode::step;
    setup.engine.mirror = {.directory = std::filesystem::path(name).replace_filename("mirror"), .every = 0};
  }

  const TimePoint start = Clock::now();
  const Ending ending = train_until_it_fails(mode, runtime, setup.engine, *faults);
  const bool soon = Clock::now() - start < kAtOnce;
  const bool told = ending.error.find(words_of(mode)) != std::string::npos;
  const bool named = runtime.rank() == kFails || (ending.by_others && ending.error.find("rank 1") != std::string::npos);
  faults->clear();
  const bool right = soon && told && named && (mode != "mirror" || restored_step(runtime, setup.engine) == 2);
  fmt::print("{} on rank {}: {}\n", right ? "as expected" : "WRONG", runtime.rank(), ending.error);
  std::fflush(stdout);
  // The launcher ends the job with the first to go: none does before all have said theirs and removed their files.
  meet("said", runtime.rank(), runtime.world_size());
  directory.reset();
  meet("removed", runtime.rank(), runtime.world_size());
  return right ? 0 : 1;
}
