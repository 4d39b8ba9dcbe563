// SPDX-License-Identifier: Apache-2.0
#include "interrupt.hpp"

#include <array>
#include <csignal>
#include <cstdlib>
#include <ctime>

namespace hoist::cli {

namespace {

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
measure::StopFlag stop_requested{false};
volatile std::sig_atomic_t signal_seen = 0;

// `timeout` and shells may send a process the same signal twice in a row; only a person asks again after this time.
constexpr double kImpatientSeconds = 0.5;
double first_signal_at = 0;  // in seconds of CLOCK_MONOTONIC, once signal_seen is not 0

extern "C" void on_signal(int number) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  if (signal_seen != 0 && seconds - first_signal_at > kImpatientSeconds) {
    ::signal(number, SIG_DFL);
    ::raise(number);
    return;
  }
  if (signal_seen == 0) first_signal_at = seconds;
  signal_seen = number;
  stop_requested.store(true, std::memory_order_relaxed);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  stop_requested.store(false, std::memory_order_relaxed);
  signal_seen = 0;
  for (const int number : kSignals) {
    struct sigaction current {};
    ::sigaction(number, nullptr, &current);
    if (current.sa_handler == SIG_IGN) continue;  // nohup ignores the signal
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (const int other : kSignals) ::sigaddset(&action.sa_mask, other);
    ::sigaction(number, &action, nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  for (const int number : kSignals) {
    struct sigaction current {};
    ::sigaction(number, nullptr, &current);
    if (current.sa_handler == on_signal) ::signal(number, SIG_DFL);
  }
}

const measure::StopFlag* InterruptGuard::flag() const { return &stop_requested; }

void InterruptGuard::end_by_signal() {
  const int number = signal_seen != 0 ? signal_seen : SIGTERM;
  ::signal(number, SIG_DFL);
  ::raise(number);
  std::_Exit(128 + number);
}

}  // namespace hoist::cli
