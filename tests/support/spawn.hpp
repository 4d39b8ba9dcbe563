// SPDX-License-Identifier: Apache-2.0
// tests/support/spawn.hpp - starts programs as processes of their own, mpirun among them.
#pragma once

#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace hoist::test {

// Starts `words`, a program and its arguments. Its output and its messages go to two files, which may be one file.
// `first`, if there is one, is called in the new process before the program starts.
inline pid_t spawn(std::vector<std::string> words, const std::string& out, const std::string& error,
                   const std::function<void()>& first = {}) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  for (const auto& [file, descriptor] : {std::pair(out, STDOUT_FILENO), std::pair(error, STDERR_FILENO)})
    ::dup2(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600), descriptor);
  if (first) first();
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(arguments[0], arguments.data());
  ::_exit(127);
}

// Lets Open MPI's mpirun work on any machine: as root, with more ranks than cores, unbound, without the system calls
// that containers forbid. hoist_mpi_run() in cmake/HoistModule.cmake sets the same variables for programs that CTest
// starts.
inline void set_open_mpi_variables() {
  for (const char* const name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                                 "OMPI_MCA_rmaps_base_oversubscribe", "OMPI_MCA_mpi_yield_when_idle"})
    ::setenv(name, "1", 1);
  ::setenv("OMPI_MCA_hwloc_base_binding_policy", "none", 1);
  ::setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 1);
}

}  // namespace hoist::test
