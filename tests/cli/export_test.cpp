// SPDX-License-Identifier: Apache-2.0
// hoist export: what Python reads is what Engine::read had; it comes back at any world size; a failed one leaves
// nothing.
#include <csignal>

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <unistd.h>

#include <hoist/interchange/import.hpp>
#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/python.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist::export_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class Export : public test::ProgramTest {
 protected:
  std::vector<std::string> names_in(const std::string& name) const {
    std::vector<std::string> names;
    if (!fs::exists(path(name))) return names;
    for (const auto& entry : fs::directory_iterator(path(name))) names.push_back(entry.path().filename().string());
    return names;
  }
};

TEST_F(Export, HoldsTheMastersBitByBit) {
  for (const int world_size : {1, 3}) {
    const std::string store = "store" + std::to_string(world_size);
    const std::string to = "out" + std::to_string(world_size);
    const test::Masters masters = test::make_store(path(store), world_size, 2);
    const auto result = run("export " + store + " --to " + to + " --json report.json");
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("model.safetensors"));
    const interchange::SafetensorsModel model(path(to));
    EXPECT_EQ(model.metadata().at("hoist.step"), "2");
    EXPECT_EQ(model.tensors().size(), masters.size());
    for (const auto& [name, expected] : masters) EXPECT_EQ(test::values_of<float>(model, name), expected) << name;
    const auto report = json_of("report.json");
    EXPECT_EQ(report["step"], 2);
    EXPECT_EQ(report["tensors"], 9);
    EXPECT_EQ(report["data_bytes"], 4 * report["elements"].get<std::uint64_t>());
  }
}

// Files of torch.save are PyTorch's to write.
TEST_F(Export, NamesTheCommandThatWritesForDeepSpeed) {
  test::make_store(path("store"), 1, 2);
  const auto result = run("export store --to \"it's there\" --universal --step 2");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(
      result.output,
      HasSubstr(R"(python -m hoist.torch.deepspeed export 'store' --to 'it'\''s there' --step '2' --config FILE)"));
  EXPECT_FALSE(fs::exists(path("it's there")));
  EXPECT_THAT(run("export store other --to there --universal").errors, HasSubstr("--universal takes one store"));
  for (const char* option : {"--dtype bf16", "--shard-size 1GB", "--json report.json"})
    EXPECT_EQ(run(std::string("export store --to there --universal ") + option).exit_code, 2) << option;
}

TEST_F(Export, Bf16HoldsTheWeightsOfTheForwardPass) {
  const test::Masters masters = test::make_store(path("store"), 2, 2);
  ASSERT_EQ(run("export store --to weights --dtype bf16 --shard-size 100kB").exit_code, 0);
  EXPECT_GT(names_in("weights").size(), 3u);
  const interchange::SafetensorsModel model(path("weights"));
  for (const auto& [name, expected] : masters) {
    ASSERT_EQ(model.find(name)->info->type, interchange::TensorType::bf16);
    const auto values = test::values_of<bf16>(model, name);
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], to_bf16(expected[i])) << name << " " << i;
  }
}

TEST_F(Export, Fp16IsForModelsOfFp16) {
  const test::Masters masters = test::make_store(path("store"), 2, 2, {.dtype = DType::fp16});
  ASSERT_EQ(run("export store --to weights --dtype fp16").exit_code, 0);
  const interchange::SafetensorsModel model(path("weights"));
  for (const auto& [name, expected] : masters) {
    ASSERT_EQ(model.find(name)->info->type, interchange::TensorType::f16);
    const auto values = test::values_of<std::uint16_t>(model, name);
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(values[i], float_to_fp16(expected[i])) << name << " " << i;
  }
  ASSERT_EQ(run("export store --to masters").exit_code, 0);
  const interchange::SafetensorsModel whole(path("masters"));
  for (const auto& [name, expected] : masters) {
    if (!name.ends_with("frozen")) {
      EXPECT_EQ(test::values_of<float>(whole, name), expected) << name;
    }
  }
  test::make_store(path("other"), 1, 1);
  const auto refused = run("export other --to other-weights --dtype fp16");
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("is bf16, of which fp16 would lose range"));
  EXPECT_THAT(names_in("other-weights"), IsEmpty());
}

