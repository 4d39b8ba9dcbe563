// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <exception>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <hoist/aio/detail/unaligned_plan.hpp>
#include <hoist/aio/transfer_memory.hpp>
#include <hoist/aio/unaligned.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::aio {

namespace {

using detail::UnalignedPiece;

constexpr std::uint64_t kSector = File::kAlignment;

struct UnalignedRequest {
  Operation operation = Operation::read;
  StripedFile* file = nullptr;
  std::uint64_t offset_bytes = 0;
  std::span<std::byte> memory;
  Priority priority = Priority::foreground;
};

struct UnalignedTransfer {
  UnalignedRequest request;
  Promise promise;
  std::vector<UnalignedPiece> pieces;  // bounced
  std::size_t next = 0;                // of these
  std::size_t unfinished = 0;          // pieces, direct ones included, and the call that starts them
  std::exception_ptr error;            // the first
};

// A piece that has a bounce buffer.
struct Bounce {
  std::shared_ptr<UnalignedTransfer> transfer;
  UnalignedPiece piece;
  std::byte* buffer = nullptr;

  std::uint64_t begin() const { return piece.cover_begin(kSector); }
  std::uint64_t end() const { return piece.cover_end(kSector); }
  bool shares_first() const { return piece.offset_bytes % kSector != 0; }
  bool shares_last() const { return piece.end_bytes() % kSector != 0; }
  std::span<std::byte> cover() const { return {buffer, end() - begin()}; }
  std::byte* in_buffer() const { return buffer + (piece.offset_bytes - begin()); }
  std::byte* in_memory() const {
    return transfer->request.memory.data() + (piece.offset_bytes - transfer->request.offset_bytes);
  }
};

}  // namespace

class Unaligned::Impl : public std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(const UnalignedOptions& options)
      : piece_bytes_(options.piece_bytes), memory_(round_down(options.bounce_bytes, options.piece_bytes)) {
    for (std::uint64_t at = 0; at + piece_bytes_ <= options.bounce_bytes; at += piece_bytes_)
      free_.push_back(memory_.span().data() + at);
  }

  Completion start(const UnalignedRequest& request);

 private:
  // A sector that is being read, changed and written; no other transfer may change it meanwhile.
  struct Sector {
    const StripedFile* file;
    std::uint64_t offset_bytes;
    bool operator==(const Sector&) const = default;
  };

  void start_direct(const std::shared_ptr<UnalignedTransfer>& transfer, const UnalignedPiece& piece);
  void pump();
  std::vector<Bounce> take_ready();
  bool claim(const Bounce& bounce) HOIST_REQUIRES(mutex_);
  void release(const Bounce& bounce) HOIST_REQUIRES(mutex_);
  void start_bounce(const Bounce& bounce);
  void read_shared_sectors(const Bounce& bounce);
  void write_bounce(const Bounce& bounce);
  void finish_bounce(const Bounce& bounce, std::exception_ptr error);
  void finish(const std::shared_ptr<UnalignedTransfer>& transfer, std::exception_ptr error);

  const std::uint64_t piece_bytes_;
  const TransferMemory memory_;

  Mutex mutex_;
  std::vector<std::byte*> free_ HOIST_GUARDED_BY(mutex_);
  std::array<std::deque<std::shared_ptr<UnalignedTransfer>>, kPriorityCount> queues_
      HOIST_GUARDED_BY(mutex_);  // by priority
  std::vector<Sector> claimed_ HOIST_GUARDED_BY(mutex_);
  bool pumping_ HOIST_GUARDED_BY(mutex_) = false;
};

