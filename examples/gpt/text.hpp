// SPDX-License-Identifier: Apache-2.0
// examples/gpt/text.hpp - the training text, and which windows of it a step sees.
//
// Errors     BadInputError when the file cannot be read, is not a regular file, or is too short.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <hoist/core/error.hpp>

namespace hoist::gpt {

// An error that the person at the command line can correct; exit code 2.
class BadInputError : public Error {
 public:
  using Error::Error;
};

// Chooses a step's windows. The choice depends on these values alone, so that a resumed run sees what an uninterrupted
// one would have.
struct BatchOptions {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;  // counted from 0
  int rank = 0;
  int world_size = 1;
  int batch = 1;    // windows per rank
  int context = 1;  // bytes per window
};

// [batch, context] bytes, and for each the byte that follows it.
struct Batch {
  std::vector<std::uint8_t> inputs;
  std::vector<std::uint8_t> targets;
};

class Text {
 public:
  // The whole file at `path`. Errors: BadInputError, also when it holds fewer than context + 1 bytes.
  static Text load(const std::string& path, int context);
  explicit Text(std::vector<std::uint8_t> bytes);

  std::uint64_t byte_count() const { return bytes_.size(); }
  std::uint64_t fingerprint() const { return fingerprint_; }
  // World size w with batch b sees the windows that one rank with batch w * b sees.
  Batch batch(const BatchOptions& options) const;

 private:
  std::vector<std::uint8_t> bytes_;
  std::uint64_t fingerprint_;  // every step's run state has it
};

}  // namespace hoist::gpt
