// SPDX-License-Identifier: Apache-2.0
// A store spread over several drives: same contents, and every way of bringing the wrong drives is refused.
#include <array>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/tiers/store_harness.hpp>
#include <hoist/tiers/detail/store_drives.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace hoist::tiers::test::store_drives_test {
namespace {

namespace fs = std::filesystem;
using hoist::test::TempDirectory;
using testing::HasSubstr;

class StoreDrivesTest : public ::testing::Test {
 protected:
  StoreDrivesTest() {
    const auto store = create_store(options_, *queue_);
    run_step(*store, options_, 0, all_records(options_));
    run_step(*store, options_, 1, {0, 2});
  }
  Writers writers() const {
    Writers writers(options_.records.size(), 0);
    writers[0] = writers[2] = 1;
    return writers;
  }
  std::string drive_file(unsigned drive, const std::string& suffix) const {
    const std::string& directory = drive == 0 ? options_.directory : options_.stripe_directories[drive - 1];
    return directory + "/rank-00000." + suffix;
  }
  std::string refusal_to_open(const StoreOptions& options) {
    try {
      (void)open_store(options, *queue_);
    } catch (const StoreError& error) {
      return error.what();
    }
    return "it was opened";
  }
  std::string refusal_to_create(const StoreOptions& options) {
    try {
      (void)create_store(options, *queue_);
    } catch (const StoreError& error) {
      return error.what();
    }
    return "it was made";
  }

