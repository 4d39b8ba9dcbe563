// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <fmt/format.h>

#include <hoist/aio/detail/drive_queue_impl.hpp>
#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/owning_process.hpp>

namespace hoist::aio {

namespace {

constexpr std::uint64_t kBlockBytesMax = kGiB;  // one request's length is 31 bits for the kernel
constexpr std::uint64_t kSliceBytesMax = kGiB;  // one registered buffer
constexpr unsigned kQueueDepthMax = 4096;
constexpr unsigned kThreadCountMax = 256;

void check(const DriveQueueOptions& options) {
  if (options.block_bytes == 0 || options.block_bytes % File::kAlignment != 0 || options.block_bytes > kBlockBytesMax)
    throw UsageError(fmt::format("the block of a transfer must be a multiple of {} of at most 1 GiB, not {} bytes",
                                 format_bytes(File::kAlignment), options.block_bytes));
  if (options.answer_timeout <= Nanoseconds::zero()) throw UsageError("answer_timeout must be positive");
  if (options.queue_depth == 0 || options.queue_depth > kQueueDepthMax)
    throw UsageError(fmt::format("the queue depth must be 1 to {}, not {}", kQueueDepthMax, options.queue_depth));
  if (options.thread_count == 0 || options.thread_count > kThreadCountMax)
    throw UsageError(fmt::format("the thread count must be 1 to {}, not {}", kThreadCountMax, options.thread_count));
  for (const auto& slice : options.registered_memory) {
    if (slice.empty() || slice.size() > kSliceBytesMax)
      throw UsageError(fmt::format("memory is registered in pieces of 1 byte to 1 GiB, not {} bytes", slice.size()));
  }
}

void check_aligned(const detail::Request& request) {
  const auto aligned = [](std::uint64_t value) { return value % File::kAlignment == 0; };
  HOIST_ASSERT(aligned(request.offset_bytes) && aligned(request.length_bytes) &&
                   aligned(reinterpret_cast<std::uintptr_t>(request.data)),
               "misaligned transfer: offset {}, length {}, address {}", request.offset_bytes, request.length_bytes,
               static_cast<const void*>(request.data));
}

}  // namespace

DriveQueue::DriveQueue(const DriveQueueOptions& options) : DriveQueue(options, nullptr) {}

DriveQueue::DriveQueue(const DriveQueueOptions& options, std::unique_ptr<Backend> backend) {
  check(options);
  impl_ = std::make_unique<Impl>(options, backend ? std::move(backend) : make_backend(options));
}

DriveQueue::~DriveQueue() {
  if (impl_->stop()) return;
  // The kernel, or a stuck thread, may still use the queue's memory.
  leave_unfreed(impl_.release());
}

Completion DriveQueue::start(const detail::Request& request, Priority priority) {
  check_aligned(request);
  if (request.length_bytes == 0) return {};
  return impl_->enqueue(request, priority);
}

Completion DriveQueue::read(const File& file, std::uint64_t offset_bytes, std::span<std::byte> target,
                            Priority priority) {
  return start({Operation::read, &file, offset_bytes, target.data(), target.size()}, priority);
}

Completion DriveQueue::write(const File& file, std::uint64_t offset_bytes, std::span<const std::byte> source,
                             Priority priority) {
  // A block serves both directions; the memory of a write is only read.
  auto* data = const_cast<std::byte*>(source.data());
  return start({Operation::write, &file, offset_bytes, data, source.size()}, priority);
}

Completion DriveQueue::sync(const File& file) {
  return impl_->enqueue({Operation::sync, &file, 0, nullptr, 0}, Priority::foreground);
}

DriveQueue::Stats DriveQueue::stats() const { return impl_->stats(); }

bool DriveQueue::gave_up() const { return impl_->gave_up(); }

const std::string& DriveQueue::description() const { return impl_->description(); }

}  // namespace hoist::aio
