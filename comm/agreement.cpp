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

struct ProblemText {
  std::uint64_t bytes = 0;
  std::array<char, kProblemTextBytes> text{};
};
static_assert(sizeof(ProblemText) == 1024);

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

std::optional<Problem> first_problem(Communicator& communicator, std::optional<std::string_view> mine) {
  const std::byte flag{static_cast<unsigned char>(mine ? 1 : 0)};
  std::vector<std::byte> flags(static_cast<std::size_t>(communicator.size()));
  communicator.exchange(std::span(&flag, 1), flags);
  const auto first = std::ranges::find(flags, std::byte{1});
  if (first == flags.end()) return std::nullopt;
  // A text of every rank, since only one exchange brings it to all.
  ProblemText text;
  if (mine) {
    text.bytes = std::min(mine->size(), kProblemTextBytes);
    std::memcpy(text.text.data(), mine->data(), text.bytes);
  }
  std::vector<ProblemText> texts(flags.size());
  communicator.exchange(std::as_bytes(std::span(&text, 1)), std::as_writable_bytes(std::span(texts)));
  const ProblemText& told = texts[static_cast<std::size_t>(first - flags.begin())];
  return Problem{static_cast<int>(first - flags.begin()),
                 std::string(told.text.data(), std::min<std::uint64_t>(told.bytes, kProblemTextBytes))};
}

}  // namespace hoist::comm
