// SPDX-License-Identifier: Apache-2.0
// comm/agreement.hpp - detects that ranks are about to do different things, before they hang or mix up data, or that a
// rank failed to do its part.
//
// Threading  As the control plane of the given communicator.
// Errors     CommError; of agree(), the same on every rank.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <hoist/comm/communicator.hpp>

namespace hoist::comm {

// [collective] Returns when every rank passed the same `hash`. Otherwise throws a CommError that names the first rank
// whose hash is not rank 0's, and the `what` of both: a short text about the rank's intended call, of which the first
// kAgreementTextBytes travel. Texts may differ where hashes agree. Cost: one exchange of 128 bytes per rank.
// `details`: a text of several lines; the error has the first line that differs between the two ranks. It is called,
// and texts are exchanged by all ranks, only if hashes differ.
void agree(Communicator& communicator, std::uint64_t hash, std::string_view what,
           const std::function<std::string()>& details = {});

inline constexpr std::size_t kAgreementTextBytes = 112;

// The reason why a rank did not do its part.
struct Problem {
  int rank = 0;
  std::string text;
};

// [collective] The problem of the first rank that has one, the same on every rank; nullopt if no rank has one. The
// first kProblemTextBytes of a text travel. Cost: one exchange of a byte per rank; if there is a problem, two more: of
// the texts' lengths and of the texts.
std::optional<Problem> first_problem(Communicator& communicator, std::optional<std::string_view> mine);

inline constexpr std::size_t kProblemTextBytes = 1024;

}  // namespace hoist::comm
