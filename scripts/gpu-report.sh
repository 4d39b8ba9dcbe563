#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and measures hoist on a GPU: configures, builds, runs the GPU tests and the Python suite with its models on the GPU,
# measures copies, and PyTorch training with its state in every place (bench/placements/measure.py), repeats the GPU tests
# under compute-sanitizer, runs the rest of the suite, and prints one report.
#
#   scripts/gpu-report.sh [--prefix DIR]... [--build DIR] [--out DIR] [--disk DIR] [--jobs N] [--keep-going]
#                         [--minutes N] [--python PROGRAM] [--torch "OPTION..."]
#
#   --prefix DIR   distribution packages unpacked there by scripts/unpack-deps.sh, for machines where liburing, hwloc,
#                  oneTBB, Highway and the rest cannot be installed; several times for several trees
#   --build DIR    default: build/gpu-report
#   --out DIR      logs and the report; default: BUILD/report
#   --disk DIR     on the drive that holds the state when it is on NVMe; default: the report's folder
#   --python PROGRAM  an interpreter that has PyTorch and nanobind, and DeepSpeed if that shall be measured too;
#                  default: python3
#   --torch OPTIONS  for bench/placements/measure.py: model, batch sizes, budgets (--help lists them)
#   --keep-going   goes on after a step that failed (the report says which)
#   --minutes N    stops the step that runs after N minutes, and starts none after it; default: no limit
#
# Exit status: 0 all passed; 1 something failed; 2 wrong arguments; 77 there is no GPU, said in one line.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
prefixes=() build=$root/build/gpu-report out='' disk='' python=python3 torch=() jobs=$(nproc) keep_going='' deadline=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) prefixes+=("$(cd "${2:?--prefix needs a folder}" && pwd)"); shift 2 ;;
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --disk) disk=${2:?--disk needs a folder}; shift 2 ;;
    --python) python=${2:?--python needs a program}; shift 2 ;;
    --torch) read -r -a torch <<<"${2?--torch needs options}"; shift 2 ;;
    --jobs) jobs=${2:?--jobs needs a number}; shift 2 ;;
    --keep-going) keep_going=yes; shift ;;
    --minutes) deadline=$((SECONDS + 60 * ${2:?--minutes needs a number})); shift 2 ;;
    *) sed -n '3,21p' "${BASH_SOURCE[0]}" | cut -c 3- >&2; exit 2 ;;
  esac
done

# --- is there anything to report on? ---------------------------------------------------------------------------------

export PATH=$PATH:/usr/local/cuda/bin
no_gpu() { echo "no GPU report: $1"; exit 77; }
command -v nvidia-smi >/dev/null || no_gpu "nvidia-smi is not there, so the NVIDIA driver is not installed"
cards=$(nvidia-smi --list-gpus 2>&1) || no_gpu "nvidia-smi finds no card ($(head -1 <<<"$cards"))"
grep -q '^GPU ' <<<"$cards" || no_gpu "nvidia-smi lists no card ($(head -1 <<<"$cards"))"
command -v nvcc >/dev/null || no_gpu "nvcc is not there; install the CUDA Toolkit, 12.0 or newer, and put it on the PATH"

# --- packages that are unpacked instead of installed -----------------------------------------------------------------

# prepend VARIABLE PATH: in front of what the variable lists already.
prepend() {
  if [ -d "$2" ]; then export "$1=$2${!1:+:${!1}}"; fi
}
for prefix in "${prefixes[@]}"; do
  for usr in "$prefix/usr" "$prefix"; do
    prepend PATH "$usr/bin"
    prepend CPATH "$usr/include"
    prepend CMAKE_PREFIX_PATH "$usr"
    for lib in "$usr/lib" "$usr/lib/$(uname -m)-linux-gnu"; do
      prepend LIBRARY_PATH "$lib"
      prepend LD_LIBRARY_PATH "$lib"
      prepend PKG_CONFIG_PATH "$lib/pkgconfig"
    done
    prepend PKG_CONFIG_PATH "$usr/share/pkgconfig"
  done
done

mkdir -p "$build"
build=$(cd "$build" && pwd)
out=${out:-$build/report}
mkdir -p "$out"
out=$(cd "$out" && pwd)
report=$out/report.md
failed=0

say() { tee -a "$report" <<<"$*"; }

