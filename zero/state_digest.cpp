// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include <hoist/core/digest.hpp>
#include <hoist/zero/engine.hpp>

namespace hoist {

std::string state_digest(Engine& engine, State state) {
  constexpr std::uint64_t kPieceElements = 1 << 18;
  Digest digest;
  std::vector<float> values;
  const auto parameters = engine.model().parameters();
  for (std::uint32_t p = 0; p < parameters.size(); ++p) {
    if (!engine.keeps(ParameterId{p}, state)) continue;
    const std::uint64_t count = element_count(parameters[p]);
    for (std::uint64_t first = 0; first < count; first += kPieceElements) {
      values.resize(std::min(kPieceElements, count - first));
      engine.read(ParameterId{p}, state, first, values);
      digest.update(std::as_bytes(std::span(values)));
    }
  }
  return digest.hex();
}

}  // namespace hoist
