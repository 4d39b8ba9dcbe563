#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every fuzzer for a while, each from its corpus in the tree, which is left as it is. Needs clang. What a fuzzer finds
# lies in build/fuzz/found, and ends this with 1.
#
#   scripts/fuzz.sh [SECONDS]     of each fuzzer; 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=${1:-20}
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
declare -A corpus=(
  [fuzz_config]=tests/fuzz/config/corpus
  [fuzz_safetensors]=tests/fuzz/safetensors/corpus
  [fuzz_manifest]=tests/fuzz/store/manifest-corpus
  [fuzz_slot]=tests/fuzz/store/slot-corpus
  [fuzz_label]=tests/fuzz/store/label-corpus
)
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target "${!corpus[@]}" >/dev/null
mkdir -p build/fuzz/found
grown=$(mktemp -d build/fuzz/grown-XXXXXX)
trap 'rm -rf "$grown"' EXIT
status=0
for fuzzer in "${!corpus[@]}"; do
  mkdir "$grown/$fuzzer"
  echo "== $fuzzer"
  # New inputs go to the first directory.
  "build/fuzz/bin/$fuzzer" "$grown/$fuzzer" "${corpus[$fuzzer]}" -max_total_time="$seconds" -timeout=20 \
    -artifact_prefix=build/fuzz/found/ -print_final_stats=1 >"$grown/log" 2>&1 || status=1
  grep -E 'stat::number_of_executed_units|ERROR|SUMMARY|runtime error|Test unit written' "$grown/log"
done
exit "$status"
