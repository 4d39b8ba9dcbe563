// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdlib>
#include <memory>

#include <unistd.h>

#include <hoist/aio/detail/nameless_file.hpp>
#include <hoist/aio/detail/polling_probe.hpp>
#include <hoist/aio/detail/quarantine.hpp>
#include <hoist/aio/detail/uring_setup.hpp>

namespace hoist::aio::detail {

namespace {

constexpr useconds_t kLookIntervalUs = 50;

const char* remedy_of(Polling polling) {
  return polling == Polling::submission
             ? "allow SQPOLL rings (Linux 5.11 or newer)"
             : "give the drive poll queues (nvme.poll_queues=N on the kernel's command line) and use a file system "
               "with direct transfers";
}

// Everything the kernel may still write to while the probe is under way.
struct Probe {
  io_uring ring{};
  bool ring_made = false;
  std::unique_ptr<void, decltype(&std::free)> buffer{std::aligned_alloc(File::kAlignment, File::kAlignment),
                                                     &std::free};
  std::optional<File> file;

  ~Probe() {
    if (ring_made) io_uring_queue_exit(&ring);
  }

  int set_up(Polling polling) {
    unsigned flags = 0;
    if (const int code = set_up_ring(ring, 1, polling, flags); code != 0) return code;
    ring_made = true;
    if ((flags & IORING_SETUP_R_DISABLED) != 0) enable_ring(ring);
    return 0;
  }

  // A block to read, really written before.
  int prepare_file(const std::string& directory) {
    file.emplace(nameless_file(directory, File::kAlignment));
    if (!file->is_direct()) return EOPNOTSUPP;
    std::fill_n(static_cast<std::byte*>(buffer.get()), File::kAlignment, std::byte{1});
    return ::pwrite(file->descriptor(), buffer.get(), File::kAlignment, 0) < 0 ? errno : 0;
  }

  void start() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring);
    if (file) {
      io_uring_prep_read(entry, file->descriptor(), buffer.get(), File::kAlignment, 0);
    } else {
      io_uring_prep_nop(entry);
    }
    static_cast<void>(io_uring_submit(&ring));
  }

  // An errno, 0, or nothing while it has not ended.
  std::optional<int> look() {
    static_cast<void>(io_uring_get_events(&ring));  // never waits: it asks for no event
    io_uring_cqe* entry = nullptr;
    if (io_uring_peek_cqe(&ring, &entry) != 0) return std::nullopt;
    return entry->res < 0 ? -entry->res : 0;
  }
};

}  // namespace

std::optional<Unavailable> probe_polling(Polling polling, const std::string& directory) {
  auto probe = std::make_unique<Probe>();
  const auto refused = [&](int code) { return Unavailable{code, errno_text(code), remedy_of(polling)}; };
  if (probe->buffer == nullptr) return refused(ENOMEM);
  if (const int code = probe->set_up(polling); code != 0) return refused(code);
  if (polling == Polling::completion) {
    if (const int code = probe->prepare_file(directory); code != 0) return refused(code);
  }
  probe->start();
  const TimePoint deadline = Clock::now() + kProbeTimeout;
  while (Clock::now() < deadline) {
    if (const auto code = probe->look()) return *code == 0 ? std::nullopt : std::optional(refused(*code));
    ::usleep(kLookIntervalUs);
  }
  quarantine(probe.release());
  return Unavailable{ETIMEDOUT, "a probe never ended", remedy_of(polling)};
}

}  // namespace hoist::aio::detail
