#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every fuzzer for a while, as many at once as there are processors, each from its corpus in the tree, which is run
# through first and left as it is. Needs clang. A fuzzer's findings are saved in build/fuzz/found, and make this fail.
#
#   scripts/fuzz.sh [SECONDS]     of each fuzzer; 20
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export seconds=${1:-20}
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
echo "== fuzz: $seconds s each"
cmake --preset fuzz >/dev/null
cmake --build --preset fuzz --target fuzzers -- --quiet

grown=$(mktemp -d)
export grown
trap 'rm -rf "$grown"' EXIT
mkdir -p build/fuzz/found

# fuzz NAME CORPUS...: prints the result; returns 1 if it found something.
fuzz() {
  local name=$1 log="$grown/$1.log" status=0
  shift
  set -- "${@/#/tests/}"
  mkdir "$grown/$name"  # new inputs go to the first directory
  "build/fuzz/bin/fuzz_$name" "$grown/$name" "$@" -max_total_time="$seconds" -timeout=20 \
    -rss_limit_mb=2048 -artifact_prefix="build/fuzz/found/$name-" -print_final_stats=1 >"$log" 2>&1 || status=1
  printf '%-12s %s inputs, %s files in the corpus\n' "$name" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" "$(find "$@" -type f | wc -l)"
  [ $status -eq 0 ] || cat "$log"
  return $status
}
export -f fuzz
printf '%s\n' 'config fuzz/config/corpus config/data/accept' 'safetensors fuzz/safetensors/corpus' \
  'manifest fuzz/store/manifest-corpus' 'slot fuzz/store/slot-corpus' 'label fuzz/store/label-corpus' |
  xargs --max-procs="$(nproc)" --max-lines=1 bash -c 'fuzz "$@"' fuzz
