// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include <hoist/core/assert.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/zero/update/tile_pipeline.hpp>

namespace hoist::detail {

using tiers::Region;
using tiers::Tile;

TilePipeline::TilePipeline(Runtime& runtime, const UnitTable& table, const Memory& memory, const RecordMap& records,
                           RecordIo& record_io, tiers::Store* store)
    : runtime_(runtime),
      table_(table),
      memory_(memory),
      records_(records),
      record_io_(record_io),
      store_(store),
      weights_written_(table.units().size()) {
  for (const auto& bytes : memory.update_buffers()) buffers_.push_back({.bytes = bytes});
  first_piece_.resize(table.units().size() + 1);
  for (const Piece& piece : memory.pieces()) ++first_piece_[piece.unit.index + 1];
  std::partial_sum(first_piece_.begin(), first_piece_.end(), first_piece_.begin());
  std::size_t tiles_max = 0;
  for (const Piece& piece : memory.pieces()) tiles_max = std::max<std::size_t>(tiles_max, piece.tile_count);
  checksums_w_.resize(tiles_max);
  checksums_s_.resize(tiles_max);
}

TilePipeline::~TilePipeline() { abandon(ahead_); }

std::span<const Tile> TilePipeline::tiles(const Piece& piece) const {
  return table_.unit(piece.unit).trainable.tiles().subspan(piece.first_tile, piece.tile_count);
}

void TilePipeline::timed_wait(const Completion& completion, WaitCause cause) {
  if (completion.done()) return completion.wait();
  const TimePoint start = Clock::now();
  completion.wait();
  if (cause != WaitCause::none) runtime_.ledger().waited(cause, Clock::now() - start);
}

void TilePipeline::walk(const WalkOptions& options, const Work& work, std::optional<UnitId> only) {
  std::uint32_t unit = only ? only->index : 0;
  const std::uint32_t end = only ? unit + 1 : static_cast<std::uint32_t>(table_.units().size());
  const Next next = [&](bool) -> std::optional<UpdateRequest> {
    while (unit < end && !table_.units()[unit].is_trainable()) ++unit;
    if (unit == end) return std::nullopt;
    return UpdateRequest{UnitId{unit++}};
  };
  run(options, work, next, [](UnitId) {});
}

void TilePipeline::run(const WalkOptions& options, const Work& work, const Next& next, const Updated& updated) {
  std::deque<Job> jobs;  // started, oldest first
  std::optional<UpdateRequest> request;
  std::size_t piece = 0;  // the next of the request's
  std::deque<UpdateRequest> later;
  const auto next_request = [&](bool wait) -> std::optional<UpdateRequest> {
    while (auto wanted = next(wait && later.empty())) {
      if (!is_only_written(wanted->unit, options)) return wanted;
      updated(wanted->unit);
      if (options.read_apart) later.push_back(*wanted);
    }
    if (later.empty()) return std::nullopt;
    const UpdateRequest first = later.front();
    later.pop_front();
    return first;
  };
  if (!options.makes_weights) abandon(ahead_);
  try {
    while (true) {
      // Read ahead as far as buffers are free; when nothing is started at all, wait for one.
      while (request || (request = next_request(/*wait=*/jobs.empty()))) {
        if (piece < first_piece_[request->unit.index]) piece = first_piece_[request->unit.index];
        if (!start(piece, request->target, options, jobs)) break;
        if (!jobs.back().ends_unit) {
          ++piece;
          continue;
        }
        request.reset();
        piece = 0;
      }
      if (jobs.empty()) break;
      go_on(jobs.front(), options, work, updated);
      jobs.pop_front();
    }
  } catch (...) {
    abandon(jobs);
    abandon(ahead_);
    throw;
  }
  record_io_.await_copies();  // whoever comes next finds device-only memory changed
}

void TilePipeline::go_on(Job& job, const WalkOptions& options, const Work& work, const Updated& updated) {
  for (const Completion& read : job.reads) timed_wait(read, options.waits);
  update(job, options, work);
  write(job, options);
  if (job.ends_unit && !is_only_written(job.piece.unit, options)) updated(job.piece.unit);
}

// A unit that the device has updated, or that nothing has: nobody waits for it, and it comes last, if at all.
bool TilePipeline::is_only_written(UnitId unit, const WalkOptions& options) const {
  return memory_.apart(unit) && !options.change_apart;
}

// Reads under way still target the buffers: see them out before anybody else uses them.
void TilePipeline::abandon(std::deque<Job>& jobs) noexcept {
  for (const Job& job : jobs) {
    for (const Completion& read : job.reads) {
      try {
        read.wait();
      } catch (...) {  // the first error is the one that counts
      }
    }
  }
  jobs.clear();
}

bool TilePipeline::ends_unit(std::size_t index) const {
  return index + 1 == first_piece_[memory_.pieces()[index].unit.index + 1];
}

// `buffer` may be null where the piece needs none.
TilePipeline::Job TilePipeline::job_of(std::size_t index, Buffer* buffer) const {
  const Piece& piece = memory_.pieces()[index];
  const UnitHome& home = memory_.home(piece.unit);
  const Tile& first = tiles(piece).front();
  const bool apart = memory_.apart(piece.unit);
  std::byte* const bytes = buffer == nullptr ? nullptr : buffer->bytes.data();
  Job job{.piece = piece, .buffer = buffer, .ends_unit = ends_unit(index)};
  job.weights = home.weights != nullptr && !apart ? home.weights + first.w_offset : bytes;
  job.state = memory_.state_at_home(piece) && !apart ? home.state + first.s_offset
                                                     : bytes + memory_.buffered_bytes(piece).weights;
  return job;
}

bool TilePipeline::start(std::size_t index, std::byte* target, const WalkOptions& options, std::deque<Job>& jobs) {
  const Piece& piece = memory_.pieces()[index];
  if (const auto read = read_already(piece); read != ahead_.end()) {
    jobs.push_back(std::move(*read));
    jobs.back().target = target;
    ahead_.erase(read);
    return true;
  }
  // What lives in memory needs no reading ahead, but must not hold up the reading of what comes after it.
  const bool needs_buffer = memory_.buffered_bytes(piece).total() > 0;
  if (!needs_buffer && jobs.size() > buffers_.size()) return false;
  Buffer* const buffer = needs_buffer ? buffer_for(jobs, options.waits) : nullptr;
  if (needs_buffer && buffer == nullptr) return false;
  jobs.push_back(job_of(index, buffer));
  jobs.back().target = target;
  if (memory_.apart(piece.unit) ? options.read_apart : options.read) read(jobs.back(), options);
  return true;
}

bool TilePipeline::held(const Buffer& buffer, const std::deque<Job>& jobs) const {
  const auto holds = [&](const Job& job) { return job.buffer == &buffer; };
  return std::ranges::any_of(jobs, holds) || std::ranges::any_of(ahead_, holds);
}

// One that no job holds and no write uses.
TilePipeline::Buffer* TilePipeline::idle_buffer(const std::deque<Job>& jobs) {
  for (Buffer& buffer : buffers_) {
    if (held(buffer, jobs) || !buffer.idle.done()) continue;
    buffer.idle.wait();  // rethrows a failed write
    buffer.last_use = ++uses_;
    return &buffer;
  }
  return nullptr;
}

// An idle one; else, when there is no job to go on with, the one written out of first.
TilePipeline::Buffer* TilePipeline::buffer_for(const std::deque<Job>& jobs, WaitCause cause) {
  if (Buffer* const idle = idle_buffer(jobs)) return idle;
  if (!jobs.empty()) return nullptr;
  if (ahead_.size() == buffers_.size()) abandon(ahead_);  // all of them for what comes later
  Buffer* oldest = nullptr;
  for (Buffer& buffer : buffers_)
    if (!held(buffer, jobs) && (oldest == nullptr || buffer.last_use < oldest->last_use)) oldest = &buffer;
  timed_wait(oldest->idle, cause);
  oldest->last_use = ++uses_;
  return oldest;
}

// --- reading ---------------------------------------------------------------------------------------------------------

void TilePipeline::read_ahead(const WalkOptions& walk, std::span<const UnitId> units) noexcept {
  try {
    for (const Buffer& buffer : buffers_) buffer.idle.wait();
    for (const UnitId unit : units) {
      for (std::size_t index = first_piece_[unit.index]; index < first_piece_[unit.index + 1]; ++index) {
        const Piece& piece = memory_.pieces()[index];
        if (memory_.apart(unit)) break;  // nothing of it is on NVMe alone
        if (memory_.buffered_bytes(piece).total() == 0 || read_already(piece) != ahead_.end()) continue;
        Buffer* const buffer = idle_buffer({});
        if (buffer == nullptr) return;
        ahead_.push_back(job_of(index, buffer));
        ahead_.back().priority = aio::Priority::background;
        read(ahead_.back(), walk);
      }
    }
  } catch (...) {  // the step will meet it again
    abandon(ahead_);
  }
}

std::deque<TilePipeline::Job>::iterator TilePipeline::read_already(const Piece& piece) {
  return std::ranges::find_if(ahead_, [&](const Job& job) {
    return job.piece.unit.index == piece.unit.index && job.piece.first_tile == piece.first_tile;
  });
}

RecordPart TilePipeline::part(const Piece& piece, Region region) const {
  return record_io_.part(piece.unit, RecordKind::trainable, region, piece.first_tile, piece.tile_count);
}

void TilePipeline::read(Job& job, const WalkOptions& options) {
  const auto buffered = memory_.buffered_bytes(job.piece);
  const bool comes_from_store = !memory_.apart(job.piece.unit);
  if (buffered.state > 0) {
    job.reads.push_back(record_io_.start_read(part(job.piece, Region::state), job.state, job.priority));
    job.verifies_state = comes_from_store;
  }
  if (buffered.weights == 0) return;
  if (comes_from_store) return read_weights(job, options);
  job.reads.push_back(record_io_.start_read(part(job.piece, Region::weights), job.weights, job.priority));
}

// From the store, runs of tiles whose weights the work looks at.
void TilePipeline::read_weights(Job& job, const WalkOptions& options) {
  const auto piece_tiles = tiles(job.piece);
  const std::uint64_t base = piece_tiles.front().w_offset;
  job.verifies_weights = true;
  for (std::size_t first = 0, end = 0; first < piece_tiles.size(); first = end) {
    const bool made = makes_weights(job, piece_tiles[first], options);
    for (end = first; end < piece_tiles.size() && makes_weights(job, piece_tiles[end], options) == made;) ++end;
    if (made) continue;
    const Piece run{job.piece.unit, job.piece.first_tile + static_cast<std::uint32_t>(first),
                    static_cast<std::uint32_t>(end - first)};
    job.reads.push_back(record_io_.start_read(part(run, Region::weights),
                                              job.weights + (piece_tiles[first].w_offset - base), job.priority));
  }
}

bool TilePipeline::makes_weights(const Job& job, const Tile& tile, const WalkOptions& options) const {
  return options.makes_weights && table_.unit(job.piece.unit).segments[tile.segment].update_makes_weights();
}

void TilePipeline::update(Job& job, const WalkOptions& options, const Work& work) {
  const TimePoint begin = Clock::now();
  const auto piece_tiles = tiles(job.piece);
  const Unit& unit = table_.unit(job.piece.unit);
  const std::optional<tiers::RecordId> record = records_.trainable(job.piece.unit);
  const Tile& first = piece_tiles.front();
  const auto [writes_weights, writes_state] = writes(job.piece, options);
  runtime_.update_pool().run(piece_tiles.size(), [&](std::size_t i) {
    const Tile& tile = piece_tiles[i];
    const auto index = job.piece.first_tile + static_cast<std::uint32_t>(i);
    const std::span<std::byte> weights(job.weights + (tile.w_offset - first.w_offset), tile.w_bytes);
    const std::span<std::byte> state(job.state + (tile.s_offset - first.s_offset), tile.s_bytes);
    const bool made = makes_weights(job, tile, options);
    if (job.verifies_weights && !made) store_->verify(*record, Region::weights, index, 1, weights);
    if (job.verifies_weights && made) {  // what fills the tile up is stored with it
      const std::uint64_t used = tile.elements * dtype_bytes(unit.segments[tile.segment].dtype);
      std::ranges::fill(weights.subspan(used), std::byte{0});
    }
    if (job.verifies_state) store_->verify(*record, Region::state, index, 1, state);
    work({.unit = job.piece.unit,
          .segment = &unit.segments[tile.segment],
          .tile = &tile,
          .weights = weights.data(),
          .state = state.data()});
    if (job.target != nullptr) std::memcpy(job.target + tile.w_offset, weights.data(), tile.w_bytes);
    if (writes_weights) checksums_w_[i] = store_->checksum(*record, Region::weights, index, weights);
    if (writes_state) checksums_s_[i] = store_->checksum(*record, Region::state, index, state);
  });
  const TimePoint end = Clock::now();
  if (!options.in_background) return runtime_.ledger().waited(WaitCause::optimizer, end - begin);
  busy_ns_.fetch_add((end - begin).count(), std::memory_order_relaxed);
  if (Trace* const trace = runtime_.trace(); trace != nullptr) trace->add(TraceRow::optimizer, unit.name, begin, end);
}

TilePipeline::Writes TilePipeline::writes(const Piece& piece, const WalkOptions& options) const {
  const bool weights_at_home = memory_.home(piece.unit).weights != nullptr;
  return {.weights = weights_at_home ? options.write_homes : options.write_streamed,
          .state = memory_.state_at_home(piece) ? options.write_homes : options.write_streamed};
}

void TilePipeline::write(Job& job, const WalkOptions& options) {
  const tiers::Tile& first = tiles(job.piece).front();
  const tiers::Tile& last = tiles(job.piece).back();
  const auto [writes_weights, writes_state] = writes(job.piece, options);
  std::vector<Completion> started;
  const auto start_write = [&](Region region, const std::byte* source, std::uint64_t bytes,
                               const std::vector<std::uint64_t>& checksums) {
    started.push_back(store_->write(*records_.trainable(job.piece.unit), region, job.piece.first_tile,
                                    job.piece.tile_count, {source, bytes},
                                    std::span(checksums).first(job.piece.tile_count), aio::Priority::background));
  };
  if (writes_weights) {
    start_write(Region::weights, job.weights, last.w_offset + last.w_bytes - first.w_offset, checksums_w_);
    Completion& written = weights_written_[job.piece.unit.index];
    const std::array parts{written, started.back()};
    written = written.done() && !written.error() ? started.back() : when_all(parts);
  }
  if (writes_state) {
    start_write(Region::state, job.state, last.s_offset + last.s_bytes - first.s_offset, checksums_s_);
  }
  if (memory_.apart(job.piece.unit) && options.change_apart) {
    started.push_back(record_io_.start_write(part(job.piece, Region::weights), job.weights));
    started.push_back(record_io_.start_write(part(job.piece, Region::state), job.state));
  }
  if (job.buffer != nullptr) job.buffer->idle = when_all(started);
}

}  // namespace hoist::detail