// hoist.optim names parameters so if its program names none, and cuts large ones into pieces. Another program may have
// such names.
TEST_F(Export, WarnsOfNamesThatNoModelHasAndJoinsPiecesOfHoistOptim) {
  const auto commit = [](Engine& engine, const std::string& name, const std::string& program_state) {
    engine.save(name, std::as_bytes(std::span(program_state))).wait();
  };
  test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("store"));
  setup.engine.keep_steps = 3;
  {
    Runtime runtime(setup.runtime);
    Model model;
    model.add_unit("unit 0", std::vector<ParameterSpec>{{.name = "parameter 0", .shape = {100}},
                                                        {.name = "parameter 1[0:70]", .shape = {70, 2}},
                                                        {.name = "parameter 1[70:100]", .shape = {30, 2}}});
    Engine engine = Engine::create(runtime, setup.engine, model,
                                   [](ParameterId parameter, std::uint64_t first, std::span<float> values) {
                                     for (float& value : values)
                                       value = static_cast<float>(1000 * parameter.index + first++);
                                   });
    commit(engine, "optim", R"({"groups": [{"lr": 0.1}], "program": {"best": Infinity}})");
    commit(engine, "torch", R"({"program": {"groups": [1]}, "rates": []})");
    commit(engine, "bytes", "{\"program");
  }
  for (const std::string other : {"torch", "bytes"}) {
    ASSERT_EQ(run("export store --from " + other + " --to " + other).exit_code, 0);
    const interchange::SafetensorsModel uncut(path(other));
    EXPECT_EQ(uncut.tensors().size(), 3u) << other;
    EXPECT_NE(uncut.find("parameter 1[70:100]"), nullptr) << other;
  }
  const auto result = run("export store --from optim --to weights");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.errors, HasSubstr("without names: 'parameter 0' and 2 others; give hoist.optim "
                                       "model.named_parameters()"));
  const interchange::SafetensorsModel joined(path("weights"));
  const auto* const whole = joined.find("parameter 1");
  ASSERT_NE(whole, nullptr);
  EXPECT_THAT(whole->info->shape, testing::ElementsAre(100, 2));
  const std::vector<float> values = test::values_of<float>(joined, "parameter 1");
  EXPECT_EQ(values.front(), 1000);
  EXPECT_EQ(values[139], 1139);
  EXPECT_EQ(values[140], 2000);
  EXPECT_EQ(values.back(), 2059);
  EXPECT_EQ(joined.tensors().size(), 2u);
  test::make_store(path("named"), 1, 1);
  EXPECT_THAT(run("export named --to others").errors, Not(HasSubstr("named_parameters")));
}

TEST_F(Export, PythonReadsWhatTheEngineHad) {
  HOIST_NEEDS_PYTHON(path(""), "safetensors, numpy");
  const test::Masters masters = test::make_store(path("store"), 2, 3);
  for (const auto& [name, values] : masters) {
    std::ofstream(path(name + ".f32"), std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * 4));
  }
  ASSERT_EQ(run("export store --to one").exit_code, 0);
  ASSERT_EQ(run("export store --to cut --shard-size 200kB").exit_code, 0);
  EXPECT_EQ(test::run_python(path(""), R"(
import glob, json, numpy as np
from safetensors.numpy import load_file
one = load_file("one/model.safetensors")
index = json.load(open("cut/model.safetensors.index.json"))
cut = {}
for shard in set(index["weight_map"].values()):
    cut.update(load_file("cut/" + shard))
expected = {name[:-4]: np.fromfile(name, dtype=np.uint32) for name in glob.glob("*.f32")}
assert len(expected) == 9 and len(set(index["weight_map"].values())) > 1
assert set(one) == set(cut) == set(expected) == set(index["weight_map"])
assert one["unit1.frozen"].shape == (3, 1000)
for name, bits in expected.items():
    assert (one[name].ravel().view(np.uint32) == bits).all(), name
    assert (cut[name].ravel().view(np.uint32) == bits).all(), name
)"),
            0);
}

