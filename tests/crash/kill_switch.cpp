// SPDX-License-Identifier: Apache-2.0
#include "kill_switch.hpp"

#include <cerrno>
#include <csignal>
#include <new>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/clock.hpp>

namespace hoist::test {

const char* name_of(Phase phase) {
  constexpr std::array<const char*, kPhaseCount> kNames{"create",        "initialize", "forward update", "step update",
                                                        "backward",      "reduce",     "flush",          "manifest",
                                                        "between ranks", "restore",    "reshard",        "remove"};
  return kNames[static_cast<std::size_t>(phase)];
}

SharedWitness::SharedWitness() {
  void* const memory = ::mmap(nullptr, sizeof(Witness), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  HOIST_ASSERT(memory != MAP_FAILED);
  witness_ = new (memory) Witness;
}

SharedWitness::SharedWitness(const std::string& path, File file) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (file == File::make ? O_CREAT | O_TRUNC : 0), 0600);
  HOIST_ASSERT(descriptor >= 0 && ::ftruncate(descriptor, sizeof(Witness)) == 0, "{}: errno {}", path, errno);
  void* const memory = ::mmap(nullptr, sizeof(Witness), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  HOIST_ASSERT(memory != MAP_FAILED);
  witness_ = file == File::make ? new (memory) Witness : static_cast<Witness*>(memory);
}

SharedWitness::~SharedWitness() { ::munmap(witness_, sizeof(Witness)); }

void KillSwitch::event(Phase phase) {
  const std::uint64_t count = witness_.events[static_cast<std::size_t>(phase)].fetch_add(1) + 1;
  if (plan_.nth == 0 || phase != plan_.phase || count != plan_.nth) return;
  witness_.killed_ns = Clock::now().time_since_epoch().count();
  witness_.killed_itself = true;
  ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

}  // namespace hoist::test
