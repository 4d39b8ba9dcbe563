// SPDX-License-Identifier: Apache-2.0
#include "volumes.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <hoist/core/units.hpp>

namespace hoist::test {

bool succeeds(const std::string& command) { return std::system(("(" + command + ") >/dev/null 2>&1").c_str()) == 0; }

void fill_up(const std::string& file) {
  const int descriptor = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
  off_t at = 0;
  for (off_t piece = 64 * kMiB; piece >= static_cast<off_t>(kBlockAlignment);) {
    if (::fallocate(descriptor, 0, at, piece) == 0)
      at += piece;
    else
      piece /= 2;
  }
  ::fsync(descriptor);
  ::close(descriptor);
}

bool has_room(const std::string& file, std::uint64_t bytes) {
  const int descriptor = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR);
  const bool had = ::fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)) == 0;
  ::close(descriptor);
  ::unlink(file.c_str());
  return had;
}

ThinVolume::ThinVolume(const TempDirectory& directory, const char* real_size)
    : backing_(directory / "backing"), mount_(directory / "mounted") {
  std::filesystem::create_directories(backing_);
  std::filesystem::create_directories(mount_);
  backed_ = succeeds(fmt::format("mount -t tmpfs -o size={} hoist-test {}", real_size, backing_));
  mounted_ = backed_ && succeeds(fmt::format("truncate -s 64M {}/image", backing_)) &&
             succeeds(fmt::format("mkfs.ext4 -q -F -m 0 -E nodiscard {}/image", backing_)) && mount();
}

ThinVolume::~ThinVolume() {
  unmount();
  if (backed_) succeeds(fmt::format("umount {0} || umount -l {0}", backing_));
}

bool ThinVolume::grow(const char* real_size) const {
  return succeeds(fmt::format("mount -o remount,size={} {}", real_size, backing_));
}

bool ThinVolume::mount() {
  return mounted_ = succeeds(fmt::format("mount -o loop,errors=remount-ro {}/image {}", backing_, mount_));
}

void ThinVolume::unmount() {
  if (mounted_) succeeds(fmt::format("umount {0} || umount -l {0}", mount_));
  mounted_ = false;
}

bool ThinVolume::detach() {
  mounted_ = false;
  return succeeds(fmt::format("umount -l {}", mount_));
}

std::string ThinVolume::device_name() const {
  std::ifstream mounts("/proc/mounts");
  for (std::string device, place, rest; mounts >> device >> place && std::getline(mounts, rest);) {
    if (place == mount_) return device.substr(device.rfind('/') + 1);
  }
  return {};
}

LoopVolume::LoopVolume(const TempDirectory& directory, const std::string& kind)
    : kind_(kind), mount_(directory / ("mounted-" + kind)) {
  // mkfs.xfs makes none smaller.
  const std::map<std::string, std::string> make{{"ext4", "truncate -s 64M {0} && mkfs.ext4 -q -F -m 0 {0}"},
                                                {"xfs", "truncate -s 300M {0} && mkfs.xfs -q -f -m reflink=1 {0}"},
                                                {"btrfs", "truncate -s 128M {0} && mkfs.btrfs -q -f --mixed {0}"}};
  const std::string image = directory / (kind + "-image");
  std::filesystem::create_directories(mount_);
  mounted_ = succeeds(fmt::format(fmt::runtime(make.at(kind)), image)) &&
             succeeds(fmt::format("mount -o loop {} {}", image, mount_));
}

LoopVolume::~LoopVolume() {
  if (mounted_) succeeds(fmt::format("umount {0} || umount -l {0}", mount_));
}

}  // namespace hoist::test