TEST_F(Export, ComesBackAtAnotherWorldSize) {
  const test::Masters masters = test::make_store(path("store"), 2, 3);
  ASSERT_EQ(run("export store --to weights --shard-size 200kB").exit_code, 0);
  for (const int world_size : {1, 3}) {
    test::on_ranks(world_size, [&](int, const Runtime::MakeCommunicator& join) {
      const test::ToySetup setup =
          test::toy_setup(Placement::nvme, Placement::nvme, path("again" + std::to_string(world_size)));
      Runtime runtime(setup.runtime, join);
      test::ToyModel model(runtime, setup.engine);
      Engine& engine = model.initialize(interchange::fill_from(path("weights"), model.model().parameters()));
      EXPECT_TRUE(test::masters_of(engine) == masters) << world_size << " ranks";
    });
  }
}

TEST_F(Export, AnEarlierStepIsChosenByNumber) {
  test::make_store(path("store"), 1, 2);
  EXPECT_EQ(run("export store --to newest").exit_code, 0);
  EXPECT_EQ(run("export store --to earlier --step 1").exit_code, 0);
  EXPECT_EQ(interchange::SafetensorsModel(path("earlier")).metadata().at("hoist.step"), "1");
  const auto result = run("export store --to other --step 7");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("holds the steps 2, 1"));
  EXPECT_EQ(run("export store --to other --step best").exit_code, 2);
  EXPECT_FALSE(fs::exists(path("other")));
}

TEST_F(Export, AStepThatIsKeptUnderANameIsChosenByNumberToo) {
  test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("store"));
  setup.engine.keep_steps = 2;
  {
    test::ToyProgram program(setup);
    program.train(1, 2);
    program.engine().save("second", {}).wait();
    program.train(3, 6);
  }
  EXPECT_EQ(run("export store --to weights --step 2").exit_code, 0);
  EXPECT_EQ(interchange::SafetensorsModel(path("weights")).metadata().at("hoist.step"), "2");
  EXPECT_THAT(run("export store --to other --step 3").errors, HasSubstr("holds the steps 6, 5, 2 ('second')"));
}

TEST_F(Export, BadInputIsRefusedBeforeAnythingIsWritten) {
  test::make_store(path("store"), 1, 0);
  EXPECT_EQ(run("export missing --to weights").exit_code, 2);
  EXPECT_EQ(run("export store").exit_code, 2);
  EXPECT_EQ(run("export store --to weights --dtype fp64").exit_code, 2);
  EXPECT_EQ(run("export store --to weights --shard-size many").exit_code, 2);
  EXPECT_EQ(run("export store --to weights --shard-size 0").exit_code, 2);
  const auto kept = run("export store --to weights --from best");
  EXPECT_EQ(kept.exit_code, 2);
  EXPECT_THAT(kept.errors, HasSubstr("--from best: store has no named checkpoint"));
  const auto nowhere = run("export store --to weights --json no/such/report.json");
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_THAT(nowhere.errors, HasSubstr("no/such/report.json"));
  EXPECT_FALSE(fs::exists(path("weights")));
  fs::create_directory(path("full"));
  write("full/model.safetensors", "precious");
  const auto result = run("export store --to full");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("already holds model.safetensors"));
  EXPECT_EQ(test::contents_of(path("full/model.safetensors")), "precious");
  EXPECT_EQ(run("export store --to full/model.safetensors").exit_code, 1);
}

TEST_F(Export, DamageEndsItAndLeavesNothing) {
  test::make_store(path("store"), 1, 0);
  const std::string data = path("store/rank-00000.data");
  test::flip_bits(data, fs::file_size(data) / 4);  // in the middle of the first commit's extents
  const auto result = run("export store --to weights --shard-size 100kB");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("rank-00000.data"));
  EXPECT_FALSE(fs::exists(path("weights")));
}

