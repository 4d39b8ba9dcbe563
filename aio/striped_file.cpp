// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <utility>

#include <hoist/aio/detail/transfer.hpp>
#include <hoist/aio/striped_file.hpp>
#include <hoist/core/assert.hpp>

namespace hoist::aio {

namespace {

std::vector<StripeDrive> single(DriveQueue& queue, File file) {
  std::vector<StripeDrive> drives;
  drives.push_back({&queue, std::move(file)});
  return drives;
}

}  // namespace

StripedFile::StripedFile(StripeLayout layout, std::vector<StripeDrive> drives)
    : layout_(std::move(layout)), drives_(std::move(drives)) {
  HOIST_ASSERT(drives_.size() == layout_.drive_count(), "{} files for {} drives", drives_.size(),
               layout_.drive_count());
  for (const StripeDrive& drive : drives_) HOIST_ASSERT(drive.queue != nullptr, "no queue for {}", drive.file.path());
}

StripedFile::StripedFile(DriveQueue& queue, File file)
    : StripedFile(StripeLayout::one_drive(), single(queue, std::move(file))) {}

Completion StripedFile::read(std::uint64_t offset_bytes, std::span<std::byte> target, Priority priority) {
  if (drives_.size() == 1) return drives_.front().queue->read(drives_.front().file, offset_bytes, target, priority);
  return start(Operation::read, offset_bytes, target, target.size(), priority);
}

Completion StripedFile::read_padded(std::uint64_t offset_bytes, std::span<std::byte> target, std::uint64_t needed_bytes,
                                    Priority priority) {
  return start(Operation::read, offset_bytes, target, needed_bytes, priority);
}

Completion StripedFile::write(std::uint64_t offset_bytes, std::span<const std::byte> source, Priority priority) {
  if (drives_.size() == 1) return drives_.front().queue->write(drives_.front().file, offset_bytes, source, priority);
  // As in DriveQueue::write: the memory of a write is only read.
  return start(Operation::write, offset_bytes, {const_cast<std::byte*>(source.data()), source.size()}, source.size(),
               priority);
}

Completion StripedFile::start(Operation operation, std::uint64_t offset_bytes, std::span<std::byte> memory,
                              std::uint64_t needed_bytes, Priority priority) {
  std::array<Completion, StripeLayout::kDriveCountMax> parts;
  std::size_t count = 0;
  for (unsigned d = 0; d < drives_.size(); ++d) {
    const std::uint64_t begin = layout_.drive_bytes(d, offset_bytes);
    const std::uint64_t end = layout_.drive_bytes(d, offset_bytes + memory.size());
    if (begin == end) continue;
    StripeDrive& drive = drives_[d];
    parts[count++] = drive.queue->start({.operation = operation,
                                         .file = &drive.file,
                                         .offset_bytes = begin,
                                         .data = memory.data(),
                                         .length_bytes = end - begin,
                                         .share = {&layout_, d, offset_bytes},
                                         .optional_bytes = end - layout_.drive_bytes(d, offset_bytes + needed_bytes)},
                                        priority);
  }
  return when_all(std::span(parts).first(count));
}

Completion StripedFile::sync() {
  std::array<Completion, StripeLayout::kDriveCountMax> parts;
  for (std::size_t d = 0; d < drives_.size(); ++d) parts[d] = drives_[d].queue->sync(drives_[d].file);
  return when_all(std::span(parts).first(drives_.size()));
}

bool StripedFile::gave_up() const {
  return std::ranges::any_of(drives_, [](const StripeDrive& drive) { return drive.queue->gave_up(); });
}

std::vector<std::string> StripedFile::data_paths() const {
  std::vector<std::string> paths;
  for (const StripeDrive& drive : drives_) paths.push_back(drive.file.path());
  return paths;
}

}  // namespace hoist::aio
