#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests on an emulated machine with two NUMA nodes of 1 GiB and two processors each, under qemu: where memory really
# is, and where threads really run. Installs what it needs, as root on Debian or a relative.
#
#   scripts/emulated-numa.sh [PRESET]        PRESET: dev (default), built before
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=build/${1:-dev}/bin

packages=(qemu-system-x86 busybox-static linux-image-cloud-amd64 cpio)
if ! dpkg-query --show "${packages[@]}" >/dev/null 2>&1; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "Packages are missing, and installing them needs root. Run this script as root once, or:" >&2
    echo "  apt-get update && apt-get install ${packages[*]}" >&2
    exit 1
  fi
  apt-get update --quiet=2
  apt-get install --yes --quiet=2 --no-install-recommends "${packages[@]}" >/dev/null
fi
kernels=(/boot/vmlinuz-*-cloud-amd64)

# An initial file system with the programs, their libraries, and a first process that runs them.
root=$(mktemp -d)
trap 'rm -rf "$root" "$root.initrd" "$root.log"' EXIT
mkdir -p "$root"/{bin,proc,sys,tmp,dev}
cp /bin/busybox "$root/bin/"
for program in platform_test zero_test hoist; do
  cp "$bin/$program" "$root/bin/"
  ldd "$bin/$program" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -Ln "$library" "$root$library"
  done
done
cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm
hoist doctor --path /tmp 2>&1 | grep -i numa
failed=0
platform_test --gtest_filter='HostMemory.*:Topology.*:NumaPlacement.*:FirstTouch.*' || failed=1
zero_test --gtest_filter='NumaTraining.*' || failed=1
echo "result: $failed"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet --create --format=newc | gzip -1) >"$root.initrd"

# A virtual machine often offers a KVM that does not work: KVM=1 tries it.
acceleration=$([ "${KVM:-0}" = 1 ] && echo kvm || echo tcg)
timeout 900 qemu-system-x86_64 -machine "q35,accel=$acceleration" -cpu max,arch-capabilities=off -smp 4 -m 2G -nographic -no-reboot \
  -object memory-backend-ram,size=1G,id=m0 -object memory-backend-ram,size=1G,id=m1 \
  -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1 \
  -kernel "${kernels[-1]}" -initrd "$root.initrd" -append "console=ttyS0 quiet panic=-1" | tee "$root.log"
grep -q "^result: 0" "$root.log"
