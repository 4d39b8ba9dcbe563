// SPDX-License-Identifier: Apache-2.0
// tests/crash/volumes.hpp - small file systems in files, mounted for one test: what an operator's drive does when it
// fills up, is limited, fails or goes away.
//
// Needs the right to mount and the file system's own tools; without, mounted() is false and obstacle() says why.
//
// Errors     None: what fails here is a test that is skipped.
#pragma once

#include <cstdint>
#include <string>

#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::test {

// Whether the shell command succeeded; says nothing.
bool succeeds(const std::string& command);

// Takes all that is left of a file system, in a file beside the store's; without writing to it, where fallocate can.
void fill_up(const std::string& file);
// Whether so much can be had for another file. (What statvfs says is available need not be.)
bool has_room(const std::string& file, std::uint64_t bytes);

// An ext4 in a sparse file on a tmpfs that is too small for it: space that was promised and is not there, as on a thin
// volume.
class ThinVolume {
 public:
  ThinVolume(const TempDirectory& directory, const char* real_size);
  ~ThinVolume();
  ThinVolume(const ThinVolume&) = delete;
  ThinVolume& operator=(const ThinVolume&) = delete;

  bool mounted() const { return mounted_; }
  static const char* obstacle() { return "no ext4 can be mounted here (needs root, mkfs.ext4, loop devices)"; }
  const std::string& path() const { return mount_; }
  std::string store() const { return mount_ + "/store"; }
  std::string backing_file(const char* name) const { return backing_ + "/" + name; }
  bool grow(const char* real_size) const;
  bool mount();
  void unmount();
  bool detach();  // `umount -l`
  // The device behind the mount, as /sys/fs/ext4 names it.
  std::string device_name() const;

 private:
  const std::string backing_, mount_;
  bool backed_ = false, mounted_ = false;
};

// A file system of a given kind in a sparse file.
class LoopVolume {
 public:
  // `kind`: "ext4", "xfs" or "btrfs".
  LoopVolume(const TempDirectory& directory, const std::string& kind);
  ~LoopVolume();
  LoopVolume(const LoopVolume&) = delete;
  LoopVolume& operator=(const LoopVolume&) = delete;

  bool mounted() const { return mounted_; }
  std::string obstacle() const {
    return "no " + kind_ + " can be mounted here (needs root, mkfs." + kind_ + ", loop devices, the kernel's support)";
  }
  const std::string& path() const { return mount_; }
  std::string operator/(const std::string& name) const { return mount_ + "/" + name; }

 private:
  const std::string kind_, mount_;
  bool mounted_ = false;
};

}  // namespace hoist::test
