// SPDX-License-Identifier: Apache-2.0
// tests/support/system_calls.hpp - the calls by which a store makes files and names durable, seen by a test.
//
// These are not transfers, so no aio::Backend sees them: fsync (of directories and labels), rename, fallocate, mkdir,
// unlink and remove. A program that uses observe_system_calls() has its own versions of them, which ask the observer
// and then go on to the system's.
//
// Threading  An observer is called on every thread that makes such a call. Set it while no other thread does.
#pragma once

#include <cstdint>
#include <string>

namespace hoist::test {

struct SystemCall {
  enum class Kind : std::uint8_t { sync, rename, allocate, make_directory, remove };
  Kind kind = Kind::sync;
  std::string path;    // of the file or directory; of a rename, the old name
  std::string target;  // of a rename: the new name
};

class SystemCallObserver {
 public:
  virtual ~SystemCallObserver() = default;
  // False: the call is not made, and its caller is told that it went well.
  virtual bool before(const SystemCall&) { return true; }
  // The result of a call that was made: 0 or -1.
  virtual void after(const SystemCall&, int) {}
};

// Null: nobody. Returns who it was before.
SystemCallObserver* observe_system_calls(SystemCallObserver* observer);

}  // namespace hoist::test