  TempDirectory directory_;
  StoreOptions options_ = small_model_on(directory_ / "store", 3);
  std::unique_ptr<aio::DriveQueue> queue_ = clean_queue();
};

TEST_F(StoreDrivesTest, HoldsAllItsRecordsByWeight) {
  const auto store = open_store(options_, *queue_);
  store->adopt(store->commits().front());
  EXPECT_EQ(difference(*store, options_, writers()), "");
  std::vector<double> bytes;
  for (const std::string& path : store->data_paths()) bytes.push_back(static_cast<double>(fs::file_size(path)));
  ASSERT_EQ(bytes.size(), 3u);
  const double all = bytes[0] + bytes[1] + bytes[2];
  EXPECT_NEAR(bytes[0] / all, 0.5, 0.02);
  EXPECT_NEAR(bytes[1] / all, 0.25, 0.02);
  EXPECT_EQ(Store::cost(options_).disk_bytes,
            static_cast<std::uint64_t>(all) + fs::file_size(drive_file(0, "manifest")));
}

// A drive measured as far slower than the others gets no stripe of a small store.
TEST_F(StoreDrivesTest, ADriveWithoutAByteIsADriveLikeTheOthers) {
  for (unsigned empty = 0; empty < 3; ++empty) {
    StoreOptions options = small_model_on(directory_ / ("lopsided" + std::to_string(empty)), 3);
    options.stripe_weights = {16, 16, 16};
    options.stripe_weights[empty] = 1;
    options.stripe_unit_bytes = kMiB;
    {
      const auto store = create_store(options, *queue_);
      EXPECT_EQ(fs::file_size(store->data_paths()[empty]), 0u);
      run_step(*store, options, 0, all_records(options));
      run_step(*store, options, 1, {0, 2});
    }
    const auto store = open_store(options, *queue_);
    store->adopt(store->commits().front());
    EXPECT_EQ(difference(*store, options, writers()), "");
  }
}

TEST_F(StoreDrivesTest, IsReadWithoutSayingWhereTheDrivesAre) {
  const auto found = Store::look(options_.directory, 0);
  EXPECT_EQ(found.stripe_directories, options_.stripe_directories);
  StoreReader reader(options_.directory, 0, options_.records, found.commits.front(), *queue_);
  const RecordLayout& layout = options_.records[0].layout;
  const auto tiles = static_cast<std::uint32_t>(layout.tiles().size());
  const Buffer buffer(layout.region_bytes(Region::state));
  EXPECT_NO_THROW(reader.read(RecordId{0}, Region::state, 0, tiles, buffer.span()));
}

// The files were copied by other means than ours, so the copy's manifest and labels name the original's directories.
TEST_F(StoreDrivesTest, ACopyNeverReadsTheDrivesOfItsOriginal) {
  const auto copied = [&](const std::string& directory) { return directory + "-copied"; };
  std::vector<std::string> drives = options_.stripe_directories;
  for (std::string& drive : drives) {
    fs::copy(drive, copied(drive));
    drive = copied(drive);
    const auto bytes = read_file(drive + "/rank-00000.data");
    for (std::uint64_t offset = 0; offset < bytes.size(); offset += 4096)
      poke(drive + "/rank-00000.data", offset, std::vector(1, ~bytes[offset]));
  }
  const std::string copy = copied(options_.directory);
  fs::copy(options_.directory, copy);
  const CommitHeader commit = Store::look(copy, 0).commits.front();
  const auto read = [&](const std::string& store, std::span<const std::string> elsewhere) {
    StoreReader reader(store, 0, options_.records, commit, *queue_, StoreReader::Lock::none, elsewhere);
    const RecordLayout& layout = options_.records[0].layout;
    const Buffer buffer(layout.region_bytes(Region::state));
    reader.read(RecordId{0}, Region::state, 0, static_cast<std::uint32_t>(layout.tiles().size()), buffer.span());
  };
  EXPECT_THROW(read(copy, drives), CorruptionError);  // that of its own drives
  EXPECT_FALSE(Store::lacks_a_drive(copy, 0, drives));
  const auto is_original = testing::AllOf(HasSubstr(options_.stripe_directories[0] + " belongs to the store in"),
                                          HasSubstr(copy + " is a copy"), HasSubstr("no longer used, move it away"));
  EXPECT_THAT([&] { read(copy, {}); }, testing::ThrowsMessage<StoreError>(is_original));
  EXPECT_TRUE(Store::lacks_a_drive(copy, 0, {}));
  EXPECT_THAT(Store::wrong_data_files(copy, 0), testing::Contains(is_original));
  EXPECT_NO_THROW(read(options_.directory, {}));
  const std::string link = directory_ / "link";
  fs::create_directory_symlink(options_.directory, link);
  EXPECT_NO_THROW(read(link, {}));
  // Once the first one is gone, it is no copy: the store has been moved.
  fs::rename(options_.directory, directory_ / "away");
  EXPECT_NO_THROW(read(copy, {}));
}

TEST_F(StoreDrivesTest, DamageNamesADataFileAndAnOffsetInIt) {
  const std::string path = drive_file(2, "data");
  const auto bytes = read_file(path);
  for (std::uint64_t offset = 0; offset < bytes.size(); offset += 4096)
    poke(path, offset, std::vector(1, ~bytes[offset]));
  const auto store = open_store(options_, *queue_);
  store->adopt(store->commits().front());
  try {
    (void)difference(*store, options_, writers());
    ADD_FAILURE() << "nothing was noticed";
  } catch (const CorruptionError& error) {
    // A tile is several units; the error names where it begins.
    EXPECT_THAT(store->data_paths(), testing::Contains(error.where.path));
    EXPECT_LT(error.where.offset_bytes, fs::file_size(error.where.path));
  }
}

TEST_F(StoreDrivesTest, DrivesInAnotherOrderAreRefused) {
  StoreOptions swapped = options_;
  std::swap(swapped.stripe_directories[0], swapped.stripe_directories[1]);
  EXPECT_THAT(refusal_to_open(swapped), HasSubstr("is not drive 1 of 3"));
}

TEST_F(StoreDrivesTest, AnotherNumberOfDrivesIsRefused) {
  StoreOptions fewer = options_;
  fewer.stripe_directories.pop_back();
  fewer.stripe_weights.pop_back();
  EXPECT_THAT(refusal_to_open(fewer),
              AllOf(HasSubstr("spread over 3 drives, and 2 are given"), HasSubstr(options_.stripe_directories[1])));
  const StoreOptions one = small_model(options_.directory);
  EXPECT_THAT(refusal_to_open(one), HasSubstr("spread over 3 drives, and 1 are given"));
}

TEST_F(StoreDrivesTest, AMissingDriveIsNamed) {
  fs::rename(options_.stripe_directories[1], directory_ / "unplugged");
  EXPECT_THAT(refusal_to_open(options_), HasSubstr(options_.stripe_directories[1]));
  fs::rename(directory_ / "unplugged", options_.stripe_directories[1]);
  EXPECT_EQ(refusal_to_open(options_), "it was opened");
}

TEST_F(StoreDrivesTest, ALabelThatCannotBeReadIsNotAMissingOne) {
  fs::remove(drive_file(1, "label"));
  fs::create_directory(drive_file(1, "label"));
  try {
    (void)open_store(options_, *queue_);
    ADD_FAILURE() << "it was opened";
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.path, drive_file(1, "label"));
    EXPECT_EQ(error.where.code, EISDIR);
  }
}

