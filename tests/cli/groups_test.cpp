// SPDX-License-Identifier: Apache-2.0
// hoist inspect and export on the stores of several sharding groups: the result is about the job, not about one group.
#include <filesystem>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist::groups_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

enum class Names : std::uint8_t { of_stages, of_slices };  // disjoint, as a pipeline's; the same, as a tensor's slices

class Groups : public test::ProgramTest {
 protected:
  // Two groups, of one rank and of two, train `steps` steps into job/group-0 and job/group-1, and keep the last but
  // one.
  void train(std::uint64_t steps, Names names, const std::string& job = "job") {
    test::on_groups({1, 2}, [&](int group, int rank, const Runtime::Groups& groups) {
      test::ToySetup setup =
          test::toy_setup(Placement::nvme, Placement::nvme, path(job + "/group-" + std::to_string(group) + "/hoist"));
      setup.engine.keep_steps = 1;
      Runtime runtime(setup.runtime, groups);
      const std::string prefix = names == Names::of_stages ? fmt::format("stage{}.", group) : "";
      const std::vector<ParameterSpec> specs{{.name = prefix + "weight", .shape = {100, 70}},
                                             {.name = prefix + "bias", .shape = {70}, .dtype = DType::fp32}};
      Model model;
      const UnitId unit = model.add_unit("layer", specs);
      Engine engine =
          Engine::create(runtime, setup.engine, model, [&](ParameterId, std::uint64_t first, std::span<float> values) {
            for (std::size_t i = 0; i < values.size(); ++i)
              values[i] = static_cast<float>(group + 1) / 8 + static_cast<float>(first + i) / 65536;
          });
      const auto stream = runtime.device().create_stream("compute");
      for (std::uint64_t step = 1; step <= steps; ++step) {
        if (step == steps) {
          engine.save("kept", {}).wait();
          test::Masters masters = test::masters_of(engine);
          if (rank == 0) masters_[static_cast<std::size_t>(group)] = std::move(masters);
        }
        {
          const PassScope pass = engine.begin(Pass::train);
          engine.gather(unit, *stream).release(*stream);
          static_cast<void>(engine.gradients(unit, *stream));  // zeros: decay alone moves the masters
          engine.finish(unit, *stream);
        }
        engine.step();
      }
    });
  }

  // As if group 1 had died before its last commit: the newest of each of its ranks can no longer be read.
  void take_last_commit_of_group_1() {
    for (const int rank : {0, 1}) {
      const std::string store = path("job/group-1/hoist");
      const auto before = tiers::Store::look(store, rank);
      ASSERT_EQ(before.commits.size(), 2u);
      const auto is_taken = [&] {
        const auto now = tiers::Store::look(store, rank);
        return now.commits.size() == 1 && now.commits[0].step == before.commits[1].step && now.checkpoints.size() == 1;
      };
      // A byte somewhere in its slot, wherever that is.
      const std::string manifest = fmt::format("{}/rank-0000{}.manifest", store, rank);
      const std::string text = test::contents_of(manifest);
      std::fstream file(manifest, std::ios::in | std::ios::out | std::ios::binary);
      for (std::size_t at = 0; at < text.size() && !is_taken(); at += 16) {
        const auto put = [&](char byte) { file.seekp(static_cast<std::streamoff>(at)).put(byte).flush(); };
        put(static_cast<char>(text[at] ^ 0x55));
        if (!is_taken()) put(text[at]);
      }
      ASSERT_TRUE(is_taken());
    }
  }

  std::map<std::size_t, test::Masters> masters_;
};