Completion Unaligned::Impl::start(const UnalignedRequest& request) {
  if (request.memory.empty()) return {};
  auto transfer = std::make_shared<UnalignedTransfer>();
  transfer->request = request;
  std::vector<UnalignedPiece> direct;
  for (const UnalignedPiece& piece : detail::plan_unaligned(
           {request.offset_bytes, request.memory.size(), reinterpret_cast<std::uintptr_t>(request.memory.data())},
           kSector, piece_bytes_))
    (piece.direct ? direct : transfer->pieces).push_back(piece);
  transfer->unfinished = direct.size() + transfer->pieces.size() + 1;
  const Completion completion = transfer->promise.completion();
  for (const UnalignedPiece& piece : direct) start_direct(transfer, piece);
  if (!transfer->pieces.empty()) {
    {
      const MutexLock lock(mutex_);
      queues_[static_cast<std::size_t>(request.priority)].push_back(transfer);
    }
    pump();
  }
  finish(transfer, nullptr);
  return completion;
}

void Unaligned::Impl::start_direct(const std::shared_ptr<UnalignedTransfer>& transfer, const UnalignedPiece& piece) {
  const UnalignedRequest& request = transfer->request;
  const auto part = request.memory.subspan(piece.offset_bytes - request.offset_bytes, piece.length_bytes);
  const Completion moved = request.operation == Operation::read
                               ? request.file->read(piece.offset_bytes, part, request.priority)
                               : request.file->write(piece.offset_bytes, part, request.priority);
  moved.then(
      [self = shared_from_this(), transfer](std::exception_ptr error) { self->finish(transfer, std::move(error)); });
}

// Starts pieces that have a buffer and whose sectors are free. One thread at a time: a piece may end, and call this
// again, while it is being started.
void Unaligned::Impl::pump() {
  for (;;) {
    const std::vector<Bounce> ready = take_ready();
    if (ready.empty()) return;
    for (const Bounce& bounce : ready) start_bounce(bounce);
    const MutexLock lock(mutex_);
    pumping_ = false;
  }
}

// Empty, too, while another call is starting pieces; that one looks again before it returns.
std::vector<Bounce> Unaligned::Impl::take_ready() {
  std::vector<Bounce> ready;
  const MutexLock lock(mutex_);
  if (pumping_) return ready;
  for (auto& queue : queues_) {  // foreground first
    while (!queue.empty() && !free_.empty()) {
      const std::shared_ptr<UnalignedTransfer> transfer = queue.front();
      const Bounce bounce{transfer, transfer->pieces[transfer->next], free_.back()};
      if (!claim(bounce)) break;
      free_.pop_back();
      if (++transfer->next == transfer->pieces.size()) queue.pop_front();
      ready.push_back(bounce);
    }
  }
  pumping_ = !ready.empty();
  return ready;
}

bool Unaligned::Impl::claim(const Bounce& bounce) {
  if (bounce.transfer->request.operation == Operation::read) return true;
  std::vector<Sector> wanted;
  if (bounce.shares_first()) wanted.push_back({bounce.transfer->request.file, bounce.begin()});
  if (bounce.shares_last()) wanted.push_back({bounce.transfer->request.file, bounce.end() - kSector});
  for (const Sector& sector : wanted) {
    if (std::find(claimed_.begin(), claimed_.end(), sector) != claimed_.end()) return false;
  }
  claimed_.insert(claimed_.end(), wanted.begin(), wanted.end());
  return true;
}

void Unaligned::Impl::release(const Bounce& bounce) {
  if (bounce.transfer->request.operation == Operation::read) return;
  const auto let_go = [&](std::uint64_t offset_bytes) HOIST_REQUIRES(mutex_) {
    std::erase(claimed_, Sector{bounce.transfer->request.file, offset_bytes});
  };
  if (bounce.shares_first()) let_go(bounce.begin());
  if (bounce.shares_last()) let_go(bounce.end() - kSector);
}

