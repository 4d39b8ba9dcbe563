#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Cross-compiles for 64-bit ARM (preset arm64) and runs tests under qemu's user mode: the kernels must give the bits that
# they give on x86. Installs what it needs, as root on Debian or a relative.
#
#   scripts/arm64.sh [--short]      --short: the kernels and what is below them
#
# Left out: tests that end a process or start one (qemu runs no second program of the other architecture), and those that
# limit the address space or read the kernel's accounting of a process, which here are qemu's own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tests='core platform aio optim_cpu tiers tiers_memory tiers_store store_corpus scheduler partition config interchange zero zero_groups'
without='*Death*:Thread.That*:*Fork*'
without+=':StoreOpenTest.AReservationThatFailsIsUndone:HostBudget.AnAddressSpaceThatIsLimited*:*ByteTest.*KernelsAccounting*'
if [ "${1:-}" = --short ]; then
  tests='core optim_cpu scheduler'
  without+=':TileChecksum.*:Tails*:Fp16Weights*'
fi

packages=(g++-aarch64-linux-gnu qemu-user)
for library in liburing hwloc tbb hwy xxhash fmt spdlog gtest gmock; do
  packages+=("lib${library#lib}-dev:arm64")
done
if ! dpkg-query --show "${packages[@]}" >/dev/null 2>&1; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "Packages are missing, and installing them needs root. Run this script as root once, or:" >&2
    echo "  dpkg --add-architecture arm64 && apt-get update && apt-get install ${packages[*]}" >&2
    exit 1
  fi
  dpkg --add-architecture arm64
  apt-get update --quiet=2
  apt-get install --yes --quiet=2 --no-install-recommends "${packages[@]}" >/dev/null
fi

cmake --preset arm64 >/dev/null
targets=()
for test in $tests; do targets+=("${test}_test"); done
NINJA_STATUS='[%f of %t, %e s] ' cmake --build --preset arm64 --target "${targets[@]}" -- --quiet
GTEST_FILTER="-$without" ctest --preset arm64 --parallel "$(nproc)" --tests-regex "^(${tests// /|})(\\.[0-9]+)?\$"
