// SPDX-License-Identifier: Apache-2.0
// core/thread.hpp - a thread with a name that `top -H` and debuggers show.
//
// Errors     Error, naming the thread, if the system refuses another thread.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace hoist {

// The system shows the first 15 characters of `name`. Pre: `body` does not throw.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace hoist
