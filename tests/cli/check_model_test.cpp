// SPDX-License-Identifier: Apache-2.0
// The models that `hoist check` reads: weights of safetensors, files of units; and those that it refuses.
#include <string>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <hoist/core/units.hpp>

#include "program.hpp"

namespace hoist::check_model_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class CheckModel : public test::ProgramTest {};

// A file of safetensors with this header and `data_bytes` zeros.
std::string safetensors(std::string header, std::size_t data_bytes) {
  header.resize(round_up(header.size(), 8), ' ');
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + std::string(data_bytes, '\0');
}

TEST_F(CheckModel, RefusesAModelWhoseWeightsAreQuantized) {
  write("plain.json", "{}");
  write("fp8.safetensors", safetensors(R"({"w":{"dtype":"F8_E4M3","shape":[16,16],"data_offsets":[0,256]},)"
                                       R"("scale":{"dtype":"F32","shape":[1],"data_offsets":[256,260]}})",
                                       260));
  write("packed.safetensors", safetensors(R"({"blocks":{"dtype":"U8","shape":[8,16],"data_offsets":[0,128]},)"
                                          R"("bias":{"dtype":"BF16","shape":[16],"data_offsets":[128,160]}})",
                                          160));
  for (const char* const name : {"fp8", "packed"}) {
    const auto result = run(fmt::format("check plain.json --model {}.safetensors", name));
    EXPECT_EQ(result.exit_code, 2) << name;
    EXPECT_THAT(result.errors, HasSubstr("before it was quantized")) << name;
  }
}

// A shard may hold tensors that the index takes from another one.
TEST_F(CheckModel, CountsOnlyTheTensorsOfAnIndex) {
  write("plain.json", "{}");
  const std::string x = R"("x":{"dtype":"BF16","shape":[16,16],"data_offsets":[0,512]})";
  write("a.safetensors", safetensors("{" + x + "}", 512));
  write("b.safetensors", safetensors("{" + x + R"(,"y":{"dtype":"BF16","shape":[16],"data_offsets":[512,544]}})", 544));
  write("model.safetensors.index.json", R"({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})");
  const auto result = run("check plain.json --model model.safetensors.index.json");
  EXPECT_THAT(result.output, HasSubstr("272 parameters")) << result.errors;
}

