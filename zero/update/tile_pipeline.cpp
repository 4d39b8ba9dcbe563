// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>

#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/zero/update/tile_pipeline.hpp>

namespace hoist::detail {

using tiers::Region;
using tiers::Tile;

namespace {

bool is_within(const std::byte* byte, std::span<const std::byte> bytes) {
  return !std::less<>()(byte, bytes.data()) && std::less<>()(byte, bytes.data() + bytes.size());
}

}  // namespace

TilePipeline::TilePipeline(Runtime& runtime, const UnitTable& table, const Memory& memory, const RecordMap& records,
                           RecordIo& record_io, tiers::Store* store, GradientSpill* spill)
    : runtime_(runtime),
      table_(table),
      memory_(memory),
      records_(records),
      record_io_(record_io),
      store_(store),
      spill_(spill),
      weights_written_(table.units().size()) {
  for (const auto& bytes : memory.update_buffers()) buffers_.push_back({.bytes = bytes});
  first_sub_group_.resize(table.units().size() + 1);
  for (const SubGroup& sub_group : memory.sub_groups()) ++first_sub_group_[sub_group.unit.index + 1];
  std::partial_sum(first_sub_group_.begin(), first_sub_group_.end(), first_sub_group_.begin());
  std::size_t tiles_max = 0;
  for (const SubGroup& sub_group : memory.sub_groups())
    tiles_max = std::max<std::size_t>(tiles_max, sub_group.tile_count);
  checksums_w_.resize(tiles_max);
  checksums_s_.resize(tiles_max);
}

TilePipeline::~TilePipeline() { abandon(ahead_); }

void TilePipeline::bind_thread() const { runtime_.update_pool().bind_caller(); }

std::span<const Tile> TilePipeline::tiles(const SubGroup& sub_group) const {
  return table_.unit(sub_group.unit).trainable.tiles().subspan(sub_group.first_tile, sub_group.tile_count);
}

void TilePipeline::timed_wait(const Completion& completion, WaitCause cause) {
  if (completion.done()) return completion.wait();
  const TimePoint start = Clock::now();
  completion.wait();
  if (cause != WaitCause::none) runtime_.ledger().waited(cause, Clock::now() - start);
}

std::uint64_t TilePipeline::walk(const WalkOptions& options, const Work& work, std::optional<UnitId> only) {
  std::uint32_t unit = only ? only->index : 0;
  const std::uint32_t end = only ? unit + 1 : static_cast<std::uint32_t>(table_.units().size());
  const Next next = [&](bool) -> std::optional<UpdateRequest> {
    while (unit < end && !table_.units()[unit].is_trainable()) ++unit;
    if (unit == end) return std::nullopt;
    return UpdateRequest{UnitId{unit++}};
  };
  const std::uint64_t before = written_bytes_;
  run(options, work, next, [](UnitId) {});
  return written_bytes_ - before;
}

void TilePipeline::run(const WalkOptions& options, const Work& work, const Next& next, const Updated& updated) {
  std::deque<Job> jobs;  // started, oldest first
  std::optional<UpdateRequest> request;
  std::size_t index = 0;            // of the request's next sub-group
  std::deque<UpdateRequest> later;  // units that are only written: after all others
  const auto next_request = [&](bool wait) -> std::optional<UpdateRequest> {
    while (auto wanted = next(wait && later.empty())) {
      if (!is_only_written(wanted->unit, options)) return wanted;
      updated(wanted->unit);
      if (options.read_device_only) later.push_back(*wanted);
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
        index = std::max(index, first_sub_group_[request->unit.index]);
        if (!start(index, request->target, options, jobs)) break;
        if (!jobs.back().ends_unit) {
          ++index;
          continue;
        }
        request.reset();
        index = 0;
      }
      if (jobs.empty()) break;
      finish_job(jobs.front(), options, work, updated);
      jobs.pop_front();
    }
  } catch (...) {
    abandon(jobs);
    abandon(ahead_);
    throw;
  }
  record_io_.await_copies();  // whoever comes next finds device-only memory changed
}

void TilePipeline::finish_job(Job& job, const WalkOptions& options, const Work& work, const Updated& updated) {
  for (const Completion& read : job.reads) timed_wait(read, options.waits);
  update(job, options, work);
  write(job, options);
  if (job.ends_unit && !is_only_written(job.sub_group.unit, options)) updated(job.sub_group.unit);
}

// No pass waits for such a unit: the device has updated it, or it does not change. It comes last, if at all.
bool TilePipeline::is_only_written(UnitId unit, const WalkOptions& options) const {
  return memory_.device_only(unit) && !options.change_device_only;
}

// Reads under way still target the buffers: see them out before anybody else uses them.
void TilePipeline::abandon(std::deque<Job>& jobs) noexcept {
  for (const Job& job : jobs) {
    for (const Completion& read : job.reads) read.wait_quietly();  // the first error is the one that counts
  }
  jobs.clear();
}

