// SPDX-License-Identifier: Apache-2.0
// tests/crash/watched.hpp - what a rank does on disk and with others, told to a KillSwitch as events.
//
// A rank says where its program is (Stage); the backend, the communicator and the system calls decide from that and
// from what they see which phase an event belongs to.
//
// Threading  WatchedRank's stage: any thread. `reshards` and `manifest_delay` are set before the rank runs.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/comm/communicator.hpp>
#include <hoist/tests/support/system_calls.hpp>

#include "kill_switch.hpp"

namespace hoist::test {

enum class Stage : std::uint8_t { creating, restoring, forward, backward, stepping, ended };

// For a slow rank among threads: another rank's manifest is durable first.
inline constexpr std::chrono::milliseconds kSlowManifestDelay{3};

struct WatchedRank {
  // `defers_updates`: step() leaves work to the next forward.
  WatchedRank(KillSwitch& kill_switch, bool defers_updates) : kills(kill_switch), defers(defers_updates) {}
  KillSwitch& kills;
  const bool defers;
  bool reshards = false;  // its restore is of another number of ranks
  std::atomic<Stage> stage{Stage::creating};
  std::chrono::microseconds manifest_delay{0};  // so that another rank's manifest is durable first
};

std::unique_ptr<aio::Backend> watch(std::unique_ptr<aio::Backend> backend, WatchedRank& rank);
std::unique_ptr<comm::Communicator> watch(std::unique_ptr<comm::Communicator> communicator, WatchedRank& rank);

// For all ranks of the process together: they share its files' names.
class WatchedSystemCalls final : public SystemCallObserver {
 public:
  explicit WatchedSystemCalls(KillSwitch& kills) : kills_(kills) {}
  bool before(const SystemCall&) override;
  void after(const SystemCall&, int result) override;

 private:
  KillSwitch& kills_;
};

}  // namespace hoist::test
