#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds a preset and runs its tests.
#
#   scripts/test.sh [PRESET] [CTEST ARGUMENT...]      PRESET: dev (default), asan, tsan, cuda
set -euo pipefail

preset=${1:-dev}
shift || true
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install-deps.sh
cmake --preset "$preset"
cmake --build --preset "$preset"
ctest --preset "$preset" --parallel "$(nproc)" "$@"