TEST_F(StoreDrivesTest, ATruncatedDriveIsRefused) {
  fs::resize_file(drive_file(1, "data"), fs::file_size(drive_file(1, "data")) - 4096);
  EXPECT_THAT(refusal_to_open(options_), HasSubstr("was cut off"));
}

TEST_F(StoreDrivesTest, AnotherStoresDriveIsNeitherOpenedNorOverwritten) {
  StoreOptions other = small_model_on(directory_ / "other", 2);
  other.stripe_directories = {options_.stripe_directories[0]};
  const auto before = read_file(drive_file(1, "data"));
  EXPECT_THAT(refusal_to_create(other), HasSubstr("holds data of another store"));
  other.stripe_directories = {options_.directory};
  EXPECT_THAT(refusal_to_create(other), HasSubstr("is a store of its own"));
  EXPECT_EQ(read_file(drive_file(1, "data")), before);
  EXPECT_FALSE(fs::exists(directory_ / "other"));
  EXPECT_EQ(refusal_to_open(options_), "it was opened");
}

// One entry of the list was dropped, or swapped to the front: its directory already holds a part of another store.
TEST_F(StoreDrivesTest, AFurtherDriveIsNotTakenForAFreshDirectory) {
  for (const std::string& drive : options_.stripe_directories) {
    const auto before = read_file(drive + "/rank-00000.data");
    EXPECT_THAT(refusal_to_create(small_model(drive)), HasSubstr("holds data of another store"));
    EXPECT_EQ(read_file(drive + "/rank-00000.data"), before);
  }
  EXPECT_EQ(refusal_to_open(options_), "it was opened");
}

// The first drive is not mounted: its directory is empty, and the others still hold a committed store.
TEST_F(StoreDrivesTest, AStoreWhoseFirstDriveIsMissingIsNotReplaced) {
  fs::rename(options_.directory, directory_ / "unmounted");
  EXPECT_THAT(refusal_to_create(options_), AllOf(HasSubstr("holds data of the store in " + options_.directory),
                                                 HasSubstr("not mounted"), Not(HasSubstr("remove"))));
  EXPECT_FALSE(fs::exists(options_.directory));
  fs::rename(directory_ / "unmounted", options_.directory);
  EXPECT_EQ(refusal_to_open(options_), "it was opened");
}

TEST_F(StoreDrivesTest, DataWithoutALabelIsForeignUnlessItIsEmpty) {
  const StoreOptions fresh = small_model_on(directory_ / "fresh", 2);
  fs::create_directories(fresh.stripe_directories.front());
  const std::string data = fresh.stripe_directories.front() + "/rank-00000.data";
  std::ofstream(data) << "somebody's";
  EXPECT_THAT(refusal_to_create(fresh), HasSubstr("holds data of another store"));
  std::ofstream(data, std::ios::trunc).close();  // what a crash between making and labelling it leaves
  EXPECT_EQ(refusal_to_create(fresh), "it was made");
}

