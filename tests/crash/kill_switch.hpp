// SPDX-License-Identifier: Apache-2.0
// tests/crash/kill_switch.hpp - a process that kills itself at a certain moment, and what its parent learns of it.
//
// Everything that can happen to a store is an event of one phase: a transfer about to be handed to the kernel, one that
// the kernel has, one that is done, a system call, a reduction, an agreement. A plan names the n-th event of a phase;
// there the process sends itself SIGKILL. What it had done by then lies in memory it shares with its parent.
//
// Threading  event() on any thread of the child; the parent reads when the child is dead.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace hoist::test {

enum class Phase : std::uint8_t {
  create,          // directories, files, superblock
  initialize,      // the state of step 0 and its commit
  forward_update,  // update mode forward, and backward's rest: from the return of step() to the end of the next forward
  step_update,     // update mode step: inside step()
  backward,        // from the end of the forward to step()
  reduce,          // a gradient's reduce-scatter
  flush,           // of the data, at a commit
  manifest,        // written and flushed, at a commit
  between_ranks,   // this rank's manifest is durable, the others are asked about theirs
  restore,
  reshard,  // the state is read from one store and written to one of another number of ranks
  remove,   // of a store that was taken over, or of what an earlier attempt left
};
inline constexpr std::size_t kPhaseCount = static_cast<std::size_t>(Phase::remove) + 1;
const char* name_of(Phase phase);

struct KillPlan {
  Phase phase = Phase::create;
  std::uint64_t nth = 0;  // its events are counted from 1; 0: never
};

// Shared with the parent; no pointers and no locks, so that a process that dies at any instant leaves it usable.
struct Witness {
  std::array<std::atomic<std::uint64_t>, kPhaseCount> events{};
  std::atomic<bool> killed_itself{false};
  std::atomic<std::int64_t> restored{-1};   // the step this life began with
  std::atomic<std::int64_t> committed{-1};  // the newest that was reported durable
  std::atomic<std::int64_t> mirrored{-1};   // the newest that was reported whole in the mirror
  std::atomic<std::int64_t> stepped{-1};    // the newest that step() was called for
  std::atomic<bool> restoring{false};
  std::atomic<std::int64_t> killed_ns{0};  // when it killed itself, on the monotonic clock
  std::atomic<bool> refused{false};        // a forked life ended with an error of hoist's
  std::array<char, 1500> text{};           // digests at the end, or the error
  // Of ranks that are MPI processes (mpi_rank.cpp):
  std::atomic<std::int64_t> ended_ns{0};  // when it came to its end or to an error
  std::atomic<std::int64_t> process{0};   // its id, once it runs
  std::atomic<bool> failed{false};        // ended with an error
};

// A witness in memory that fork() shares, or in a file that another program opens, too.
class SharedWitness {
 public:
  SharedWitness();
  enum class File : std::uint8_t { make, open };
  SharedWitness(const std::string& path, File file);
  ~SharedWitness();
  SharedWitness(const SharedWitness&) = delete;
  SharedWitness& operator=(const SharedWitness&) = delete;
  Witness& operator*() const { return *witness_; }
  Witness* operator->() const { return witness_; }

 private:
  Witness* witness_;
};

class KillSwitch {
 public:
  KillSwitch(Witness& witness, const KillPlan& plan) : witness_(witness), plan_(plan) {}
  // One more event of a phase. Does not return when it is the one that was planned.
  void event(Phase phase);
  Witness& witness() { return witness_; }

 private:
  Witness& witness_;
  const KillPlan plan_;
};

}  // namespace hoist::test
