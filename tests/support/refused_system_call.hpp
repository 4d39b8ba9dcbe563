// SPDX-License-Identifier: Apache-2.0
// tests/support/refused_system_call.hpp - a system call that fails, as container runtimes make io_uring's fail.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>

namespace hoist::test {

inline constexpr int kNoFilter = 99;  // exit code of a child that could not set one

// Makes a system call fail with `code` for the calling thread and what it starts, when its second argument has all
// the bits of `second_argument_mask` (0: always). False if this system allows no such filter.
[[nodiscard]] inline bool refuse_system_call(long number, int code, std::uint32_t second_argument_mask = 0) {
  const auto error = SECCOMP_RET_ERRNO | (static_cast<std::uint32_t>(code) & SECCOMP_RET_DATA);
  std::array<sock_filter, 7> filter{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(number), 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args) + sizeof(std::uint64_t)),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, second_argument_mask),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, second_argument_mask, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace hoist::test
