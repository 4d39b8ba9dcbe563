#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds the `release` preset and trains a small GPT whose state lives on NVMe.
#
#   scripts/quickstart.sh [TEXT]      TEXT: any file to learn from; default: the GNU GPL
#
# STEPS overrides how long (default: about three minutes on two cores). The state goes to build/release/quickstart and
# is removed and made anew at each start.
set -euo pipefail

text=$(realpath -- "${1:-/usr/share/common-licenses/GPL-3}")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
[ -r "$text" ] || { echo "cannot read $text" >&2; exit 2; }

scripts/install-deps.sh
configured=$(cmake --preset release 2>&1) || { printf '%s\n' "$configured" >&2; exit 1; }
echo "Building (preset release) ..."
cmake --build --preset release --target hoist hoist-gpt

work=build/release/quickstart
rm -rf "$work"
mkdir -p "$work"
cd "$work"
exec ../bin/hoist-gpt --config "$root/examples/gpt/offload.json" --text "$text" --steps "${STEPS:-400}" --warmup 20 --report report.json
