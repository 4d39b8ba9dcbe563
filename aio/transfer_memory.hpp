// SPDX-License-Identifier: Apache-2.0
// aio/transfer_memory.hpp - heap memory for few and short transfers: headers, manifests, single values.
//
// Threading  One thread at a time.
// Memory     The destructor frees it, unless a drive of this process was ever given up (DriveQueue::gave_up). The
//            kernel may then still write here, so the memory is kept and never used again.
// Errors     std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hoist::aio {

class TransferMemory {
 public:
  explicit TransferMemory(std::uint64_t bytes);  // zeros, aligned as direct transfers want it
  ~TransferMemory();
  TransferMemory(const TransferMemory&) = delete;
  TransferMemory& operator=(const TransferMemory&) = delete;
  std::span<std::byte> span() const { return {data_, bytes_}; }
  std::span<std::byte> first(std::uint64_t bytes) const { return span().first(bytes); }

 private:
  std::byte* data_;
  std::uint64_t bytes_;
};

}  // namespace hoist::aio
