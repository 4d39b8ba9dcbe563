// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include <hoist/core/assert.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/zero/passes/weight_reader.hpp>

namespace hoist::detail {

using tiers::Region;

WeightReader::WeightReader(tiers::Store& store, const UnitRegions& units, const RecordMap& records,
                           const std::vector<std::span<std::byte>>& buffers, UpdateQueue& updates)
    : store_(store), units_(units), records_(records), updates_(updates) {
  for (const auto& bytes : buffers) buffers_.push_back({.bytes = bytes});
}

WeightReader::~WeightReader() {
  {
    MutexLock lock(mutex_);
    expected_.clear();
    await_copies(lock);
  }
  for (const Buffer& buffer : buffers_) buffer.read.wait_quietly();  // nobody is interested in them any more
}

void WeightReader::expect(std::vector<UnitId> order) {
  MutexLock lock(mutex_);
  // Drop what is staged but not among the next few that are read; keep the rest and do not read it again.
  auto horizon = order.begin();
  for (std::size_t reads = 0; horizon != order.end() && reads < buffers_.size(); ++horizon)
    if (units_.unit(*horizon).reads_weights()) ++reads;
  for (Buffer& buffer : buffers_) {
    if (buffer.use != Use::staged) continue;
    if (std::find(order.begin(), horizon, buffer.unit) == horizon) buffer.use = Use::free;
  }
  expected_.assign(order.begin(), order.end());
  for (Buffer& buffer : buffers_) {
    if (buffer.use != Use::staged) continue;
    const auto first = std::find(expected_.begin(), expected_.end(), buffer.unit);
    if (first != expected_.end()) expected_.erase(first);
  }
  start_reads();
}

void WeightReader::invalidate() {
  MutexLock lock(mutex_);
  expected_.clear();
  await_copies(lock);
  for (Buffer& buffer : buffers_) buffer.use = Use::free;
}

void WeightReader::outdate(UnitId unit) {
  const MutexLock lock(mutex_);
  for (Buffer& buffer : buffers_)
    if (buffer.use == Use::staged && buffer.unit == unit) buffer.use = Use::free;
  start_reads();
}

void WeightReader::await_copies(MutexLock& lock) {
  changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) {
    return std::none_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) { return b.use == Use::taken; });
  });
}

// A free buffer may still be the target of a read that was given up; it is used again only when that has ended.
void WeightReader::start_reads() {
  auto buffer = buffers_.begin();
  while (!expected_.empty()) {
    const UnitId unit = expected_.front();
    if (!units_.unit(unit).reads_weights()) {
      updates_.request_weights(unit, nullptr);
    } else {
      buffer =
          std::find_if(buffer, buffers_.end(), [](const Buffer& b) { return b.use == Use::free && b.read.done(); });
      if (buffer == buffers_.end()) return;
      start_read(*buffer, unit);
    }
    expected_.pop_front();
  }
}

// A read that cannot even be started fails like one that ended badly: to whoever takes the unit.
void WeightReader::start_read(Buffer& buffer, UnitId id) {
  buffer.use = Use::staged;
  buffer.unit = id;
  if (const auto updated = updates_.request_weights(id, buffer.bytes.data())) {
    try {
      const std::array parts{*updated, read_frozen(id, buffer.bytes)};
      buffer.read = when_all(parts);
    } catch (...) {
      // The buffer is the update's until that has ended.
      const std::array parts{*updated, Completion::failed(std::current_exception())};
      buffer.read = when_all(parts);
    }
    return;
  }
  // The last step's weights may still be on their way down.
  buffer.read =
      followed_by(updates_.weights_written(id), [this, id, target = buffer.bytes] { return read_weights(id, target); });
}

Completion WeightReader::read_weights(UnitId id, std::span<std::byte> target) {
  const std::array reads{
      read_record(records_.trainable(id), units_.table().unit(id).trainable, units_.unit(id).weight_tiles, target),
      read_frozen(id, target)};
  return when_all(reads);
}

