// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <new>

#include <hoist/aio/given_up.hpp>
#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/core/units.hpp>

namespace hoist::aio {

TransferMemory::TransferMemory(std::uint64_t bytes)
    : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kBlockAlignment}))), bytes_(bytes) {
  if (bytes != 0) std::memset(data_, 0, bytes);
}

TransferMemory::~TransferMemory() {
  if (a_drive_was_given_up())
    leave_unfreed(data_);
  else
    ::operator delete (data_, std::align_val_t{kBlockAlignment});
}

}  // namespace hoist::aio
