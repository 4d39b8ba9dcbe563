// SPDX-License-Identifier: Apache-2.0
// A store read without its program: the same parameters and values as the engine that wrote it, at any world size.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/full_table.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "stored_values.hpp"

namespace hoist::test::stored_model_test {
namespace {

using ::testing::HasSubstr;

class StoredModelAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, StoredModelAt, ::testing::Values(1, 3), ::testing::PrintToStringParamName());

TEST_P(StoredModelAt, GivesWhatTheEngineHad) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  const StateValues expected = trained(GetParam(), setup, {}, 3);
  const Model described = describe({});
  for (const ParameterSpec& spec : described.parameters())
    for (const State moment : {State::moment1, State::moment2})
      EXPECT_EQ(expected.contains({spec.name, moment}), spec.trainable) << spec.name;
  expect_stored(directory / "store", expected);
  const StoredModel model(directory / "store");
  EXPECT_EQ(model.world_size(), GetParam());
  EXPECT_EQ(model.step(), 3u);
}

TEST_P(StoredModelAt, GivesRangesAndWeights) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  const StateValues expected = trained(GetParam(), setup, {}, 2);
  StoredModel model(directory / "store");
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const StoredParameter& parameter = model.parameters()[i];
    const std::vector<float>& whole = expected.at({parameter.name, State::master});
    const std::uint64_t count = parameter.element_count();
    for (const std::uint64_t first : {std::uint64_t{0}, count / 3, count - 1}) {
      std::vector<float> part(std::min<std::uint64_t>(count - first, 20000));
      model.read(i, State::master, first, part);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(first)));
    }
    std::vector<std::byte> weights(count * dtype_bytes(parameter.dtype));
    model.read_weights(i, 0, weights);
    for (std::uint64_t e = 0; e < count; ++e) {
      if (parameter.dtype == DType::fp32) {
        ASSERT_EQ(reinterpret_cast<const float*>(weights.data())[e], whole[e]);
      } else {
        ASSERT_EQ(reinterpret_cast<const bf16*>(weights.data())[e].bits, split_master(whole[e]).weight.bits);
      }
    }
    std::vector<float> beyond(2);
    EXPECT_THROW(model.read(i, State::master, count - 1, beyond), UsageError);
  }
}

// Asks for every kind of range: one that is not made of whole elements inside of the parameter is refused, and nothing
// is written to its target.
TEST_P(StoredModelAt, GivesWholeElementsInsideOrRefuses) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  trained(GetParam(), setup, {}, 1);
  StoredModel model(directory / "store");
  constexpr std::uint64_t kFar = ~std::uint64_t{0};
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const StoredParameter& parameter = model.parameters()[i];
    SCOPED_TRACE(parameter.name);
    const std::uint64_t count = parameter.element_count(), width = dtype_bytes(parameter.dtype);
    std::vector<std::byte> whole(count * width);
    model.read_weights(i, 0, whole);
    // One byte further on, so that no element lies where its type would.
    std::vector<std::byte> room((count + 2) * width + 1, std::byte{0xA5});
    const auto untouched = [&] {
      return std::ranges::all_of(room, [](std::byte byte) { return byte == std::byte{0xA5}; });
    };
    for (const std::uint64_t first :
         {std::uint64_t{0}, std::uint64_t{1}, count / 2, count - 1, count, count + 1, kFar / width, kFar}) {
      for (const std::uint64_t bytes :
           {std::uint64_t{0}, std::uint64_t{1}, width - 1, width, width + 1, (count - 1) * width + 1, count * width,
            count * width + 1, (count + 1) * width}) {
        const auto out = std::span(room).subspan(1, bytes);
        const bool fits = bytes % width == 0 && first <= count && bytes / width <= count - first;
        if (!fits) {
          EXPECT_THROW(model.read_weights(i, first, out), UsageError) << bytes << " bytes from " << first;
          EXPECT_TRUE(untouched()) << bytes << " bytes from " << first;
          continue;
        }
        model.read_weights(i, first, out);
        EXPECT_TRUE(std::ranges::equal(out, std::span(whole).subspan(first * width, bytes)))
            << bytes << " bytes from " << first;
        std::ranges::fill(out, std::byte{0xA5});
        EXPECT_TRUE(untouched()) << bytes << " bytes from " << first;
      }
      std::vector<float> none;
      if (first <= count)
        EXPECT_NO_THROW(model.read(i, State::master, first, none));
      else
        EXPECT_THROW(model.read(i, State::master, first, none), UsageError);
    }
  }
  std::vector<std::byte> none;
  EXPECT_THROW(model.read_weights(model.parameters().size(), 0, none), UsageError);
}

