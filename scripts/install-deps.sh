#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the distribution packages hoist is built from. Idempotent: does nothing when all are there.
#
#   scripts/install-deps.sh [--dry-run]
#
# Without the right to install (neither root nor passwordless sudo) it prints the command to run and ends with 1.
set -euo pipefail

packages=(
  build-essential cmake ninja-build pkg-config git
  liburing-dev libhwloc-dev libtbb-dev libhwy-dev libisal-dev libxxhash-dev
  libfmt-dev libspdlog-dev nlohmann-json3-dev libcli11-dev
  libopenmpi-dev openmpi-bin
  libopenblas-pthread-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  libaio-dev fio # what hoist bench io compares with
)

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "This script knows Debian and its relatives. Install the equivalents of: ${packages[*]}" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

install=(apt-get install --yes --no-install-recommends "${missing[@]}")
if [ "${1:-}" = --dry-run ]; then
  echo "would run: apt-get update && ${install[*]}"
  exit 0
fi
if [ "$(id -u)" -eq 0 ]; then
  sudo=()
elif command -v sudo >/dev/null && sudo --non-interactive true 2>/dev/null; then
  sudo=(sudo)
else
  echo "Packages are missing, and installing them needs root. Run as root:" >&2
  echo "  apt-get update && ${install[*]}" >&2
  exit 1
fi

echo "Installing ${#missing[@]} packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# One line a package, so that it is seen to move.
"${sudo[@]}" apt-get update --quiet=2
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive "${install[@]}" --option=Dpkg::Use-Pty=0 |
  grep --line-buffered -E '^(Get:|Unpacking|Setting up)' || [ "${PIPESTATUS[0]}" -eq 0 ]
