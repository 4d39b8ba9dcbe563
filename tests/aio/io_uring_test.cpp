// SPDX-License-Identifier: Apache-2.0
// What the system may refuse of io_uring, and what happens then. Each refusal is made for one thread only (a seccomp
// filter, a dropped capability), which then builds the queue.
#include <array>
#include <filesystem>
#include <functional>
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/aio/detail/uring_setup.hpp>
#include <hoist/aio/drive_queue.hpp>
#include <hoist/aio/io_uring_probe.hpp>
#include <hoist/platform/topology.hpp>
#include <hoist/tests/support/refused_system_call.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio::io_uring_test {
namespace {

using test::refuse_system_call;

void in_a_thread(const std::function<void()>& work) { std::thread(work).join(); }

bool have_io_uring() {
  try {
    const DriveQueue probe({.backend = BackendKind::io_uring});
    return true;
  } catch (const Error&) {
    return false;
  }
}

void expect_round_trip(DriveQueue& queue, const AlignedBuffer& memory) {
  const test::TempDirectory directory;
  const File file(directory / "file", {.mode = OpenMode::create, .reserve_bytes = kMiB});
  fill_pattern(memory.part(0, kMiB), 5);
  queue.write(file, 0, memory.part(0, kMiB), Priority::foreground).wait();
  queue.sync(file).wait();
  queue.read(file, 0, memory.part(kMiB, kMiB), Priority::foreground).wait();
  EXPECT_TRUE(same_bytes(memory.part(0, kMiB), memory.part(kMiB, kMiB)));
}

TEST(IoUringRefused, FallsBackToThreadsAndSaysWhy) {
  for (const long number : {__NR_io_uring_setup, __NR_io_uring_enter, __NR_io_uring_register}) {
    for (const int code : {EPERM, ENOSYS}) {
      in_a_thread([number, code] {
        if (!refuse_system_call(number, code)) GTEST_SKIP() << "no seccomp filter can be set here";
        const AlignedBuffer memory(2 * kMiB);
        DriveQueue queue({.registered_memory = {memory.span()}});
        EXPECT_EQ(queue.description(), code == EPERM ? "threads (io_uring: Operation not permitted)"
                                                     : "threads (io_uring: Function not implemented)");
        expect_round_trip(queue, memory);
        EXPECT_FALSE(probe_io_uring().available) << "refused: system call " << number;
      });
    }
  }
}

TEST(IoUringRefused, AskedForByNameItIsAnErrorWithTheRemedy) {
  in_a_thread([] {
    if (!refuse_system_call(__NR_io_uring_setup, EPERM)) GTEST_SKIP() << "no seccomp filter can be set here";
    try {
      const DriveQueue queue({.backend = BackendKind::io_uring});
      ADD_FAILURE() << "io_uring was had all the same: " << queue.description();
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("Operation not permitted"));
      EXPECT_THAT(error.what(), testing::AnyOf(testing::HasSubstr("seccomp"), testing::HasSubstr("io_uring_disabled")));
      EXPECT_THAT(error.what(), testing::HasSubstr("'threads'"));
    }
  });
}

TEST(IoUringRefused, WithoutRegistrationOfFilesItUsesDescriptors) {
  if (!have_io_uring()) GTEST_SKIP() << "io_uring is not available here";
  in_a_thread([] {
    // IORING_REGISTER_FILES is 2; the mask also matches some codes that are not used here.
    if (!refuse_system_call(__NR_io_uring_register, EMFILE, IORING_REGISTER_FILES))
      GTEST_SKIP() << "no seccomp filter can be set here";
    const AlignedBuffer memory(2 * kMiB);
    DriveQueue queue({.backend = BackendKind::automatic, .registered_memory = {memory.span()}});
    EXPECT_THAT(queue.description(), testing::HasSubstr("unregistered files: Too many open files"));
    expect_round_trip(queue, memory);
  });
}

// Enough for the rings, but not for the memory that tests register. The kernel counts the rings of all of a user's
// processes, and still does so for a while after they were closed.
constexpr rlim_t kRoomForRings = 2 * kMiB;