TEST(StoredModel, SummaryNamesTheModelAndItsCommits) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  trained(2, setup, {}, 4);
  const StoreSummary summary = look_at_store(directory / "store");
  EXPECT_EQ(summary.world_size, 2);
  EXPECT_EQ(summary.unit_count, ToyShape{}.matrices.size());
  ASSERT_EQ(summary.commits.size(), 2u);
  EXPECT_EQ(summary.commits[0].step, 4u);
  EXPECT_EQ(summary.commits[1].step, 3u);
  StoredModel older(directory / "store", {.step = 3});
  EXPECT_EQ(older.step(), 3u);
  EXPECT_THROW(StoredModel(directory / "store", {.step = 1}), StoreError);
}

// The next change of the world size removes directories that it takes for empty or unfinished.
TEST(StoredModel, ADirectoryThatCannotBeListedIsNotTakenForEmpty) {
  const TempDirectory directory;
  trained(1, toy_setup(Placement::nvme, Placement::nvme, directory / "store"), {}, 1);
  {
    const FullTable full;
    EXPECT_THROW((void)has_store(directory / "store"), IoError);
    EXPECT_THROW((void)look_at_store(directory / "store"), IoError);
  }
  EXPECT_TRUE(has_store(directory / "store"));
  EXPECT_FALSE(has_store(directory / "nowhere"));
}

// Changes every byte of a manifest in turn: either the damage is reported and at most an older commit is found, or the
// byte does not matter.
TEST(StoredModel, NoByteOfAManifestCanBeWrongUnnoticed) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.caller_state_bytes_max = 100;            // so that it is short
  std::map<std::uint64_t, std::vector<float>> masters;  // of the first parameter, by step
  trained(1, setup, {}, 3);
  const std::string manifest = directory / "store/rank-00000.manifest";
  const auto first_master = [&](std::optional<std::uint64_t> step) {
    StoredModel model(directory / "store", {.step = step});
    std::vector<float> values(model.parameters()[0].element_count());
    model.read(0, State::master, 0, values);
    masters.emplace(model.step(), values);
    return masters.at(model.step()) == values ? model.step() : 0;
  };
  ASSERT_EQ(first_master(std::nullopt), 3u);
  const std::string layout = look_at_store(directory / "store").layout;
  const int file = ::open(manifest.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(file, 0);
  const std::uint64_t bytes = std::filesystem::file_size(manifest);
  std::uint64_t refused = 0, older = 0, harmless = 0;
  for (std::uint64_t at = 0; at < bytes; ++at) {
    unsigned char was = 0;
    ASSERT_EQ(::pread(file, &was, 1, static_cast<off_t>(at)), 1);
    const auto wrong = static_cast<unsigned char>(was ^ (1 + random_bits(1, at) % 255));
    ASSERT_EQ(::pwrite(file, &wrong, 1, static_cast<off_t>(at)), 1);
    try {
      const StoreSummary found = look_at_store(directory / "store");
      const bool said = std::ranges::any_of(found.ranks, [](const auto& rank) { return !rank.damage.empty(); });
      EXPECT_TRUE(found.layout.empty() || found.layout == layout) << "byte " << at;
      if (found.commits.empty()) {  // the superblock
        EXPECT_TRUE(said) << "byte " << at;
        ++refused;
      } else {
        const std::uint64_t step = found.commits.front().step;
        EXPECT_TRUE(step == 3 || (step == 2 && said)) << "byte " << at << ": step " << step;
        ++(step == 3 && !said ? harmless : older);
        EXPECT_TRUE(at % 61 != 0 || first_master(std::nullopt) == step) << "byte " << at;
      }
    } catch (const StoreError&) {
      ++refused;
    }
    ASSERT_EQ(::pwrite(file, &was, 1, static_cast<off_t>(at)), 1);
  }
  ::close(file);
  EXPECT_EQ(first_master(std::nullopt), 3u);
  RecordProperty("refused", std::to_string(refused));
  RecordProperty("older", std::to_string(older));
  RecordProperty("harmless", std::to_string(harmless));
  EXPECT_GT(refused, layout.size()) << "of the superblock";
  EXPECT_GT(older, 0u);
}

