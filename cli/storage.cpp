// SPDX-License-Identifier: Apache-2.0
#include "storage.hpp"

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>

#include <fmt/format.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/topology.hpp>

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kBlockBytesMax = kGiB;
constexpr std::int64_t kQueueDepthMax = 4096;

}  // namespace

std::uint64_t parse_size_option(const std::string& option, const std::string& text) {
  const auto bytes = parse_bytes(text);
  if (!bytes || *bytes == 0)
    throw UsageError(fmt::format("{} {} is not a number of bytes; write it as 8GiB, 512KiB or 1048576", option, text));
  return *bytes;
}

void check_block_bytes(const std::string& option, std::uint64_t bytes) {
  if (bytes % kBlockAlignment != 0 || bytes > kBlockBytesMax) {
    throw UsageError(fmt::format("{} {}: direct transfers need a multiple of 4 KiB, of at most 1 GiB; the next is {}",
                                 option, bytes,
                                 std::clamp(round_up(bytes, kBlockAlignment), kBlockAlignment, kBlockBytesMax)));
  }
}

void check_queue_depth(const std::string& option, std::int64_t depth) {
  if (depth < 1 || depth > kQueueDepthMax)
    throw UsageError(fmt::format("{} {}: must be 1 to {}; 8 to 32 suits most drives", option, depth, kQueueDepthMax));
}

aio::BackendKind parse_engine_option(const std::string& text) {
  if (text.empty()) return aio::BackendKind::automatic;
  if (text == "io_uring") return aio::BackendKind::io_uring;
  if (text == "threads") return aio::BackendKind::threads;
  if (text == "null") return aio::BackendKind::null;
  throw UsageError(fmt::format("--engine {}: must be io_uring, threads or null", text));
}

void check_paths(const std::vector<std::string>& paths, std::uint64_t bytes) {
  std::map<std::string, std::string> seen;                // canonical -> as given
  std::map<std::string, std::vector<std::string>> there;  // on each file system
  for (const std::string& path : paths) {
    measure::check_scratch_directory(path);
    std::error_code ignored;
    const auto canonical = std::filesystem::canonical(path, ignored).string();
    if (const auto [at, fresh] = seen.emplace(canonical, path); !fresh) {
      throw UsageError(
          fmt::format("--path {}: is the same directory as --path {}; name each drive once", path, at->second));
    }
    there[file_system_key(path)].push_back(path);
  }
  for (const auto& [file_system, directories] : there) measure::check_scratch_space(directories, bytes);
}

StorageRig::StorageRig(const std::vector<std::string>& paths, std::uint64_t file_bytes, std::uint64_t buffer_bytes)
    : paths_(paths) {
  const platform::Topology topology = platform::Topology::detect();
  for (const std::string& path : paths) {
    storage_.push_back(measure::storage_of(path));
    const int node = topology.node_of_path(path).value_or(-1);
    cpus_.push_back(topology.cpus_of(node));
    files_.push_back(std::make_unique<measure::ScratchFile>(path, file_bytes));
    buffers_.push_back(std::make_unique<measure::BlockBuffers>(buffer_bytes, node));
  }
}

void StorageRig::fill(const measure::StopFlag* stop, ProgressStyle style) {
  std::vector<measure::ScratchFile*> files;
  std::uint64_t total = 0;
  for (const auto& file : files_) {
    files.push_back(file.get());
    total += file->bytes();
  }
  Progress progress({.what = "writing the scratch files,", .total = total, .style = style});
  measure::fill_files(files, stop, [&](std::uint64_t done) { progress.update(done); });
}

std::vector<std::unique_ptr<measure::Drive>> StorageRig::drives(const measure::DriveOptions& options) const {
  std::vector<std::unique_ptr<measure::Drive>> drives;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    measure::DriveOptions own = options;
    own.cpus = cpus_[i];
    drives.push_back(std::make_unique<measure::Drive>(*files_[i], *buffers_[i], own));
  }
  return drives;
}

platform::PageKind StorageRig::page_kind() const { return buffers_.front()->page_kind(); }

std::vector<std::string> StorageRig::warnings() const {
  std::vector<std::string> warnings;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    if (files_[i]->file().is_direct()) continue;
    warnings.push_back(
        fmt::format("{} has no O_DIRECT: the benchmark measures the page cache (memory) there, not a drive",
                    drive_title(paths_[i], storage_[i])));
  }
  std::map<std::string, std::string> first_on_drive;  // device -> path
  for (std::size_t i = 0; i < paths_.size(); ++i) {
    const std::string device = storage_[i].device();
    if (device.empty()) continue;
    const auto [first, fresh] = first_on_drive.emplace(device, paths_[i]);
    if (!fresh) warnings.push_back(fmt::format("{} and {} share one drive ({})", first->second, paths_[i], device));
  }
  if (page_kind() == platform::PageKind::normal) {
    warnings.push_back(
        "no huge pages: a 1 MiB block is 256 pieces of memory, more than most drives take in one request; expect less "
        "speed and several times the processor time. `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, or "
        "reserve pages with vm.nr_hugepages");
  }
  return warnings;
}

std::vector<measure::Drive*> pointers(const std::vector<std::unique_ptr<measure::Drive>>& drives) {
  std::vector<measure::Drive*> result;
  for (const auto& drive : drives) result.push_back(drive.get());
  return result;
}

std::string engine_name(const aio::DriveQueue& queue) {
  const std::string& description = queue.description();
  return description.substr(0, description.find(' '));
}

std::string drive_title(const std::string& path, const measure::Storage& storage) {
  if (storage.file_system.type.empty()) return path;
  const std::string model = storage.drive ? storage.drive->model : "";
  return fmt::format("{} ({} on {}{})", path, storage.file_system.type, storage.device(),
                     model.empty() ? "" : ", " + model);
}

Json machine_json() {
  const measure::MachineDescription facts = measure::describe_machine();
  return {{"processor", facts.processor},
          {"processors", facts.processors},
          {"memory_bytes", facts.memory_bytes},
          {"kernel", facts.kernel},
          {"transparent_huge_pages", facts.transparent_huge_pages},
          {"hoist", HOIST_VERSION}};
}

Json storage_json(const measure::Storage& storage) {
  const platform::DriveFacts drive = storage.drive.value_or(platform::DriveFacts{});
  return {{"filesystem", storage.file_system.type},
          {"device", storage.device()},
          {"model", drive.model},
          {"scheduler", drive.scheduler},
          {"rotational", drive.rotational},
          {"request_bytes_max", drive.request_kib_max.value_or(0) * kKiB},
          {"request_segments_max", drive.segments_max.value_or(0)}};
}

}  // namespace hoist::cli
