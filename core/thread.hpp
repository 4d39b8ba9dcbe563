// SPDX-License-Identifier: Apache-2.0
// core/thread.hpp - threads with names that `top -H` and debuggers show. All of hoist's threads are made here.
// The program's signals are handled on its own threads: their handlers do not run on hoist's, and interrupt no transfer
// there (a drive over a network may end one with EINTR). SIGPROF, for profilers, and the signals of a thread's own
// faults are delivered.
//
// Errors     Error, naming the thread, if the system refuses another thread or gives it too small a stack.
#pragma once

#include <cstddef>
#include <functional>
#include <stop_token>
#include <string>
#include <thread>

namespace hoist {

// The system shows the first 15 characters of `name`. Pre: `body` does not throw.
std::thread start_thread(const std::string& name, std::function<void()> body);
// Its destructor asks it to stop, and waits for it.
std::jthread start_joining_thread(const std::string& name, std::function<void(const std::stop_token&)> body);
// Runs body(i) for each i below `count`, each on a thread of its own, and returns when all have ended; throws the error
// of the first that has one. Until then it calls `meanwhile`, if there is one, again and again.
void run_on_threads(const std::string& name, std::size_t count, const std::function<void(std::size_t)>& body,
                    const std::function<void()>& meanwhile = {});

}  // namespace hoist
