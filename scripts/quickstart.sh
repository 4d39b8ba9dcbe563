#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds hoist-gpt and trains a small GPT whose state lives on NVMe.
#
#   scripts/quickstart.sh [TEXT]      TEXT: any file to learn from; default: the GNU GPL, or else this repository's license
#
# Builds the preset `quickstart`: hoist-gpt without CUDA, and not the command line `hoist` (cmake --preset release has
# both). STEPS overrides how long it trains. The state goes to build/quickstart/state, which each start makes anew.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
text=${1:-/usr/share/common-licenses/GPL-3}
if [ $# -eq 0 ] && [ ! -r "$text" ]; then text=$root/LICENSE; fi
[ -r "$text" ] || { echo "cannot read $text" >&2; exit 2; }
text=$(realpath -- "$text")
cd "$root"

echo "[1/3] packages"
scripts/install-deps.sh
echo "[2/3] building hoist-gpt with $(nproc) processors"
cmake --preset quickstart
NINJA_STATUS='[%f of %t, %e s] ' cmake --build --preset quickstart

work=build/quickstart/state
rm -rf "$work"
mkdir -p "$work"
cd "$work"
steps=${STEPS:-140}
echo "[3/3] training: $steps steps"
exec ../bin/hoist-gpt --config "$root/examples/gpt/offload.json" --text "$text" --steps "$steps" --warmup 20 --report report.json
