// SPDX-License-Identifier: Apache-2.0
#include "arguments.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "run_state.hpp"

namespace hoist::gpt::arguments_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::variant<Arguments, int> parse(std::vector<const char*> words) {
  words.insert(words.begin(), "hoist-gpt");
  return parse_arguments(static_cast<int>(words.size()), words.data());
}

Arguments parsed(const std::vector<const char*>& words) { return std::get<Arguments>(parse(words)); }

// Returns what parse() printed to standard error when it refused.
std::string refusal(const std::vector<const char*>& words) {
  testing::internal::CaptureStderr();
  const auto result = parse(words);
  const std::string text = testing::internal::GetCapturedStderr();
  const int* code = std::get_if<int>(&result);
  EXPECT_TRUE(code != nullptr && *code == kExitBadInput);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  return text;
}

TEST(Arguments, EveryOption) {
  const Arguments a = parsed({"--config",  "c.json",
                              "--text",    "t",
                              "--steps",   "7",
                              "--layers",  "3",
                              "--width",   "48",
                              "--heads",   "4",
                              "--context", "16",
                              "--batch",   "2",
                              "--seed",    "18446744073709551615",
                              "--report",  "r.json",
                              "--resume",  "--threads",
                              "2",         "--learning-rate",
                              "5e-4",      "--warmup",
                              "9",         "--activations",
                              "offload"});
  EXPECT_EQ(a.config, "c.json");
  EXPECT_EQ(a.text, "t");
  EXPECT_EQ(a.steps, 7u);
  EXPECT_EQ(a.layers, 3);
  EXPECT_EQ(a.width, 48);
  EXPECT_EQ(a.heads, 4);
  EXPECT_EQ(a.context, 16);
  EXPECT_EQ(a.batch, 2);
  EXPECT_EQ(a.seed, 18446744073709551615u);
  EXPECT_EQ(a.report, "r.json");
  EXPECT_TRUE(a.resume);
  EXPECT_EQ(a.threads, 2u);
  EXPECT_EQ(a.learning_rate, 5e-4);
  EXPECT_EQ(a.warmup, 9u);
  EXPECT_EQ(a.activations, ActivationPolicy::offload);
}

TEST(Arguments, ActivationsAreComputedAgainUnlessKept) {
  EXPECT_EQ(parsed({"--config", "c.json", "--text", "t", "--steps", "7"}).activations, ActivationPolicy::recompute);
  EXPECT_EQ(parsed({"--config", "c.json", "--text", "t", "--steps", "7", "--activations", "keep"}).activations,
            ActivationPolicy::keep);
}

TEST(Arguments, RefusesInOneLine) {
  EXPECT_THAT(refusal({}), HasSubstr("--config is required"));
  EXPECT_THAT(refusal({"--config", "c", "--steps", "1"}), HasSubstr("--text is required"));
  EXPECT_THAT(refusal({"--config", "c", "--text", "t"}), HasSubstr("--steps is required"));
  const std::vector<const char*> good = {"--config", "c", "--text", "t", "--steps", "1"};
  const auto with = [&](std::initializer_list<const char*> more) {
    std::vector<const char*> words = good;
    words.insert(words.end(), more);
    return refusal(words);
  };
  EXPECT_THAT(with({"--laeyrs", "3"}), HasSubstr("--laeyrs"));
  EXPECT_THAT(with({"--layers", "0"}), HasSubstr("--layers"));
  EXPECT_THAT(with({"--layers", "-1"}), HasSubstr("--layers"));
  EXPECT_THAT(with({"--layers", "three"}), HasSubstr("--layers"));
  EXPECT_THAT(with({"--width", "1000000"}), HasSubstr("--width"));
  EXPECT_THAT(with({"--batch", "0"}), HasSubstr("--batch"));
  EXPECT_THAT(with({"--learning-rate", "-1"}), HasSubstr("--learning-rate"));
  EXPECT_THAT(with({"--learning-rate", "nan"}), HasSubstr("nan is not a finite number of at least 0"));
  EXPECT_THAT(with({"--learning-rate", "inf"}), HasSubstr("inf is not a finite number of at least 0"));
  EXPECT_THAT(with({"--seed", "-1"}), HasSubstr("--seed"));
  EXPECT_THAT(with({"--warmup", "-1"}), HasSubstr("--warmup"));
  for (const char* no_policy : {"7", "foo", "Keep"})
    EXPECT_THAT(with({"--activations", no_policy}),
                HasSubstr(std::string("--activations: ") + no_policy + " is not recompute, keep or offload"));
  EXPECT_THAT(with({"--report"}), HasSubstr("--report"));
  EXPECT_THAT(with({"extra"}), HasSubstr("extra"));
  EXPECT_THAT(refusal({"--config", "c", "--text", "t", "--steps", "-3"}), HasSubstr("--steps"));
}

