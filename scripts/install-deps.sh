#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the distribution packages hoist is built from. Idempotent: does nothing when all are there. Knows Debian and
# its relatives (apt-get), and Fedora (dnf); docs/install.md says which versions were tried.
#
#   scripts/install-deps.sh [--dry-run]
#
# Without the right to install (neither root nor passwordless sudo) it prints the command to run and ends with 1.
set -euo pipefail

debian=(
  build-essential cmake ninja-build pkg-config git
  liburing-dev libhwloc-dev libtbb-dev libhwy-dev libxxhash-dev
  libfmt-dev libspdlog-dev nlohmann-json3-dev libcli11-dev
  libopenmpi-dev openmpi-bin
  libopenblas-pthread-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  libaio-dev fio # what hoist bench io compares with
)
fedora=( # in the same order
  gcc-c++ make cmake ninja-build pkgconf-pkg-config git
  liburing-devel hwloc-devel tbb-devel highway-devel xxhash-devel
  fmt-devel spdlog-devel json-devel cli11-devel
  openmpi-devel # its programs and its MPI are found after `module load mpi`
  openblas-devel
  gtest-devel gmock-devel google-benchmark-devel
  libaio-devel fio
)

missing=()
if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  # shellcheck source=/dev/null
  [ ! -r /etc/os-release ] || . /etc/os-release
  if [ "${ID:-} ${VERSION_ID:-}" = "ubuntu 22.04" ]; then
    echo "Ubuntu 22.04 is too old: its CMake is 3.22, and hoist needs 3.25; its liburing is 2.1, and hoist needs 2.2." >&2
    echo "Use Ubuntu 24.04, or build in a container (docs/install.md)." >&2
    exit 1
  fi
  for package in "${debian[@]}"; do
    status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing+=("$package")
  done
  update=(apt-get update --quiet=2)
  install=(apt-get install --yes --no-install-recommends "${missing[@]}")
  quiet=(--option=Dpkg::Use-Pty=0)
elif command -v rpm >/dev/null && command -v dnf >/dev/null; then
  for package in "${fedora[@]}"; do
    rpm --query --quiet --whatprovides "$package" || missing+=("$package")
  done
  update=()
  install=(dnf install --assumeyes --setopt=install_weak_deps=False "${missing[@]}")
  quiet=()
else
  echo "This script knows Debian and its relatives, and Fedora. Install the equivalents of: ${debian[*]}" >&2
  exit 1
fi
if [ ${#missing[@]} -eq 0 ]; then
  exit 0
fi

command_line=${install[*]}
[ ${#update[@]} -eq 0 ] || command_line="apt-get update && $command_line"
if [ "${1:-}" = --dry-run ]; then
  echo "would run: $command_line"
  exit 0
fi
if [ "$(id -u)" -eq 0 ]; then
  sudo=()
elif command -v sudo >/dev/null && sudo --non-interactive true 2>/dev/null; then
  sudo=(sudo)
else
  echo "Packages are missing, and installing them needs root. Run as root:" >&2
  echo "  $command_line" >&2
  exit 1
fi

echo "Installing ${#missing[@]} packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# One line a package, so that it is seen to move.
[ ${#update[@]} -eq 0 ] || "${sudo[@]}" "${update[@]}"
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive "${install[@]}" "${quiet[@]}" |
  grep --line-buffered -E '^(Get:|Unpacking|Setting up| *Installing)' || [ "${PIPESTATUS[0]}" -eq 0 ]
