// SPDX-License-Identifier: Apache-2.0
// measure/machine.hpp - the drive of a directory, and the machine, which every measurement must name.
//
// Errors     None: an unknown value is an empty text or 0.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <hoist/platform/drive.hpp>

namespace hoist::measure {

struct Storage {
  platform::FileSystem file_system;
  std::optional<platform::DriveFacts> drive;  // nullopt on a network file system, in memory, and on several drives
  std::string device() const { return drive ? drive->name : file_system.source; }  // empty: unknown
};
Storage storage_of(const std::string& directory);

struct MachineDescription {
  std::string processor;
  unsigned processors = 0;  // that this process may use
  std::uint64_t memory_bytes = 0;
  std::string kernel;
  std::string transparent_huge_pages;  // the setting in effect: "always", "madvise", "never"
};
MachineDescription describe_machine();

}  // namespace hoist::measure
