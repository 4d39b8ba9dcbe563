// SPDX-License-Identifier: Apache-2.0
// aio/detail/transfer.hpp - a transfer, its blocks, and queues of transfers.
//
// Memory     Transfers are recycled; queues link through the transfer itself, so moving one never allocates.
#pragma once

#include <algorithm>
#include <exception>
#include <optional>
#include <span>

#include <hoist/aio/backend.hpp>
#include <hoist/aio/stripe_layout.hpp>
#include <hoist/core/completion.hpp>

namespace hoist::aio::detail {

// A drive's share of a transfer of a striped file: one range there, many pieces in memory.
struct StripeShare {
  const StripeLayout* layout = nullptr;  // null: the transfer is not striped
  unsigned drive = 0;
  std::uint64_t logical_offset_bytes = 0;  // of the whole transfer
};

struct Request {
  Operation operation = Operation::read;
  const File* file = nullptr;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;  // of the whole transfer, when this is a share of one
  std::uint64_t length_bytes = 0;
  StripeShare share{};
  std::uint64_t optional_bytes =
      0;  // for a read: this many at its end may be past the end of the file, and read as zeros

  // The memory of byte `at` and of the bytes that follow it both there and in the file.
  std::span<std::byte> memory_at(std::uint64_t at) const {
    if (data == nullptr) return {};
    if (share.layout == nullptr) return {data + at, length_bytes - at};
    const std::uint64_t logical_bytes = share.layout->logical_offset(share.drive, offset_bytes + at);
    const std::uint64_t run_bytes = share.layout->place(logical_bytes).run_bytes;
    return {data + (logical_bytes - share.logical_offset_bytes), std::min(run_bytes, length_bytes - at)};
  }
};

struct Transfer {
  Request request;
  std::optional<Promise> promise;  // empty while the transfer is unused
  bool fully_cut = false;
  std::uint64_t cut_bytes = 0;  // of request.length_bytes, handed out in blocks
  unsigned blocks_open = 0;     // handed out and not finished
  std::exception_ptr error;     // the first
  Transfer* next = nullptr;
};

class TransferQueue {
 public:
  bool empty() const { return first_ == nullptr; }
  Transfer& front() { return *first_; }

  void push(Transfer& transfer) {
    transfer.next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = &transfer;
    last_ = &transfer;
  }

  Transfer& pop() {
    Transfer& transfer = *first_;
    first_ = transfer.next;
    return transfer;
  }

  // Takes everything from `other`, in order.
  void append(TransferQueue& other) {
    if (other.empty()) return;
    (first_ == nullptr ? first_ : last_->next) = other.first_;
    last_ = other.last_;
    other.first_ = nullptr;
  }

 private:
  Transfer* first_ = nullptr;
  Transfer* last_ = nullptr;  // meaningless while empty
};

// A block of a transfer. There are as many as the queue is deep.
struct Flight : Block {
  Transfer* transfer = nullptr;  // null while unused
  unsigned retries = 0;
  TimePoint due{};  // of the next attempt
};

}  // namespace hoist::aio::detail