TEST(Arguments, HelpIsNoError) {
  testing::internal::CaptureStdout();
  const auto result = parse({"--help"});
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("--resume"));
  ASSERT_TRUE(std::holds_alternative<int>(result));
  EXPECT_EQ(std::get<int>(result), 0);
}

TEST(Arguments, HeadsMustDivideWidth) {
  EXPECT_NO_THROW(check_shape({.width = 48, .heads = 4}));
  EXPECT_THROW(check_shape({.width = 48, .heads = 5}), BadInputError);
}

TEST(Settle, TheFileIsUsedWhereTheCommandLineIsSilent) {
  const Config config = Config::parse(R"({"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 3},
                                          "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.25}}})",
                                      "f.json");
  const Settled settled = settle({}, config, 1);
  EXPECT_EQ(settled.batch, 6);
  EXPECT_EQ(settled.learning_rate, 0.25);
  EXPECT_THAT(settled.notes, IsEmpty());
}

TEST(Settle, TheCommandLineWinsAndSaysSoOnce) {
  const Config config = Config::parse(R"({"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 3},
                                          "bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 0.25}}})",
                                      "f.json");
  const Settled settled = settle({.batch = 3, .learning_rate = 0.5}, config, 1);
  EXPECT_EQ(settled.batch, 3);
  EXPECT_EQ(settled.learning_rate, 0.5);
  EXPECT_THAT(settled.notes, ElementsAre("--batch 3 wins over train_micro_batch_size_per_gpu 6 of f.json",
                                         "--learning-rate 0.5 wins over optimizer.params.lr 0.25 of f.json"));
  EXPECT_THAT(settle({.batch = 6, .learning_rate = 0.25}, config, 1).notes, IsEmpty());
}

TEST(Settle, ARateThatTheFileDoesNotHaveWinsOverNothing) {
  const Config config = Config::parse(R"({"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}})", "f.json");
  const Settled settled = settle({.learning_rate = 0.5}, config, 1);
  EXPECT_EQ(settled.learning_rate, 0.5);
  EXPECT_THAT(settled.notes, IsEmpty());
}

TEST(Settle, ItComputesOnTheHostDeviceAndRefusesAnother) {
  for (const char* text : {R"({})", R"({"hoist": {"device": "host"}})"})
    EXPECT_EQ(runtime_options(Config::parse(text, "f.json")).device, platform::DeviceKind::host);
  try {
    (void)runtime_options(Config::parse(R"({"hoist": {"device": "cuda"}})", "f.json"));
    FAIL() << "a GPU was taken";
  } catch (const BadInputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("f.json: hoist.device"));
    EXPECT_THAT(error.what(), HasSubstr("PyTorch"));
  }
}

TEST(Settle, TheBatchOfAllRanksIsDivided) {
  const Config config = Config::parse(
      R"({"train_batch_size": 12, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}})", "f.json");
  EXPECT_EQ(settle({}, config, 4).batch, 3);
  EXPECT_THROW((void)settle({}, config, 5), ConfigProblems);
  EXPECT_THAT(settle({.batch = 5}, config, 4).notes,
              ElementsAre("20 samples a step (--batch 5 x --micro-batches 1 x 4 ranks) win over train_batch_size 12 of "
                          "f.json"));
}

struct BatchCase {
  const char* file;  // the batch sizes
  std::optional<int> batch, micro_batches;
  int world_size;
  int settled_batch, settled_micro_batches;
  std::vector<std::string> notes;
};

Settled settled_of(const BatchCase& c) {
  const std::string text =
      std::string("{") + c.file + R"("zero_optimization": {"stage": 3}, "bf16": {"enabled": true}})";
  return settle({.batch = c.batch, .micro_batches = c.micro_batches}, Config::parse(text, "f.json"), c.world_size);
}

