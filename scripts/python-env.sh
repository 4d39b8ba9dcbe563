#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes build/venv, a virtual environment with what the Python package is built from and tested with: nanobind, pytest,
# NumPy, PyTorch as `pip install torch` installs it, and the Hugging Face packages that hoist.torch works with. Does
# nothing when it is there. Prints its interpreter.
#
#   scripts/python-env.sh [PYTHON]        # python3 without an argument
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/build/venv
if [ ! -e "$venv/complete" ]; then
  mkdir -p build
  "${1:-python3}" -m venv "$venv" >&2
  "$venv/bin/pip" install --quiet --disable-pip-version-check nanobind pytest numpy torch transformers accelerate peft >&2
  touch "$venv/complete"
fi
echo "$venv/bin/python"
