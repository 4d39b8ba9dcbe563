// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <stdexcept>

#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::test {

TempDirectory::TempDirectory() : TempDirectory(std::filesystem::current_path()) {}

TempDirectory::TempDirectory(const std::filesystem::path& parent) {
  std::string pattern = (parent / "hoist-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary directory can be made: " + pattern);
  path_ = pattern;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace hoist::test
