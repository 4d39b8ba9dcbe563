// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <xxhash.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/digest.hpp>

namespace hoist {

struct Digest::State {
  State() : handle(XXH3_createState()) {
    HOIST_ASSERT(handle != nullptr);
    XXH3_64bits_reset(handle);
  }
  ~State() { XXH3_freeState(handle); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  XXH3_state_t* handle;
};

Digest::Digest() : state_(std::make_unique<State>()) {}
Digest::~Digest() = default;
Digest::Digest(Digest&&) noexcept = default;
Digest& Digest::operator=(Digest&&) noexcept = default;

void Digest::update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_->handle, bytes.data(), bytes.size());
}
std::uint64_t Digest::value() const { return XXH3_64bits_digest(state_->handle); }
std::string Digest::hex() const { return fmt::format("{:016x}", value()); }

}  // namespace hoist
