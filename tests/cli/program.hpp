// SPDX-License-Identifier: Apache-2.0
// tests/cli/program.hpp - runs the program `hoist` as a user would.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>

#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::test {

struct ProgramResult {
  int exit_code = -1;
  std::string output;
  std::string errors;
};

class ProgramTest : public ::testing::Test {
 protected:
  // `arguments` goes through the shell; the test's directory is its working directory.
  ProgramResult run(const std::string& arguments) const {
    const std::string command = "cd '" + directory_.path().string() + "' && '" HOIST_PROGRAM "' " + arguments + " >'" +
                                path("out") + "' 2>'" + path("err") + "' </dev/null";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents_of(path("out")), contents_of(path("err"))};
  }

  std::string path(const std::string& name) const { return directory_ / name; }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path(name)) << text; }
  nlohmann::json json_of(const std::string& name) const { return nlohmann::json::parse(contents_of(path(name))); }

  TempDirectory directory_;  // of its own for each test
};

}  // namespace hoist::test
