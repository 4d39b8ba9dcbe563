#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds a preset, runs its tests and says which were skipped, and why.
#
#   scripts/test.sh [PRESET] [CTEST ARGUMENT...]      PRESET: dev (default), asan, tsan (needs clang++), cuda
#
# The Python package is built and tested if CMake finds nanobind: CONTRIBUTING.md says how.
set -euo pipefail

preset=${1:-dev}
shift || true
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "$preset" = tsan ] && ! command -v clang++ >/dev/null; then
  echo "The preset tsan is built with clang++, which is MISSING: apt-get install clang, or dnf install clang" >&2
  exit 1
fi
scripts/install-deps.sh
cmake --preset "$preset"
NINJA_STATUS='[%f of %t, %e s] ' cmake --build --preset "$preset"
rm -f "build/$preset/skipped/"*
# Four times as many at once as there are processors: most tests wait for the drive.
status=0
ctest --preset "$preset" --parallel $((4 * $(nproc))) "$@" || status=$?

# Reasons that come up often are printed once, with a count.
skipped=$(cat "build/$preset/skipped/"* 2>/dev/null || true)
if [ -n "$skipped" ]; then
  echo
  echo "Skipped tests, by reason (build/$preset/skipped names them):"
  sed 's/^[^:]*: [^:]*: //' <<<"$skipped" | sort | uniq -c | sort -rn
fi
exit "$status"
