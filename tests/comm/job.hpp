// SPDX-License-Identifier: Apache-2.0
// tests/comm/job.hpp - runs one body on every rank of a job, whatever the ranks are made of.
#pragma once

#include <chrono>
#include <functional>
#include <ostream>
#include <string>

#include <gtest/gtest.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/device.hpp>

namespace hoist::comm::conformance {

struct JobOptions {
  std::uint64_t scratch_bytes = 64 * kKiB;
  std::uint64_t device_bytes = 16 * kMiB;
  std::uint64_t chaos_seed = 1;  // every rank's device delays its streams by a seed made from this one
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
};

// A rank, as a test's body sees it: a communicator, and a device of its own.
struct Rank {
  Communicator& communicator;
  platform::Device& device;
  platform::Stream& stream;
  Ledger& ledger;
  std::span<std::byte> free;

  int rank() const { return communicator.rank(); }
  int size() const { return communicator.size(); }

  // Device memory, 64-byte aligned, until the job ends.
  std::span<std::byte> allocate(std::uint64_t bytes);
};

using Body = std::function<void(Rank&)>;
using MakeCommunicator = std::function<std::unique_ptr<Communicator>(const CommunicatorOptions&)>;

// Builds device, scratch, stream and ledger for one rank, makes its communicator and runs the body.
void run_rank(int rank, const JobOptions& options, const MakeCommunicator& make, const Body& body);

// Runs `size` ranks on threads and rethrows the error of the first rank that had one. A rank that throws aborts the
// group.
void run_threads(int size, const JobOptions& options, const Body& body);
void run_self(int size, const JobOptions& options, const Body& body);

struct Backend {
  std::string name;
  int size = 1;
  void (*run)(int size, const JobOptions& options, const Body& body) = nullptr;
  // gtest prints parameters it finds this for.
  friend void PrintTo(const Backend& backend, std::ostream* stream) { *stream << backend.name << " x" << backend.size; }
};

inline std::string backend_test_name(const ::testing::TestParamInfo<Backend>& info) {
  return info.param.name + std::to_string(info.param.size);
}

class Conformance : public ::testing::TestWithParam<Backend> {
 protected:
  void run(const JobOptions& options, const Body& body) { GetParam().run(GetParam().size, options, body); }
  void run(const Body& body) { run({}, body); }
};

}  // namespace hoist::comm::conformance
