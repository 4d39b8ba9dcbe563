// SPDX-License-Identifier: Apache-2.0
// measure/machine.hpp - the drive of a directory, and the machine, which every measurement must name.
//
// Errors     None: an unknown value is an empty text or 0.
#pragma once

#include <cstdint>
#include <string>

namespace hoist::measure {

struct DriveFacts {
  std::string filesystem;  // "ext4"
  std::string device;      // "nvme0n1", "/dev/vda" where there is no disk of that name, "tmpfs"
  std::string model;
  std::string scheduler;  // "none", "mq-deadline"
  bool rotational = false;
  std::uint64_t request_bytes_max = 0;     // larger blocks are split by the kernel
  std::uint64_t request_segments_max = 0;  // more pieces of memory are split too: 1 MiB on 4 KiB pages has 256
};
DriveFacts drive_facts(const std::string& directory);

struct MachineDescription {
  std::string processor;
  unsigned processors = 0;  // that this process may use
  std::uint64_t memory_bytes = 0;
  std::string kernel;
  std::string transparent_huge_pages;  // the setting in effect: "always", "madvise", "never"
};
MachineDescription machine_facts();

}  // namespace hoist::measure
