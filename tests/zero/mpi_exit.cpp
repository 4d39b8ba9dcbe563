// SPDX-License-Identifier: Apache-2.0
// Started by mpirun: the process ends while an engine is alive, and has a step to write. The job succeeds.
//   mpirun -np 2 mpi_exit DIRECTORY global|exit|settled
// global: main returns, and the destructor of a global ends the engine. exit: main calls exit() and nothing ends the
// engine; settled: as well, but the step is written.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include <hoist/core/error.hpp>

#include "toy_ranks.hpp"

using namespace hoist;
using namespace hoist::test;

namespace {

std::unique_ptr<Runtime> global_runtime;
std::unique_ptr<ToyModel> global_model;

}  // namespace

int main(int, char** argv) {
  const std::string mode = argv[2];
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, argv[1]);
  setup.runtime.communicator = CommunicatorKind::mpi;
  auto runtime = std::make_unique<Runtime>(setup.runtime);
  if (runtime->rank() == 0) std::filesystem::remove_all(argv[1]);
  runtime->communicator().barrier();
  auto model = std::make_unique<ToyModel>(*runtime, setup.engine);
  model->initialize();
  model->train(1, 3);
  if (mode == "settled") model->engine().settle();
  if (mode == "global") {
    global_runtime = std::move(runtime);
    global_model = std::move(model);
    return 0;
  }
  std::exit(0);
}
