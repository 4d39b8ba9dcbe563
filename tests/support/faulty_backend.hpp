// SPDX-License-Identifier: Apache-2.0
// tests/support/faulty_backend.hpp - a backend that lets another one do the work, and makes some of it go wrong.
//
//   auto faults = std::make_shared<test::Faults>(seed);
//   faults->add({.kind = test::Fault::Kind::error, .operation = aio::Operation::write, .first = 7, .code = ENOSPC});
//   aio::DriveQueue queue(options, test::make_faulty_backend(options, faults));
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/tests/support/faults.hpp>

namespace hoist::test {

class FaultyBackend final : public aio::Backend {
 public:
  FaultyBackend(std::unique_ptr<aio::Backend> inner, std::shared_ptr<Faults> faults);

  std::string description() const override;
  void submit(aio::Block& block) override;
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override;
  void wake_up() override { inner_->wake_up(); }

 private:
  // The block that the inner backend sees; the queue's own stays as it was.
  struct Flight : aio::Block {
    aio::Block* outer = nullptr;
    Faults::Decision decision{};
    TimePoint due{};
    std::uint64_t tracked_id = 0;
  };

  void start(Flight& flight);
  void start_write(Flight& flight);
  void misdirect(Flight& flight);
  void finish(Flight& flight);
  void report(Flight& flight, std::int64_t result);
  void start_due();
  Nanoseconds limit(Nanoseconds timeout) const;

  const std::unique_ptr<aio::Backend> inner_;
  const std::shared_ptr<Faults> faults_;
  std::deque<Flight> flights_;
  std::vector<Flight*> free_;
  std::vector<Flight*> held_;
  std::vector<aio::Block*> ready_;
  std::vector<aio::Block*> inner_done_;
};

// Around the backend that DriveQueue(options) would use.
std::unique_ptr<aio::Backend> make_faulty_backend(const aio::DriveQueueOptions& options,
                                                  std::shared_ptr<Faults> faults);

}  // namespace hoist::test
