#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests of hoist.torch with older releases of PyTorch: 2.6, the oldest that pyproject.toml allows, and 2.11, which cannot refuse
# to read the weights of a unit that is down. Each has an environment of its own, build/pytorch-VERSION (5 GB).
#
#   scripts/older-pytorch.sh [PRESET] [FILE...]     FILE: names of tests/python/test_FILE.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build/${1:-dev}
shift || true
python=$(sed -n 's/^Python_EXECUTABLE:[A-Z]*=//p' "$build/CMakeCache.txt")
[ -x "$python" ] || { echo "$build was configured without Python" >&2; exit 2; }
files=("$@")
[ $# -gt 0 ] || files=(training modules no_silent_errors threads ordinary_loops clipping begun_steps schedules transformations
  buffers edits changed_models state checkpoints checkpoint_failures vertical fp16 distributed optim_offload optim_schedules optim_values optim_misuse)

export PYTHONPATH=$build/python PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
failed=0
for version in 2.6.0 2.11.0; do
  environment=build/pytorch-$version
  if [ ! -e "$environment/complete" ]; then
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "torch==$version" numpy pytest safetensors
    touch "$environment/complete"
  fi
  for file in "${files[@]}"; do
    echo "== PyTorch $version: test_$file.py"
    "$environment/bin/python" tests/python/run.py "tests/python/test_$file.py" || failed=1 # a file that is skipped fails, too
  done
done
exit "$failed"
