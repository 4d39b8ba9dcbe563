// SPDX-License-Identifier: Apache-2.0
#include "window.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

namespace hoist::python {
namespace {

constexpr std::uint64_t kPage = 4 * kKiB;
constexpr std::uint64_t kHugePage = 2 * kMiB;
// A closed window takes one mapping for each repetition of the poison, and Linux allows a process 65530 of them.
constexpr std::uint64_t kMappingsWanted = 16384;
constexpr std::uint64_t kPoisonBytesMax = 64 * kMiB;

[[noreturn]] void fail(const char* operation, std::uint64_t bytes) {
  throw IoError({.operation = operation, .path = "memory", .length_bytes = bytes, .code = errno},
                "gathered weights need address space and memory: lower hoist.device_memory, or raise vm.max_map_count");
}

std::byte* reserve(std::uint64_t bytes) {
  // Huge pages need an address of their own alignment.
  const std::uint64_t extra = bytes >= kHugePage ? kHugePage : 0;
  void* at = mmap(nullptr, bytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) fail("mmap", bytes);
  if (extra == 0) return static_cast<std::byte*>(at);
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  const std::uint64_t head = round_up(address, kHugePage) - address;
  auto* begin = static_cast<std::byte*>(at);
  if (head > 0) munmap(begin, head);
  if (extra > head) munmap(begin + head + bytes, extra - head);
  return begin + head;
}

}  // namespace

Window::Window(std::uint64_t bytes) : data_(reserve(bytes)), bytes_(bytes) {}
Window::~Window() { munmap(data_, bytes_); }

Windows::Windows(std::uint64_t budget_bytes, std::uint64_t total_bytes)
    : budget_bytes_(budget_bytes),
      poison_bytes_(
          std::clamp(round_up(total_bytes / kMappingsWanted, kHugePage), std::uint64_t{kHugePage}, kPoisonBytesMax)) {
  poison_ = memfd_create("hoist-nothing", MFD_CLOEXEC);
  if (poison_ < 0 || ftruncate(poison_, static_cast<off_t>(poison_bytes_)) != 0) fail("memfd_create", poison_bytes_);
  const std::vector<unsigned char> nan(64 * kKiB, 0xFF);  // a NaN in bf16, fp16 and fp32
  for (std::uint64_t at = 0; at < poison_bytes_; at += nan.size()) {
    if (pwrite(poison_, nan.data(), nan.size(), static_cast<off_t>(at)) != static_cast<ssize_t>(nan.size()))
      fail("pwrite", nan.size());
  }
}

Windows::~Windows() {
  while (!spares_.empty()) drop_spare();
  ::close(poison_);
}

std::shared_ptr<Window> Windows::make(std::uint64_t bytes) {
  const std::shared_ptr<Window> window(new Window(round_up(std::max(bytes, std::uint64_t{1}), kPage)));
  show_nothing(window->data_, window->bytes_);
  return window;
}

// Private: what a program writes to a closed window is its own affair, and gone when the window opens.
void Windows::show_nothing(std::byte* data, std::uint64_t bytes) const {
  for (std::uint64_t at = 0; at < bytes; at += poison_bytes_) {
    const std::uint64_t length = std::min(poison_bytes_, bytes - at);
    if (mmap(data + at, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, poison_, 0) ==
        MAP_FAILED)
      fail("mmap", length);
  }
}

void Windows::drop_spare() {
  munmap(spares_.front().data, spares_.front().bytes);
  spare_bytes_ -= spares_.front().bytes;
  spares_.erase(spares_.begin());
}

void Windows::open(Window& window) {
  HOIST_ASSERT(!window.open_ && fits(window.bytes_), "a window of {} bytes", window.bytes_);
  const auto same = std::ranges::find(spares_, window.bytes_, &Spare::bytes);
  if (same != spares_.end()) {
    if (mremap(same->data, same->bytes, same->bytes, MREMAP_MAYMOVE | MREMAP_FIXED, window.data_) == MAP_FAILED)
      fail("mremap", window.bytes_);
    spare_bytes_ -= same->bytes;
    spares_.erase(same);
  } else {
    while (open_bytes_ + spare_bytes_ + window.bytes_ > budget_bytes_) drop_spare();
    if (mmap(window.data_, window.bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
      fail("mmap", window.bytes_);
    if (window.bytes_ >= kHugePage) madvise(window.data_, window.bytes_, MADV_HUGEPAGE);  // a wish
  }
  window.open_ = true;
  open_bytes_ += window.bytes_;
  peak_bytes_ = std::max(peak_bytes_, open_bytes_ + spare_bytes_);
}

// The pages move to a range of their own. The window's range stays mapped throughout: other threads map memory too.
void Windows::close(Window& window) {
  HOIST_ASSERT(window.open_);
  window.open_ = false;
  open_bytes_ -= window.bytes_;
  if (can_move_) {
    std::byte* const spare = reserve(window.bytes_);
    if (mremap(window.data_, window.bytes_, window.bytes_, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, spare) !=
        MAP_FAILED) {
      spares_.push_back({spare, window.bytes_});
      spare_bytes_ += window.bytes_;
    } else {
      munmap(spare, window.bytes_);
      can_move_ = false;  // before Linux 5.7: new pages every time
    }
  }
  show_nothing(window.data_, window.bytes_);
}

}  // namespace hoist::python