void Unaligned::Impl::start_bounce(const Bounce& bounce) {
  if (bounce.transfer->request.operation == Operation::write) {
    if (bounce.shares_first() || bounce.shares_last()) return read_shared_sectors(bounce);
    return write_bounce(bounce);
  }
  const std::uint64_t needed_bytes = bounce.piece.end_bytes() - bounce.begin();
  bounce.transfer->request.file
      ->read_padded(bounce.begin(), bounce.cover(), needed_bytes, bounce.transfer->request.priority)
      .then([self = shared_from_this(), bounce](std::exception_ptr error) {
        if (!error) std::memcpy(bounce.in_memory(), bounce.in_buffer(), bounce.piece.length_bytes);
        self->finish_bounce(bounce, std::move(error));
      });
}

void Unaligned::Impl::read_shared_sectors(const Bounce& bounce) {
  const auto read = [&](std::uint64_t offset_bytes) {
    return bounce.transfer->request.file->read_padded(offset_bytes,
                                                      bounce.cover().subspan(offset_bytes - bounce.begin(), kSector), 0,
                                                      bounce.transfer->request.priority);
  };
  std::array<Completion, 2> parts;
  const bool one_sector = bounce.end() - bounce.begin() == kSector;
  if (bounce.shares_first() || one_sector) parts[0] = read(bounce.begin());
  if (bounce.shares_last() && !one_sector) parts[1] = read(bounce.end() - kSector);
  when_all(parts).then([self = shared_from_this(), bounce](std::exception_ptr error) {
    if (error) return self->finish_bounce(bounce, std::move(error));
    self->write_bounce(bounce);
  });
}

void Unaligned::Impl::write_bounce(const Bounce& bounce) {
  std::memcpy(bounce.in_buffer(), bounce.in_memory(), bounce.piece.length_bytes);
  bounce.transfer->request.file->write(bounce.begin(), bounce.cover(), bounce.transfer->request.priority)
      .then([self = shared_from_this(), bounce](std::exception_ptr error) {
        self->finish_bounce(bounce, std::move(error));
      });
}

void Unaligned::Impl::finish_bounce(const Bounce& bounce, std::exception_ptr error) {
  {
    const MutexLock lock(mutex_);
    release(bounce);
    free_.push_back(bounce.buffer);
  }
  finish(bounce.transfer, std::move(error));
  pump();
}

void Unaligned::Impl::finish(const std::shared_ptr<UnalignedTransfer>& transfer, std::exception_ptr error) {
  {
    const MutexLock lock(mutex_);
    --transfer->unfinished;
    if (error && !transfer->error) {
      transfer->error = std::move(error);
      auto& queue = queues_[static_cast<std::size_t>(transfer->request.priority)];
      // Pieces that have not started are not started any more.
      if (std::erase(queue, transfer) > 0) transfer->unfinished -= transfer->pieces.size() - transfer->next;
    }
    if (transfer->unfinished > 0) return;
  }
  transfer->promise.settle(transfer->error);
}

Unaligned::Unaligned(const UnalignedOptions& options) {
  if (options.piece_bytes == 0 || options.piece_bytes % kSector != 0)
    throw UsageError(fmt::format("the bounce piece must be a multiple of 4 KiB, not {} bytes", options.piece_bytes));
  if (options.bounce_bytes < options.piece_bytes)
    throw UsageError(fmt::format("{} bytes of bounce buffers do not hold one piece of {} bytes", options.bounce_bytes,
                                 options.piece_bytes));
  impl_ = std::make_shared<Impl>(options);
}

Unaligned::~Unaligned() = default;

Completion Unaligned::read(StripedFile& file, std::uint64_t offset_bytes, std::span<std::byte> target,
                           Priority priority) {
  return impl_->start({Operation::read, &file, offset_bytes, target, priority});
}

Completion Unaligned::write(StripedFile& file, std::uint64_t offset_bytes, std::span<const std::byte> source,
                            Priority priority) {
  // A request serves both directions; the memory of a write is only read.
  const std::span memory(const_cast<std::byte*>(source.data()), source.size());
  return impl_->start({Operation::write, &file, offset_bytes, memory, priority});
}

}  // namespace hoist::aio
