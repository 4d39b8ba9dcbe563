#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes build/venv, a virtual environment with what the Python package is built from and tested with: nanobind, pytest,
# NumPy, PyTorch as `pip install torch` installs it, the Hugging Face packages that hoist.torch works with, and what
# scripts/lint.sh runs. Does nothing when all of it is there. Prints its interpreter.
#
#   scripts/python-env.sh [PYTHON]        # python3 without an argument
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

packages=(
  nanobind pytest numpy torch transformers accelerate peft trl
  'clang-format==14.*' 'ruff==0.17.*' 'mypy==2.4.*' # other versions format or judge the tree differently
)
venv=$PWD/build/venv
if [ "$(cat "$venv/complete" 2>/dev/null)" != "${packages[*]}" ]; then
  mkdir -p build
  "${1:-python3}" -m venv "$venv" >&2
  # uv needs a third of pip's processor time for these 5 GB. pip reaches networks that only pip is configured for.
  { "$venv/bin/pip" install --quiet --disable-pip-version-check uv &&
    "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${packages[@]}"; } >&2 ||
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "${packages[@]}" >&2
  echo "${packages[*]}" >"$venv/complete"
fi
echo "$venv/bin/python"
