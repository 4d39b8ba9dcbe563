// SPDX-License-Identifier: Apache-2.0
#include <mutex>

#include <fmt/format.h>

#include <hoist/aio/detail/backends.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/processors.hpp>

namespace hoist::aio {

namespace {

void say_fallback_once(const detail::Unavailable& why) {
  static std::once_flag said;
  std::call_once(said, [&] {
    log_warning(
        "io_uring is not available ({}): disk transfers use a pool of threads instead, with the same results "
        "but more CPU time. To have it, {}.",
        why.reason, why.remedy);
  });
}

}  // namespace

std::unique_ptr<Backend> make_backend(const DriveQueueOptions& options) {
  if (options.backend == BackendKind::null) return detail::make_null_backend(options);
  if (options.backend == BackendKind::threads) return detail::make_threads_backend(options, {});
  detail::Unavailable why;
  if (auto backend = detail::make_io_uring_backend(options, why)) return backend;
  if (options.backend == BackendKind::io_uring)
    throw Error(
        fmt::format("io_uring is not available ({}); {}, or choose the backend 'threads'", why.reason, why.remedy));
  say_fallback_once(why);
  return detail::make_threads_backend(options, "io_uring: " + why.reason);
}

namespace detail {

void enter_io_thread(const char* name, const DriveQueueOptions& options) noexcept {
  if (options.cpus.empty() || bind_current_thread(options.cpus)) return;
  log_warning(
      "{}: the system refused to bind this thread to its {} processors, of which {} is the first; it runs anywhere",
      name, options.cpus.size(), options.cpus.front());
}

}  // namespace detail

}  // namespace hoist::aio
