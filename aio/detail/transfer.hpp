// SPDX-License-Identifier: Apache-2.0
// aio/detail/transfer.hpp - a transfer that was asked for, the blocks it is cut into, and queues of transfers.
//
// Memory     Records are recycled; queues link through the record itself, so moving one never allocates.
#pragma once

#include <exception>
#include <optional>

#include <hoist/aio/backend.hpp>
#include <hoist/core/completion.hpp>

namespace hoist::aio::detail {

struct Request {
  Operation operation = Operation::read;
  const File* file = nullptr;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  std::uint64_t length_bytes = 0;
};

struct Transfer {
  Request request;
  std::optional<Promise> promise;  // empty while the record is unused
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
  TimePoint due{};  // of the next try
};

}  // namespace hoist::aio::detail
