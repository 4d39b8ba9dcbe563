// SPDX-License-Identifier: Apache-2.0
#include <sys/eventfd.h>
#include <unistd.h>

#include <hoist/aio/detail/wake_up.hpp>

namespace hoist::aio::detail {

WakeUp::~WakeUp() { ::close(descriptor_); }

void WakeUp::signal() const noexcept { static_cast<void>(::eventfd_write(descriptor_, 1)); }

void WakeUp::clear() const noexcept {
  eventfd_t count = 0;
  static_cast<void>(::eventfd_read(descriptor_, &count));
}

}  // namespace hoist::aio::detail
