#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds what scripts/gpu-report.sh runs and packs it into a folder (about 60 MB), for a machine on which nothing can be installed
# or where time is too short to compile: `scripts/gpu-report.sh --packed DIR` there. Needs the CUDA Toolkit, and no GPU.
#
#   scripts/pack-build.sh DIR [PYTHON] [BUILD]
#
#   PYTHON   an interpreter that has nanobind, of the version that the other machine has; default: python3
#   BUILD    default: build/packed
#
# The other machine needs a C and C++ library at least as new as this one's, and NCCL, from the toolkit or with PyTorch. MPI is
# left out.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:?the folder to pack into is missing}
python=$(command -v "${2:-python3}") || { echo "there is no ${2:-python3}" >&2; exit 2; }
[[ $python = /* ]] || python=$PWD/$python # CMake ignores a relative one
if [ -e "$target" ] && [ -n "$(ls -A "$target")" ] && [ ! -e "$target/commit" ]; then
  echo "$target holds something else: name a new folder" >&2
  exit 2
fi
build=${3:-$root/build/packed}
# The programs that gpu-report.sh runs, and the command line.
programs=(platform_test tiers_memory_test zero_test zero_state_test comm_test embed_device_test bench_cuda_copies hoist)

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DHOIST_WITH_CUDA=ON -DHOIST_WITH_NCCL=ON \
  -DHOIST_WITH_MPI=OFF -DHOIST_WITH_PYTHON=ON -DHOIST_WARNINGS_AS_ERRORS=OFF -DPython_EXECUTABLE="$python"
cmake --build "$build" --parallel "$(nproc)" --target "${programs[@]}" hoist_python

rm -rf "$target"
mkdir -p "$target/bin" "$target/lib" "$target/python"
git -C "$root" describe --always --dirty >"$target/commit"
for program in "${programs[@]}"; do strip -o "$target/bin/$program" "$build/bin/$program"; done
cp --recursive --dereference "$build/python/hoist" "$target/python/"
find "$target/python" -name __pycache__ -prune -exec rm -r {} +
strip "$target"/python/hoist/_hoist*.so
# Every system has a C and C++ library; a machine with a GPU and PyTorch has NVIDIA's.
ldd "$target"/bin/* "$target"/python/hoist/_hoist*.so | awk '$2 == "=>" && $3 ~ "/" {print $3}' | sort -u |
  grep -vE '/(libc|libm|libmvec|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+|libnccl|libcuda[a-z]*)\.so' |
  xargs -I{} cp --dereference {} "$target/lib/"
echo "$target: $(du --summarize --human-readable "$target" | cut -f1)"
