#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The long campaigns: the slow tests, random plans, trainers of a year ago, power cuts at every operation, the whole suite
# under both sanitizers, five minutes of each fuzzer. Several hours; run before each release. A line for each part goes to
# build/nightly.txt, for the release notes.
#
#   scripts/nightly.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p build
report=build/nightly.txt
echo "hoist $(git describe --always --dirty 2>/dev/null || echo unknown), $(date -u '+%F %H:%M UTC'), $(nproc) processors" >"$report"

failed=0
part() {
  local name=$1 begin=$SECONDS result=passed
  shift
  echo "== $name"
  "$@" || { result=FAILED; failed=1; }
  printf '%-28s %-7s %6d s\n' "$name" "$result" $((SECONDS - begin)) | tee -a "$report"
}

part "fast suite" scripts/test.sh dev
part "slow tests" ctest --test-dir build/dev --label-regex slow --output-on-failure
part "older trainers" scripts/older-trainers.sh dev
part "older PyTorch" scripts/older-pytorch.sh dev
part "10,000 random plans" env HOIST_TEST_PLANS=10000 build/dev/bin/random_plan_test
part "power cuts" env HOIST_CRASH_SEEDS=2 build/dev/bin/crash_power_test
part "each file compiled alone" sh -c "cmake --preset dev -B build/single -DCMAKE_UNITY_BUILD=OFF && cmake --build build/single"
part "address sanitizer" scripts/sanitize.sh asan
part "thread sanitizer" scripts/sanitize.sh tsan
part "64-bit ARM under qemu" scripts/arm64.sh
part "two NUMA nodes under qemu" scripts/emulated-numa.sh dev
part fuzzers scripts/fuzz.sh 300
exit "$failed"
