// SPDX-License-Identifier: Apache-2.0
#include "kill_switch.hpp"

#include <csignal>
#include <new>

#include <sys/mman.h>
#include <unistd.h>

#include <hoist/core/assert.hpp>

namespace hoist::test {

const char* name_of(Phase phase) {
  constexpr std::array<const char*, kPhaseCount> kNames{"create",        "initialize", "forward update", "step update",
                                                        "backward",      "reduce",     "flush",          "manifest",
                                                        "between ranks", "restore"};
  return kNames[static_cast<std::size_t>(phase)];
}

SharedWitness::SharedWitness() {
  void* const memory = ::mmap(nullptr, sizeof(Witness), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  HOIST_ASSERT(memory != MAP_FAILED);
  witness_ = new (memory) Witness;
}

SharedWitness::~SharedWitness() { ::munmap(witness_, sizeof(Witness)); }

void KillSwitch::event(Phase phase) {
  const std::uint64_t count = witness_.events[static_cast<std::size_t>(phase)].fetch_add(1) + 1;
  if (plan_.nth == 0 || phase != plan_.phase || count != plan_.nth) return;
  witness_.killed_itself = true;
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

}  // namespace hoist::test
