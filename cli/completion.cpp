// SPDX-License-Identifier: Apache-2.0
// hoist completion: prints scripts for bash, zsh and fish, made from the program's commands and options.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "commands.hpp"
#include "output.hpp"

namespace hoist::cli {

namespace {

struct OptionWords {
  std::vector<std::string> names;  // "--json", "-h"
  std::string help;
  bool takes_value = false;
};

// One command, or the program itself.
struct CommandWords {
  std::string path;  // "bench io"; empty: the program
  std::string help;
  std::vector<CommandWords> commands;
  std::vector<OptionWords> options;
};

CommandWords words_of(const CLI::App& app, const std::string& path) {
  CommandWords words{.path = path, .help = app.get_description()};
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    words.commands.push_back(words_of(*command, path.empty() ? command->get_name() : path + " " + command->get_name()));
  }
  for (const CLI::Option* option : app.get_options()) {
    OptionWords named{.help = option->get_description(), .takes_value = option->get_items_expected_max() > 0};
    for (const std::string& name : option->get_lnames()) named.names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) named.names.push_back("-" + name);
    if (!named.names.empty()) words.options.push_back(std::move(named));
  }
  return words;
}

std::string last_word(const std::string& path) { return path.substr(path.rfind(' ') + 1); }

// Every command, the program first.
std::vector<const CommandWords*> flattened(const CommandWords& top) {
  std::vector<const CommandWords*> all{&top};
  for (const CommandWords& command : top.commands) {
    for (const CommandWords* below : flattened(command)) all.push_back(below);
  }
  return all;
}

std::vector<std::string> all_names(const CommandWords& words) {
  std::vector<std::string> names;
  for (const CommandWords& command : words.commands) names.push_back(last_word(command.path));
  for (const OptionWords& option : words.options) names.insert(names.end(), option.names.begin(), option.names.end());
  return names;
}

std::vector<std::string> value_options(const CommandWords& top) {
  std::vector<std::string> names;
  for (const CommandWords* words : flattened(top)) {
    for (const OptionWords& option : words->options) {
      if (option.takes_value) names.insert(names.end(), option.names.begin(), option.names.end());
    }
  }
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

// The words that name commands select the command; options and their values do not count. After an option that takes a
// value, and if no word fits, bash completes file names.
std::string bash_script(const CommandWords& top) {
  std::string script =
      "# bash completion of hoist: source <(hoist completion bash)\n"
      "_hoist() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command= words= i\n"
      "  COMPREPLY=()\n"
      "  case $before in\n";
  script += fmt::format("    {}) return ;;\n  esac\n", fmt::join(value_options(top), "|"));
  script += "  for ((i = 1; i < COMP_CWORD; i++)); do\n    case \"$command ${COMP_WORDS[i]}\" in\n";
  std::vector<std::string> paths;
  for (const CommandWords* words : flattened(top)) {
    if (!words->path.empty()) paths.push_back(fmt::format("\" {}\"", words->path));
  }
  script += fmt::format("      {}) command=\"$command ${{COMP_WORDS[i]}}\" ;;\n", fmt::join(paths, "|"));
  script += "    esac\n  done\n  case \"$command\" in\n";
  for (const CommandWords* words : flattened(top)) {
    script += fmt::format("    \"{}\") words=\"{}\" ;;\n", words->path.empty() ? "" : " " + words->path,
                          fmt::join(all_names(*words), " "));
  }
  script +=
      "  esac\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
      "}\n"
      "complete -o default -F _hoist hoist\n";
  return script;
}

// zsh's _arguments gives brackets, colons and backslashes in an option's explanation a meaning.
std::string zsh_explanation(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    if (c == ':' || c == '[' || c == ']' || c == '\\') escaped += '\\';
    escaped += c;
  }
  return escaped;
}

std::string zsh_function(const CommandWords& words) {
  std::string name = "_hoist" + (words.path.empty() ? "" : "_" + words.path);
  std::ranges::replace(name, ' ', '_');
  std::string script = fmt::format("{}() {{\n  local -a specs=(\n", name);
  for (const OptionWords& option : words.options) {
    for (const std::string& option_name : option.names) {
      const std::string value = option.takes_value ? ":value:_files" : "";
      const std::string explanation = shell_quoted("[" + zsh_explanation(option.help) + "]");
      script += fmt::format("    {}\n", shell_quoted(option_name) + explanation + value);
    }
  }
  if (words.commands.empty()) {
    return script + "    '*:file:_files'\n  )\n  _arguments -s : \"${specs[@]}\"\n}\n";
  }
  script += "    '1:command:->command' '*::arguments:->arguments'\n  )\n";
  script += "  local context state line\n  _arguments -C : \"${specs[@]}\"\n  case $state in\n    command)\n";
  script += "      local -a commands=(\n";
  for (const CommandWords& command : words.commands) {
    script += fmt::format("        {}\n", shell_quoted(last_word(command.path) + ":" + command.help));
  }
  script += "      )\n      _describe command commands ;;\n    arguments)\n";
  script += fmt::format("      (( $+functions[{0}_${{line[1]}}] )) && {0}_${{line[1]}} ;;\n  esac\n}}\n", name);
  for (const CommandWords& command : words.commands) script += zsh_function(command);
  return script;
}

std::string zsh_script(const CommandWords& top) {
  return "#compdef hoist\n# zsh completion of hoist: source <(hoist completion zsh)\n" + zsh_function(top) +
         "compdef _hoist hoist\n";
}

std::string fish_condition(const CommandWords& words) {
  if (words.path.empty()) return "__fish_use_subcommand";
  std::string condition;
  std::string rest = words.path;
  while (!rest.empty()) {
    const std::size_t space = rest.find(' ');
    condition += (condition.empty() ? "" : "; and ") + ("__fish_seen_subcommand_from " + rest.substr(0, space));
    rest = space == std::string::npos ? "" : rest.substr(space + 1);
  }
  return condition;
}

std::string fish_script(const CommandWords& top) {
  std::string script = "# fish completion of hoist: hoist completion fish | source\n";
  for (const CommandWords* words : flattened(top)) {
    const std::string when = shell_quoted(fish_condition(*words));
    for (const CommandWords& command : words->commands) {
      script += fmt::format("complete -c hoist -n {} -f -a {} -d {}\n", when, last_word(command.path),
                            shell_quoted(command.help));
    }
    for (const OptionWords& option : words->options) {
      std::string names;
      for (const std::string& name : option.names) {
        names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      script += fmt::format("complete -c hoist -n {}{}{} -d {}\n", when, names, option.takes_value ? " -r" : "",
                            shell_quoted(option.help));
    }
  }
  return script;
}

}  // namespace

Command add_completion(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("completion", "Print a script that lets a shell complete this program's commands and options");
  auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  command->footer("Example: source <(hoist completion bash)");
  return {command, [shell, top = &app] {
            const CommandWords words = words_of(*top, "");
            say("{}", *shell == "bash" ? bash_script(words) : *shell == "zsh" ? zsh_script(words) : fish_script(words));
            return static_cast<int>(kOk);
          }};
}

}  // namespace hoist::cli
