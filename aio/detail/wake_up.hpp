// SPDX-License-Identifier: Apache-2.0
// aio/detail/wake_up.hpp - an event descriptor: any thread signals, a ring that polls it hears.
//
// Threading  Any thread.
// Memory     Shared by a backend and by the files that may still have to tell it that they close.
#pragma once

namespace hoist::aio::detail {

class WakeUp {
 public:
  explicit WakeUp(int descriptor) : descriptor_(descriptor) {}  // takes it over
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