// Without CAP_IPC_LOCK the memlock limit binds. The capability is the thread's, the limit the process's.
bool drop_ipc_lock() {
  __user_cap_header_struct header{.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  std::array<__user_cap_data_struct, 2> data{};
  if (::syscall(SYS_capget, &header, data.data()) != 0) return false;
  data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
  return ::syscall(SYS_capset, &header, data.data()) == 0;
}

TEST(IoUringRefused, BeyondTheMemlockLimitMemoryIsNotRegisteredAndTransfersWork) {
  if (!have_io_uring()) GTEST_SKIP() << "io_uring is not available here";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  const rlimit low{.rlim_cur = kRoomForRings, .rlim_max = before.rlim_max};
  if (before.rlim_max < low.rlim_cur || ::setrlimit(RLIMIT_MEMLOCK, &low) != 0)
    GTEST_SKIP() << "the memlock limit cannot be set here";
  in_a_thread([] {
    if (!drop_ipc_lock()) GTEST_SKIP() << "CAP_IPC_LOCK cannot be dropped here";
    const AlignedBuffer memory(4 * kMiB);
    std::optional<DriveQueue> queue;
    try {
      queue.emplace(DriveQueueOptions{.backend = BackendKind::io_uring, .registered_memory = {memory.span()}});
    } catch (const Error& error) {  // the limit is one for all processes of a user
      if (::geteuid() == 0) {
        ADD_FAILURE() << error.what();
        return;
      }
      GTEST_SKIP() << "other processes of this user have locked what the limit allows: " << error.what();
    }
    EXPECT_THAT(queue->description(), testing::HasSubstr("unregistered buffers: Cannot allocate memory"));
    expect_round_trip(*queue, memory);
  });
  ::setrlimit(RLIMIT_MEMLOCK, &before);
}

// The kernel flushes on a thread of its own, and the limit leaves no room for one.
[[noreturn]] void flush_at_the_limit_of_threads(const File& file) {
  const LogCapture log;
  DriveQueue queue({.backend = BackendKind::io_uring});
  const rlimit none{.rlim_cur = 1, .rlim_max = 1};
  constexpr uid_t kNobody = 65534;  // no limit holds for root
  if (::setrlimit(RLIMIT_NPROC, &none) != 0 || ::setresuid(kNobody, kNobody, kNobody) != 0) std::_Exit(2);
  exit_if(!io_error_of(queue.sync(file)), log);
}

TEST(IoUringRefusedDeath, AFlushNeedsNoThreadOfTheKernel) {
  if (!have_io_uring()) GTEST_SKIP() << "io_uring is not available here";
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become a user at its limit";
  const test::TempDirectory directory;
  const File file(directory / "file", {.mode = OpenMode::create, .reserve_bytes = kMiB});
  EXPECT_EXIT(flush_at_the_limit_of_threads(file), testing::ExitedWithCode(0), "");
}

constexpr int kSkipped = 77;

// Run in a process of its own, where the sentences have not been said yet.
[[noreturn]] void say_that_io_uring_is_refused() {
  const LogCapture log;
  if (!refuse_system_call(__NR_io_uring_setup, EPERM)) std::_Exit(kSkipped);
  for (int i = 0; i < 3; ++i) DriveQueue({});
  exit_if(log.count("io_uring is not available") == 1 && log.count("To have it") == 1, log);
}

[[noreturn]] void say_that_memory_is_not_registered() {
  const LogCapture log;
  const AlignedBuffer memory(4 * kMiB);
  const rlimit low{.rlim_cur = kRoomForRings, .rlim_max = kRoomForRings};
  if (::setrlimit(RLIMIT_MEMLOCK, &low) != 0 || !drop_ipc_lock()) std::_Exit(kSkipped);
  for (int i = 0; i < 3; ++i) DriveQueue({.registered_memory = {memory.span()}});
  exit_if(log.count("refused to register 4.0 MiB") == 1 && log.count("ulimit -l") == 1, log);
}

TEST(IoUringRefusedDeath, EachFallBackIsSaidOnceWithTheRemedy) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  bool skipped = false;
  const auto ends_well = [&](int status) {
    skipped = skipped || testing::ExitedWithCode(kSkipped)(status);
    return skipped || testing::ExitedWithCode(0)(status);
  };
  EXPECT_EXIT(say_that_io_uring_is_refused(), ends_well, "");
  if (skipped) GTEST_SKIP() << "system calls cannot be refused here";
  if (!have_io_uring()) GTEST_SKIP() << "io_uring is not available here";
  EXPECT_EXIT(say_that_memory_is_not_registered(), ends_well, "");
  if (skipped) GTEST_SKIP() << "the memlock limit cannot be set here";
}

TEST(RingFlags, TheLastChoiceAsksForNothingNew) {
  EXPECT_EQ(detail::kRingFlagChoices.back(), 0u);
  EXPECT_NE(detail::kRingFlagChoices.front() & IORING_SETUP_SINGLE_ISSUER, 0u);
}

// The processors that the thread of a queue with these options may use.
std::vector<int> processors_of_io_thread(const DriveQueueOptions& options) {
  const test::TempDirectory directory;
  const File file(directory / "file", {.mode = OpenMode::create, .reserve_bytes = 4 * kKiB});
  const AlignedBuffer memory(4 * kKiB);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  DriveQueue queue(options);
  // A continuation attached to a write that has already ended runs here and not on the I/O thread: then another write
  // is made.
  for (bool on_io_thread = false; !on_io_thread;) {
    Promise ran;
    const Completion finished = ran.completion();
    queue.write(file, 0, memory.span(), Priority::foreground)
        .then([&, here = std::this_thread::get_id()](std::exception_ptr) {
          on_io_thread = std::this_thread::get_id() != here;
          if (on_io_thread) ::sched_getaffinity(0, sizeof(allowed), &allowed);
          ran.complete();
        });
    finished.wait();
  }
  std::vector<int> cpus;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(static_cast<int>(cpu));
  }
  return cpus;
}

TEST(IoThread, RunsOnTheProcessorsItWasGiven) {
  const auto topology = platform::Topology::detect();
  const int cpu = topology.nodes().back().cpus.back();
  for (const BackendKind backend : {BackendKind::automatic, BackendKind::threads})
    EXPECT_EQ(processors_of_io_thread({.backend = backend, .cpus = {cpu}}), std::vector<int>{cpu});
  // A refusal is a line in the log.
  EXPECT_EQ(processors_of_io_thread({.cpus = {70000}}).size(), topology.cpu_count());
}

TEST(IoUring, DescribesWhatItHas) {
  if (!have_io_uring()) GTEST_SKIP() << "io_uring is not available here";
  const AlignedBuffer memory(64 * kKiB);
  EXPECT_EQ(DriveQueue({.backend = BackendKind::io_uring, .registered_memory = {memory.span()}}).description(),
            "io_uring (registered buffers, registered files)");
  EXPECT_EQ(DriveQueue({.backend = BackendKind::io_uring}).description(), "io_uring (registered files)");
}

}  // namespace
}  // namespace hoist::aio::io_uring_test
