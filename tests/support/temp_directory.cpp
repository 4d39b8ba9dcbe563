// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <stdexcept>

#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::test {

namespace {

constexpr const char* kParentVariable = "HOIST_TEST_DIRECTORY";

std::filesystem::path default_parent() {
  const char* const parent = std::getenv(kParentVariable);
  return parent == nullptr ? std::filesystem::current_path() : std::filesystem::path(parent);
}

}  // namespace

TempDirectory::TempDirectory() : TempDirectory(default_parent()) {}

void TempDirectory::hold_those_of_children() {
  ::setenv(kParentVariable, path_.c_str(), /*overwrite=*/1);
  holds_those_of_children_ = true;
}

TempDirectory::TempDirectory(const std::filesystem::path& parent) {
  std::string pattern = (parent / "hoist-test-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary directory can be made: " + pattern);
  path_ = pattern;
}

TempDirectory::~TempDirectory() {
  if (holds_those_of_children_) ::unsetenv(kParentVariable);
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::filesystem::path scratch_in_memory() {
  const std::filesystem::path memory = "/dev/shm";
  std::error_code ignored;
  return std::filesystem::is_directory(memory, ignored) ? memory : std::filesystem::current_path();
}

}  // namespace hoist::test
