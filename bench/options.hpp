// SPDX-License-Identifier: Apache-2.0
// bench/options.hpp - a bench's command line (options with a value, and flags), and the file that --json names.
//
//   Options options(argc, argv);
//   const bool smoke = options.flag("--smoke");
//   const unsigned pairs = options.number("--pairs", smoke ? 2u : 31u);
//   options.end();
//
// end() lists the options and ends the program if --help is among the words.
//
// Errors     UsageError for an option without its value, for a value that is no number, too small or too large for
//            its type, for an option that is given twice, and, in end(), for a word that nothing has asked for. IoError
//            for a file that cannot be written.
#pragma once

#include <algorithm>
#include <cerrno>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

namespace hoist::bench {

class Options {
 public:
  Options(int argc, char** argv) : words_(argv + 1, argv + argc) {}

  bool flag(std::string_view name) {
    asked_for_.emplace_back(name);
    return std::erase(words_, name) > 0;
  }

  std::string text(std::string_view name, std::string otherwise = {}) {
    asked_for_.push_back(fmt::format("{} VALUE", name));
    for (auto word = words_.begin(); word != words_.end(); ++word) {
      if (*word != name) continue;
      if (word + 1 == words_.end()) throw UsageError(fmt::format("{} has no value", name));
      std::string value = *(word + 1);
      words_.erase(word, word + 2);
      if (std::ranges::find(words_, name) != words_.end()) throw UsageError(fmt::format("{} is given twice", name));
      return value;
    }
    return otherwise;
  }

  template <std::integral Number>
  Number number(std::string_view name, Number otherwise, std::type_identity_t<Number> least = 1) {
    const std::string value = text(name);
    if (value.empty()) return otherwise;
    const auto number = parse_number<Number>(value);
    if (!number) throw UsageError(fmt::format("{} {}: this is not a number, or too large a one", name, value));
    if (*number < least) throw UsageError(fmt::format("{} {}: must be at least {}", name, value, least));
    return *number;
  }

  // Such as 64MiB; several with commas between them.
  std::vector<std::uint64_t> byte_counts(std::string_view name, const std::vector<std::uint64_t>& otherwise) {
    const std::string value = text(name);
    if (value.empty()) return otherwise;
    std::vector<std::uint64_t> counts;
    for (std::size_t first = 0; first <= value.size();) {
      const std::size_t end = std::min(value.find(',', first), value.size());
      const auto bytes = parse_bytes(std::string_view(value).substr(first, end - first));
      if (!bytes || *bytes == 0)
        throw UsageError(fmt::format("{} {}: must be a number of bytes above 0, such as 64MiB", name, value));
      counts.push_back(*bytes);
      first = end + 1;
    }
    return counts;
  }
  std::uint64_t bytes(std::string_view name, std::uint64_t otherwise) { return byte_counts(name, {otherwise}).front(); }

  // All options have been asked for.
  void end() const {
    if (std::ranges::find(words_, "--help") != words_.end()) {
      fmt::print("Options: {}\n", fmt::join(asked_for_, ", "));
      std::exit(EXIT_SUCCESS);
    }
    if (!words_.empty())
      throw UsageError(fmt::format("'{}' is not an option of this program (see --help)", words_.front()));
  }

 private:
  std::vector<std::string> words_;  // that nothing has asked for yet
  std::vector<std::string> asked_for_;
};

// Without a path it writes nothing.
inline void write_json(const std::string& path, std::string_view json) {
  if (path.empty()) return;
  errno = 0;
  std::ofstream file(path);
  file << json << '\n';
  file.close();
  if (!file) throw IoError({"write", path, 0, json.size(), errno}, "name another file with --json");
}

// A bench's main(): `run` returns the exit code; it is 2 after an exception.
template <typename Run>
int run_main(const Run& run) try {
  return run();
} catch (const std::exception& error) {
  fmt::print(stderr, "{}: {}\n", program_invocation_short_name, error.what());
  return 2;
}

}  // namespace hoist::bench
