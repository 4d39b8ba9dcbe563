// SPDX-License-Identifier: Apache-2.0
// measure/kernels.hpp - compares optimizer updates with memory bandwidth.
//
// Each round runs three legs on the same arrays, in an order that changes from round to round: the update, and twice
// the best stream kernel of the same traffic (plain or prefetching, chosen first). The result is the ratio of each
// round; the second stream leg against the first is the control, which shows the noise. Beside it two other limits: the
// same update on tiles that stay in a core's cache, which is what arithmetic alone would allow, and the divisions and
// square roots of that arithmetic without the rest of it.
//
// Threading  Blocks its caller; the legs run on a pool of their own.
// Memory     The arrays: KernelOptions::state_bytes, on huge pages if available.
// Errors     BudgetError if memory is short; Error if the update makes state that may not be committed; Interrupted.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <hoist/core/dtype.hpp>
#include <hoist/measure/interruption.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/optim_cpu/optimizer.hpp>

namespace hoist::measure {

struct KernelCase {
  optim::OptimizerOptions optimizer;
  DType master =
      DType::bf16;  // type of the weights. bf16: split; fp16: whole beside them; fp32: the weights themselves
  DType gradient = DType::bf16;
  std::string instruction_set{};  // empty: the best
  bool checksum = false;          // of every tile's weights and state, as in a step that is written
};

struct KernelOptions {
  std::uint64_t state_bytes = 1'100'000'000;  // of all arrays together
  unsigned pairs = 31;
  unsigned threads = 0;  // 0: every processor
  const StopFlag* stop = nullptr;
  std::function<void(unsigned pairs_done)> progress{};
};

struct KernelResult {
  std::string instruction_set;
  std::uint64_t parameters = 0;
  unsigned threads = 0;
  double traffic_bytes = 0;            // a parameter: read and written
  std::vector<double> ratios;          // speed of the update / of the stream, one for each round
  std::vector<double> control_ratios;  // stream / stream
  std::vector<double> update_seconds;
  bool stream_prefetches = false;
  double in_cache_ratio = 0;  // speed of the update in cache / of the stream
  double division_ratio = 0;  // speed of its divisions and square roots alone / of the stream; 0: it has none

  double gigabytes_per_second() const;
  // The limit: "memory", unless the update is slower than the stream and would be in cache, too. Then "division" if
  // that alone takes most of the update's time in cache, or else "instructions", the number that a core executes.
  const char* limit() const;
};

KernelResult compare_kernel(const KernelCase& what, const KernelOptions& options);

}  // namespace hoist::measure
