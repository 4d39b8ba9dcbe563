// SPDX-License-Identifier: Apache-2.0
// cli/doctor/finding.hpp - what `hoist doctor` says about one thing, and where it looks.
//
// A look never fails: what cannot be read is "unknown", and the next thing is looked at.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace hoist::cli {

enum class Verdict : std::uint8_t {
  well,
  lacking,  // training works without it, at the cost that is said
  missing,  // training needs it
};
const char* verdict_name(Verdict verdict);

struct Finding {
  std::string subject;  // "huge pages"
  std::string found;    // "none reserved; transparent: madvise"
  Verdict verdict = Verdict::well;
  std::string cost{};                                              // what it costs to lack it; empty when all is well
  std::string remedy{};                                            // the command that fixes it, or what to change
  nlohmann::ordered_json data = nlohmann::ordered_json::object();  // the same in numbers, for programs
};

struct Section {
  std::string title;
  std::vector<Finding> findings;
};

// Where the system's own account of itself lies; tests build others.
struct Machine {
  std::string proc = "/proc";
  std::string sys = "/sys";
};

Section look_at_io_uring(const Machine& machine);
Section look_at_memory(const Machine& machine);
Section look_at_processors(const Machine& machine);
Section look_at_devices(const Machine& machine);
// One directory that would hold a store. Makes a small file there for a moment.
// Pre: it is a directory.
Section look_at_path(const Machine& machine, const std::string& directory);

// --- reading /proc and /sys ------------------------------------------------------------------------------------------

// The first line, without the newline; nothing when the file cannot be read.
std::optional<std::string> first_line(const std::string& path);
// A whole file that is a number; nothing for "max" and everything else.
std::optional<std::uint64_t> number_in(const std::string& path);
// The rest of the line that begins with `key` and a colon ("MemTotal:  16 kB" -> "16 kB").
std::optional<std::string> field_of(const std::string& path, const std::string& key);
// The same where the value is in kB.
std::optional<std::uint64_t> field_bytes(const std::string& path, const std::string& key);

}  // namespace hoist::cli