TEST_F(CheckModel, ReadsAModelFromTheHeadersOfItsWeights) {
  write("plain.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})");
  const std::string header =
      R"({"model.embed_tokens.weight":{"dtype":"BF16","shape":[64,32],"data_offsets":[0,4096]},)"
      R"("model.layers.0.up.weight":{"dtype":"BF16","shape":[32,32],"data_offsets":[4096,6144]},)"
      R"("model.layers.0.down.weight":{"dtype":"BF16","shape":[32,32],"data_offsets":[6144,8192]},)"
      R"("model.layers.1.up.weight":{"dtype":"BF16","shape":[32,32],"data_offsets":[8192,10240]},)"
      R"("positions":{"dtype":"I64","shape":[8],"data_offsets":[10240,10304]}})";
  write("model.safetensors", safetensors(header, 10304));
  const auto result = run("check plain.json --model model.safetensors --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("5120 parameters (3 units of model.safetensors)"));
  EXPECT_EQ(run("plan --model model.safetensors").exit_code, 0);
  EXPECT_EQ(run("check plain.json --model missing.safetensors").exit_code, 2);
  EXPECT_EQ(run("check plain.json --model plain.json").exit_code, 2);
  EXPECT_EQ(run("check plain.json --model model.safetensors --parameters 5").exit_code, 2);
}

// As an engine would. A units file that names no type has the configuration's.
TEST_F(CheckModel, RefusesTypesOfWeightsThatTheConfigurationForbids) {
  struct Case {
    const char *config, *type, *refusal;  // empty: accepted
  };
  constexpr const char *kFp16 = R"({"fp16": {"enabled": true}})", *kBf16 = R"({"bf16": {"enabled": true}})",
                       *kFp32 = R"({"bf16": {"enabled": false}})";
  for (const Case& one : std::initializer_list<Case>{
           {kFp16, "", ""},
           {kFp16, "fp16", ""},
           {kFp16, "bf16", "parameter 'a.weight' is bf16, but the configuration asks for fp16 weights (fp16.enabled)"},
           {kFp16, "fp32", "fp16.enabled: no trainable parameter of the program is fp16"},
           {kBf16, "", ""},
           {kBf16, "fp16", "asks for bf16 weights (bf16.enabled)"},
           {kBf16, "bf16", ""},
           {kBf16, "fp32", ""},
           {kFp32, "", ""},
           {kFp32, "fp16", "asks for fp32 weights (bf16.enabled is false)"},
           {kFp32, "bf16", "asks for fp32 weights (bf16.enabled is false)"},
           {kFp32, "fp32", ""},
           {"{}", "", ""},
           {"{}", "fp16", ""},
       }) {
    SCOPED_TRACE(fmt::format("{} {}", one.config, one.type));
    write("file.json", one.config);
    const std::string type = *one.type == '\0' ? "" : fmt::format(R"("dtype": "{}", )", one.type);
    write("units.json", "{" + type + R"("units": [{"name": "a", "parameters": 1000000}]})");
    for (const char* command : {"check", "plan"}) {
      const auto result = run(std::string(command) + " file.json --units units.json");
      EXPECT_EQ(result.exit_code, *one.refusal == '\0' ? 0 : 2) << result.output << result.errors;
      EXPECT_THAT(result.errors, HasSubstr(one.refusal));
    }
  }
  write("units.json", R"({"units": [{"name": "a", "parameters": 1000000}]})");
  write("file.json", kFp32);
  ASSERT_EQ(run("check file.json --units units.json --json fp32.json").exit_code, 0);
  write("file.json", kBf16);
  ASSERT_EQ(run("check file.json --units units.json --json bf16.json").exit_code, 0);
  EXPECT_GT(json_of("fp32.json")["prediction"]["device"]["least_bytes"].get<double>(),
            json_of("bf16.json")["prediction"]["device"]["least_bytes"].get<double>() + 1e6);
}

TEST_F(CheckModel, RefusesModelsItCannotRead) {
  write("good.json", "{}");
  const auto with_units = [&](const char* text) {
    write("units.json", text);
    const auto result = run("check good.json --units units.json");
    EXPECT_EQ(result.exit_code, 2) << text;
    return result.errors;
  };
  EXPECT_THAT(with_units("{"), HasSubstr("is not JSON"));
  for (const char* units : {R"({})", R"({"units": []})", R"({"units": {"u": 1}})"})
    EXPECT_THAT(with_units(units), HasSubstr("units: needs a list of units"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": -1}]})"), HasSubstr("units[0].parameters"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1.5}]})"), HasSubstr("units[0].parameters"));
  EXPECT_THAT(with_units(R"({"units": [{"parameters": 1}]})"), HasSubstr("has no name"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1, "x": 1}]})"), HasSubstr("units[0].x"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1, "stable_in_pass": 1}]})"),
              HasSubstr("units[0].stable_in_pass"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1, "gathered_with": [4294967296]}]})"),
              HasSubstr("gathered with a unit that is not there"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1, "gathered_with": 0}]})"),
              HasSubstr("units[0].gathered_with: 0 is not a list of indices"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1, "tied": "x"}]})"),
              HasSubstr("units[0].tied: \"x\" is not a list of names"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1}], "dtype": "fp8"})"), HasSubstr("dtype"));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1, "parameters": 2}]})"), HasSubstr("given twice"));
  EXPECT_THAT(with_units((R"({"units": )" + std::string(100000, '[')).c_str()), HasSubstr("nested deeper"));
  const std::string long_number = with_units((R"({"units": )" + std::string(1'000'000, '1') + "}").c_str());
  EXPECT_THAT(long_number, AllOf(HasSubstr("is not JSON: number overflow"), HasSubstr("111...")));
  EXPECT_LT(long_number.size(), 300u);
  std::string euros;  // the message is cut between two of them, wherever it begins
  for (int i = 0; i < 500; ++i) euros += "€";
  for (const char* before : {"", "x", "xx"})
    EXPECT_THAT(with_units((std::string("{\"units\": \"") + before + euros + "\n").c_str()),
                AllOf(HasSubstr("€..."), Not(HasSubstr("\\x"))));
  EXPECT_THAT(with_units(R"({"units": [{"name": "a", "parameters": 1e13}]})"),
              HasSubstr("unit 'a' has 1e+13 parameters"));
  std::string many = R"({"units": [{"name": "a", "parameters": 1e12})";
  for (int i = 0; i < 10; ++i) many += R"(, {"name": "b)" + std::to_string(i) + R"(", "parameters": 1e12})";
  EXPECT_THAT(with_units((many + "]}").c_str()), HasSubstr("1.1e+13 parameters together"));
  EXPECT_EQ(run("check good.json --units missing.json").exit_code, 2);
  const auto directory = run("check good.json --units .");
  EXPECT_EQ(directory.exit_code, 2);
  EXPECT_THAT(directory.errors, HasSubstr("Is a directory"));
  EXPECT_EQ(run("check good.json --units /dev/zero").exit_code, 2) << "without filling memory";
  EXPECT_EQ(run("check good.json --parameters many").exit_code, 2);
  EXPECT_EQ(run("check good.json --parameters 0").exit_code, 2);
}

TEST_F(CheckModel, AUnitsFileMayHaveComments) {
  write("good.json", "{}");
  write("units.json", "{\"units\": [{\"name\": \"a\", \"parameters\": 100},  # the only one\n]}");
  const auto result = run("check good.json --units units.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
}

}  // namespace
}  // namespace hoist::check_model_test
