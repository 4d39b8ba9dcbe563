// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <map>

#include <gmock/gmock.h>

#include <hoist/aio/engine.hpp>
#include <hoist/tiers/store.hpp>

#include "program.hpp"

namespace hoist {
namespace {

using ::testing::HasSubstr;

// Makes a store of one small record and commits `steps` steps, the first being 0.
void make_store(const std::string& directory, int rank, int world_size, std::uint64_t steps) {
  aio::Engine engine({});
  const tiers::RecordSegment segment{DType::bf16, true, 64};
  tiers::StoreOptions options;
  options.directory = directory;
  options.identity = {"one record", rank, world_size};
  options.records = {{"unit", tiers::RecordLayout(std::span(&segment, 1))}};
  const auto store = tiers::Store::create(options, engine);
  const tiers::RecordLayout& layout = options.records[0].layout;
  alignas(4096) static std::byte zeros[1 << 16];
  for (std::uint64_t step = 0; step < steps; ++step) {
    store->begin_step(step);
    for (const tiers::Region region : {tiers::Region::weights, tiers::Region::state}) {
      const std::span<const std::byte> bytes(zeros, layout.region_bytes(region));
      const std::uint64_t checksum = store->checksum(tiers::RecordId{0}, region, 0, bytes);
      store->write(tiers::RecordId{0}, region, 0, 1, bytes, std::span(&checksum, 1), aio::Priority::foreground).wait();
    }
    store->commit({}).wait();
  }
}

class Inspect : public test::ProgramTest {};

TEST_F(Inspect, NamesStepsAndRanks) {
  make_store(path("nvme/hoist"), 0, 2, 3);
  make_store(path("nvme/hoist"), 1, 2, 2);
  for (const char* directory : {"nvme/hoist", "nvme", "nvme/hoist/"}) {
    const auto result = run(std::string("inspect ") + directory + " --json report.json");
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("step 2"));
    EXPECT_THAT(result.output, HasSubstr("resumes from step 1"));
    const auto report = json_of("report.json");
    ASSERT_EQ(report["ranks"].size(), 2u);
    EXPECT_EQ(report["ranks"][0]["commits"][0]["step"], 2);
    EXPECT_EQ(report["ranks"][0]["commits"][1]["step"], 1);
    EXPECT_EQ(report["ranks"][1]["commits"][0]["step"], 1);
    EXPECT_EQ(report["resumes_from_step"], 1);
  }
}

TEST_F(Inspect, AStoreWithoutACommitIsSaid) {
  make_store(path("store"), 0, 1, 0);
  const auto result = run("inspect store --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("nothing to resume from"));
  EXPECT_TRUE(json_of("report.json")["resumes_from_step"].is_null());
}

TEST_F(Inspect, ChangesNothing) {
  make_store(path("store"), 0, 1, 2);
  const auto contents = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(path("store"))) {
      files[entry.path().string()] = test::text_of(entry.path());
    }
    return files;
  };
  const auto before = contents();
  EXPECT_EQ(run("inspect store").exit_code, 0);
  EXPECT_TRUE(contents() == before);
}

TEST_F(Inspect, DamageIsAFailure) {
  make_store(path("store"), 0, 1, 1);
  for (const auto& entry : std::filesystem::directory_iterator(path("store"))) {
    if (entry.path().extension() != ".manifest") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(64);
    file << "damage in the superblock";
  }
  const auto result = run("inspect store");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("cannot be used"));
}

TEST_F(Inspect, RefusesWhatIsNoStore) {
  EXPECT_EQ(run("inspect missing").exit_code, 2);
  std::filesystem::create_directory(path("empty"));
  const auto result = run("inspect empty");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("no store"));
  write("file", "text");
  EXPECT_EQ(run("inspect file").exit_code, 2);
}

}  // namespace
}  // namespace hoist
