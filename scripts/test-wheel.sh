#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Python package as a stranger would: `pip install .` of a copy of the sources, outside of the tree, into a
# fresh virtual environment, with pip's build isolation (it fetches scikit-build-core and nanobind from PyPI). Then looks
# at what was installed, and uses it.
#
#   scripts/test-wheel.sh [PYTHON]        # python3 without an argument
#
# Where PYTHON has torch, pytest and numpy, the tutorial is run with what was installed. Ends with 77 where PyPI cannot be
# reached.
set -euo pipefail

python=$(command -v "${1:-python3}") || { echo "there is no ${1:-python3}" >&2; exit 2; }
[[ $python = /* ]] || python=$PWD/$python # this script changes its folder
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/hoist-wheel-XXXXXX")
trap 'rm -rf "$work"' EXIT

mkdir "$work/source"
git -C "$root" ls-files -z --cached --others --exclude-standard --deduplicate |
  (cd "$root" && xargs -0 -I{} sh -c 'if [ -e "$1" ]; then printf "%s\0" "$1"; fi' _ {} | tar --null -T - -c) | tar -x -C "$work/source"
# PYTHON may belong to an environment itself; the new one is made by what that one was made by.
base=$("$python" -c 'import sys; print(sys._base_executable)')
"$base" -m venv "$work/venv"
"$work/venv/bin/python" -m pip download -q --no-deps -d "$work/probe" nanobind ||
  { echo "skipped: PyPI cannot be reached, and build isolation needs it"; exit 77; }

cd "$work/source"
"$work/venv/bin/pip" install .
rm -rf "$work/source/python" # what is imported from here on was installed

cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.metadata, pathlib, sys
import hoist

home = pathlib.Path(hoist.__file__).parent
assert home.is_relative_to(sys.prefix), home
files = {str(f) for f in importlib.metadata.files("hoist")}
for name in ("hoist/_hoist.pyi", "hoist/py.typed", "hoist/torch/engine.py", "hoist/torch/transformers.py", "hoist/aio.py"):
    assert name in files, (name, sorted(files))
stubs = (home / "_hoist.pyi").read_text()
assert "class UnitManager:" in stubs and "def find_checkpoints" in stubs
assert not any(f.endswith((".a", ".hpp", ".cmake")) for f in files), sorted(files)
assert hoist.Config.parse('{"train_batch_size": 4}', "text").training.train_batch_size == 4
try:
    hoist.Config.parse('{"train_batch_sise": 4}', "text")
except hoist.ConfigError as error:
    assert "did you mean" in str(error)
print(f"installed: hoist {importlib.metadata.version('hoist')}, {len(files)} files")
PY

if "$python" -c 'import torch, pytest, numpy' 2>/dev/null; then
  # Found after the new environment's own packages.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
    "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
  mkdir "$work/source/python" # the tests' directory looks like the tree's
  OMP_WAIT_POLICY=PASSIVE "$work/venv/bin/python" -m pytest -q -p no:cacheprovider --rootdir="$work" -c /dev/null \
    --basetemp="$work/t" "$work/source/tests/python/test_tutorial.py"
else
  echo "the tutorial was not run: $python has no torch, pytest and numpy"
fi
