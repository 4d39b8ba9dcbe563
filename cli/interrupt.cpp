// SPDX-License-Identifier: Apache-2.0
#include "interrupt.hpp"

#include <array>
#include <csignal>
#include <cstdlib>

namespace hoist::cli {

namespace {

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
measure::StopFlag stop_requested{false};
volatile std::sig_atomic_t signal_seen = 0;

extern "C" void on_signal(int number) {
  signal_seen = number;
  stop_requested.store(true, std::memory_order_relaxed);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  stop_requested.store(false, std::memory_order_relaxed);
  for (const int number : kSignals) {
    struct sigaction current {};
    ::sigaction(number, nullptr, &current);
    if (current.sa_handler == SIG_IGN) continue;  // nohup wants it so
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
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