TEST_F(Groups, AreInspectedTogether) {
  train(3, Names::of_stages);
  auto result = run("inspect job/group-0 job/group-1 --json found.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("the job of these 2 groups resumes from step 3"));
  auto json = json_of("found.json");
  EXPECT_EQ(json["resumes_from_step"], 3);
  EXPECT_EQ(json["checkpoints"][0]["name"], "kept");
  ASSERT_EQ(json["groups"].size(), 2u);
  EXPECT_EQ(json["groups"][1]["world_size"], 2);
  EXPECT_EQ(run("verify job/group-0 job/group-1 --json found.json").exit_code, 0);
  EXPECT_EQ(json_of("found.json")["commits"][0]["step"], 3);

  take_last_commit_of_group_1();
  result = run("inspect job/group-0 job/group-1 --json found.json");
  EXPECT_THAT(result.output, HasSubstr("the job of these 2 groups resumes from step 2"));
  json = json_of("found.json");
  EXPECT_EQ(json["resumes_from_step"], 2);
  EXPECT_EQ(json["groups"][0]["resumes_from_step"], 3) << "what the group itself has";
  EXPECT_EQ(run("verify job/group-0 job/group-1 --json found.json").exit_code, 0);
  EXPECT_EQ(json_of("found.json")["commits"][0]["step"], 2) << "what the job would go on from";
}

TEST_F(Groups, OneOfThemSaysThatThereAreOthers) {
  train(1, Names::of_stages);
  train(1, Names::of_stages, "other");
  auto result = run("inspect job/group-1 --json found.json");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, AllOf(HasSubstr("one sharding group's part"), HasSubstr("job/group-0/hoist")));
  EXPECT_EQ(json_of("found.json")["other_groups"].size(), 1u);
  result = run("export job/group-0/hoist --to weights");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.errors, AllOf(HasSubstr("one sharding group's part"), HasSubstr("job/group-1/hoist"),
                                   Not(HasSubstr("other/group"))));
  fs::remove_all(path("job/group-1"));
  EXPECT_THAT(run("inspect job/group-0").output, Not(HasSubstr("sharding group")));
}

TEST_F(Groups, StagesAreExportedAsOneModelOfTheStepThatAllHave) {
  train(3, Names::of_stages);
  take_last_commit_of_group_1();
  auto result = run("export job/group-0 job/group-1 --to weights --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(json_of("report.json")["step"], 2);
  const interchange::SafetensorsModel model(path("weights"));
  EXPECT_EQ(model.tensors().size(), 4u);
  for (const char* name : {"stage0.weight", "stage0.bias", "stage1.weight", "stage1.bias"})
    EXPECT_NE(model.find(name), nullptr) << name;

  result = run("export job/group-0 job/group-1 --to kept --from kept");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  const interchange::SafetensorsModel kept(path("kept"));
  for (const std::size_t group : {0u, 1u}) {
    for (const auto& [name, expected] : masters_[group]) {
      ASSERT_NE(kept.find(name), nullptr) << name;
      EXPECT_EQ(test::values_of<float>(kept, name), expected) << name;
    }
  }
  result = run("export job/group-0 job/group-1 --to none --step 3");
  EXPECT_EQ(result.exit_code, 2) << "the step was there";
  EXPECT_THAT(result.errors, AllOf(HasSubstr("--step 3"), HasSubstr("have in common the steps 2; rank 0: commit slot"),
                                   HasSubstr("; rank 1: commit slot")));
  EXPECT_EQ(run("export job/group-0 --to none --step 4").exit_code, 2) << "a whole store that never had the step";
  EXPECT_FALSE(fs::exists(path("none")));
}

TEST_F(Groups, SlicesOfOneTensorAreNotTakenForAModel) {
  train(2, Names::of_slices);
  const auto result = run("export job/group-0 job/group-1 --to weights");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("parts of one tensor or copies"));
  EXPECT_FALSE(fs::exists(path("weights")));
  for (const char* group : {"0", "1"})
    EXPECT_EQ(run("export job/group-" + std::string(group) + " --step 2 --to weights-" + group).exit_code, 0);
}

TEST_F(Groups, StoresThatAreNoJobAreRefused) {
  train(1, Names::of_stages);
  train(1, Names::of_stages, "other");
  for (const char* command : {"inspect", "export --to weights"}) {
    auto result = run(std::string(command) + " job/group-0 other/group-1");
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.errors, HasSubstr("stores of different jobs"));
    result = run(std::string(command) + " job/group-0 job/group-0/hoist");
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_THAT(result.errors, HasSubstr("the same group's store"));
    EXPECT_EQ(run(std::string(command) + " job/group-0 nowhere").exit_code, 2);
  }
  EXPECT_FALSE(fs::exists(path("weights")));
  EXPECT_THROW(look_at_job({}), UsageError);
}

}  // namespace
}  // namespace hoist::groups_test
