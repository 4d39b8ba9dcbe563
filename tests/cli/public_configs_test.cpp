// SPDX-License-Identifier: Apache-2.0
// Configurations with the values of public projects' files (tests/config/data/wild), to which no section "hoist" was
// added, for models that those projects train: hoist check says whether the model fits a machine, and if not, which
// memory it lacks, with the numbers. The machines come from files, so the result does not depend on where the test
// runs.
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <hoist/core/units.hpp>
#include <hoist/tests/config/samples.hpp>

#include "program.hpp"

namespace hoist::public_configs_test {
namespace {

struct PublicCase {
  const char* sample;  // in tests/config/data/wild
  const char* parameters;
  const char* machine;
  const char* limit = "";  // the memory that is too small; empty: the model fits
};

constexpr const char* kGpu = "memory of a GPU";
constexpr const char* kHost = "host memory";

constexpr PublicCase kCases[] = {
    {"alpaca_offload", "7e9", "h200-4-drives"},  // Stanford Alpaca: LLaMA 7B
    {"alpaca_offload", "7e9", "laptop", kHost},
    {"baichuan2", "13e9", "h100-8"},  // Baichuan2-13B
    {"baichuan2", "13e9", "h200-4-drives", kGpu},
    {"belle_stage3", "7e9", "h200-4-drives"},               // BELLE: BLOOMZ 7B
    {"bigscience_13b_fp16_zero1", "13e9", "h100-8"},        // BigScience's 13B
    {"deepseek_coder_zero3", "33e9", "h200-4-drives"},      // DeepSeek-Coder 33B
    {"deepseek_coder_zero3", "6.7e9", "laptop", kHost},     // and 6.7B
    {"deepspeed_chat_actor", "1.3e9", "h100-8"},            // DeepSpeed-Chat: OPT 1.3B
    {"deepspeed_chat_hybrid_off", "66e9", "h100-8", kGpu},  // and OPT 66B
    {"deepspeed_examples_alpaca_lora", "7e9", "h200-4-drives"},
    {"deepspeed_tutorial_infinity", "70e9", "h200-4-drives"},
    {"deepspeed_tutorial_deepnvme", "7e9", "laptop"},
    {"deepspeed_tutorial_old_zero3", "10e9", "h200-4-drives"},  // the tutorial's 10B
    {"dolly_a100", "12e9", "h100-8"},                           // Dolly 12B
    {"fastchat_zero3", "13e9", "h100-8"},                       // Vicuna 13B
    {"fastchat_zero3", "70e9", "h100-8", kGpu},
    {"finetune_cosine_zero3", "8e9", "h200-4-drives"},
    {"axolotl_zero2_cpu", "8e9", "h100-8"},
    {"axolotl_zero3_bf16_cpuoffload_all", "70e9", "h100-8"},
    {"lightning_zero3_offload", "13e9", "h200-4-drives"},
    {"llama_factory_z3_offload", "70e9", "h100-8"},  // Llama 3 70B
    {"llama_factory_z3_offload", "70e9", "h200-4-drives", kHost},
    {"llama_factory_z3_partial_offload", "8e9", "h100-8"},
    {"llama_x", "13e9", "h200-4-drives"},
    {"llava_zero3", "13e9", "h100-8"},          // LLaVA 13B
    {"lmflow_zero3", "33e9", "h200-4-drives"},  // LMFlow: LLaMA 33B
    {"megatron_zero2_cpu_offload", "1.5e9", "h200-4-drives"},
    {"open_assistant_65b", "65e9", "h100-8"},                  // Open-Assistant: LLaMA 65B
    {"open_assistant_falcon", "40e9", "h200-4-drives", kGpu},  // and Falcon 40B
    {"open_instruct_offload", "70e9", "h100-8"},               // Tulu 2 70B
    {"qwen_zero2", "7e9", "h100-8"},                           // Qwen 7B
    {"qwen_zero3", "72e9", "h100-8", kGpu},                    // and 72B
    {"transformers_zero2", "3e9", "h200-4-drives"},            // T5 3B
    {"transformers_zero3_cpu", "11e9", "h200-4-drives"},       // and 11B
    {"transformers_zero3_decay", "11e9", "h100-8"},
    {"transformers_zero3_nvme", "11e9", "laptop"},
    {"transformers_zero3_nvme", "7e9", "laptop"},
    {"wizard_math", "70e9", "h100-8"},  // WizardMath 70B
    {"wizard_math", "70e9", "h200-4-drives", kHost},
    {"xtuner_zero3_offload", "20e9", "h200-4-drives"},  // InternLM2 20B
};

class PublicConfigs : public test::ProgramTest {};

TEST_F(PublicConfigs, FitAMachineOrLackMemoryThatIsNamed) {
  for (const PublicCase& one : kCases) {
    const std::string where = fmt::format("{} {} {}", one.sample, one.parameters, one.machine);
    const std::string text = test::table_sample("wild", one.sample).text;
    ASSERT_EQ(text.find("\"hoist\""), std::string::npos) << where;
    write("config.json", text);
    const auto result =
        run(fmt::format("check config.json --parameters {} --machine {}/machines/{}.json --json check.json",
                        one.parameters, HOIST_SOURCE_DIR, one.machine));
    const bool fits = std::string_view(one.limit).empty();
    EXPECT_EQ(result.exit_code, fits ? 0 : 2) << where << result.output << result.errors;
    EXPECT_EQ(result.errors, "") << where;
    const auto report = json_of("check.json");
    ASSERT_EQ(report["accepted"], true) << where << result.output;
    EXPECT_EQ(report["machine"]["fits"], fits) << where;
    EXPECT_EQ(report["machine"]["limiting"], fits ? nlohmann::json(nullptr) : nlohmann::json(one.limit)) << where;
    EXPECT_THAT(result.output, testing::HasSubstr(fits ? "\nfits " : "\nDOES NOT FIT ")) << where;
    for (const auto& memory : report["machine"]["memories"]) {
      const std::uint64_t least = memory["least_bytes"], free = memory["free_bytes"];
      EXPECT_EQ(memory["fits"], least <= free) << where << memory;
      if (memory["name"] != one.limit) continue;
      EXPECT_GT(least, free) << where;
      EXPECT_THAT(result.output, testing::HasSubstr(fmt::format("{}: {} needed, {} free", one.limit,
                                                                format_bytes(least), format_bytes(free))))
          << where;
    }
    // There is a section to paste that names the chosen device and budgets.
    EXPECT_EQ(report["section"].is_null(), !fits) << where;
  }
}

}  // namespace
}  // namespace hoist::public_configs_test
