// SPDX-License-Identifier: Apache-2.0
// tests/crash/rank_life.hpp - what one rank of a training does from its start to its end, or to its death; and the
// process it does it in.
//
// Checked in every life: it begins with a commit that is not older than the newest that was reported durable, nor newer
// than the last that was begun, and with that commit's caller state.
//
// Threading  train_rank() on each rank's own thread.
// Errors     What is wrong with what was found is a WrongLife; what hoist throws passes through.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include <sys/types.h>

#include <hoist/tests/zero/toy_model.hpp>

#include "kill_switch.hpp"
#include "watched.hpp"

namespace hoist::test {

inline constexpr int kExitFinished = 0, kExitFailed = 3;

class WrongLife : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The state that a life should find, and where it ends.
struct LifeTerms {
  std::int64_t promised = -1;  // the newest step that was reported durable
  std::int64_t begun = -1;     // the last that was begun
  std::uint64_t last_step = 60;
  bool equal_gradients = false;  // the number of ranks makes no difference
  std::uint64_t seed = 1;        // of the model: another one for each sharding group
  bool forks = false;            // a child before each step, which uses the engine and exits
};

const ToyShape& crash_shape();
const char* mode_name(UpdateMode mode);
// Everything a crash test's engine needs, but for its communicator. `pinned_fraction`: of what is on NVMe.
ToySetup crash_setup(Placement parameters, UpdateMode mode, const std::string& store, double pinned_fraction = 0);

// A maximum that several threads may raise.
void raise_to(std::atomic<std::int64_t>& value, std::int64_t to);

void say(Witness& witness, const std::string& text);

// Trains to the end, and returns the digests.
std::string train_rank(const ToySetup& setup, const Runtime::Groups& groups, WatchedRank& rank, const LifeTerms& terms);

// The ranks of a job, which are threads: `groups` sharding groups of `ranks` each. train(group, index, joins) is called
// on every one and returns its digests; `index` counts them from 0, group by group. Returns what the groups' first
// ranks did.
std::string train_job(int groups, int ranks,
                      const std::function<std::string(int group, int index, const Runtime::Groups& joins)>& train);
// Where the store of one of so many groups is.
std::string store_of_group(const std::string& store, int groups, int group);

enum class LifeEnd : std::uint8_t { killed, finished, failed };

// A life in a process of its own, which ends with the word that it returns, or its error, in the witness.
class ChildLife {
 public:
  ChildLife(const std::function<std::string()>& life, Witness& witness);
  ~ChildLife();
  ChildLife(const ChildLife&) = delete;
  ChildLife& operator=(const ChildLife&) = delete;
  void send(int signal) const;
  bool has_ended();
  // `killed`: it was sent SIGKILL.
  LifeEnd wait(bool killed = false);

 private:
  Witness& witness_;
  pid_t process_ = -1;
  std::optional<int> status_;
};

// With `kill_after`, this process kills it after that time.
LifeEnd live_in_child(const std::function<std::string()>& life, Witness& witness,
                      std::optional<std::chrono::microseconds> kill_after);

}  // namespace hoist::test
