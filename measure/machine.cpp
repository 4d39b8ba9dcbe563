// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <system_error>

#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/core/processors.hpp>
#include <hoist/measure/machine.hpp>

namespace hoist::measure {

namespace fs = std::filesystem;

Storage storage_of(const std::string& directory) {
  std::error_code failed;
  if (!fs::exists(directory, failed)) return {};
  const platform::FileSystem file_system = platform::file_system_of(directory);
  return {.file_system = file_system, .drive = platform::drive_of(file_system.drive)};
}

MachineDescription describe_machine() {
  MachineDescription facts;
  facts.processor = field_of("/proc/cpuinfo", "model name").value_or("");
  facts.processors = static_cast<unsigned>(current_processors().size());
  facts.memory_bytes =
      static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  utsname name{};
  if (::uname(&name) == 0) facts.kernel = fmt::format("{} {}", name.sysname, name.release);
  facts.transparent_huge_pages = chosen_of(first_line("/sys/kernel/mm/transparent_hugepage/enabled").value_or(""));
  return facts;
}

}  // namespace hoist::measure
