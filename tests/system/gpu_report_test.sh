#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/gpu-report.sh where there is no GPU: one line that says what is missing, and 77.
#
#   gpu_report_test.sh SCRIPT
set -euo pipefail

script=$1
work=$(mktemp -d "${TMPDIR:-/tmp}/hoist-gpu-report-XXXXXX")
trap 'rm -rf "$work"' EXIT

# expect STATUS PATTERN ARGUMENT...: what the script prints with $work/bin in front of everything, and how it ends.
expect() {
  local status=$1 pattern=$2 lines text ended=0
  shift 2
  text=$(PATH="$work/bin:$PATH" "$script" --build "$work/build" "$@" 2>&1) || ended=$?
  lines=$(wc -l <<<"$text")
  if [ "$ended" != "$status" ] || ! grep -qE "$pattern" <<<"$text" || { [ "$status" = 77 ] && [ "$lines" != 1 ]; }; then
    echo "expected $status and '$pattern', got $ended and: $text" >&2
    exit 1
  fi
}

# nvidia_smi STATUS TEXT: a driver's tool that answers so.
nvidia_smi() {
  mkdir -p "$work/bin"
  printf '#!/bin/sh\necho "%s"\nexit %s\n' "$2" "$1" >"$work/bin/nvidia-smi"
  chmod +x "$work/bin/nvidia-smi"
}

nvidia_smi 9 "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
expect 77 '^no GPU report: nvidia-smi finds no GPU \(NVIDIA-SMI has failed'
nvidia_smi 0 "No devices were found"
expect 77 '^no GPU report: nvidia-smi lists no GPU \(No devices'
expect 2 'gpu-report.sh \[--packed DIR' --no-such-option
if [ -e "$work/build" ]; then
  echo "a build was begun" >&2
  exit 1
fi
