// SPDX-License-Identifier: Apache-2.0
// zero/update/tile_pipeline.hpp - the optimizer step over all records: read ahead, update, write behind.
//
// The records are cut into sub-groups (runs of tiles), which pass through a pool of buffers: while one is updated,
// later ones are being read and earlier ones written. A tile is verified, updated and checksummed in one pass while it
// is in cache. State that the CPU can read in memory is updated in place and, when steps are durable, written from
// there. The device updates device-only units itself; other walks bring their state into the buffers and back.
//
// Between walks the buffers are idle: read_ahead() fills them with what the next step begins with, while the program is
// still making its gradients.
//
// Threading  One caller at a time; tiles run on the update pool.
// Errors     IoError, CorruptionError; Error when a master or moment is not finite or too large to be committed.
// Main path  run -> for each sub-group: read -> tiles (verify, update, checksum) -> write.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include <hoist/core/busy_clock.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/layout/tile_access.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/memory/record_io.hpp>

namespace hoist::detail {

// The state that a walk over all trainable tiles reads and writes.
struct WalkOptions {
  bool read = true;              // reads the tiles on NVMe first; false: the work makes them, or does not look at them
  bool write_stored = true;      // writes the tiles on NVMe
  bool write_resident = true;    // writes tiles that are resident in memory to the store, as a commit needs it
  bool read_device_only = true;  // brings the tiles of device-only units into buffers first
  bool change_device_only = true;  // puts what the work made of them back
  WaitCause waits = WaitCause::nvme;
  bool in_background = false;  // nobody waits meanwhile: the time does not count as waiting
  // The work makes weights where Segment::update_makes_weights(): they are not read, and all of them are written.
  bool makes_weights = false;
  bool read_gradients = false;  // those that are spilled, too
};

// A unit to update. `target`, unless null, receives a copy (host layout) of its new trainable weights that are on NVMe.
struct UpdateRequest {
  UnitId unit{};
  std::byte* target = nullptr;
};

class TilePipeline {
 public:
  TilePipeline(Runtime& runtime, const UnitTable& table, const Memory& memory, const RecordMap& records,
               RecordIo& record_io, tiers::Store* store, GradientSpill* spill);
  ~TilePipeline();  // waits for the reads ahead to end
  TilePipeline(const TilePipeline&) = delete;
  TilePipeline& operator=(const TilePipeline&) = delete;

  // Runs work(tile) over every trainable tile of unit `only`, or of all units: in parallel within a sub-group, one
  // sub-group after the other. Returns when everything is computed and all writes are started; the store's commit waits
  // for them. Returns the bytes of those writes. Pre: a step of the store is open if anything is written.
  using Work = std::function<void(const TileAccess&)>;
  std::uint64_t walk(const WalkOptions& options, const Work& work, std::optional<UnitId> only = {});
  // The same over the units that `next` names, until it names none. next(wait) may block only if `wait`: then the
  // pipeline has nothing else to do. It calls updated(unit) when the unit's tiles are computed and their writes
  // started, or at once if this walk does not change the unit's weights: those of a device-only unit, without
  // WalkOptions::change_device_only.
  using Next = std::function<std::optional<UpdateRequest>(bool wait)>;
  using Updated = std::function<void(UnitId)>;
  void run(const WalkOptions& options, const Work& work, const Next& next, const Updated& updated);

  // Starts to read the records of `units` for the next step, in this order and with background priority, into the free
  // buffers. First waits until the last writes out of the buffers are done. The next run with
  // WalkOptions::makes_weights takes what was read instead of reading it; any other walk drops it. A sub-group whose
  // gradient alone is on NVMe only takes its buffer. An error here, or during the reads, makes that run fail.
  void read_ahead(const WalkOptions& walk, std::span<const UnitId> units) noexcept;

  // Binds the calling thread, which does nothing else, to the processors that tiles are updated on.
  void bind_thread() const;

  // Time spent computing in runs in the background, up to now.
  Nanoseconds busy() const { return busy_.total(); }

  // Done when the last walk's writes of the unit's weights to the store have ended. Weights that stay in memory do not
  // count.
  Completion weights_written(UnitId unit) const { return weights_written_[unit.index]; }

 private:
  struct Buffer {
    std::span<std::byte> bytes;
    Completion idle;             // last write out of it
    std::uint64_t last_use = 0;  // counts uses of all buffers
  };
  struct Job {
    SubGroup sub_group;
    std::byte* weights = nullptr;  // of the sub-group's first tile
    std::byte* state = nullptr;
    std::byte* gradient = nullptr;  // null unless it is spilled
    Buffer* buffer = nullptr;
    std::byte* target = nullptr;  // of a copy of the weights
    bool ends_unit = false;
    aio::Priority priority = aio::Priority::foreground;  // of the reads
    std::vector<Completion> reads;
    bool verifies_weights = false, verifies_state = false;  // weights that the update makes are not verified
    bool verifies_gradient = false;
  };
  void finish_job(Job& job, const WalkOptions& options, const Work& work, const Updated& updated);
  void abandon(std::deque<Job>& jobs) noexcept;  // leaves none
  bool is_only_written(UnitId unit, const WalkOptions& options) const;
  Job job_of(std::size_t index, Buffer* buffer) const;
  std::deque<Job>::iterator read_already(const SubGroup& sub_group);  // in ahead_
  bool start(std::size_t index, std::byte* target, const WalkOptions& options, std::deque<Job>& jobs);
  std::byte* target_of(const SubGroup& sub_group, std::byte* unit_target) const;
  bool held(const Buffer& buffer, const std::deque<Job>& jobs) const;
  Buffer* idle_buffer(const std::deque<Job>& jobs);
  Buffer* buffer_for(const std::deque<Job>& jobs, WaitCause cause);
  void read(Job& job, const WalkOptions& options);
  void read_weights(Job& job, const WalkOptions& options);
  void read_gradient(Job& job, const WalkOptions& options);
  bool makes_weights(const Job& job, const tiers::Tile& tile, const WalkOptions& options) const;
  void update(Job& job, const WalkOptions& options, const Work& work);
  void update_tile(const Job& job, std::size_t i, const WalkOptions& options, const Work& work);
  struct Writes {
    bool weights = false, state = false;
  };
  Writes writes(const SubGroup& sub_group, const WalkOptions& options) const;
  void write(Job& job, const WalkOptions& options);
  RecordPart part(const SubGroup& sub_group, tiers::Region region) const;
  std::span<const tiers::Tile> tiles(const SubGroup& sub_group) const;
  void timed_wait(const Completion& completion, WaitCause cause);

  Runtime& runtime_;
  const UnitTable& table_;
  const Memory& memory_;
  const RecordMap& records_;
  RecordIo& record_io_;
  tiers::Store* store_;
  GradientSpill* spill_;
  std::vector<Buffer> buffers_;
  std::deque<Job> ahead_;  // read for the next step
  std::uint64_t uses_ = 0;
  std::uint64_t written_bytes_ = 0;                       // to the store, by all walks
  std::vector<std::size_t> first_sub_group_;              // by unit, and one past the last
  BusyClock busy_;                                        // computing in the background
  std::vector<Completion> weights_written_;               // by unit
  std::vector<std::uint64_t> checksums_w_, checksums_s_;  // of the sub-group being updated
};

}  // namespace hoist::detail
