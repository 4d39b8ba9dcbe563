// SPDX-License-Identifier: Apache-2.0
// core/error.hpp - the exceptions that hoist throws.
//
// Three kinds, never mixed: a bug is HOIST_ASSERT; an expected outcome (queue full, pool empty) is a return value; the
// environment or bad input is one of these exceptions. Each carries what was attempted and the remedy. Asynchronous
// work stores its exception in a Completion, whose wait() throws it.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

namespace hoist {

// The system's text for an errno.
std::string errno_text(int code);

// Base of everything hoist throws. what() is one complete sentence for a person, the remedy included. Text from files
// in it is safe to print: escape sequences are replaced. The members of the classes below hold it as it is.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& sentence);
};

// The caller broke the contract of the public API, or asked a command for something impossible. The engine's state is
// unchanged.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A configuration value that hoist cannot use. `key` is its path, for example "zero_optimization.stage".
class ConfigError : public Error {
 public:
  ConfigError(std::string key_path, const std::string& problem);
  const std::string key;
};

// A tier cannot hold what the configuration requires.
class BudgetError : public Error {
 public:
  struct Need {
    std::string tier;          // "device", "pinned", "host" or "nvme"
    std::uint64_t have_bytes;  // the budget
    std::uint64_t need_bytes;  // the smallest budget that works
    std::string key;           // the configuration key to raise
    std::string detail;        // what the bytes are for
  };
  explicit BudgetError(Need need);
  // The machine has too little memory: `have_bytes` is what it offers, `key` the setting to lower. If that is as much
  // as is needed, the system has refused it nevertheless.
  static BudgetError machine(Need need);
  const Need need;

 private:
  BudgetError(Need need, const std::string& sentence);
};

// A system call or transfer failed. `code` is the errno, 0 for a transfer that ended short.
class IoError : public Error {
 public:
  struct Where {
    std::string operation;  // "read", "write", "fdatasync", "open", ...
    std::string path;
    std::uint64_t offset_bytes = 0;
    std::uint64_t length_bytes = 0;
    int code = 0;
  };
  // Without a remedy of the caller's, who may know more, it is usual_remedy(where.code).
  explicit IoError(Where where, const std::string& remedy = {});
  const Where where;
};
// What to do about an errno, whatever the operation; "" where that depends on it.
const char* usual_remedy(int code) noexcept;

// Bytes read from NVMe are not the bytes that were written.
class CorruptionError : public Error {
 public:
  struct Where {
    std::string unit;    // the unit (layer) the bytes belong to
    std::string region;  // "weights", "optimizer state" or "gradient"
    std::string path;
    std::uint64_t offset_bytes = 0;
    std::uint64_t expected = 0;  // checksum that was recorded
    std::uint64_t found = 0;     // checksum of what was read
  };
  // `remedy` may be empty.
  explicit CorruptionError(Where where, const std::string& remedy = {});
  const Where where;
};

// An unusable store: it belongs to another model, another process uses it, its format is newer, or it has no commit.
class StoreError : public Error {
 public:
  using Error::Error;
};

// A device call failed. `code` is the CUDA error, 0 for the host device.
class DeviceError : public Error {
 public:
  DeviceError(const std::string& call, int code, const std::string& description, const std::string& remedy);
  const int code;
};

// A collective failed, or ranks disagree about what to do next.
class CommError : public Error {
 public:
  using Error::Error;
};

// The same, learned in an exchange that worked: every rank that took part has the error, and the communicators can
// still be used.
class ExchangedError : public CommError {
 public:
  using CommError::CommError;
};

// what() of any exception, or "out of memory" if there is none for it.
std::string text_of(const std::exception_ptr& error) noexcept;

// The exception that is being handled, of work that may be done in part: UsageError and BudgetError, which promise an
// unchanged state, become an Error of the same words.
std::exception_ptr current_failure();

}  // namespace hoist
