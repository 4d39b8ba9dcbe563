// SPDX-License-Identifier: Apache-2.0
// core/kernel_files.hpp - reading the small text files of /proc and /sys.
//
// Threading  Any.
// Errors     None: what cannot be read is missing from the result.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace hoist {

// The first line, without the newline and without spaces at its end.
std::optional<std::string> first_line(const std::filesystem::path& file);
// The number that the first line consists of; nullopt for "max" and anything else.
std::optional<std::uint64_t> number_in(const std::filesystem::path& file);
// The rest of the line that begins with `key` and a colon ("MemTotal:  16 kB" -> "16 kB"). Spaces may follow the key.
std::optional<std::string> field_of(const std::filesystem::path& file, const std::string& key);
// The same for a value in kB.
std::optional<std::uint64_t> field_bytes(const std::filesystem::path& file, const std::string& key);
// The choice that is in effect: "none [mq-deadline] kyber" -> "mq-deadline"; all of a text without brackets.
std::string chosen_of(const std::string& choices);

// How many numbers a list such as "0-3,8" names; 0 if it is not such a list.
unsigned size_of_list(const std::string& list);

std::vector<std::string> split(const std::string& text, char separator);

struct Mount {
  std::string device;                // "259:2": major and minor number
  std::string root;                  // what of the file system is mounted
  std::string point;                 // where
  std::string type;                  // "ext4"
  std::string source;                // "/dev/nvme0n1p1"
  std::vector<std::string> options;  // of the mount and of the file system
};
// In the order in which they were mounted. `proc`: the root of procfs.
std::vector<Mount> mounts(const std::filesystem::path& proc = "/proc");
// The mount that `path`, or what exists of it, is on.
std::optional<Mount> mount_of(const std::filesystem::path& path, const std::filesystem::path& proc = "/proc");
// Equal for two directories of one file system. (stat() gives subvolumes of btrfs device numbers of their own.) Empty:
// stat() failed, and errno says why.
std::string file_system_key(const std::filesystem::path& path);

}  // namespace hoist
