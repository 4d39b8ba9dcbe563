// SPDX-License-Identifier: Apache-2.0
// tests/support/guarded.hpp - an array between guard bytes, at any offset from an aligned address.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace hoist::test {

// `count` elements, zeros, that start `offset` elements after a 64-byte boundary, guarded on both sides.
template <typename T>
class Guarded {
 public:
  explicit Guarded(std::size_t count = 0, std::size_t offset = 0)
      : count_(count), bytes_(kGuard + (offset + count) * sizeof(T) + kGuard + 64, kGuardByte) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data()) + kGuard;
    first_ = (address + 63) / 64 * 64 - reinterpret_cast<std::uintptr_t>(bytes_.data()) + offset * sizeof(T);
    std::memset(bytes_.data() + first_, 0, count * sizeof(T));
  }
  Guarded(const Guarded&) = delete;  // the boundary would move
  Guarded(Guarded&&) = default;
  Guarded& operator=(Guarded&&) = default;

  T* data() { return reinterpret_cast<T*>(bytes_.data() + first_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data() + first_); }
  T& operator[](std::size_t i) { return data()[i]; }
  const T& operator[](std::size_t i) const { return data()[i]; }
  std::size_t size() const { return count_; }

  bool intact() const {
    const auto untouched = [](unsigned char byte) { return byte == kGuardByte; };
    const auto end = static_cast<std::ptrdiff_t>(first_ + count_ * sizeof(T));
    return std::all_of(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(first_), untouched) &&
           std::all_of(bytes_.begin() + end, bytes_.end(), untouched);
  }
  bool same_bytes(const Guarded& other) const {
    return count_ == other.count_ && std::memcmp(data(), other.data(), count_ * sizeof(T)) == 0;
  }

 private:
  static constexpr std::size_t kGuard = 128;
  static constexpr unsigned char kGuardByte = 0xC3;
  std::size_t count_;
  std::size_t first_ = 0;
  std::vector<unsigned char> bytes_;
};

}  // namespace hoist::test
