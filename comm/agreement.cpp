// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/error.hpp>

namespace hoist::comm {

namespace {

struct Statement {
  std::uint64_t hash = 0;
  std::uint64_t text_bytes = 0;
  std::array<char, kAgreementTextBytes> text{};

  std::string_view view() const {
    return {text.data(), static_cast<std::size_t>(std::min<std::uint64_t>(text_bytes, kAgreementTextBytes))};
  }
};
static_assert(sizeof(Statement) == 128);  // no padding: every byte that travels is set

}  // namespace

void agree(Communicator& communicator, std::uint64_t hash, std::string_view what) {
  Statement mine;
  mine.hash = hash;
  mine.text_bytes = std::min(what.size(), kAgreementTextBytes);
  std::memcpy(mine.text.data(), what.data(), mine.text_bytes);
  std::vector<Statement> all(static_cast<std::size_t>(communicator.size()));
  try {
    communicator.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  } catch (const CommError& error) {
    throw CommError(fmt::format("{} (this rank is at '{}')", error.what(), what));
  }
  const auto odd = std::find_if(all.begin(), all.end(), [&](const Statement& s) { return s.hash != all[0].hash; });
  if (odd == all.end()) return;
  throw CommError(fmt::format(
      "the ranks have diverged: rank {} is at '{}' ({:016x}), rank 0 at '{}' ({:016x}); every rank must make the same "
      "calls in the same order",
      odd - all.begin(), odd->view(), odd->hash, all[0].view(), all[0].hash));
}

}  // namespace hoist::comm
