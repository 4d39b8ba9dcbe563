// SPDX-License-Identifier: Apache-2.0
// cli/storage.hpp - shared by `hoist bench io` and `hoist tune`: checks the directories that stand for drives, makes a
// scratch file in each, and describes them.
//
// Errors  UsageError, with the available and the required value and the remedy.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/measure/machine.hpp>
#include <hoist/measure/workload.hpp>

#include "progress.hpp"

namespace hoist::cli {

// "512KiB" for `option`: at least one byte.
std::uint64_t parse_size_option(const std::string& option, const std::string& text);
void check_block_bytes(const std::string& option, std::uint64_t bytes);
void check_queue_depth(const std::string& option, std::int64_t depth);
aio::BackendKind parse_engine_option(const std::string& text);  // "" is automatic

// Refuses directories that are missing, given twice, not writable, or too full for `bytes` in each.
void check_paths(const std::vector<std::string>& paths, std::uint64_t bytes);

// A scratch file and buffers for each path. Destroying it removes the files.
class StorageRig {
 public:
  // `file_bytes` in each directory, `buffer_bytes` of memory for each.
  StorageRig(const std::vector<std::string>& paths, std::uint64_t file_bytes, std::uint64_t buffer_bytes);

  // Writes every byte of the files, with a progress bar.
  void fill(const measure::StopFlag* stop, ProgressStyle style);
  // New queues over the same files and buffers.
  std::vector<std::unique_ptr<measure::Drive>> drives(const measure::DriveOptions& options) const;

  const std::vector<measure::Storage>& storage() const { return storage_; }
  platform::PageKind page_kind() const;
  // Circumstances that change the meaning of the figures: no O_DIRECT, no huge pages, two paths on one drive.
  std::vector<std::string> warnings() const;

 private:
  std::vector<std::string> paths_;
  std::vector<std::unique_ptr<measure::ScratchFile>> files_;
  std::vector<std::unique_ptr<measure::BlockBuffers>> buffers_;
  std::vector<measure::Storage> storage_;
  std::vector<std::vector<int>> cpus_;  // of each path's NUMA node
};

std::vector<measure::Drive*> pointers(const std::vector<std::unique_ptr<measure::Drive>>& drives);

// The actual kind of a queue (--engine): "io_uring", "threads" or "null".
std::string engine_name(const aio::DriveQueue& queue);
std::string drive_title(const std::string& path, const measure::Storage& storage);  // "/data (ext4 on nvme0n1)"
nlohmann::ordered_json machine_json();
nlohmann::ordered_json storage_json(const measure::Storage& storage);

}  // namespace hoist::cli
