// SPDX-License-Identifier: Apache-2.0
// tiers/scratch.hpp - space on a store's drives for bytes that no commit depends on.
//
// One file on each drive, beside the store's data and striped in the same way. Its name is removed before anything is
// written, so the system frees the space when the process ends, killed or not. The file has no checksums: whoever reads
// bytes verifies them.
//
// Threading  Any thread may start transfers.
// Memory     A transfer borrows its memory until it is done.
// Errors     BudgetError, tier "nvme", if a file system is too small; IoError.
// Main path  write -> StripedFile; read -> StripedFile.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <hoist/aio/striped_file.hpp>
#include <hoist/core/trace.hpp>

namespace hoist::tiers {

namespace detail {
class Transfers;
}

struct ScratchOptions {
  std::vector<std::string> paths;  // one for each drive, while the files have names; files that are there are removed
  aio::StripeLayout layout = aio::StripeLayout::one_drive();
  std::uint64_t bytes = 0;  // reserved; a multiple of 4 KiB
  Trace* trace = nullptr;   // receives transfers
};

class Scratch {
 public:
  // Pre: no other process uses these paths; one queue for each of them, which outlives this object.
  Scratch(const ScratchOptions& options, std::span<aio::DriveQueue* const> queues);
  ~Scratch();  // waits for transfers
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // As in aio::DriveQueue. The trace shows the transfer under `name`.
  Completion read(std::uint64_t offset_bytes, std::span<std::byte> target, aio::Priority priority,
                  const std::string& name);
  Completion write(std::uint64_t offset_bytes, std::span<const std::byte> source, aio::Priority priority,
                   const std::string& name);

  // Where a byte lies, for an error's text.
  struct Place {
    std::string path;
    std::uint64_t offset_bytes = 0;
  };
  Place place(std::uint64_t offset_bytes) const;

 private:
  Trace* const trace_;
  std::unique_ptr<aio::StripedFile> file_;
  std::unique_ptr<detail::Transfers> transfers_;
};

}  // namespace hoist::tiers
