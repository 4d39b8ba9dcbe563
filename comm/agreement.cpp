// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/first_difference.hpp>

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

// Every rank's text, of which the first bytes travel.
std::vector<std::string> texts_of_all(Communicator& communicator, std::string text) {
  constexpr std::size_t kBytesMax = std::size_t{1} << 20;
  text.resize(std::min(text.size(), kBytesMax));
  const std::vector<std::uint64_t> sizes = values_of_all<std::uint64_t>(communicator, text.size());
  const std::uint64_t longest = std::min<std::uint64_t>(*std::ranges::max_element(sizes), kBytesMax);
  if (longest == 0) return std::vector<std::string>(sizes.size());
  text.resize(longest);
  std::string all(longest * sizes.size(), '\0');
  communicator.exchange(std::as_bytes(std::span(text)), std::as_writable_bytes(std::span(all)));
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < sizes.size(); ++rank)
    texts.push_back(all.substr(rank * longest, std::min(sizes[rank], longest)));
  return texts;
}

}  // namespace

void agree(Communicator& communicator, std::uint64_t hash, std::string_view what,
           const std::function<std::string()>& details) {
  Statement mine;
  mine.hash = hash;
  mine.text_bytes = std::min(what.size(), kAgreementTextBytes);
  std::memcpy(mine.text.data(), what.data(), mine.text_bytes);
  std::vector<Statement> all;
  try {
    all = values_of_all(communicator, mine);
  } catch (const CommError& error) {
    throw CommError(fmt::format("{} (this rank is at '{}')", error.what(), what));
  }
  const auto odd = std::find_if(all.begin(), all.end(), [&](const Statement& s) { return s.hash != all[0].hash; });
  if (odd == all.end()) return;
  std::string mine_in_full;
  try {
    if (details) mine_in_full = details();
  } catch (...) {  // the others wait for a text: an empty one will do
  }
  const std::vector<std::string> texts = texts_of_all(communicator, std::move(mine_in_full));
  const std::string& theirs = texts[static_cast<std::size_t>(odd - all.begin())];
  const std::string difference =
      theirs == texts.front()
          ? ""
          : "; " + first_difference(theirs, texts.front(), fmt::format("rank {}", odd - all.begin()), "rank 0");
  throw ExchangedError(fmt::format(
      "the ranks have diverged: rank {} is at '{}', rank 0 at '{}'{}; every rank must make the same calls in "
      "the same order",
      odd - all.begin(), odd->view(), all[0].view(), difference));
}

std::optional<Problem> first_problem(Communicator& communicator, std::optional<std::string_view> mine) {
  const std::byte flag{static_cast<unsigned char>(mine ? 1 : 0)};
  const std::vector<std::byte> flags = values_of_all(communicator, flag);
  const auto first = std::ranges::find(flags, std::byte{1});
  if (first == flags.end()) return std::nullopt;
  const auto rank = static_cast<std::size_t>(first - flags.begin());
  // By an exchange, in which a rank waits for all others: a broadcast's root may go on, and end, before they have its
  // text.
  std::vector<std::string> texts =
      texts_of_all(communicator, std::string(mine.value_or("").substr(0, kProblemTextBytes)));
  return Problem{static_cast<int>(rank), std::move(texts[rank])};
}

}  // namespace hoist::comm
