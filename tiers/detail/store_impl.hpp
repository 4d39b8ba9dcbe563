// SPDX-License-Identifier: Apache-2.0
// tiers/detail/store_impl.hpp - the state of an open store: tables, transfers in flight, and the commit thread.
//
// store.cpp reads, writes and commits, store_checkpoints.cpp makes named checkpoints and holds commits, store_open.cpp
// makes and opens stores; store_look.cpp looks at closed ones.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <hoist/aio/striped_file.hpp>
#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/tiers/detail/record_table.hpp>
#include <hoist/tiers/detail/store_drives.hpp>
#include <hoist/tiers/detail/store_files.hpp>
#include <hoist/tiers/detail/transfers.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_format.hpp>

namespace hoist::tiers {

class Store::Impl final : public Store {
 public:
  struct Files {
    std::unique_ptr<aio::StripedFile> data;  // locked
    std::unique_ptr<aio::File> manifest;
  };

  Impl(const StoreOptions& options, Superblock superblock, detail::StorePaths paths, aio::DriveQueue& queue);
  ~Impl() override;

  static std::uint64_t memory_bytes(const StoreOptions& options, const Superblock& superblock);

  bool drive_gave_up() const;

  // A new store: nothing to adopt. The labels are written, and the directories flushed, with the first commit.
  void start_new(Files files, std::vector<std::string> directories_to_flush, std::vector<std::string> made_directories,
                 std::vector<detail::LabelledDrive> labels_to_write);
  // An existing one: reads all slots.
  void start_existing(Files files);

  void remove_new() noexcept override;
  bool remove_remains() noexcept override;
  void load(const CommitHeader& commit) override;
  void verify_records(std::span<std::byte> buffer, const std::function<bool()>& go_on) override;
  void adopt(const CommitHeader& commit) override;
  Completion read(RecordId record, Region region, std::uint32_t first, std::uint32_t count, std::span<std::byte> target,
                  aio::Priority priority) override;
  void verify(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
              std::span<const std::byte> bytes) const override;
  using Store::begin_step;
  void begin_step(std::uint64_t step, std::uint32_t revision) override;
  std::uint64_t checksum(RecordId record, Region region, std::uint32_t tile, std::span<const std::byte> bytes) override;
  Completion write(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                   std::span<const std::byte> source, std::span<const std::uint64_t> checksums,
                   aio::Priority priority) override;
  Completion commit(std::span<const std::byte> caller_state, Agree agree) override;
  Completion recommit(std::span<const std::byte> caller_state, Agree agree) override;
  Completion add_checkpoint(const std::string& name, std::span<const std::byte> caller_state, Agree agree) override;
  void remove_checkpoint(std::uint64_t checkpoint_serial) override;
  std::unique_ptr<StoreReader> hold() override;
  std::unique_ptr<Scratch> make_scratch(std::uint64_t bytes, Queues queues) const override;

  std::span<const CommitHeader> commits() const override { return found_.commits; }
  std::vector<CommitHeader> commits_and_abandoned() const override { return found_.commits_and_abandoned(); }
  std::vector<CommitHeader> checkpoints() const override;
  std::vector<CommitHeader> checkpoints_apart_from(const CorruptionError::Where& damage) const override;
  std::uint32_t checkpoints_max() const override { return superblock_.checkpoints_max - held_max_; }
  std::span<const ManifestDamage> damage() const override { return damage_; }
  std::span<const std::byte> caller_state() const override { return caller_state_; }
  std::vector<std::string> data_paths() const override { return files_.data->data_paths(); }
  std::uint64_t store_number() const override { return superblock_.store_number; }

 private:
  struct Job {
    SlotHeader header;
    Agree agree;
    Promise promise;
    enum class Kind : std::uint8_t { commit, recommit, checkpoint } kind = Kind::commit;
    std::vector<std::byte> state{};  // a commit's is in the image already
  };
  struct Checkpoint {
    CommitHeader header;
    std::uint32_t slot = 0;
    std::vector<std::uint32_t> extents;  // of all records
  };

  void require_room(std::span<const std::byte> caller_state) const;  // UsageError
  Completion enqueue(Job job) HOIST_REQUIRES(mutex_);
  void commit_loop();
  // Everything that makes a job durable, in its order; then agrees, or says that it failed.
  void make_durable_and_agree(Job& job);
  void make_durable(const SlotHeader& header);
  void write_again(Job& job);
  void write_checkpoint(const Job& job);
  // Removes the checkpoints that a new one replaces, after all ranks agreed on it. On the commit thread.
  void remove_oldest(const CommitHeader& newest);
  void remove(std::vector<Checkpoint>::iterator checkpoint);
  void blank_slot(std::uint32_t slot);
  void list_checkpoints();  // into listed_
  void hold_checkpoint();   // after a load
  void continue_step(std::uint64_t step) HOIST_REQUIRES(mutex_);
  std::uint32_t free_checkpoint_slot() const;
  void use(Files files);
  // StoreError if a file has lost its name.
  void write_slot(std::uint32_t slot, const SlotHeader& header);
  void read_slot(std::uint32_t slot);
  void load_slot(std::uint32_t slot);
  std::uint32_t load_commit(const CommitHeader& commit) HOIST_REQUIRES(mutex_);  // returns its slot

  aio::DriveQueue& queue_;  // of the manifest
  const Superblock superblock_;
  const detail::StorePaths paths_;
  const Durability durability_;
  const std::uint32_t held_max_;  // of the places for named checkpoints, those that hold() uses
  std::atomic<std::uint32_t> held_{0};
  Trace* const trace_;
  Files files_;
  detail::FileNames names_;  // of files_
  detail::RecordTable table_;
  aio::TransferMemory image_;  // one slot; the commit thread's during a commit
  std::unique_ptr<detail::Transfers> transfers_ = std::make_unique<detail::Transfers>();
  std::vector<std::byte> caller_state_;
  std::vector<SlotCheck> slots_;         // as they were found
  Commits found_;                        // in them
  std::vector<Checkpoint> checkpoints_;  // oldest first; the commit thread's during a job
  std::vector<Checkpoint> listed_;       // for checkpoints(): without what a job has not finished
  std::vector<ManifestDamage> damage_;
  std::vector<std::string> directories_to_flush_;       // by the first commit
  std::vector<std::string> made_directories_;           // for remove_new()
  std::vector<detail::LabelledDrive> labels_to_write_;  // by the first commit, before its manifest

  mutable Mutex mutex_;
  ConditionVariable wake_;  // for the commit thread
  ConditionVariable idle_;  // a commit has ended
  std::atomic<bool> step_open_{false};
  // From adopted_ to revision_: set by the constructor; then written under mutex_, by adopt() and, while no job is
  // waiting or running, by begin_step(); otherwise by the commit thread, which alone reads them without it.
  bool adopted_ = false;  // there is a current state, or the store is new
  std::uint64_t step_ = 0;
  std::uint32_t incarnation_ = 1;
  std::uint32_t slot_ = 1;  // holds the last commit; the next one goes to the other
  std::optional<std::uint64_t> committed_step_;
  std::uint32_t revision_ = 0;                        // of the current step, or of the last one
  bool committing_ HOIST_GUARDED_BY(mutex_) = false;  // a job is waiting or running
  bool stopping_ HOIST_GUARDED_BY(mutex_) = false;
  std::exception_ptr failed_ HOIST_GUARDED_BY(mutex_);
  std::deque<Job> jobs_ HOIST_GUARDED_BY(mutex_);  // in order: a commit, and what keeps it
  std::thread thread_;
};

}  // namespace hoist::tiers
