// SPDX-License-Identifier: Apache-2.0
// measure/subprocess.hpp - runs another program and reads its output.
//
// Errors     IoError if it cannot be started; Interrupted, after ending the program too.
#pragma once

#include <string>
#include <vector>

#include <hoist/measure/interruption.hpp>

namespace hoist::measure {

struct Subprocess {
  std::vector<std::string> command;      // searched for along PATH
  std::vector<std::string> environment;  // "NAME=value", added to ours or in place of ours
};

struct SubprocessResult {
  int exit_code = -1;  // 128 + signal when it was killed
  std::string output;
  std::string errors;
};

// Where `program` is along PATH; empty if it is nowhere.
std::string find_program(const std::string& program);

SubprocessResult run_subprocess(const Subprocess& process, const StopFlag* stop);

}  // namespace hoist::measure