TEST(StoredModel, DamageIsListedAndNeverHandedOut) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  trained(1, setup, {.matrices = {3000, 5000}, .norm = 40}, 2);
  const std::string data = directory / "store/rank-00000.data";
  flip_bits(data, 11, 4096);  // every tile of every extent
  StoredModel model(directory / "store");
  const std::vector<CorruptionError> damage = verify_job(std::vector{directory / "store"})[0].damage;
  EXPECT_GT(damage.size(), 4u);
  for (const CorruptionError& error : damage) EXPECT_EQ(error.where.path, data);
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    std::vector<float> values(model.parameters()[i].element_count());
    EXPECT_THROW(model.read(i, State::master, 0, values), CorruptionError);
  }
}

TEST(StoredModel, RefusesWhatIsNotWhole) {
  const TempDirectory directory;
  EXPECT_THROW(look_at_store(directory / "nothing"), StoreError);
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  trained(2, setup, {}, 2);
  std::filesystem::rename(directory / "store/rank-00001.manifest", directory / "elsewhere");
  EXPECT_THAT([&] { StoredModel model(directory / "store"); },
              testing::ThrowsMessage<StoreError>(HasSubstr("rank-00001.manifest is missing")));
  std::filesystem::remove(directory / "store/rank-00001.data");
  EXPECT_THAT([&] { StoredModel model(directory / "store"); },
              testing::ThrowsMessage<StoreError>(HasSubstr("of 2 ranks")));
}

// A program that was killed while it began to distribute the state anew leaves a directory without a manifest: the
// store that a run continues from is the one that is read.
TEST(StoredModel, ADirectoryWithoutAManifestIsPassedOver) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  trained(2, setup, {}, 2);
  const std::string begun = directory / ("store/" + detail::new_store_directory(1, 1).name);
  std::filesystem::create_directory(begun);
  std::ofstream(begun + "/rank-00000.data").flush();
  EXPECT_EQ(StoredModel(directory / "store").step(), 2u);
  EXPECT_EQ(look_at_store(directory / "store").commits.front().step, 2u);
  const std::vector<std::string> groups{directory / "store"};
  EXPECT_EQ(look_at_job(groups).commits.front().step, 2u);
}

TEST(StoredModel, FilesUnderAnotherRanksNameOrOfAnotherRunAreRefused) {
  const TempDirectory directory;
  for (const char* store : {"one", "two"}) {
    const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / store);
    trained(2, setup, {}, 2);
  }
  std::filesystem::copy(directory / "one", directory / "copied");
  std::filesystem::copy(directory / "one", directory / "mixed");
  for (const std::string suffix : {".data", ".manifest"}) {
    const auto replace = std::filesystem::copy_options::overwrite_existing;
    std::filesystem::copy_file(directory / ("one/rank-00000" + suffix), directory / ("copied/rank-00001" + suffix),
                               replace);
    std::filesystem::copy_file(directory / ("two/rank-00001" + suffix), directory / ("mixed/rank-00001" + suffix),
                               replace);
  }
  EXPECT_THROW(StoredModel(directory / "copied"), StoreError);
  EXPECT_THROW(StoredModel(directory / "mixed"), StoreError);
  ToySetup mixed = toy_setup(Placement::nvme, Placement::nvme, directory / "mixed");
  on_ranks(2, [&](int, const Runtime::MakeCommunicator& join) {
    ToyModel model(mixed, join);
    EXPECT_EQ(model.find_commit(), std::nullopt);
    EXPECT_THROW(model.restore(), StoreError);
  });
}

TEST(StoredModel, ATrainerKeepsReadersOutAndReadersLetEachOtherIn) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  {
    ToyProgram model(setup);
    model.train(1, 1);
    model.engine().settle();
    EXPECT_EQ(look_at_store(directory / "store").commits.front().step, 1u);  // looking is free
    EXPECT_THAT([&] { StoredModel stored(directory / "store"); },
                testing::ThrowsMessage<StoreError>(HasSubstr("in use by process")));
  }
  const StoredModel first(directory / "store");
  const StoredModel second(directory / "store");
  ToySetup impatient = setup;
  impatient.engine.lock_timeout = Nanoseconds{0};
  ToyModel model(impatient);
  EXPECT_THROW(model.restore(), StoreError);
}

}  // namespace
}  // namespace hoist::test::stored_model_test
