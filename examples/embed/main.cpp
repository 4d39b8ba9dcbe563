// SPDX-License-Identifier: Apache-2.0
// A small program that embeds hoist: an autoencoder whose weights and optimizer states are in a store on disk.
#include <cstdio>
#include <exception>

#include "autoencoder.hpp"

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fputs("usage: embed STORE_DIRECTORY\n", stderr);
    return 2;
  }
  // The device is the GPU if there is one. With several ranks (mpirun), 4 MiB of its memory are their scratch.
  const embed::Outcome outcome =
      embed::train({.device_memory_bytes = 8 * hoist::kMiB, .pinned_memory_bytes = 32 * hoist::kMiB}, argv[1]);
  std::printf("W[0][0] = %.6f, held-out loss %.4f -> %.4f, committed step %d\n", static_cast<double>(outcome.weight),
              outcome.loss_before, outcome.loss_after, static_cast<int>(outcome.committed_step));
  return outcome.loss_after < outcome.loss_before ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "embed: %s\n", error.what());
  return 1;
}
