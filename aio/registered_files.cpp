// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/aio/detail/registered_files.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::aio::detail {

int RegisteredFiles::prepare(io_uring& ring) {
  std::array<int, kSlotCount> empty{};
  empty.fill(-1);
  const int code = -io_uring_register_files(&ring, empty.data(), kSlotCount);
  if (code > 0) return code;
  const MutexLock lock(mutex_);
  leaving_.reserve(kSlotCount);
  ring_ = &ring;
  return 0;
}

void RegisteredFiles::start() {
  const MutexLock lock(mutex_);
  io_thread_ = std::this_thread::get_id();
}

int RegisteredFiles::slot_of(const File& file) {
  const MutexLock lock(mutex_);
  if (ring_ == nullptr) return -1;
  if (const int slot = find(file.id()); slot >= 0) return slot;
  const int slot = find(0);
  if (slot < 0) return -1;
  int descriptor = file.descriptor();
  if (io_uring_register_files_update(ring_, static_cast<unsigned>(slot), &descriptor, 1) != 1) return -1;
  file_ids_[static_cast<std::size_t>(slot)] = file.id();
  file.observe(shared_from_this());
  return slot;
}

void RegisteredFiles::serve() {
  if (!asked_.load(std::memory_order_acquire)) return;
  const MutexLock lock(mutex_);
  asked_.store(false, std::memory_order_relaxed);
  for (const std::uint64_t file_id : leaving_) forget(file_id);
  leaving_.clear();
  forgotten_.notify_all();
}

void RegisteredFiles::detach() {
  const MutexLock lock(mutex_);
  // A kernel thread destroys the ring later; its files are released now.
  if (ring_ != nullptr) static_cast<void>(io_uring_unregister_files(ring_));
  ring_ = nullptr;
  file_ids_.fill(0);
  forgotten_.notify_all();
}

void RegisteredFiles::closing(std::uint64_t file_id) noexcept {
  MutexLock lock(mutex_);
  if (ring_ == nullptr || find(file_id) < 0) return;
  if (std::this_thread::get_id() == io_thread_) return forget(file_id);
  leaving_.push_back(file_id);
  asked_.store(true, std::memory_order_release);
  wake_up_->signal();
  forgotten_.wait_for(lock, kForgetTimeout, [&]() HOIST_REQUIRES(mutex_) { return find(file_id) < 0; });
}

int RegisteredFiles::find(std::uint64_t file_id) const {
  const auto found = std::find(file_ids_.begin(), file_ids_.end(), file_id);
  return found == file_ids_.end() ? -1 : static_cast<int>(found - file_ids_.begin());
}

void RegisteredFiles::forget(std::uint64_t file_id) {
  const int slot = find(file_id);
  if (slot < 0) return;
  int none = -1;
  static_cast<void>(io_uring_register_files_update(ring_, static_cast<unsigned>(slot), &none, 1));
  file_ids_[static_cast<std::size_t>(slot)] = 0;
}

}  // namespace hoist::aio::detail