// A key that the file does not have wins nothing, and one whose value is not in effect is named.
TEST(Settle, TheNotesOnBatchSizesAreTrueAndComplete) {
  const BatchCase cases[] = {
      {R"("train_micro_batch_size_per_gpu": 4,)", {}, 4, 1, 4, 4, {}},
      {R"("train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,)",
       {},
       4,
       1,
       4,
       4,
       {"--micro-batches 4 wins over gradient_accumulation_steps 2 of f.json"}},
      {R"("train_batch_size": 32,)", {}, 4, 1, 8, 4, {}},
      {R"("train_batch_size": 32,)", 4, {}, 2, 4, 4, {}},
      {R"("train_batch_size": 32,)", 4, 4, 2, 4, 4, {}},
      {R"("train_batch_size": 32,)",
       8,
       4,
       2,
       8,
       4,
       {"64 samples a step (--batch 8 x --micro-batches 4 x 2 ranks) win over train_batch_size 32 of f.json"}},
      {R"("train_batch_size": 32, "train_micro_batch_size_per_gpu": 8,)",
       {},
       2,
       1,
       8,
       2,
       {"16 samples a step (--batch 8 x --micro-batches 2 x 1 rank) win over train_batch_size 32 of f.json"}},
      {R"("train_batch_size": 32, "train_micro_batch_size_per_gpu": 8,)",
       4,
       {},
       1,
       4,
       8,
       {"--batch 4 wins over train_micro_batch_size_per_gpu 8 of f.json"}},
  };
  for (const BatchCase& c : cases) {
    SCOPED_TRACE(c.file);
    const Settled settled = settled_of(c);
    EXPECT_EQ(settled.batch, c.settled_batch);
    EXPECT_EQ(settled.micro_batches, c.settled_micro_batches);
    EXPECT_EQ(settled.notes, c.notes);
  }
  EXPECT_THROW((void)settled_of({R"("train_batch_size": 32,)", {}, 5, 1, 0, 0, {}}), ConfigProblems);
}

TEST(Settle, AScheduleOfTheFileLeavesNoRateToTheCommandLine) {
  const auto with = [](const std::string& schedule) {
    return Config::parse(
        R"({"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "scheduler": )" + schedule + "}", "f.json");
  };
  for (const char* schedule :
       {R"({"type": "OneCycle", "params": {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3}})",
        R"({"type": "LRRangeTest", "params": {}})", R"({"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}})",
        R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 100}})"}) {
    SCOPED_TRACE(schedule);
    const Config config = with(schedule);
    EXPECT_THAT(settle({}, config, 1).notes, IsEmpty());
    EXPECT_THROW((void)settle({.learning_rate = 0.5}, config, 1), BadInputError);
    EXPECT_THROW((void)settle({.warmup = 9}, config, 1), BadInputError);
  }
}

// --- the program's part of a commit --------------------------------------------------------------------------------

RunState example() {
  return {.step = 41,
          .seed = 18446744073709551615u,
          .layers = 2,
          .width = 32,
          .heads = 4,
          .context = 16,
          .samples_per_step = 8,
          .text_bytes = 35149,
          .text_fingerprint = 0xFEDCBA9876543210u};
}

TEST(RunState, RoundTrip) { EXPECT_EQ(decode(encode(example())), example()); }

TEST(RunState, RefusesForeignBytes) {
  const auto bytes_of = [](std::string_view text) { return std::as_bytes(std::span(text)); };
  EXPECT_THROW((void)decode({}), BadInputError);
  EXPECT_THROW((void)decode(bytes_of("{")), BadInputError);
  EXPECT_THROW((void)decode(bytes_of("[1]")), BadInputError);
  EXPECT_THROW((void)decode(bytes_of(R"({"program":"other","format":2})")), BadInputError);
  EXPECT_THROW((void)decode(bytes_of(R"({"program":"hoist-gpt","format":3})")), BadInputError);
  EXPECT_THROW((void)decode(bytes_of(R"({"program":"hoist-gpt","format":1})")), BadInputError);
  EXPECT_THROW((void)decode(bytes_of(R"({"program":"hoist-gpt","format":2,"step":"x"})")), BadInputError);
}

TEST(RunState, NamesWhatDiffers) {
  RunState other = example();
  other.step = 0;
  EXPECT_NO_THROW(check_same_run(example(), other));
  const auto message = [&](auto change) {
    RunState asked = example();
    change(asked);
    try {
      check_same_run(example(), asked);
    } catch (const BadInputError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(message([](RunState& s) { s.layers = 3; }), HasSubstr("--layers 2, not 3"));
  EXPECT_THAT(message([](RunState& s) { s.width = 3; }), HasSubstr("--width 32"));
  EXPECT_THAT(message([](RunState& s) { s.heads = 3; }), HasSubstr("--heads 4"));
  EXPECT_THAT(message([](RunState& s) { s.context = 3; }), HasSubstr("--context 16"));
  EXPECT_THAT(message([](RunState& s) { s.samples_per_step = 3; }), HasSubstr("8 samples a step, not 3"));
  EXPECT_THAT(message([](RunState& s) { s.seed = 3; }), HasSubstr("--seed 18446744073709551615"));
  EXPECT_THAT(message([](RunState& s) { s.text_fingerprint = 3; }), HasSubstr("another text"));
}

}  // namespace
}  // namespace hoist::gpt::arguments_test