# step NAME COMMAND...: runs it into a log, and says how it ended.
step() {
  local name=$1 log=$out/${1// /-}.log begin=$SECONDS limited=()
  shift
  if [ -n "$deadline" ]; then
    if [ "$SECONDS" -ge "$deadline" ]; then
      failed=1
      say "| $name | not run | | the time given with --minutes has passed |"
      return
    fi
    limited=(timeout --kill-after=10 $((deadline - SECONDS)))
  fi
  echo "== $name ..." >&2
  if "${limited[@]}" "$@" >"$log" 2>&1; then
    say "| $name | passed | $((SECONDS - begin)) s | $(summary "$log") |"
    return
  fi
  failed=1
  say "| $name | **failed** | $((SECONDS - begin)) s | $(summary "$log") |"
  tail -n 40 "$log" >&2
  if [ -z "$keep_going" ]; then
    echo "stopped at '$name'; its log is $log" >&2
    exit 1
  fi
}

# detail FILE: a step's log, which the report ends with.
details=()
detail() {
  if [ -s "$1" ]; then details+=("$1"); fi
}

# The result that a log ends with, as a line.
summary() {
  grep -E 'tests passed|tests failed|ERROR SUMMARY|RACECHECK SUMMARY|\[  PASSED  \]|\[  FAILED  \] [0-9]+ test' "$1" |
    tail -n 3 | tr -d '=' | tr '\n|' ';/' | sed 's/;$//' || true
}

# --- the report ------------------------------------------------------------------------------------------------------

: >"$report"
say "# hoist on a GPU"
say ""
say "$(date -u '+%F %H:%M UTC'), commit $(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)."
say ""
say "| | |"
say "|---|---|"
say "| card | $(nvidia-smi --query-gpu=name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader | tr '\n' ';') |"
say "| toolkit | $(nvcc --version | grep -o 'release.*') |"
say "| CPU | $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2-), $(nproc) cores |"
say "| memory | $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo), locked at most $(ulimit -l) KiB |"
say "| system | $(uname -r), $(. /etc/os-release 2>/dev/null && echo "${PRETTY_NAME:-unknown}") |"
say ""
say "| step | | took | |"
say "|---|---|---|---|"

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
step configure cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DHOIST_WITH_CUDA=ON \
  -DHOIST_WITH_NCCL=AUTO -DHOIST_WARNINGS_AS_ERRORS=OFF -DPython_EXECUTABLE="$(command -v "$python" || echo "$python")"
step build cmake --build "$build" --parallel "$jobs"

# The CUDA half of every suite; the same tests run on the host device in "suite".
gpu_tests='*/cuda:Cuda*:Nccl.*'
programs=(platform_test tiers_memory_test zero_test zero_state_test comm_test embed_device_test)
step "GPU tests" bash -c 'for program in "${@:2}"; do "$program" --gtest_filter="$1" || exit; done' _ "$gpu_tests" \
  "${programs[@]/#/$build/bin/}"
# A suite that skipped everything has shown nothing.
if ! grep -q '\[       OK \].*/cuda' "$out/GPU-tests.log"; then
  say "| GPU tests | **failed** | | every one was skipped |"
  exit 1
fi

# Every file of Python tests, with its models on the GPU. A file's log is python-FILE.log. test_accelerator tests another device.
export PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH}
importable=yes
lacks=$("$python" -c 'import pytest, hoist.torch' 2>&1) || importable=
python_tests() {
  printf '%s\n' "$1"/test_*.py | grep -v accelerator | xargs -P "$2" -I{} sh -c '
    name=$(basename "$1" .py)
    timeout 240 "$2" "$3/run.py" "$1" >"$4/python-$name.log" 2>&1
    status=$?
    echo "$name: exit status $status, $(tail -n 1 "$4/python-$name.log")"
    [ "$status" -eq 0 ] || [ "$status" -eq 77 ]' _ {} "$3" "$1" "$4"
}
export -f python_tests
if [ -n "$importable" ]; then
  HOIST_TEST_ACCELERATOR=cuda OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE \
    step "Python suite on the GPU" bash -c 'python_tests "$@"' _ "$root/tests/python" "$(((jobs + 1) / 2))" "$python" "$out"
  detail "$out/Python-suite-on-the-GPU.log"
else
  say "| Python suite on the GPU | not run | | $python lacks: $(tail -n 1 <<<"$lacks") |"
fi

step copies "$build/bin/bench_cuda_copies" --json "$out/copies.json"
detail "$out/copies.log"

# Placements of a PyTorch program's state: step times, links, waiting and peaks.
disk=${disk:-$out}
mkdir -p "$disk"
if [ -n "$importable" ]; then
  step placements "$python" "$root/bench/placements/measure.py" --directory "$disk" --json "$out/placements.json" "${torch[@]}"
  detail "$out/placements.log"
fi

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/compute-sanitizer/compute-sanitizer 2>/dev/null || true)
for tool in memcheck racecheck; do
  if [ -n "$sanitizer" ]; then
    # NCCL's own kernels poll memory that others write, so that only ours are looked at for races.
    step "$tool" bash -c 'for program in "${@:4}"; do "$1" --tool "$2" --error-exitcode 9 "$program" --gtest_filter="$3" || exit; done' \
      _ "$sanitizer" "$tool" '*/cuda:Cuda*' "$build/bin/platform_test" "$build/bin/zero_test" "$build/bin/embed_device_test"
  else
    say "| $tool | not run | | compute-sanitizer is not there: install it with the CUDA Toolkit |"
  fi
done

step suite ctest --test-dir "$build" --parallel "$jobs" --output-on-failure --label-exclude slow

for log in "${details[@]}"; do
  say ""
  say "## $(basename "$log" .log)"
  say ""
  say '```'
  say "$(grep -v ' \.\.\.$' "$log")"
  say '```'
done
echo "report: $report" >&2
exit "$failed"