// `buffer` may be null if the sub-group needs none.
TilePipeline::Job TilePipeline::job_of(std::size_t index, Buffer* buffer) const {
  const SubGroup& sub_group = memory_.sub_groups()[index];
  const auto place = memory_.place(sub_group, buffer == nullptr ? nullptr : buffer->bytes.data());
  return {.sub_group = sub_group,
          .weights = place.weights,
          .state = place.state,
          .gradient = place.gradient,
          .buffer = buffer,
          .ends_unit = index + 1 == first_sub_group_[sub_group.unit.index + 1]};
}

bool TilePipeline::start(std::size_t index, std::byte* target, const WalkOptions& options, std::deque<Job>& jobs) {
  const SubGroup& sub_group = memory_.sub_groups()[index];
  if (const auto read = read_already(sub_group); read != ahead_.end()) {
    jobs.push_back(std::move(*read));
    jobs.back().target = target_of(sub_group, target);
    ahead_.erase(read);
    read_gradient(jobs.back(), options);
    return true;
  }
  // Sub-groups in memory need no reading ahead, but must not hold up the reading of those after them.
  const bool needs_buffer = memory_.plan().units().buffered_bytes(sub_group).total() > 0;
  if (!needs_buffer && jobs.size() > buffers_.size()) return false;
  Buffer* const buffer = needs_buffer ? buffer_for(jobs, options.waits) : nullptr;
  if (needs_buffer && buffer == nullptr) return false;
  jobs.push_back(job_of(index, buffer));
  jobs.back().target = target_of(sub_group, target);
  if (memory_.device_only(sub_group.unit) ? options.read_device_only : options.read) read(jobs.back(), options);
  read_gradient(jobs.back(), options);
  return true;
}

