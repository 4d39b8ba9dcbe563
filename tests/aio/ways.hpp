// SPDX-License-Identifier: Apache-2.0
// The ways of moving data that every test of results runs over.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include <gtest/gtest.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/tests/support/faulty_backend.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio {

struct Way {
  const char* name;
  BackendKind backend;
  bool registered = false;
  bool faulty = false;  // with failures on top that the queue has to recover from
};

inline constexpr std::array kWays{
    Way{.name = "io_uring_registered", .backend = BackendKind::io_uring, .registered = true},
    Way{.name = "io_uring_unregistered", .backend = BackendKind::io_uring},
    Way{.name = "threads", .backend = BackendKind::threads},
    Way{.name = "faulty", .backend = BackendKind::threads, .faulty = true}};

inline void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }
inline std::string name_of_way(const testing::TestParamInfo<Way>& info) { return info.param.name; }

inline DriveQueueOptions queue_options(const Way& way, const AlignedBuffer& memory) {
  DriveQueueOptions options{.backend = way.backend};
  if (way.registered) options.registered_memory = {memory.span()};
  if (way.faulty) options.retries_max = 100;
  return options;
}

inline DriveQueue make_queue(const Way& way, const DriveQueueOptions& options) {
  if (!way.faulty) return DriveQueue(options);
  const auto faults = std::make_shared<test::Faults>(20260);
  const auto add = [&](test::Fault::Kind kind, std::optional<Operation> operation, int code) {
    faults->add({.kind = kind,
                 .operation = operation,
                 .count = test::Faults::kForever,
                 .probability = 0.05,
                 .code = code,
                 .delay = std::chrono::microseconds(300)});
  };
  for (const Operation operation : {Operation::read, Operation::write}) {  // a flush is never tried again
    add(test::Fault::Kind::error, operation, EAGAIN);
    add(test::Fault::Kind::error, operation, EINTR);
  }
  add(test::Fault::Kind::short_transfer, std::nullopt, 0);
  add(test::Fault::Kind::delay, std::nullopt, 0);
  return DriveQueue(options, test::make_faulty_backend(options, faults));
}

inline DriveQueues make_queues(unsigned count, const Way& way, const DriveQueueOptions& options) {
  DriveQueues queues;
  for (unsigned i = 0; i < count; ++i) queues.emplace_back(new DriveQueue(make_queue(way, options)));
  return queues;
}

// Why this machine does not let us, for a skip.
inline std::optional<std::string> unavailable(const Way& way) {
  if (way.backend != BackendKind::io_uring) return std::nullopt;
  try {
    const AlignedBuffer memory(File::kAlignment);
    static_cast<void>(make_queue(way, queue_options(way, memory)));
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

}  // namespace hoist::aio
