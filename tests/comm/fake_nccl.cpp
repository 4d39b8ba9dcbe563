// SPDX-License-Identifier: Apache-2.0
#include "fake_nccl.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <nccl.h>

#include <hoist/core/dtype.hpp>

// Kept after its end, so that a late use is seen.
struct ncclComm {
  int size = 1;
  int rank = 0;
  int polls_left = 0;  // until success
  bool finalized = false;
  bool ended = false;
};

namespace hoist::test::fake_nccl {
namespace {

constexpr int kPolls = 3;

struct Library {
  std::mutex mutex;
  std::vector<std::unique_ptr<ncclComm>> communicators;
  std::vector<std::string> operations, violations;
  std::set<int> operators;
  Counts counts;
  bool stalled = false;
  bool connection_lost = false;
  int failing_rank = -1;
  std::vector<std::jthread> late;  // last: they end before what they use
};
Library library;

thread_local int depth = 0;
thread_local std::set<ncclComm*> in_group;

void require(bool rule, const std::string& broken) {
  if (!rule) library.violations.push_back(broken);
}

void require_free(const ncclComm* communicator, const char* call) {
  require(communicator != nullptr && !communicator->ended, fmt::format("{} after the communicator's end", call));
  require(communicator != nullptr && communicator->polls_left == 0,
          fmt::format("{} before the last call was over", call));
}

// What has begun and is now to be polled; within a group only its end is.
ncclResult_t begun(ncclComm* communicator) {
  if (depth > 0) {
    in_group.insert(communicator);
    return ncclSuccess;
  }
  communicator->polls_left = kPolls;
  return ncclInProgress;
}

ncclComm* make(int rank, int size, const ncclConfig_t* config) {
  require(config != nullptr && config->blocking == 0, "a communicator that blocks");
  library.communicators.push_back(std::make_unique<ncclComm>());
  ncclComm* const made = library.communicators.back().get();
  *made = {.size = size, .rank = rank, .polls_left = kPolls};
  ++library.counts.made;
  return made;
}

std::size_t bytes_of(ncclDataType_t type) { return type == ncclFloat32 ? 4 : type == ncclInt8 ? 1 : 2; }

ncclResult_t operation(const char* name, const void* source, void* target, std::size_t count, ncclDataType_t type,
                       ncclComm* communicator) {
  const std::lock_guard lock(library.mutex);
  require_free(communicator, name);
  if (communicator->rank == library.failing_rank) {
    library.failing_rank = -1;
    return ncclSystemError;
  }
  library.operations.push_back(fmt::format("{} of {}", name, count * bytes_of(type)));
  if (communicator->size == 1 && source != nullptr && source != target)
    std::memcpy(target, source, count * bytes_of(type));
  return begun(communicator);
}

}  // namespace

void reset() {
  const std::lock_guard lock(library.mutex);
  library.communicators.clear();
  library.operations.clear();
  library.violations.clear();
  library.operators.clear();
  library.counts = {};
  library.stalled = library.connection_lost = false;
  library.failing_rank = -1;
  library.late.clear();
}
void stall() {
  const std::lock_guard lock(library.mutex);
  library.stalled = true;
}
void lose_connection() {
  const std::lock_guard lock(library.mutex);
  library.connection_lost = true;
}
void fail(int rank) {
  const std::lock_guard lock(library.mutex);
  library.failing_rank = rank;
}
std::vector<std::string> operations() {
  const std::lock_guard lock(library.mutex);
  return library.operations;
}
std::vector<std::string> violations() {
  const std::lock_guard lock(library.mutex);
  return library.violations;
}
Counts counts() {
  const std::lock_guard lock(library.mutex);
  Counts counts = library.counts;
  counts.operators = static_cast<int>(library.operators.size());
  return counts;
}

}  // namespace hoist::test::fake_nccl

using namespace hoist::test::fake_nccl;

extern "C" {

const char* ncclGetErrorString(ncclResult_t) { return "an error of NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 1, sizeof *id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId, int rank, ncclConfig_t* config) {
  const std::lock_guard lock(library.mutex);
  *made = make(rank, size, config);
  return ncclInProgress;
}
// As NCCL's, it says success when it has only begun, and a thread stores the communicator, which may be late.
ncclResult_t ncclCommSplit(ncclComm_t from, int, int rank, ncclComm_t* made, ncclConfig_t* config) {
  const std::lock_guard lock(library.mutex);
  require_free(from, "ncclCommSplit");
  *made = nullptr;
  library.late.emplace_back([made, communicator = make(rank, from->size, config)] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic_ref(*made).store(communicator);
  });
  begun(from);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* state) {
  const std::lock_guard lock(library.mutex);
  require(!communicator->ended, "ncclCommGetAsyncError after the communicator's end");
  if (communicator->polls_left > 0 && !library.stalled) --communicator->polls_left;
  *state = library.connection_lost ? ncclRemoteError : communicator->polls_left > 0 ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  const std::lock_guard lock(library.mutex);
  require_free(communicator, "ncclCommFinalize");
  communicator->finalized = true;
  return begun(communicator);
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  const std::lock_guard lock(library.mutex);
  require_free(communicator, "ncclCommDestroy");
  require(communicator->finalized, "ncclCommDestroy before ncclCommFinalize");
  communicator->ended = true;
  ++library.counts.destroyed;
  return ncclSuccess;
}
// Ends the threads that make communicators, as NCCL's does.
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  const std::lock_guard lock(library.mutex);
  library.late.clear();
  require(!communicator->ended, "ncclCommAbort after the communicator's end");
  communicator->ended = true;
  ++library.counts.aborted;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  const std::lock_guard lock(library.mutex);
  require(depth > 0, "ncclGroupEnd without a group");
  if (--depth > 0) return ncclSuccess;
  ncclResult_t result = ncclSuccess;
  for (ncclComm* const communicator : std::exchange(in_group, {})) result = begun(communicator);
  return result;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* made, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t communicator) {
  const std::lock_guard lock(library.mutex);
  require_free(communicator, "ncclRedOpCreatePreMulSum");
  require(residence == ncclScalarHostImmediate, "a factor on the device");
  std::uint16_t bits = 0;
  std::memcpy(&bits, scalar, sizeof bits);
  if (type == ncclBfloat16) library.operations.push_back(fmt::format("factor {}", hoist::to_float(hoist::bf16{bits})));
  int number = ncclNumOps;
  while (library.operators.contains(number)) ++number;
  library.operators.insert(number);
  *made = static_cast<ncclRedOp_t>(number);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t made, ncclComm_t communicator) {
  const std::lock_guard lock(library.mutex);
  require_free(communicator, "ncclRedOpDestroy");
  require(library.operators.erase(static_cast<int>(made)) == 1, "an operator destroyed twice, or never made");
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* source, void* target, std::size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t) {
  return operation("all_gather", source, target, count, type, communicator);
}
ncclResult_t ncclReduceScatter(const void* source, void* target, std::size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t communicator, cudaStream_t) {
  return operation("reduce_scatter", source, target, count, type, communicator);
}
ncclResult_t ncclBroadcast(const void* source, void* target, std::size_t count, ncclDataType_t type, int,
                           ncclComm_t communicator, cudaStream_t) {
  return operation("broadcast", source, target, count, type, communicator);
}

}  // extern "C"
