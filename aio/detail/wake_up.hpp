// SPDX-License-Identifier: Apache-2.0
// aio/detail/wake_up.hpp - an event descriptor: any thread signals it, and a ring polls it.
//
// Threading  Any thread.
// Memory     Shared by a backend and its files, which tell it when they close.
#pragma once

namespace hoist::aio::detail {

class WakeUp {
 public:
  explicit WakeUp(int descriptor) : descriptor_(descriptor) {}  // takes ownership
  ~WakeUp();
  WakeUp(const WakeUp&) = delete;
  WakeUp& operator=(const WakeUp&) = delete;

  int descriptor() const { return descriptor_; }
  void signal() const noexcept;
  void clear() const noexcept;

 private:
  const int descriptor_;
};

}  // namespace hoist::aio::detail
