// SPDX-License-Identifier: Apache-2.0
// hoist verify: reads and checks every byte that a store would give back, also while a training uses it.
#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/units.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "store_directory.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

struct VerifyArguments {
  std::vector<std::string> stores;
  std::string bytes_per_second;
  std::string json;
};

void print(const Verification& verification) {
  constexpr std::size_t kShownMax = 50;
  const std::string which = verification.name.empty() ? "" : fmt::format(", named {}", verification.name);
  if (verification.retired) return say("not verified{}: {}\n", which, verification.not_done);
  if (!verification.not_done.empty()) complain("hoist verify: not verified{}: {}\n", which, verification.not_done);
  if (verification.is_sound())
    say("verified step {}{}: all of {} matches its checksums\n", verification.step, which,
        format_bytes(verification.bytes));
  if (verification.damage.empty()) return;
  say("damaged: {} of step {}{}\n", counted(verification.damage.size(), "tile"), verification.step, which);
  std::vector<std::vector<std::string>> rows{{"unit", "what", "file", "offset", "expected", "found"}};
  for (std::size_t i = 0; i < std::min(verification.damage.size(), kShownMax); ++i) {
    const CorruptionError::Where& where = verification.damage[i].where;
    rows.push_back({where.unit, where.region, where.path, fmt::format("{}", where.offset_bytes),
                    fmt::format("{:016x}", where.expected), fmt::format("{:016x}", where.found)});
  }
  say("{}", columns(rows));
  if (verification.damage.size() > kShownMax)
    say("  and {} more; --json lists them all\n", verification.damage.size() - kShownMax);
}

Json json_of(const Verification& verification) {
  Json json{{"name", verification.name}, {"done", verification.not_done.empty()}, {"retired", verification.retired},
            {"step", verification.step}, {"checked_bytes", verification.bytes},   {"damage", Json::array()}};
  if (!verification.not_done.empty()) json["reason"] = verification.not_done;
  for (const CorruptionError& error : verification.damage) {
    json["damage"].push_back({{"unit", error.where.unit},
                              {"region", error.where.region},
                              {"path", error.where.path},
                              {"offset_bytes", error.where.offset_bytes},
                              {"expected", fmt::format("{:016x}", error.where.expected)},
                              {"found", fmt::format("{:016x}", error.where.found)}});
  }
  return json;
}

// Ranks without files in a group's directory.
std::vector<int> absent_ranks(const StoreSummary& group) {
  std::vector<int> absent;
  for (int rank = 0; rank < group.world_size.value_or(0); ++rank)
    if (std::ranges::find(group.ranks, rank, &StoreSummary::Rank::rank) == group.ranks.end()) absent.push_back(rank);
  return absent;
}

int verify(const VerifyArguments& arguments) {
  check_json(arguments.json);
  const std::uint64_t rate = rate_of(arguments.bytes_per_second);
  const StoredJob job = find_settled_job(arguments.stores);
  std::vector<std::string> directories;
  for (const std::string& path : arguments.stores) directories.push_back(find_store(path));
  const std::vector<Verification> results =
      verify_job(directories, {.bytes_per_second = rate, .progress = reported_as("verifying")});
  for (const Verification& verification : results) print(verification);
  const std::vector<StoreSummary> stores = all_stores(job);
  const bool sound =
      std::ranges::all_of(results, &Verification::is_sound) && std::ranges::none_of(stores, lost_a_checkpoint);
  Json json{{"sound", sound},
            {"commits", Json::array()},
            {"manifest_damage", Json::array()},
            {"absent_ranks", Json::array()}};
  for (const StoreSummary& group : job.groups) {
    const std::vector<int> absent = absent_ranks(group);
    json["absent_ranks"].push_back(absent);
    if (!absent.empty())
      say("{}: no files of rank {} are here; verify them on their hosts\n", group.directory, fmt::join(absent, ", "));
  }
  for (const StoreSummary& store : stores) {
    for (const std::string& line : damage_lines(store)) {
      say("{}\n", line);
      json["manifest_damage"].push_back(line);
    }
  }
  for (const Verification& verification : results) json["commits"].push_back(json_of(verification));
  write_json(arguments.json, json);
  return sound ? kOk : kFailure;
}

}  // namespace

Command add_verify(CLI::App& app) {
  CLI::App* command = app.add_subcommand("verify", "Read a store and compare it with its checksums; changes nothing");
  auto arguments = std::make_shared<VerifyArguments>();
  add_stores(*command, arguments->stores);
  command
      ->add_option("--bytes-per-second", arguments->bytes_per_second,
                   "Read no faster on average, so that a training can use the drives as well")
      ->type_name("BYTES");
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->footer(
      "Example: hoist verify /local_nvme --bytes-per-second 100MB\n"
      "Reads the newest commit and every named checkpoint, also while a training uses the store. Run it on the host\n"
      "that has the drives: ranks with files on other hosts are not read.\n"
      "Exit code 1: something is damaged, or could not be verified.");
  return {command, [arguments] { return report_unreadable_store("verify", [&] { return verify(*arguments); }); }};
}

}  // namespace hoist::cli