// The step or the name that was asked for may be in it, and no other value of the option would do.
TEST_F(Export, ADamagedManifestIsNotAWrongStep) {
  test::make_store(path("one"), 1, 2);
  test::make_store(path("two"), 2, 2);
  test::flip_bits(path("one/rank-00000.manifest"), 64);
  test::flip_bits(path("two/rank-00001.manifest"), 64);
  for (const auto& [store, rank] : {std::pair("one", "rank 0"), std::pair("two", "rank 1")}) {
    for (const auto& [command, which] : {std::pair("export", "--step 2"), std::pair("copy", "--from kept")}) {
      const auto result = run(fmt::format("{} {} --to there {}", command, store, which));
      EXPECT_EQ(result.exit_code, 2) << result.errors;
      EXPECT_THAT(result.errors, AllOf(HasSubstr(which), HasSubstr(fmt::format("; {}: {}/rank-0000", rank, store)),
                                       HasSubstr(".manifest cannot be used: checksum")));
    }
  }
  EXPECT_FALSE(fs::exists(path("there")));
}

TEST_F(Export, AStoreInUseIsLeftAlone) {
  const test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("store"));
  Runtime runtime(setup.runtime);
  test::ToyModel model(runtime, setup.engine);
  model.initialize();
  const auto result = run("export store --to weights");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("process " + std::to_string(::getpid())));
  EXPECT_FALSE(fs::exists(path("weights")));
}

TEST_F(Export, TooLittleRoomIsBadInput) {
  test::make_store(path("store"), 1, 0);
  fs::create_directory(path("small"));
  if (std::system(("mount -t tmpfs -o size=16k tmpfs " + path("small")).c_str()) != 0)
    GTEST_SKIP() << "nothing can be mounted here";
  const auto result = run("export store --to small/weights");
  static_cast<void>(std::system(("umount " + path("small")).c_str()));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr(": free space, or choose another directory"));
}

// --- resources -------------------------------------------------------------------------------------------------------

// Runs the program and says how much memory it needed at most.
std::uint64_t peak_bytes_of(const std::vector<std::string>& arguments) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<char*> list{const_cast<char*>(HOIST_PROGRAM)};
    for (const std::string& argument : arguments) list.push_back(const_cast<char*>(argument.c_str()));
    list.push_back(nullptr);
    const int quiet = ::open("/dev/null", O_WRONLY);
    ::dup2(quiet, STDOUT_FILENO);
    ::execv(HOIST_PROGRAM, list.data());
    ::_exit(127);
  }
  int status = 0;
  rusage usage{};
  EXPECT_EQ(::wait4(child, &status, 0, &usage), child);
  EXPECT_EQ(status, 0);
  return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

TEST_F(Export, TakesTheSameMemoryForAModelOfAnySize) {
  test::make_store(path("small"), 1, 0);
  test::ToyShape large;
  large.matrices = {8 << 20, 4 << 20};
  test::on_ranks(1, [&](int, const Runtime::MakeCommunicator& join) {
    test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("large"));
    setup.runtime.device_memory_bytes = 96 * kMiB;
    setup.runtime.pinned_memory_bytes = 192 * kMiB;
    Runtime runtime(setup.runtime, join);
    test::ToyModel model(runtime, setup.engine, large);
    model.initialize();
  });
  const std::uint64_t of_small = peak_bytes_of({"export", path("small"), "--to", path("a")});
  const std::uint64_t of_large = peak_bytes_of({"export", path("large"), "--to", path("b")});
  EXPECT_GT(fs::file_size(path("b/model.safetensors")), 48 * kMiB);
  // 8 MiB of pieces and the reader's tiles, all of which the large model fills and the small one does not.
  EXPECT_LT(of_large, of_small + 16 * kMiB);
  RecordProperty("peak_bytes", static_cast<int>(of_large));
}

}  // namespace
}  // namespace hoist::export_test