TEST_F(StoreDrivesTest, ARefusedCreationLeavesNothing) {
  StoreOptions doomed = small_model_on(directory_ / "doomed", 3);
  doomed.stripe_directories[1] = options_.stripe_directories[0];  // another store's
  EXPECT_THAT(refusal_to_create(doomed), HasSubstr("holds data of another store"));
  EXPECT_FALSE(fs::exists(doomed.directory));
  EXPECT_FALSE(fs::exists(doomed.stripe_directories[0]));
}

TEST_F(StoreDrivesTest, RelativePathsAreKeptAbsolute) {
  const fs::path before = fs::current_path();
  fs::current_path(directory_.path());
  StoreOptions relative = small_model_on("relative", 2);
  {
    const auto store = create_store(relative, *queue_);
    run_step(*store, relative, 0, all_records(relative));
  }
  fs::current_path(before);
  const auto found = Store::look(directory_ / "relative", 0);
  EXPECT_EQ(found.stripe_directories, std::vector{(directory_ / "relative-drive1")});
}

// ".." after a link leads to the parent of the link's target, whoever follows the name.
TEST_F(StoreDrivesTest, ANameThroughALinkAndBackIsOnePlace) {
  fs::create_directories(directory_ / "deep/inside");
  fs::create_directory_symlink(directory_ / "deep/inside", directory_ / "link");
  const StoreOptions through = small_model_on(directory_ / "link/../other", 2);
  {
    const auto store = create_store(through, *queue_);
    run_step(*store, through, 0, all_records(through));
  }
  EXPECT_TRUE(fs::exists(directory_ / "deep/other/rank-00000.data"));
  EXPECT_TRUE(fs::exists(directory_ / "deep/other-drive1/rank-00000.data"));
  EXPECT_FALSE(fs::exists(directory_ / "other-drive1"));
  EXPECT_EQ(Store::look(directory_ / "deep/other", 0).commits.size(), 1u);
  EXPECT_EQ(open_store(through, *queue_)->commits().size(), 1u);
}

TEST_F(StoreDrivesTest, EveryDriveIsLocked) {
  const auto store = open_store(options_, *queue_);
  const auto found = Store::look(options_.directory, 0);
  EXPECT_THAT(refusal_to_open(options_), HasSubstr("is in use"));
  EXPECT_THROW(StoreReader(options_.directory, 0, options_.records, found.commits.front(), *queue_), StoreError);
}

TEST_F(StoreDrivesTest, AStoreThatNeverCommittedIsReplaced) {
  const StoreOptions fresh = small_model_on(directory_ / "fresh", 2);
  { const auto store = create_store(fresh, *queue_); }
  { const auto store = create_store(fresh, *queue_); }
  const auto store = create_store(fresh, *queue_);
  run_step(*store, fresh, 0, all_records(fresh));
}

// A start replaces what an earlier one left. If that is interrupted, the start after it succeeds.
TEST_F(StoreDrivesTest, AReplacementThatFailsHalfWayLeavesNothingInTheWay) {
  for (const bool by_kill : {false, true}) {
    StoreOptions replaced = small_model_on(directory_ / (by_kill ? "killed" : "failed"), 3);
    { const auto store = create_store(replaced, *queue_); }
    if (by_kill) {  // its labels are written and its manifest has lost its name; no data was started over
      for (unsigned d = 1; d < 3; ++d) {
        const detail::StorePaths drive(replaced.stripe_directories[d - 1], 0);
        detail::write_label(drive, {.store_number = 7, .drive = d, .drive_count = 3, .home = replaced.directory});
      }
      const std::string manifest = replaced.directory + "/rank-00000.manifest";
      fs::rename(manifest, manifest + "-new");
    } else {
      const auto faults = std::make_shared<hoist::test::Faults>(1);
      faults->add({.kind = hoist::test::Fault::Kind::error, .code = EIO});
      aio::DriveQueue queue(queue_options(), hoist::test::make_faulty_backend(queue_options(), faults));
      EXPECT_THROW(create_store(replaced, queue), IoError);
    }
    EXPECT_EQ(refusal_to_create(replaced), "it was made");
  }
}

