// SPDX-License-Identifier: Apache-2.0
// aio/detail/backends.hpp - makes the backends of this module, and binds their threads.
#pragma once

#include <memory>
#include <string>

#include <hoist/aio/drive_queue.hpp>

namespace hoist::aio::detail {

// Why io_uring is not available: the errno's text, and the remedy.
struct Unavailable {
  std::string reason;
  std::string remedy;
};

// Null if the system refuses; then `why` is filled in.
std::unique_ptr<Backend> make_io_uring_backend(const DriveQueueOptions& options, Unavailable& why);
// `note` is appended to the description: why this backend was chosen. May be empty.
std::unique_ptr<Backend> make_threads_backend(const DriveQueueOptions& options, const std::string& note);
std::unique_ptr<Backend> make_null_backend(const DriveQueueOptions& options);

// Binds the calling thread to options.cpus, if there are any. Logs a refused binding of the thread `name`.
void enter_io_thread(const char* name, const DriveQueueOptions& options) noexcept;

}  // namespace hoist::aio::detail
