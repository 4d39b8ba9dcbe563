#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The whole suite under a sanitizer, slow tests left out: builds everything first, which takes a while.
#
#   scripts/sanitize.sh asan    address and undefined behaviour; jobs of MPI included
#   scripts/sanitize.sh tsan    threads; without MPI: it is not built with the sanitizer, which would report races inside MPI
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=${1:?usage: scripts/sanitize.sh asan|tsan}
cmake --preset "$preset" -DHOIST_SANITIZE_POINTERS=ON
cmake --build --preset "$preset"
status=0
ctest --preset "$preset" --parallel $((2 * $(nproc))) || status=$?
if [ "$preset" = asan ]; then
  # Open MPI itself leaves memory behind.
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 ctest --test-dir build/asan --label-regex mpi --output-on-failure || status=$?
fi
exit "$status"
