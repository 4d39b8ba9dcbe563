// SPDX-License-Identifier: Apache-2.0
// tests/cli/storage_program.hpp - runs `hoist bench io` and `hoist tune` on directories of the test's own.
#pragma once

#include <sys/resource.h>

#include <hoist/measure/scratch_file.hpp>

#include "program.hpp"

namespace hoist::test {

class StorageProgramTest : public ProgramTest {
 protected:
  StorageProgramTest() { std::filesystem::create_directory(path("drive")); }

  // The bytes that the kernel has charged this process's children for reading from and writing to drives.
  struct Traffic {
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
  };
  static Traffic traffic() {
    rusage usage{};
    ::getrusage(RUSAGE_CHILDREN, &usage);
    return {static_cast<std::uint64_t>(usage.ru_inblock) * 512, static_cast<std::uint64_t>(usage.ru_oublock) * 512};
  }

  bool drive_is_empty() const { return std::filesystem::is_empty(path("drive")); }
  std::filesystem::path scratch_data() const {
    return std::filesystem::path(path("drive")) / measure::ScratchFile::kDirectoryName /
           measure::ScratchFile::kDataName;
  }
};

}  // namespace hoist::test
