// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/error.hpp>
#include <hoist/tiers/detail/store_files.hpp>
#include <hoist/tiers/detail/transfers.hpp>
#include <hoist/tiers/scratch.hpp>

namespace hoist::tiers {

namespace {

// A crash before the name is gone leaves an empty file behind, which the next start that spills gradients removes.
aio::File make_file(const std::string& path, std::uint64_t bytes) {
  detail::remove_file(path);
  aio::File file(path, {.mode = aio::OpenMode::create});
  detail::remove_file(path);
  const std::string directory = path.substr(0, path.find_last_of('/'));
  const detail::SpaceNeed need{directory, bytes, "nvme_path",
                               "gradients that do not fit pinned memory (hoist.gradient_spill),",
                               ", or hoist.pinned_memory"};
  if (const auto free_bytes = detail::free_bytes(directory); free_bytes < bytes)
    throw detail::too_little_space(need, free_bytes);
  detail::reserve(file, bytes, need);
  return file;
}

}  // namespace

Scratch::Scratch(const ScratchOptions& options, std::span<aio::DriveQueue* const> queues)
    : trace_(options.trace), transfers_(std::make_unique<detail::Transfers>()) {
  std::vector<aio::StripeDrive> files;
  for (unsigned d = 0; d < options.layout.drive_count(); ++d)
    files.push_back({queues[d], make_file(options.paths[d], options.layout.drive_bytes(d, options.bytes))});
  file_ = std::make_unique<aio::StripedFile>(options.layout, std::move(files));
}

Scratch::~Scratch() { detail::drain_or_leak(transfers_, file_->file(0).path(), file_); }

Completion Scratch::read(std::uint64_t offset_bytes, std::span<std::byte> target, aio::Priority priority,
                         const std::string& name) {
  return detail::drawn(trace_, TraceRow::nvme_read, name, target.size(),
                       transfers_->read([&] { return file_->read(offset_bytes, target, priority); }));
}

Completion Scratch::write(std::uint64_t offset_bytes, std::span<const std::byte> source, aio::Priority priority,
                          const std::string& name) {
  return detail::drawn(trace_, TraceRow::nvme_write, name, source.size(),
                       transfers_->write([&] { return file_->write(offset_bytes, source, priority); }));
}

Scratch::Place Scratch::place(std::uint64_t offset_bytes) const {
  const aio::StripeLayout::DriveOffset at = file_->layout().place(offset_bytes);
  return {file_->file(at.drive).path(), at.offset_bytes};
}

}  // namespace hoist::tiers
