// SPDX-License-Identifier: Apache-2.0
#include "job.hpp"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <hoist/core/rng.hpp>

namespace hoist::comm::conformance {

std::span<std::byte> Rank::allocate(std::uint64_t bytes) {
  const std::uint64_t taken = round_up(bytes, 64);
  if (taken > free.size()) throw std::runtime_error("the test's device is too small");
  const std::span<std::byte> piece = free.first(bytes);
  free = free.subspan(taken);
  return piece;
}

void run_rank(int rank, const JobOptions& options, const MakeCommunicator& make, const Body& body) {
  Ledger ledger;
  platform::DeviceOptions device_options;
  device_options.memory_bytes = options.device_bytes;
  device_options.host.chaos_seed =
      options.chaos_seed == 0 ? 0 : random_bits(options.chaos_seed, static_cast<std::uint64_t>(rank)) | 1;
  const auto device = platform::Device::create(device_options);
  const auto stream = device->create_stream("comm test");

  CommunicatorOptions communicator_options;
  communicator_options.scratch = device->memory().first(options.scratch_bytes);
  communicator_options.ledger = &ledger;
  communicator_options.timeout = options.timeout;
  const auto communicator = make(communicator_options);
  Rank context{*communicator, *device, *stream, ledger, device->memory().subspan(options.scratch_bytes)};
  body(context);
}

void run_threads(int size, const JobOptions& options, const Body& body) {
  ThreadGroup group(size);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        run_rank(
            rank, options, [&](const CommunicatorOptions& o) { return group.join(rank, o); }, body);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
        group.abort(error.what());
      }
    });
  }
  threads.clear();
  if (first) std::rethrow_exception(first);
}

void run_self(int, const JobOptions& options, const Body& body) { run_rank(0, options, make_self, body); }

}  // namespace hoist::comm::conformance
