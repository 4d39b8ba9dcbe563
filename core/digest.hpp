// SPDX-License-Identifier: Apache-2.0
// core/digest.hpp - XXH3-64 over a stream of bytes: the fingerprint that compares placements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace hoist {

class Digest {
 public:
  Digest();
  ~Digest();
  Digest(Digest&&) noexcept;
  Digest& operator=(Digest&&) noexcept;

  void update(std::span<const std::byte> bytes);
  std::uint64_t value() const;
  std::string hex() const;  // 16 digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hoist
