// SPDX-License-Identifier: Apache-2.0
// tests/support/machine_of_files.hpp - for tests that write what a machine's kernel says in /proc and /sys.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::test {

class MachineOfFiles : public ::testing::Test {
 protected:
  void put(const std::filesystem::path& name, const std::string& text) const {
    const std::filesystem::path file = directory_.path() / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  std::string mount_point(const std::string& name) const { return directory_ / name; }

  TempDirectory directory_;
};

}  // namespace hoist::test
