// SPDX-License-Identifier: Apache-2.0
// Started by mpirun: the ranks of MPI end in the bits of as many threads of one process (one rank: of `self`).
//   mpi_test [ranks of a group that gathers among itself]
#include <cstdio>
#include <cstdlib>
#include <string>

#include <hoist/core/error.hpp>

#include "toy_ranks.hpp"

using namespace hoist;
using namespace hoist::test;

int main(int argc, char** argv) {
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme);
  setup.runtime.communicator = CommunicatorKind::mpi;
  if (argc > 1) {
    setup.engine.secondary_shard_ranks = std::atoi(argv[1]);
    setup.engine.reuse_distance_elements = setup.engine.live_elements_max = 0;  // backward fetches again
  }
  int result = 0;
  try {
    Runtime runtime(setup.runtime);
    // All ranks of this machine share one store directory; its name comes from rank 0.
    TempDirectory directory;
    char name[512] = {};
    std::snprintf(name, sizeof name, "%s", (directory / "store").c_str());
    runtime.communicator().broadcast_host(std::as_writable_bytes(std::span(name)), 0);
    setup.engine.store_directory = name;
    Digests digests;
    {
      ToyModel model(runtime, setup.engine);
      model.initialize();
      model.train(1, 5);
      if (argc > 1 && model.engine().wire_bytes_in_group() == 0) throw Error("no group has gathered anything");
      digests = digests_of(model);
    }
    if (runtime.rank() == 0) {
      const ToySetup reference = toy_setup(Placement::pinned, Placement::pinned);
      const int size = runtime.world_size();
      const Digests expected =
          size == 1 ? train_once(reference, ToyShape{}, 5) : train_on(size, reference, ToyShape{}, 5)[0].digests;
      result = digests == expected ? 0 : 1;
      std::printf("%d ranks of MPI and of threads %s: %s\n", size, result == 0 ? "agree" : "DIFFER",
                  digests.master.c_str());
    }
    runtime.communicator().barrier();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return result;
}