// Removes the store of a run that was never finished, as the next start of one rank does.
std::string refusal_to_remove(const StoreOptions& options) {
  std::vector<std::string> directories = options.stripe_directories;
  directories.insert(directories.begin(), options.directory);
  try {
    Store::remove(directories, {}, [&] { Store::check_unfinished(directories, 1, /*took_over=*/false); });
    return "it was removed";
  } catch (const StoreError& error) {
    return error.what();
  }
}

TEST_F(StoreDrivesTest, ARemovedStoreTakesNothingAlongThatIsStillWanted) {
  StoreOptions doomed = small_model_on(directory_ / "doomed", 2);
  const std::string own_drive = doomed.stripe_directories[0];
  const auto begin = [&] {
    const auto store = create_store(doomed, *queue_);
    run_step(*store, doomed, 0, all_records(doomed));
  };
  begin();
  doomed.stripe_directories = {options_.stripe_directories[0]};  // the configuration names another drive now
  EXPECT_THAT(refusal_to_remove(doomed), HasSubstr("holds data of another store"));
  doomed.stripe_directories = {options_.directory};
  EXPECT_THAT(refusal_to_remove(doomed), HasSubstr("is a store of its own"));
  EXPECT_EQ(refusal_to_open(options_), "it was opened");
  doomed.stripe_directories = {own_drive};
  EXPECT_EQ(refusal_to_remove(doomed), "it was removed");

  begin();  // and a removal was killed after it had removed the label
  fs::rename(doomed.directory + "/rank-00000.manifest", doomed.directory + "/rank-00000.manifest-new");
  fs::remove(own_drive + "/rank-00000.label");
  EXPECT_EQ(refusal_to_remove(doomed), "it was removed");
  EXPECT_TRUE(fs::is_empty(doomed.directory) && fs::is_empty(own_drive));

  begin();
  {
    const auto store = open_store(doomed, *queue_);
    store->adopt(store->commits().front());
    run_step(*store, doomed, 1, all_records(doomed));
  }
  EXPECT_THAT(refusal_to_remove(doomed), HasSubstr("cannot be replaced: rank 0 has more than a first commit there"));
  fs::rename(doomed.directory + "/rank-00000.manifest", directory_ / "aside");
  EXPECT_THAT(refusal_to_remove(doomed), HasSubstr("bring the manifest back"));
  fs::rename(directory_ / "aside", doomed.directory + "/rank-00000.manifest");
  EXPECT_EQ(refusal_to_open(doomed), "it was opened");
}

TEST_F(StoreDrivesTest, OptionsThatMakeNoSenseAreRefused) {
  StoreOptions twice = small_model_on(directory_ / "twice", 2);
  twice.stripe_directories = {twice.directory + "/"};
  EXPECT_THROW(create_store(twice, *queue_), UsageError);
  fs::create_directory_symlink(directory_.path(), directory_ / "link");
  twice.stripe_directories = {directory_ / "link/twice"};
  EXPECT_THROW(create_store(twice, *queue_), UsageError) << "before the directory is made";
  fs::create_directory(twice.directory);
  EXPECT_THROW(create_store(twice, *queue_), UsageError) << "and after";
  StoreOptions unweighted = small_model_on(directory_ / "unweighted", 2);
  unweighted.stripe_weights = {1};
  EXPECT_THROW(create_store(unweighted, *queue_), UsageError);
  const std::array one{queue_.get()};
  EXPECT_THROW((void)Store::create(small_model_on(directory_ / "queues", 2), one), UsageError);
  EXPECT_FALSE(fs::exists(directory_ / "unweighted"));
}

}  // namespace
}  // namespace hoist::tiers::test::store_drives_test
