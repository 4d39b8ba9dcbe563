// SPDX-License-Identifier: Apache-2.0
// tests/support/python.hpp - the Python that tests compare files with: $HOIST_TEST_PYTHON, else python3.
#pragma once

#include <cstdlib>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

namespace hoist::test {

// Runs `program` in `directory`; its output goes to the test's. Returns the exit status as std::system does.
inline int run_python(const std::string& directory, const std::string& program) {
  const char* chosen = std::getenv("HOIST_TEST_PYTHON");
  const std::string python = chosen != nullptr ? chosen : "python3";
  std::ofstream(directory + "/program.py") << program;
  return std::system(("cd '" + directory + "' && '" + python + "' program.py").c_str());
}

// Skips the test, in its own body or in SetUp, where these modules are not installed.
#define HOIST_NEEDS_PYTHON(directory, modules)                                                                 \
  do {                                                                                                         \
    if (::hoist::test::run_python(                                                                             \
            directory, "import sys\ntry:\n  import " modules "\nexcept ImportError:\n  sys.exit(1)\n") != 0) { \
      GTEST_SKIP() << "no Python with " modules " (pip install them; HOIST_TEST_PYTHON names an interpreter)"; \
    }                                                                                                          \
  } while (false)

}  // namespace hoist::test
