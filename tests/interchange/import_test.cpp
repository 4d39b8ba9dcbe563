// SPDX-License-Identifier: Apache-2.0
// Initial values from files: every value exact, every mismatch named before anything begins, any world size.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include <gmock/gmock.h>

#include <hoist/interchange/import.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>

#include "safetensors_files.hpp"

namespace hoist::interchange::import_test {
namespace {

using test::save;
using test::TempDirectory;
using test::tensor;
using ::testing::HasSubstr;
using ::testing::Not;

ParameterSpec parameter(std::string name, std::vector<std::int64_t> shape) {
  return {.name = std::move(name), .shape = std::move(shape)};
}

std::vector<float> filled(const Initializer& fill, std::uint32_t index, std::uint64_t first, std::size_t count) {
  std::vector<float> values(count, 777.0f);
  fill(ParameterId{index}, first, values);
  return values;
}

std::uint32_t bits(float value) { return std::bit_cast<std::uint32_t>(value); }

TEST(Import, EveryPatternOfTheNarrowTypesIsWidenedExactly) {
  const TempDirectory directory;
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  save(directory / "m", {tensor("b", TensorType::bf16, {256, 256}, all), tensor("h", TensorType::f16, {1 << 16}, all)});
  const std::vector<ParameterSpec> parameters{parameter("b", {256, 256}), parameter("h", {1 << 16})};
  const Initializer fill = fill_from(directory / "m", parameters);
  const std::vector<float> widened_b = filled(fill, 0, 0, all.size());
  const std::vector<float> widened_h = filled(fill, 1, 0, all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(bits(widened_b[i]), static_cast<std::uint32_t>(i) << 16);
    ASSERT_EQ(bits(widened_h[i]), bits(fp16_to_float(all[i])));
  }
  // Any slice is the same slice of the whole.
  for (const auto& [first, count] : {std::pair<std::size_t, std::size_t>{1, 1}, {77, 1001}, {65535, 1}, {65536, 0}}) {
    const std::vector<float> slice = filled(fill, 1, first, count);
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(bits(slice[i]), bits(widened_h[first + i]));
  }
}

TEST(Import, MastersComeBitByBit) {
  const TempDirectory directory;
  const std::vector<float> values{0.0f,
                                  -0.0f,
                                  1.1f,
                                  std::numeric_limits<float>::denorm_min(),
                                  3.0e38f,
                                  std::bit_cast<float>(0x3f808000u),
                                  std::bit_cast<float>(0x3f807fffu)};
  save(directory / "m", {tensor("w", TensorType::f32, {7}, values)});
  const std::vector<ParameterSpec> parameters{parameter("w", {7})};
  const std::vector<float> read = filled(fill_from(directory / "m", parameters), 0, 0, 7);
  EXPECT_EQ(std::memcmp(read.data(), values.data(), 28), 0);
}

class ImportProblems : public ::testing::Test {
 protected:
  std::string problem(const std::vector<ParameterSpec>& parameters, const ImportOptions& options = {}) {
    try {
      fill_from(directory_ / "m", parameters, options);
      return "accepted";
    } catch (const Error& error) {
      return error.what();
    }
  }
  TempDirectory directory_;
};

TEST_F(ImportProblems, AllAreNamedAtOnce) {
  save(directory_ / "m", {tensor("long", TensorType::f64, {2}, std::vector<double>{1, 2}),
                          tensor("shape", TensorType::f32, {2, 3}, std::vector<float>(6)),
                          tensor("extra", TensorType::f32, {}, std::vector<float>(1))});
  const std::string all = problem({parameter("long", {2}), parameter("shape", {3, 2}), parameter("absent", {1})});
  EXPECT_THAT(all, HasSubstr("4 problems"));
  EXPECT_THAT(all, HasSubstr("'long' is F64"));
  EXPECT_THAT(all, HasSubstr("'shape' is [2, 3]"));
  EXPECT_THAT(all, HasSubstr("but [3, 2] in the model"));
  EXPECT_THAT(all, HasSubstr("'absent' is missing"));
  EXPECT_THAT(all, HasSubstr("'extra' is not a parameter"));
}

TEST_F(ImportProblems, AnotherModelIsRefusedInAFewLines) {
  save(directory_ / "m", {tensor("extra", TensorType::f32, {}, std::vector<float>(1))});
  std::vector<ParameterSpec> parameters;
  for (int i = 0; i < 500; ++i) parameters.push_back(parameter("p" + std::to_string(i), {1}));
  const std::string all = problem(parameters);
  EXPECT_THAT(all, HasSubstr("501 problems"));
  EXPECT_THAT(all, HasSubstr("and 481 more"));
  EXPECT_THAT(all, Not(HasSubstr("'p20'")));
}

TEST_F(ImportProblems, OptionsRenameFillAndIgnore) {
  save(directory_ / "m", {tensor("model.w", TensorType::f32, {2}, std::vector<float>{5, 6}),
                          tensor("inv_freq", TensorType::i64, {}, std::vector<std::int64_t>(1))});
  const std::vector<ParameterSpec> parameters{parameter("w", {2}), parameter("new_head", {3})};
  const ImportOptions options{.tensor_names = [](const std::string& name) { return std::vector{"model." + name}; },
                              .otherwise =
                                  [](ParameterId id, std::uint64_t first, std::span<float> out) {
                                    for (float& value : out) value = static_cast<float>(id.index * 100 + first++);
                                  },
                              .allow_unused = true};
  const Initializer fill = fill_from(directory_ / "m", parameters, options);
  EXPECT_EQ(filled(fill, 0, 1, 1), (std::vector<float>{6}));
  EXPECT_EQ(filled(fill, 1, 1, 2), (std::vector<float>{101, 102}));
}

TEST_F(ImportProblems, AParameterMayHaveSeveralNames) {
  const std::vector<ParameterSpec> parameters{parameter("w", {2})};
  const ImportOptions options{.tensor_names = [](const std::string& name) {
    return std::vector<std::string>{name, "tied"};
  }};
  const auto read = [&](std::initializer_list<std::string> names) {
    const TempDirectory directory;
    std::vector<test::TestTensor> tensors;
    for (const std::string& name : names)
      tensors.push_back(tensor(name, TensorType::f32, {2}, std::vector<float>{5, names.size() == 1 ? 7.0f : 6.0f}));
    save(directory / "m", tensors);
    return filled(fill_from(directory / "m", parameters, options), 0, 1, 1);
  };
  EXPECT_EQ(read({"w"}), (std::vector<float>{7}));
  EXPECT_EQ(read({"tied"}), (std::vector<float>{7}));
  EXPECT_EQ(read({"w", "tied"}), (std::vector<float>{6}));
  EXPECT_THROW(read({"w", "tied", "extra"}), SafetensorsError);
  EXPECT_THROW(read({"other"}), SafetensorsError);
}

TEST_F(ImportProblems, TensorsOfOneTiedParameterAreTheSame) {
  const std::int64_t count = (1 << 18) + 3;  // more than one piece of the comparison
  const std::vector<ParameterSpec> parameters{parameter("w", {count})};
  const ImportOptions options{.tensor_names = [](const std::string& name) {
    return std::vector<std::string>{name, "tied"};
  }};
  const auto length = static_cast<std::uint64_t>(count);
  std::vector<float> first(length, 1), values = first;
  const auto with = [&](const test::TestTensor& tied) {
    std::filesystem::remove_all(directory_ / "m");
    save(directory_ / "m", {tensor("w", TensorType::f32, {length}, first), tied});
    return problem(parameters, options);
  };
  EXPECT_EQ(with(tensor("tied", TensorType::f32, {length}, values)), "accepted");
  EXPECT_EQ(with(tensor("tied", TensorType::bf16, {length}, std::vector<std::uint16_t>(length, 0x3f80))), "accepted");
  first.front() = 0.0f;
  values.front() = -0.0f;
  EXPECT_EQ(with(tensor("tied", TensorType::f32, {length}, values)), "accepted");
  first.front() = values.front() = NAN;
  EXPECT_EQ(with(tensor("tied", TensorType::f32, {length}, values)), "accepted");
  values.back() = 2;
  EXPECT_THAT(with(tensor("tied", TensorType::f32, {length}, values)),
              AllOf(HasSubstr("1 problem: 'w' in "), HasSubstr("and 'tied' in "), HasSubstr("remove the wrong one")));
  EXPECT_THAT(with(tensor("tied", TensorType::f32, {length, 1}, values)), HasSubstr("'tied' is [262147, 1]"));
  EXPECT_THAT(with(tensor("tied", TensorType::i32, {length}, values)), HasSubstr("'tied' is I32"));
}

TEST_F(ImportProblems, ValuesThatCannotBeCommittedAreRefusedByTheEngine) {
  save(directory_ / "m", {tensor("w", TensorType::f32, {2}, std::vector<float>{1, NAN})});
  const test::ToySetup setup = test::toy_setup(Placement::pinned, Placement::pinned);
  Runtime runtime(setup.runtime);
  Model model;
  model.add_unit("u", {parameter("w", {2})});
  try {
    Engine::create(runtime, setup.engine, model, fill_from(directory_ / "m", model.parameters()));
    FAIL() << "a NaN became a weight";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'w'"));
  }
}

// --- between world sizes ---------------------------------------------------------------------------------------------

// All masters of `engine` as one file. [C]
void save_masters(Engine& engine, const std::string& directory) {
  std::vector<test::TestTensor> tensors;
  const auto parameters = engine.model().parameters();
  for (std::uint32_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& spec = parameters[i];
    std::vector<std::uint64_t> shape(spec.shape.begin(), spec.shape.end());
    std::vector<float> values(*tensor_bytes(TensorType::f32, shape) / 4);
    engine.read(ParameterId{i}, State::master, 0, values);
    tensors.push_back(tensor(spec.name, TensorType::f32, shape, values));
  }
  if (engine.runtime().rank() == 0) save(directory, tensors, 100'000);
}

TEST(ImportEngine, MastersSurviveAChangeOfWorldSize) {
  const TempDirectory directory;
  std::string trained;
  test::on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
    const test::ToySetup setup = test::toy_setup(Placement::pinned, Placement::pinned);
    Runtime runtime(setup.runtime, join);
    test::ToyModel model(runtime, setup.engine);
    Engine& engine = model.initialize();
    model.train(1, 3);
    save_masters(engine, directory / "m");
    const std::string digest = state_digest(engine, State::master);
    if (rank == 0) trained = digest;
  });
  for (const int world_size : {1, 3}) {
    test::on_ranks(world_size, [&](int, const Runtime::MakeCommunicator& join) {
      const test::ToySetup setup =
          test::toy_setup(Placement::nvme, Placement::nvme, directory / ("store" + std::to_string(world_size)));
      Runtime runtime(setup.runtime, join);
      test::ToyModel model(runtime, setup.engine);
      Engine& engine = model.initialize(fill_from(directory / "m", model.model().parameters()));
      EXPECT_EQ(state_digest(engine, State::master), trained) << world_size << " ranks";
    });
  }
}

}  // namespace
}  // namespace hoist::interchange::import_test
