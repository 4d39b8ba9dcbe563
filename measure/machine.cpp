// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include <fmt/format.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <hoist/measure/machine.hpp>

namespace hoist::measure {

namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::uint64_t number(const fs::path& path) {
  std::uint64_t value = 0;
  std::ifstream(path) >> value;
  return value;
}

// "mq-deadline [none] bfq" -> "none".
std::string chosen(const std::string& choices) {
  const auto begin = choices.find('[');
  const auto end = choices.find(']', begin);
  return end == std::string::npos ? choices : choices.substr(begin + 1, end - begin - 1);
}

// Type and source of the mount that holds `device`, from /proc/self/mountinfo:
// "36 35 98:0 /root /point options - type source options".
void read_mount(dev_t device, DriveFacts& facts) {
  const std::string wanted = fmt::format("{}:{}", major(device), minor(device));
  std::ifstream file("/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string id, parent, number_text, word;
    fields >> id >> parent >> number_text;
    if (number_text != wanted) continue;
    while (fields >> word && word != "-") {
    }
    fields >> facts.filesystem >> facts.device;
    return;
  }
}

// A partition's queue is its disk's.
fs::path queue_of(const fs::path& block_device) {
  std::error_code ignored;
  if (fs::exists(block_device / "queue", ignored)) return block_device / "queue";
  return block_device.parent_path() / "queue";
}

}  // namespace

DriveFacts drive_facts(const std::string& directory) {
  DriveFacts facts;
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) return facts;
  read_mount(info.st_dev, facts);
  std::error_code error;
  const fs::path device =
      fs::canonical(fmt::format("/sys/dev/block/{}:{}", major(info.st_dev), minor(info.st_dev)), error);
  if (error) return facts;
  const fs::path queue = queue_of(device);
  facts.device = device.filename();
  facts.model = first_line(queue.parent_path() / "device/model");
  facts.scheduler = chosen(first_line(queue / "scheduler"));
  facts.rotational = number(queue / "rotational") != 0;
  facts.request_bytes_max = number(queue / "max_sectors_kb") * 1024;
  facts.request_segments_max = number(queue / "max_segments");
  return facts;
}

MachineDescription machine_facts() {
  MachineDescription facts;
  std::ifstream processors("/proc/cpuinfo");
  for (std::string line; std::getline(processors, line);) {
    if (!line.starts_with("model name")) continue;
    const auto colon = line.find(':');
    if (colon != std::string::npos && colon + 2 <= line.size()) facts.processor = line.substr(colon + 2);
    break;
  }
  cpu_set_t usable;
  if (::sched_getaffinity(0, sizeof usable, &usable) == 0) facts.processors = static_cast<unsigned>(CPU_COUNT(&usable));
  facts.memory_bytes =
      static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  utsname name{};
  if (::uname(&name) == 0) facts.kernel = fmt::format("{} {}", name.sysname, name.release);
  facts.transparent_huge_pages = chosen(first_line("/sys/kernel/mm/transparent_hugepage/enabled"));
  return facts;
}

}  // namespace hoist::measure
