// SPDX-License-Identifier: Apache-2.0
// tests/support/meeting.hpp - the ranks of a job on one machine wait for each other without MPI, which cannot be used
// after a rank has failed. The launcher ends the job with the first process that exits, so none may exit before all
// have printed.
#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <unistd.h>

namespace hoist::test {

// Returns when `ranks` processes of this job have called it with `name`, or after two minutes, when one must have died.
// The launcher is the parent of them all.
inline void meet(const std::string& name, int rank, int ranks) {
  namespace fs = std::filesystem;
  const fs::path place = fs::temp_directory_path() / ("hoist-job-" + std::to_string(::getppid()) + "-" + name);
  fs::create_directories(place);
  std::ofstream(place / std::to_string(rank)) << "here";
  std::error_code error;
  for (int polls = 0; polls < 12000; ++polls) {
    int here = 0;
    for (fs::directory_iterator entry(place, error), end; !error && entry != end; entry.increment(error)) ++here;
    if (error || here >= ranks) break;  // gone: another one saw them all before
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  fs::remove_all(place, error);
}

}  // namespace hoist::test
