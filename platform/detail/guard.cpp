// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <hoist/core/log.hpp>
#include <hoist/platform/detail/guard.hpp>

namespace hoist::platform::detail {

namespace {

#if defined(__x86_64__) && defined(PKEY_DISABLE_ACCESS)

// Never freed, because pages that carry it may still exist.
int key() {
  static const int kKey = ::pkey_alloc(0, PKEY_DISABLE_ACCESS);
  return kKey;
}
void set_rights(unsigned rights) { static_cast<void>(::pkey_set(key(), rights)); }
int rights() { return ::pkey_get(key()); }
int protect(std::span<std::byte> pages) {
  return ::pkey_mprotect(pages.data(), pages.size(), PROT_READ | PROT_WRITE, key());
}
constexpr unsigned kNoAccess = PKEY_DISABLE_ACCESS;

#else

int key() { return -1; }
void set_rights(unsigned) {}
int rights() { return 0; }
int protect(std::span<std::byte>) { return 0; }
constexpr unsigned kNoAccess = 0;

#endif

}  // namespace

bool can_guard() { return key() > 0; }

void guard(std::span<std::byte> pages) {
  if (!can_guard() || pages.empty()) return;
  if (protect(pages) != 0) log_warning("memory of the host device is not guarded: pkey_mprotect failed");
  set_rights(kNoAccess);
}

GuardedAccess::GuardedAccess() {
  if (!can_guard()) return;
  before_ = rights();
  set_rights(0);
}

GuardedAccess::~GuardedAccess() {
  if (can_guard()) set_rights(static_cast<unsigned>(before_));
}

}  // namespace hoist::platform::detail
