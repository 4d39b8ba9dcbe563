// SPDX-License-Identifier: Apache-2.0
#include "run_state.hpp"

#include <algorithm>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "text.hpp"

namespace hoist::gpt {
namespace {

constexpr const char* kProgram = "hoist-gpt";

}  // namespace

std::vector<std::byte> encode(const RunState& state) {
  const nlohmann::ordered_json json = {{"program", kProgram},
                                       {"format", RunState::kFormatVersion},
                                       {"step", state.step},
                                       {"seed", state.seed},
                                       {"layers", state.layers},
                                       {"width", state.width},
                                       {"heads", state.heads},
                                       {"context", state.context},
                                       {"samples_per_step", state.samples_per_step},
                                       {"text_bytes", state.text_bytes},
                                       {"text_fingerprint", state.text_fingerprint}};
  const std::string text = json.dump();
  std::vector<std::byte> bytes(text.size());
  std::ranges::transform(text, bytes.begin(), [](char c) { return static_cast<std::byte>(c); });
  return bytes;
}

RunState decode(std::span<const std::byte> bytes) {
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  RunState state;
  try {
    const auto json = nlohmann::json::parse(text);
    if (json.at("program") != kProgram)
      throw BadInputError("the store's commit was made by another program than hoist-gpt");
    const int version = json.at("format").get<int>();
    if (version != RunState::kFormatVersion) {
      throw BadInputError(
          fmt::format("the store's commit has run-state format {}, this hoist-gpt knows {}: use the version "
                      "that wrote it",
                      version, RunState::kFormatVersion));
    }
    json.at("step").get_to(state.step);
    json.at("seed").get_to(state.seed);
    json.at("layers").get_to(state.layers);
    json.at("width").get_to(state.width);
    json.at("heads").get_to(state.heads);
    json.at("context").get_to(state.context);
    json.at("samples_per_step").get_to(state.samples_per_step);
    json.at("text_bytes").get_to(state.text_bytes);
    json.at("text_fingerprint").get_to(state.text_fingerprint);
  } catch (const nlohmann::json::exception&) {
    throw BadInputError("the store's commit does not hold a hoist-gpt run; another program wrote it");
  }
  return state;
}

void check_same_run(const RunState& committed, const RunState& asked) {
  const auto same = [](const char* option, auto before, auto now) {
    if (before == now) return;
    throw BadInputError(
        fmt::format("the store holds a run with {} {}, not {}: pass {} {} to continue it, or choose another "
                    "store",
                    option, before, now, option, before));
  };
  same("--layers", committed.layers, asked.layers);
  same("--width", committed.width, asked.width);
  same("--heads", committed.heads, asked.heads);
  same("--context", committed.context, asked.context);
  same("--seed", committed.seed, asked.seed);
  if (committed.samples_per_step != asked.samples_per_step) {
    throw BadInputError(
        fmt::format("the store holds a run of {} samples a step, not {}: choose --batch and --micro-batches so that "
                    "--batch x --micro-batches x ranks is {}, or choose another store",
                    committed.samples_per_step, asked.samples_per_step, committed.samples_per_step));
  }
  if (committed.text_bytes != asked.text_bytes || committed.text_fingerprint != asked.text_fingerprint) {
    throw BadInputError(
        fmt::format("the store holds a run on another text ({} bytes, not {}): pass the same --text to "
                    "continue it, or choose another store",
                    committed.text_bytes, asked.text_bytes));
  }
}

}  // namespace hoist::gpt