Completion WeightReader::read_frozen(UnitId id, std::span<std::byte> target) {
  return read_record(records_.frozen(id), units_.table().unit(id).frozen, units_.unit(id).frozen_tiles,
                     target.subspan(units_.host_pieces(id).stored_frozen.offset));
}

Completion WeightReader::read_record(std::optional<tiers::RecordId> record, const tiers::RecordLayout& layout,
                                     std::uint32_t first, std::span<std::byte> target) {
  const std::uint32_t count = static_cast<std::uint32_t>(layout.tiles().size()) - first;
  if (count == 0) return {};
  return store_.read(*record, Region::weights, first, count,
                     target.first(layout.tile_bytes(Region::weights, first, count)), aio::Priority::foreground);
}

WeightReader::Buffer* WeightReader::staged(UnitId unit) {
  const auto found = std::find_if(buffers_.begin(), buffers_.end(),
                                  [&](const Buffer& b) { return b.use == Use::staged && b.unit == unit; });
  return found == buffers_.end() ? nullptr : &*found;
}

// Not read ahead: read it now, into a free buffer, else into the first that nobody copies from.
WeightReader::Buffer& WeightReader::buffer_for(UnitId unit, MutexLock& lock) {
  while (true) {
    if (Buffer* buffer = staged(unit)) return *buffer;
    Buffer* victim = nullptr;
    for (Buffer& buffer : buffers_) {
      if (buffer.use == Use::taken) continue;
      if (victim == nullptr || buffer.use == Use::free) victim = &buffer;
    }
    if (victim == nullptr) {
      changed_.wait(lock);
      continue;
    }
    if (!victim->read.done()) {
      const Completion abandoned = victim->read;
      victim->use = Use::taken;  // nobody else may pick it meanwhile
      mutex_.unlock();           // not `lock`, which is the caller's: Clang could not follow that
      abandoned.wait_quietly();  // the read that matters is still to come
      mutex_.lock();
      victim->use = Use::free;
      continue;  // it may have been read ahead meanwhile
    }
    const auto expected = std::find(expected_.begin(), expected_.end(), unit);
    if (expected != expected_.end()) expected_.erase(expected);
    start_read(*victim, unit);
    return *victim;
  }
}

std::byte* WeightReader::take(UnitId unit) {
  Completion read;
  std::span<std::byte> bytes;
  {
    MutexLock lock(mutex_);
    Buffer& buffer = buffer_for(unit, lock);
    buffer.use = Use::taken;
    read = buffer.read;
    bytes = buffer.bytes;
  }
  try {
    read.wait();
    verify(unit, bytes);
  } catch (...) {
    hand_back(bytes.data());
    throw;
  }
  return bytes.data();
}

void WeightReader::verify(UnitId id, std::span<const std::byte> bytes) const {
  const auto check = [&](std::optional<tiers::RecordId> record, const tiers::RecordLayout& layout, std::uint32_t first,
                         const HostPiece& piece) {
    if (piece.bytes == 0) return;
    store_.verify(*record, Region::weights, first, static_cast<std::uint32_t>(layout.tiles().size()) - first,
                  bytes.subspan(piece.offset, piece.bytes));
  };
  const Unit& unit = units_.table().unit(id);
  const HostPieces pieces = units_.host_pieces(id);
  check(records_.trainable(id), unit.trainable, units_.unit(id).weight_tiles, pieces.stored_trainable);
  check(records_.frozen(id), unit.frozen, units_.unit(id).frozen_tiles, pieces.stored_frozen);
}

void WeightReader::hand_back(std::byte* bytes) {
  MutexLock lock(mutex_);
  const auto buffer =
      std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.bytes.data() == bytes; });
  HOIST_ASSERT(buffer != buffers_.end() && buffer->use == Use::taken);
  buffer->use = Use::free;
  start_reads();
  changed_.notify_all();  // under the mutex: who waits may destroy this next
}

}  // namespace hoist::detail
