// SPDX-License-Identifier: Apache-2.0
// `hoist doctor` about io_uring and the limit on locked memory.
#include <fmt/format.h>
#include <sys/resource.h>

#include <hoist/aio/io_uring_probe.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

#include "finding.hpp"

namespace hoist::cli {

namespace {

constexpr unsigned kCapIpcLock = 14;

// Whether this process may lock memory beyond its limit.
bool may_lock_without_limit(const MachineSources& machine) {
  const auto effective = field_of(machine.proc + "/self/status", "CapEff");
  return effective && (std::strtoull(effective->c_str(), nullptr, 16) >> kCapIpcLock & 1) != 0;
}

// The reason why io_uring is refused: a sysctl, a seccomp filter, or a kernel without it.
void name_guard(const MachineSources& machine, const aio::IoUringSupport& support, Finding& finding) {
  const auto disabled = number_in(machine.proc + "/sys/kernel/io_uring_disabled");
  const auto seccomp = field_of(machine.proc + "/self/status", "Seccomp");
  finding.data["io_uring_disabled"] = disabled.value_or(0);
  finding.data["seccomp"] = seccomp.value_or("unknown");
  if (disabled.value_or(0) != 0) {
    finding.found += fmt::format(": forbidden by the sysctl kernel.io_uring_disabled = {}", *disabled);
    finding.remedy = "sudo sysctl -w kernel.io_uring_disabled=0";
    if (*disabled == 1) finding.remedy += "   (or join the group of kernel.io_uring_group)";
  } else if (seccomp && *seccomp == "2") {
    finding.found += ": a seccomp filter is active and most likely forbids it, as container runtimes do";
    finding.remedy =
        "docker run --security-opt seccomp=PROFILE.json, a copy of the default profile that allows io_uring_setup, "
        "io_uring_enter and io_uring_register";
  } else {
    finding.remedy = support.remedy;
  }
}

Finding part(const char* subject, int code, const char* cost, std::string remedy) {
  Finding finding{.subject = subject, .found = code == 0 ? "works" : errno_text(code)};
  finding.data = {{"errno", code}};
  if (code == 0) return finding;
  return finding.lacks(Verdict::lacking, cost, std::move(remedy));
}

Finding locked_memory(const MachineSources& machine) {
  Finding finding{.subject = "memlock limit", .found = "unknown"};
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return finding;
  const bool unlimited = limit.rlim_cur == RLIM_INFINITY;
  const bool exempt = may_lock_without_limit(machine);
  finding.found = unlimited ? "unlimited" : format_bytes(limit.rlim_cur);
  if (!unlimited && exempt) finding.found += ", which CAP_IPC_LOCK lifts";
  finding.data = {{"bytes", unlimited ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(limit.rlim_cur)},
                  {"cap_ipc_lock", exempt}};
  if (unlimited || exempt || limit.rlim_cur >= kGiB) return finding;
  return finding.lacks(
      Verdict::lacking,
      "buffers beyond it cannot be registered with io_uring: the kernel pins their pages again at each transfer",
      limit.rlim_max == RLIM_INFINITY
          ? "ulimit -l unlimited"
          : "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/memlock.conf, then log in again (docker: "
            "--ulimit memlock=-1)");
}

}  // namespace

Section look_at_io_uring(const MachineSources& machine) {
  Section section{"io_uring", {}};
  const aio::IoUringSupport support = aio::probe_io_uring();
  Finding available{.subject = "io_uring", .found = support.available ? "allowed" : support.reason};
  if (!support.available) {
    available.verdict = Verdict::lacking;
    available.cost = "transfers go through a pool of threads: the same results, with more CPU time for each byte";
    name_guard(machine, support, available);
  }
  available.data["available"] = support.available;
  section.findings.push_back(std::move(available));
  if (support.available) {
    section.findings.push_back(part("SINGLE_ISSUER, DEFER_TASKRUN", support.deferred_tasks,
                                    "the kernel interrupts the I/O thread for every finished block",
                                    "use Linux 6.1 or newer"));
    const auto remedy = [](int code, int usual, const char* usual_remedy) -> std::string {
      if (code == EPERM) return "allow io_uring_register in the seccomp filter";
      return code == usual ? usual_remedy : "";
    };
    section.findings.push_back(part("registered files", support.registered_files,
                                    "the kernel looks up the file at each transfer",
                                    remedy(support.registered_files, EINVAL, "use Linux 5.11 or newer")));
    section.findings.push_back(part("registered buffers", support.registered_buffers,
                                    "the kernel pins each buffer's pages again at each transfer",
                                    remedy(support.registered_buffers, ENOMEM, "raise the memlock limit, see below")));
  }
  section.findings.push_back(locked_memory(machine));
  return section;
}

}  // namespace hoist::cli
