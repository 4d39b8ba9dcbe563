#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests of trainers, of models from files and of recipes with the releases of transformers, TRL and PEFT in
# scripts/older-trainers.txt. An environment of its own, build/older-trainers, has them; PyTorch comes from the environment that
# the build was configured with.
#
#   scripts/older-trainers.sh [PRESET]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build/${1:-dev}
python=$(sed -n 's/^Python_EXECUTABLE:[A-Z]*=//p' "$build/CMakeCache.txt")
[ -x "$python" ] || { echo "$build was configured without Python" >&2; exit 2; }

environment=build/older-trainers
[ -x "$environment/bin/python" ] || "$python" -m venv "$environment"
packages='import sysconfig; print(sysconfig.get_paths()["purelib"])'
"$python" -c "$packages" >"$("$environment/bin/python" -c "$packages")/pytorch.pth"
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check --requirement scripts/older-trainers.txt

export PYTHONPATH=$build/python PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
failed=0
for file in trainers trainer trainer_checkpoints trainer_configurations pretrained save_pretrained finetune finetune_files architectures; do
  echo "== test_$file.py"
  "$environment/bin/python" tests/python/run.py "tests/python/test_$file.py" || failed=1  # a file that is skipped fails, too
done
exit "$failed"
