#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and measures hoist on a GPU: configures, builds, runs the GPU tests and the Python suite with its models on the GPU,
# measures copies, and PyTorch training with its state in every place (bench/placements/measure.py), repeats the GPU tests
# under compute-sanitizer, runs the rest of the suite, and prints one report.
#
#   scripts/gpu-report.sh [--packed DIR | --build DIR] [--out DIR] [--disk DIR] [--jobs N] [--keep-going]
#                         [--minutes N] [--python PROGRAM] [--torch "OPTION..."]
#
#   --packed DIR   nothing is compiled: a folder that scripts/pack-build.sh made elsewhere, for --python's version
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
packed='' build=$root/build/gpu-report out='' disk='' python=python3 torch=() jobs=$(nproc) keep_going='' deadline=
while [ $# -gt 0 ]; do
  case $1 in
    --packed) packed=$(cd "${2:?--packed needs a folder}" && pwd); shift 2 ;;
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --disk) disk=${2:?--disk needs a folder}; shift 2 ;;
    --python) python=${2:?--python needs a program}; shift 2 ;;
    --torch) read -r -a torch <<<"${2?--torch needs options}"; shift 2 ;;
    --jobs) jobs=${2:?--jobs needs a number}; shift 2 ;;
    --keep-going) keep_going=yes; shift ;;
    --minutes) deadline=$((SECONDS + 60 * ${2:?--minutes needs a number})); shift 2 ;;
    *) sed -n '3,20p' "${BASH_SOURCE[0]}" | cut -c 3- >&2; exit 2 ;;
  esac
done
python=$(command -v "$python" || echo "$python")
[[ $python != */* || $python = /* ]] || python=$PWD/$python # CMake ignores a relative one

# --- is there anything to report on? ---------------------------------------------------------------------------------

export PATH=$PATH:/usr/local/cuda/bin
no_gpu() { echo "no GPU report: $1"; exit 77; }
command -v nvidia-smi >/dev/null || no_gpu "nvidia-smi is not there, so the NVIDIA driver is not installed"
gpus=$(nvidia-smi --list-gpus 2>&1) || no_gpu "nvidia-smi finds no GPU ($(head -1 <<<"$gpus"))"
grep -q '^GPU ' <<<"$gpus" || no_gpu "nvidia-smi lists no GPU ($(head -1 <<<"$gpus"))"
[ -n "$packed" ] || command -v nvcc >/dev/null || no_gpu "nvcc is not there; install the CUDA Toolkit, 12.0 or newer, and put it on the PATH"

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
say "$(date -u '+%F %H:%M UTC'), commit $(cat "${packed:-/}/commit" 2>/dev/null || git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)."
say ""
say "| | |"
say "|---|---|"
say "| GPU | $(nvidia-smi --query-gpu=name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader | tr '\n' ';') |"
say "| toolkit | $(nvcc --version 2>/dev/null | grep -o 'release.*' || echo none) |"
say "| CPU | $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2-), $(nproc) cores |"
say "| memory | $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo), locked at most $(ulimit -l) KiB |"
say "| system | $(uname -r), $(. /etc/os-release 2>/dev/null && echo "${PRETTY_NAME:-unknown}") |"
say ""
say "| step | | took | |"
say "|---|---|---|---|"

if [ -n "$packed" ]; then
  bin=$packed/bin package=$packed/python
  # NCCL comes with the toolkit or with PyTorch.
  nccl=$("$python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null || true)
  export LD_LIBRARY_PATH=$packed/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}:/usr/local/cuda/lib64${nccl:+:$nccl/lib}
else
  bin=$build/bin package=$build/python
  generator=()
  if command -v ninja >/dev/null; then generator=(-G Ninja); fi
  step configure cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DHOIST_WITH_CUDA=ON \
    -DHOIST_WITH_NCCL=AUTO -DHOIST_WARNINGS_AS_ERRORS=OFF -DPython_EXECUTABLE="$python"
  step build cmake --build "$build" --parallel "$jobs"
fi

# The CUDA half of every suite; the same tests run on the host device in "suite".
gpu_tests='*/cuda:Cuda*:Nccl.*'
programs=(platform_test tiers_memory_test zero_test zero_state_test comm_test embed_device_test)
step "GPU tests" bash -c 'for program in "${@:2}"; do "$program" --gtest_filter="$1" || exit; done' _ "$gpu_tests" \
  "${programs[@]/#/$bin/}"
# A suite that skipped everything has shown nothing.
if ! grep -q '\[       OK \].*/cuda' "$out/GPU-tests.log"; then
  say "| GPU tests | **failed** | | every one was skipped |"
  exit 1
fi

# Every file of Python tests, with its models on the GPU. A file's log is python-FILE.log. test_accelerator tests another device.
export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
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
  say "| Python suite and placements | not run | | $python lacks: $(tail -n 1 <<<"$lacks") |"
  [ -z "$packed" ] || failed=1 # the package was packed for another version, say
fi

step copies "$bin/bench_cuda_copies" --json "$out/copies.json"
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
    # NCCL's own kernels poll memory that others write, so that only ours are looked at for races. Tests make calls that CUDA
    # refuses, such as memory registered twice, which are no errors here.
    step "$tool" bash -c 'for program in "${@:4}"; do "$1" --tool "$2" --report-api-errors no --error-exitcode 9 "$program" --gtest_filter="$3" || exit; done' \
      _ "$sanitizer" "$tool" '*/cuda:Cuda*' "$bin/platform_test" "$bin/zero_test" "$bin/embed_device_test"
  else
    say "| $tool | not run | | compute-sanitizer is not there: install it with the CUDA Toolkit |"
  fi
done

# The packed build has no other tests.
[ -n "$packed" ] || step suite ctest --test-dir "$build" --parallel "$jobs" --output-on-failure --label-exclude slow

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
