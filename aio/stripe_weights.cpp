// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include <hoist/aio/detail/nameless_file.hpp>
#include <hoist/aio/stripe_layout.hpp>
#include <hoist/aio/stripe_weights.hpp>
#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/thread.hpp>

namespace hoist::aio {

namespace {

constexpr double kTolerance = 0.1;
constexpr std::uint64_t kPieceBytes = kMiB;
constexpr std::size_t kPiecesInFlight = 16;

// One drive, driven by one thread: a ring of pieces in flight, each with its own part of the memory.
class Meter {
 public:
  Meter(const MeasuredDrive& drive, const MeasureOptions& options)
      : queue_(*drive.queue),
        file_(detail::nameless_file(drive.directory, options.file_bytes)),
        file_bytes_(options.file_bytes) {
    for (std::uint64_t at = 0; at < kPiecesInFlight * kPieceBytes; at += sizeof(std::uint64_t)) {
      const std::uint64_t value = random_bits(1, at);  // a drive may compress
      std::memcpy(memory_.span().data() + at, &value, sizeof(value));
    }
  }
  // After an error, the other pieces may still be in flight.
  ~Meter() {
    for (const Completion& piece : in_flight_) piece.wait_quietly();
  }
  Meter(const Meter&) = delete;
  Meter& operator=(const Meter&) = delete;

  double bytes_per_second(Nanoseconds time_limit) {
    const Nanoseconds third = time_limit / 3;
    pass(Operation::write, file_bytes_, 1, third);
    const double writing = pass(Operation::write, filled_bytes_, kForever, third);
    const double reading = pass(Operation::read, filled_bytes_, kForever, third);
    return 2.0 / (1.0 / writing + 1.0 / reading);
  }

 private:
  static constexpr std::uint64_t kForever = ~std::uint64_t{0};

  // Goes over the first `span_bytes` of the file until the time is up, at most `rounds` times. Returns bytes per
  // second, including the end of the transfers in flight.
  double pass(Operation operation, std::uint64_t span_bytes, std::uint64_t rounds, Nanoseconds time_limit) {
    const TimePoint start = Clock::now();
    std::uint64_t started = 0;
    const std::uint64_t pieces_in_span = span_bytes / kPieceBytes;
    do {
      Completion& slot = in_flight_[started % kPiecesInFlight];
      slot.wait();
      slot = start_piece(operation, started % pieces_in_span, started);
      ++started;
    } while (Clock::now() - start < time_limit && started / pieces_in_span < rounds);
    for (const Completion& piece : in_flight_) piece.wait();
    filled_bytes_ = std::max(filled_bytes_, std::min(started, pieces_in_span) * kPieceBytes);
    return static_cast<double>(started * kPieceBytes) / to_seconds(Clock::now() - start);
  }

  Completion start_piece(Operation operation, std::uint64_t place, std::uint64_t index) {
    const auto part = memory_.span().subspan(index % kPiecesInFlight * kPieceBytes, kPieceBytes);
    if (operation == Operation::read) return queue_.read(file_, place * kPieceBytes, part, Priority::foreground);
    return queue_.write(file_, place * kPieceBytes, part, Priority::foreground);
  }

  DriveQueue& queue_;
  const File file_;
  const std::uint64_t file_bytes_;
  std::uint64_t filled_bytes_ = 0;
  const TransferMemory memory_{kPiecesInFlight * kPieceBytes};
  std::array<Completion, kPiecesInFlight> in_flight_;
};

}  // namespace

std::vector<std::uint32_t> stripe_weights(std::span<const double> bytes_per_second) {
  const double fastest = *std::max_element(bytes_per_second.begin(), bytes_per_second.end());
  HOIST_ASSERT(fastest > 0, "no drive moved anything");
  std::vector<std::uint32_t> weights(bytes_per_second.size());
  for (std::uint32_t scale = 1; scale <= StripeLayout::kWeightMax; ++scale) {
    bool close = true;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const double exact = bytes_per_second[i] / fastest * scale;
      weights[i] = static_cast<std::uint32_t>(std::max(1.0, std::round(exact)));
      close = close && std::abs(weights[i] - exact) <= kTolerance * exact;
    }
    if (close) break;
  }
  return weights;
}

StripeMeasurement measure_weights(std::span<const MeasuredDrive> drives, const MeasureOptions& options) {
  if (drives.empty()) throw UsageError("there is no drive to measure");
  if (options.file_bytes == 0 || options.file_bytes % kPieceBytes != 0)
    throw UsageError(fmt::format("drives are measured with a file of whole MiB, not {} bytes", options.file_bytes));
  StripeMeasurement result;
  result.bytes_per_second.resize(drives.size());
  run_on_threads("hoist-measure", drives.size(), [&](std::size_t i) {
    result.bytes_per_second[i] = Meter(drives[i], options).bytes_per_second(options.time_limit);
  });
  result.weights = stripe_weights(result.bytes_per_second);
  return result;
}

}  // namespace hoist::aio
