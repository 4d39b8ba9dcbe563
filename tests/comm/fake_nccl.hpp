// SPDX-License-Identifier: Apache-2.0
// tests/comm/fake_nccl.hpp - the calls of NCCL that comm/ makes, without NCCL: communicators that do not block, and the
// rules for them.
//
// By the user guide ("Fault tolerance", "Group calls", ncclCommFinalize, ncclRedOpDestroy): a call only begins; until
// ncclCommGetAsyncError() says success, the communicator takes no other call but abort; what is finalized first may be
// destroyed; groups are closed by the thread that opened them; operators are destroyed by hand. Data moves where a
// communicator has one rank, and nowhere else.
#pragma once

#include <string>
#include <vector>

namespace hoist::test::fake_nccl {

void reset();
// Calls from now on never get beyond their beginning: a rank is missing.
void stall();
// The next operation of this rank fails.
void fail(int rank);
// From now on every communicator has an asynchronous error.
void lose_connection();
// "all_gather of 4096", in the order they were begun.
std::vector<std::string> operations();
// Rules that were broken.
std::vector<std::string> violations();
struct Counts {
  int made = 0, destroyed = 0, aborted = 0, operators = 0;  // operators: alive
};
Counts counts();

}  // namespace hoist::test::fake_nccl
