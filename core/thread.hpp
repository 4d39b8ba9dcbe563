// SPDX-License-Identifier: Apache-2.0
// core/thread.hpp - a thread of ours, by a name that `top -H` and debuggers show.
//
// Errors     Error, naming the thread, where the system refuses another one.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace hoist {

// Of `name` the first 15 characters are shown. Pre: `body` does not throw.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace hoist