std::byte* TilePipeline::target_of(const SubGroup& sub_group, std::byte* unit_target) const {
  const UnitRegions& units = memory_.plan().units();
  if (unit_target == nullptr || units.are_weights_resident(sub_group)) return nullptr;
  const std::uint64_t first = table_.unit(sub_group.unit).trainable.tiles()[sub_group.first_tile].w_offset;
  return unit_target + (first - units.host_pieces(sub_group.unit).stored_trainable.host_offset);
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

// Returns an idle buffer. Without one: null while jobs are left to finish; else waits for the one taken longest ago.
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
      for (std::size_t index = first_sub_group_[unit.index]; index < first_sub_group_[unit.index + 1]; ++index) {
        const SubGroup& sub_group = memory_.sub_groups()[index];
        if (memory_.device_only(unit)) break;  // none of it is only on NVMe
        // One whose gradient alone is on NVMe takes its buffer here: in start() it would take one from those read
        // ahead.
        if (memory_.plan().units().buffered_bytes(sub_group).total() == 0 || read_already(sub_group) != ahead_.end())
          continue;
        Buffer* const buffer = idle_buffer(ahead_);
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

std::deque<TilePipeline::Job>::iterator TilePipeline::read_already(const SubGroup& sub_group) {
  return std::ranges::find_if(ahead_, [&](const Job& job) {
    return job.sub_group.unit.index == sub_group.unit.index && job.sub_group.first_tile == sub_group.first_tile;
  });
}

RecordPart TilePipeline::part(const SubGroup& sub_group, Region region) const {
  return record_io_.part(sub_group.unit, RecordKind::trainable, region, sub_group.first_tile, sub_group.tile_count);
}

void TilePipeline::read(Job& job, const WalkOptions& options) {
  const auto buffered = memory_.plan().units().buffered_bytes(job.sub_group);
  const bool comes_from_store = !memory_.device_only(job.sub_group.unit);
  if (buffered.state > 0) {
    job.reads.push_back(record_io_.start_read(part(job.sub_group, Region::state), job.state, job.priority));
    job.verifies_state = comes_from_store;
  }
  if (buffered.weights == 0) return;
  if (comes_from_store) return read_weights(job, options);
  job.reads.push_back(record_io_.start_read(part(job.sub_group, Region::weights), job.weights, job.priority));
}

// Not ahead: the gradient may still be on its way down.
void TilePipeline::read_gradient(Job& job, const WalkOptions& options) {
  if (job.gradient == nullptr || !options.read_gradients) return;
  job.reads.push_back(spill_->start_read(job.sub_group, job.gradient, aio::Priority::foreground));
  job.verifies_gradient = true;
}

// From the store, runs of tiles whose weights the work looks at.
void TilePipeline::read_weights(Job& job, const WalkOptions& options) {
  const auto job_tiles = tiles(job.sub_group);
  const std::uint64_t base = job_tiles.front().w_offset;
  job.verifies_weights = true;
  for (std::size_t first = 0, end = 0; first < job_tiles.size(); first = end) {
    const bool made = makes_weights(job, job_tiles[first], options);
    for (end = first; end < job_tiles.size() && makes_weights(job, job_tiles[end], options) == made;) ++end;
    if (made) continue;
    const SubGroup run{job.sub_group.unit, job.sub_group.first_tile + static_cast<std::uint32_t>(first),
                       static_cast<std::uint32_t>(end - first)};
    job.reads.push_back(record_io_.start_read(part(run, Region::weights),
                                              job.weights + (job_tiles[first].w_offset - base), job.priority));
  }
}

bool TilePipeline::makes_weights(const Job& job, const Tile& tile, const WalkOptions& options) const {
  return options.makes_weights && table_.unit(job.sub_group.unit).segments[tile.segment].update_makes_weights();
}

void TilePipeline::update(Job& job, const WalkOptions& options, const Work& work) {
  const TimePoint begin = Clock::now();
  const auto update_one = [&](std::size_t i) { update_tile(job, i, options, work); };
  const auto update_all = [&] {
    runtime_.update_pool().run(tiles(job.sub_group).size(), std::cref(update_one));  // a reference: no copy on the heap
  };
  if (!options.in_background) {
    update_all();
    return runtime_.ledger().waited(WaitCause::optimizer, Clock::now() - begin);
  }
  const BusyClock::Span busy(busy_);
  update_all();
  if (Trace* const trace = runtime_.trace(); trace != nullptr)
    trace->add(TraceRow::optimizer, table_.unit(job.sub_group.unit).name, begin, Clock::now());
}

void TilePipeline::update_tile(const Job& job, std::size_t i, const WalkOptions& options, const Work& work) {
  const Unit& unit = table_.unit(job.sub_group.unit);
  const tiers::RecordId record = *records_.trainable(job.sub_group.unit);
  const Tile& first = tiles(job.sub_group).front();
  const Tile& tile = tiles(job.sub_group)[i];
  const auto index = job.sub_group.first_tile + static_cast<std::uint32_t>(i);
  const std::span<std::byte> weights(job.weights + (tile.w_offset - first.w_offset), tile.w_bytes);
  const std::span<std::byte> state(job.state + (tile.s_offset - first.s_offset), tile.s_bytes);
  const bool made = makes_weights(job, tile, options);
  if (job.verifies_weights && !made) store_->verify(record, Region::weights, index, 1, weights);
  if (job.verifies_weights && made) {  // the padding of the tile is stored with it
    const std::uint64_t used = tile.elements * dtype_bytes(unit.segments[tile.segment].dtype);
    std::ranges::fill(weights.subspan(used), std::byte{0});
  }
  if (job.verifies_state) store_->verify(record, Region::state, index, 1, state);
  const std::byte* gradient = nullptr;
  if (job.verifies_gradient) {
    gradient = job.gradient + (unit.gradient_offset(tile) - unit.gradient_offset(first));
    spill_->verify({job.sub_group.unit, index, 1}, gradient);
  }
  work({.unit = job.sub_group.unit,
        .segment = &unit.segments[tile.segment],
        .tile = &tile,
        .weights = weights.data(),
        .state = state.data(),
        .gradient = gradient});
  if (job.target != nullptr) std::memcpy(job.target + (tile.w_offset - first.w_offset), weights.data(), tile.w_bytes);
  const Writes written = writes(job.sub_group, options);
  if (written.weights) checksums_w_[i] = store_->checksum(record, Region::weights, index, weights);
  if (written.state) checksums_s_[i] = store_->checksum(record, Region::state, index, state);
}

TilePipeline::Writes TilePipeline::writes(const SubGroup& sub_group, const WalkOptions& options) const {
  const UnitRegions& units = memory_.plan().units();
  return {.weights = units.are_weights_resident(sub_group) ? options.write_resident : options.write_stored,
          .state = units.is_state_resident(sub_group) ? options.write_resident : options.write_stored};
}

void TilePipeline::write(Job& job, const WalkOptions& options) {
  const auto [writes_weights, writes_state] = writes(job.sub_group, options);
  std::array<Completion, 4> from_buffer;
  std::size_t count = 0;
  // State in memory does not change before the next step begins, which waits for this step's commit. So only the commit
  // waits for its write.
  const auto start_write = [&](Region region, const std::byte* source, const std::vector<std::uint64_t>& checksums) {
    const std::uint64_t bytes = part(job.sub_group, region).tiles.length_bytes;
    const bool makes_room = job.buffer != nullptr && is_within(source, job.buffer->bytes);
    const Completion write =
        store_->write(*records_.trainable(job.sub_group.unit), region, job.sub_group.first_tile,
                      job.sub_group.tile_count, {source, bytes}, std::span(checksums).first(job.sub_group.tile_count),
                      makes_room ? aio::Priority::background : aio::Priority::commit);
    written_bytes_ += bytes;
    if (!makes_room) return;
    from_buffer[count++] = write;
    if (region != Region::weights) return;
    Completion& written = weights_written_[job.sub_group.unit.index];
    const std::array parts{written, write};
    written = when_all(parts);
  };
  if (writes_weights) start_write(Region::weights, job.weights, checksums_w_);
  if (writes_state) start_write(Region::state, job.state, checksums_s_);
  if (memory_.device_only(job.sub_group.unit) && options.change_device_only) {
    from_buffer[count++] = record_io_.start_write(part(job.sub_group, Region::weights), job.weights);
    from_buffer[count++] = record_io_.start_write(part(job.sub_group, Region::state), job.state);
  }
  if (job.buffer != nullptr) job.buffer->idle = when_all(from_buffer);
}

}  // namespace hoist::detail
