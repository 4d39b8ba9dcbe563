// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <fmt/format.h>

#include <hoist/aio/detail/engine_impl.hpp>
#include <hoist/aio/engine.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>

namespace hoist::aio {

namespace {

constexpr std::uint64_t kBlockBytesMax = kGiB;  // one request's length is 31 bits for the kernel
constexpr std::uint64_t kSliceBytesMax = kGiB;  // one registered buffer
constexpr unsigned kQueueDepthMax = 4096;
constexpr unsigned kThreadCountMax = 256;

void check(const EngineOptions& options) {
  if (options.block_bytes == 0 || options.block_bytes % File::kAlignment != 0 || options.block_bytes > kBlockBytesMax)
    throw UsageError(fmt::format("the block of a transfer must be a multiple of {} of at most 1 GiB, not {} bytes",
                                 format_bytes(File::kAlignment), options.block_bytes));
  if (options.queue_depth == 0 || options.queue_depth > kQueueDepthMax)
    throw UsageError(fmt::format("the queue depth must be 1 to {}, not {}", kQueueDepthMax, options.queue_depth));
  if (options.thread_count == 0 || options.thread_count > kThreadCountMax)
    throw UsageError(fmt::format("the thread count must be 1 to {}, not {}", kThreadCountMax, options.thread_count));
  for (const auto& slice : options.registered_memory) {
    if (slice.empty() || slice.size() > kSliceBytesMax)
      throw UsageError(fmt::format("memory is registered in pieces of 1 byte to 1 GiB, not {} bytes", slice.size()));
  }
}

const EngineOptions& checked(const EngineOptions& options) {
  check(options);
  return options;
}

void check_aligned(std::uint64_t offset_bytes, const std::byte* data, std::size_t length_bytes) {
  HOIST_ASSERT(offset_bytes % File::kAlignment == 0 && length_bytes % File::kAlignment == 0 &&
                   reinterpret_cast<std::uintptr_t>(data) % File::kAlignment == 0,
               "misaligned transfer: offset {}, length {}, address {}", offset_bytes, length_bytes,
               static_cast<const void*>(data));
}

}  // namespace

Engine::Engine(const EngineOptions& options) : Engine(options, make_backend(checked(options))) {}

Engine::Engine(const EngineOptions& options, std::unique_ptr<Backend> backend) {
  check(options);
  HOIST_ASSERT(backend != nullptr);
  impl_ = std::make_unique<Impl>(options, std::move(backend));
}

Engine::~Engine() {
  if (impl_->stop()) return;
  // The kernel, or a stuck thread, may still use what the engine owns. Kept reachable and never used again.
  static_cast<void>(detail::quarantine(impl_.release()));
}

Completion Engine::read(const File& file, std::uint64_t offset_bytes, std::span<std::byte> target, Priority priority) {
  check_aligned(offset_bytes, target.data(), target.size());
  if (target.empty()) return {};
  return impl_->enqueue({Operation::read, &file, offset_bytes, target.data(), target.size()}, priority);
}

Completion Engine::write(const File& file, std::uint64_t offset_bytes, std::span<const std::byte> source,
                         Priority priority) {
  check_aligned(offset_bytes, source.data(), source.size());
  if (source.empty()) return {};
  // A block serves both directions; the memory of a write is only read.
  auto* data = const_cast<std::byte*>(source.data());
  return impl_->enqueue({Operation::write, &file, offset_bytes, data, source.size()}, priority);
}

Completion Engine::sync(const File& file) {
  return impl_->enqueue({Operation::sync, &file, 0, nullptr, 0}, Priority::foreground);
}

Engine::Stats Engine::stats() const { return impl_->stats(); }

const std::string& Engine::description() const { return impl_->description(); }

}  // namespace hoist::aio
