// SPDX-License-Identifier: Apache-2.0
// hoist doctor: reports what this machine and this build offer, what each gap costs, and how to close it.
#include <array>
#include <filesystem>
#include <memory>
#include <system_error>

#include <fmt/format.h>

#include "../commands.hpp"
#include "../output.hpp"
#include "finding.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

struct DoctorArguments {
  std::vector<std::string> paths;
  std::string json;
};

std::size_t count(const std::vector<Section>& sections, Verdict verdict) {
  std::size_t found = 0;
  for (const Section& section : sections) {
    for (const Finding& finding : section.findings) found += finding.verdict == verdict ? 1u : 0u;
  }
  return found;
}

void print_section(const Section& section) {
  constexpr const char* kMarks[] = {"  ", "- ", "! "};
  std::vector<std::vector<std::string>> rows;
  for (const Finding& finding : section.findings) {
    rows.push_back({kMarks[static_cast<std::size_t>(finding.verdict)] + finding.subject, finding.found});
    if (!finding.cost.empty()) rows.push_back({"", "costs: " + finding.cost});
    if (!finding.remedy.empty()) rows.push_back({"", "fix:   " + finding.remedy});
  }
  say("\n{}\n{}", section.title, columns(rows));
}

Json report_json(const std::vector<Section>& sections) {
  static constexpr std::array kVerdicts{"ok", "lacking", "missing"};  // by Verdict
  Json json{{"version", HOIST_VERSION},
            {"missing", count(sections, Verdict::missing)},
            {"lacking", count(sections, Verdict::lacking)},
            {"findings", Json::array()}};
  for (const Section& section : sections) {
    for (const Finding& finding : section.findings) {
      json["findings"].push_back({{"section", section.title},
                                  {"subject", finding.subject},
                                  {"verdict", kVerdicts[static_cast<std::size_t>(finding.verdict)]},
                                  {"found", finding.found},
                                  {"cost", finding.cost},
                                  {"remedy", finding.remedy},
                                  {"data", finding.data}});
    }
  }
  return json;
}

int doctor(const DoctorArguments& arguments) {
  for (const std::string& path : arguments.paths) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) continue;
    complain("hoist doctor: {} is not a directory; name a directory for a store with --path\n", path);
    return kBadInput;
  }
  check_json(arguments.json);
  const MachineSources machine;
  std::vector<Section> sections{look_at_devices(machine), look_at_processors(machine), look_at_memory(machine),
                                look_at_io_uring(machine)};
  for (const std::string& path : arguments.paths) sections.push_back(look_at_path(machine, path));

  say("hoist {}\n", HOIST_VERSION);
  for (const Section& section : sections) print_section(section);
  if (arguments.paths.empty()) say("\nNo drive was examined; name a directory for a store with --path DIR.\n");
  const std::size_t missing = count(sections, Verdict::missing);
  const std::size_t lacking = count(sections, Verdict::lacking);
  if (missing > 0) {
    say("\n{} that training needs {} missing (!), {} could be better (-): see what each costs.\n",
        counted(missing, "thing"), missing == 1 ? "is" : "are", lacking);
  } else {
    say("\nNothing that training needs is missing; {} could be better (-): see what each costs.\n",
        counted(lacking, "thing"));
  }
  write_json(arguments.json, report_json(sections));
  return missing == 0 ? kOk : kFailure;
}

}  // namespace

Command add_doctor(CLI::App& app) {
  CLI::App* command = app.add_subcommand("doctor", "Report what this machine and this build offer");
  auto arguments = std::make_shared<DoctorArguments>();
  command->add_option("--path", arguments->paths, "Also examine the drive of this directory; may be repeated")
      ->type_name("DIR");
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->footer(
      "Example: hoist doctor --path /local_nvme --json machine.json\n"
      "Exit code 1: something that training needs is missing.");
  return {command, [arguments] { return doctor(*arguments); }};
}

}  // namespace hoist::cli
