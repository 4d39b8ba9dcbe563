#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Downloads the libraries that hoist is built from and unpacks them into a folder, for a machine on which nothing can be
# installed: scripts/gpu-report.sh --prefix DIR builds from it. Without root. MPI and OpenBLAS, which a build can do
# without, are left out: with them the folder would be too large to carry.
#
#   scripts/unpack-deps.sh DIR      on a Debian of the same release as the other machine, or older
set -euo pipefail

target=${1:?the folder to unpack into is missing}
mkdir -p "$target"
target=$(cd "$target" && pwd)
development=(
  liburing-dev libhwloc-dev libtbb-dev libhwy-dev libxxhash-dev libfmt-dev libspdlog-dev nlohmann-json3-dev
  libcli11-dev libgtest-dev libgmock-dev libbenchmark-dev libaio-dev
)
# libraries_of PACKAGE...: the libraries that these depend on directly. Every system has a C library and udev.
libraries_of() {
  apt-cache depends --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
    sed -n 's/^ *Depends: \(lib[^<>]*\)$/\1/p' | grep -vE '^lib(c6|gcc|stdc\+\+|udev|ltdl)' | sort -u
}
shared=$(libraries_of "${development[@]}")
# shellcheck disable=SC2086  # lists, here and below
further=$(libraries_of $shared)
packages=$(mktemp -d)
chmod a+rx "$packages" # apt-get downloads as a user of its own
trap 'rm -rf "$packages"' EXIT
# shellcheck disable=SC2086
(cd "$packages" && apt-get download --quiet=2 "${development[@]}" $shared $further)
for package in "$packages"/*.deb; do
  dpkg --extract "$package" "$target"
done
rm -rf "$target"/usr/share/doc "$target"/usr/share/man
echo "$target: $(du --summarize --human-readable "$target" | cut -f1)"
