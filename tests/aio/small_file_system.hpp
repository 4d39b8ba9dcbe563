// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace hoist::aio {

// A small file system of a given kind in a file, mounted for one test.
class SmallFileSystem {
 public:
  SmallFileSystem(const std::string& directory, const std::string& type) : mount_point_(directory + "/mounted") {
    const std::string image = directory + "/image";
    std::ofstream(image).flush();
    std::filesystem::resize_file(image, 16 * 1024 * 1024);
    std::filesystem::create_directory(mount_point_);
    const std::string make = "mkfs." + type + " -q -F " + image + " >/dev/null 2>&1";
    const std::string mount = "mount -o loop " + image + " " + mount_point_ + " >/dev/null 2>&1";
    mounted_ = std::system(make.c_str()) == 0 && std::system(mount.c_str()) == 0;
  }
  ~SmallFileSystem() {
    // Lazily where a quarantined ring still holds a file.
    const std::string unmount = "umount " + mount_point_ + " 2>/dev/null || umount -l " + mount_point_;
    if (mounted_) static_cast<void>(std::system(unmount.c_str()));
  }
  SmallFileSystem(const SmallFileSystem&) = delete;
  SmallFileSystem& operator=(const SmallFileSystem&) = delete;
  bool mounted() const { return mounted_; }
  const std::string& path() const { return mount_point_; }
  std::string operator/(const std::string& name) const { return mount_point_ + "/" + name; }

 private:
  std::string mount_point_;
  bool mounted_ = false;
};

}  // namespace hoist::aio
