// SPDX-License-Identifier: Apache-2.0
// cli/doctor/finding.hpp - one finding of `hoist doctor`, and the places it examines.
//
// An examination never fails: an unreadable value is "unknown", and the next one is examined.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <hoist/core/kernel_files.hpp>
#include <hoist/platform/gpu_memory.hpp>

namespace hoist::cli {

enum class Verdict : std::uint8_t {
  ok,
  lacking,  // training works without it, at the stated cost
  missing,  // training needs it
};

struct Finding {
  std::string subject;  // "huge pages"
  std::string found;    // "none reserved; transparent: madvise"
  Verdict verdict = Verdict::ok;
  std::string cost{};    // the cost of lacking it; empty if nothing is missing
  std::string remedy{};  // the command that fixes it, or what to change
  nlohmann::ordered_json data = nlohmann::ordered_json::object();  // the same in numbers, for programs

  Finding& lacks(Verdict how, std::string what_it_costs, std::string what_to_do) {
    verdict = how;
    cost = std::move(what_it_costs);
    remedy = std::move(what_to_do);
    return *this;
  }
};

std::vector<platform::GpuMemoryFacts> cuda_memories();

struct Section {
  std::string title;
  std::vector<Finding> findings;
};

// The roots of /proc and /sys, and what the CUDA runtime says of each GPU's memory; tests build others.
struct MachineSources {
  std::string proc = "/proc";
  std::string sys = "/sys";
  std::function<std::vector<platform::GpuMemoryFacts>()> gpu_memories = cuda_memories;
};

Section look_at_io_uring(const MachineSources& machine);
Section look_at_memory(const MachineSources& machine);
Section look_at_processors(const MachineSources& machine);
Section look_at_devices(const MachineSources& machine);
// A directory for a store. Makes a small temporary file there.
// Pre: it is a directory.
Section look_at_path(const MachineSources& machine, const std::string& directory);

}  // namespace hoist::cli
