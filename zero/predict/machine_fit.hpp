// SPDX-License-Identifier: Apache-2.0
// zero/predict/machine_fit.hpp - whether a machine has what a prediction asks for.
//
// Threading  Any thread. Looks at the file systems of the store's directories.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <hoist/zero/machine.hpp>
#include <hoist/zero/predict/prediction.hpp>

namespace hoist {

// All ranks of the machine together.
struct MachineFit {
  struct Memory {
    std::string name;  // "memory of a GPU", "memory of GPU and processors", "NVMe at /data/hoist"
    std::uint64_t least_bytes = 0;
    std::uint64_t bytes = 0;  // what will be held; the least where that does not fit
    std::uint64_t free_bytes = 0;
    std::string remedy;  // part of a sentence
    bool fits() const { return least_bytes <= free_bytes; }
  };
  int ranks = 1;
  std::vector<Memory> memories;
  std::uint64_t mirror_bytes = 0;     // of a mirror, if it is not known whether its drive has them
  std::vector<std::string> problems;  // sentences, the limiting memory first; none: it fits
  bool fits() const { return problems.empty(); }
};

// `runtime`: as chosen for `machine`. Space that the store's files have already is not needed again.
// `drive_bytes`: of all drives, if this is not the machine that the program runs on; a mirror's are then unknown.
// Empty: looks at the file systems.
MachineFit machine_fit(const Prediction& prediction, const RuntimeOptions& runtime, const EngineOptions& engine,
                       const Machine& machine, std::optional<std::uint64_t> drive_bytes = std::nullopt);
// What keeps this process from making the directories of store and mirror, as sentences. machine_fit() looks by itself
// where it is not given `drive_bytes`.
std::vector<std::string> directory_problems(const EngineOptions& engine);

}  // namespace hoist
