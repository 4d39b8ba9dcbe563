// SPDX-License-Identifier: Apache-2.0
// Random lives of a run: starts with any number of ranks, named checkpoints and ways back to them, a mirror, drives
// that are lost or not mounted for one start, a rank's files that are gone for one start, operations that fail. A
// simple model of the files says what a start may come to:
//  - A run goes on from the state of an undisturbed run at that step, bit by bit, on every rank.
//  - If the files of its store are in place, it goes on from its newest commit.
//  - If its store is lost and its mirror is whole, it goes on from the mirror.
//  - A start that is refused changes nothing: when everything is mounted again, the run goes on from its newest commit.
//  - A run begins anew only where nothing is left of it.
//
// The test plays seeds from HOIST_TEST_FIRST_SEED (1) on: at least 6, and for at least HOIST_TEST_SECONDS (4).
// HOIST_TEST_SEED=N plays one seed, and prints what happens.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/faulty_backend.hpp>

#include "mirror_run.hpp"

namespace hoist::test::random_lives_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kSteps = 40;  // of the undisturbed run; a life ends before
constexpr int kStarts = 12;           // of a life

// The step of a copy is in this range. It is several steps wide after a session in which an operation failed.
struct Steps {
  std::uint64_t low = 0, high = 0;
  bool has(std::uint64_t step) const { return low <= step && step <= high; }
};

// A directory that is not mounted for one start. What a program writes there meanwhile is hidden afterwards.
class Unmounted {
 public:
  Unmounted(std::string directory, std::string aside) : directory_(std::move(directory)), aside_(std::move(aside)) {
    if (!fs::exists(directory_)) return;
    fs::rename(directory_, aside_);
    is_away_ = true;
  }
  void mount() {
    if (!std::exchange(is_away_, false)) return;
    fs::remove_all(directory_);
    fs::rename(aside_, directory_);
  }

 private:
  std::string directory_, aside_;
  bool is_away_ = false;
};

enum class Event : std::uint8_t {
  all_stores_lost,
  drive_lost,
  drive_not_mounted,
  mirror_lost,
  mirror_not_mounted,
  files_of_store_away,
  files_of_mirror_away,
};
constexpr std::uint64_t kEvents = 7;

class Life {
 public:
  Life(std::uint64_t seed, const std::map<std::uint64_t, Digests>& undisturbed, bool speaks)
      : rng_(seed), undisturbed_(undisturbed), speaks_(speaks) {
    const Placement parameters = rng_.below(3) == 0 ? Placement::pinned : Placement::nvme;
    const Placement optimizer = rng_.below(4) == 0 ? Placement::pinned : Placement::nvme;
    on_nvme_ = parameters == Placement::nvme || optimizer == Placement::nvme;
    setup_ = toy_setup(parameters, optimizer);
    setup_.engine.gradient_clipping = 0;
    setup_.engine.store_directory = directory_ / "store";
    own_drives_ = rng_.below(2) == 0;
    own_mirrors_ = own_drives_ && rng_.below(3) == 0;
    is_striped_ = rng_.below(3) == 0;
    keeps_ = 1 + static_cast<std::uint32_t>(rng_.below(3));
    setup_.engine.keep_steps = keeps_;
    if (rng_.below(4) != 0)
      setup_.engine.mirror = {.directory = directory_ / "mirror", .every = static_cast<std::uint32_t>(rng_.below(4))};
    ranks_ = 1 << rng_.below(3);
    if (own_drives_ && ranks_ == 1) ranks_ = 2;
  }

  void live() {
    say() << (on_nvme_ ? "on NVMe" : "in memory") << (own_drives_ ? ", drives of its own for each rank" : "")
          << (own_mirrors_ ? ", mirrors too" : "") << (is_striped_ ? ", two drives a store" : "") << ", keep_steps "
          << keeps_ << ", mirror " << (has_mirror() ? "every " + std::to_string(setup_.engine.mirror.every) : "none")
          << '\n';
    for (int start = 0; start < kStarts && !testing::Test::HasFailure() && step_limit() + 5 < kSteps; ++start) {
      say() << "start " << start << ": ";
      happen();
      this->start();
      std::for_each(unmounted_.rbegin(), unmounted_.rend(), [](Unmounted& drive) { drive.mount(); });
      return_files();
      unmounted_.clear();
      store_is_away_ = mirror_is_away_ = is_part_of_mirror_away_ = false;
      say() << '\n';
    }
  }
  std::string story() const { return story_.str(); }

 private:
  std::ostream& say() { return speaks_ ? std::cout : story_; }
  bool has_mirror() const { return !setup_.engine.mirror.directory.empty(); }
  std::uint64_t step_limit() const { return std::max(store_ ? store_->high : 0, mirror_ ? mirror_->high : 0); }

  std::string store_of(int rank) const {
    return setup_.engine.store_directory + (own_drives_ ? std::to_string(rank) : "");
  }
  std::string mirror_of(int rank) const {
    return setup_.engine.mirror.directory + (own_mirrors_ ? std::to_string(rank) : "");
  }
  std::string second_drive_of(int rank) const {
    return directory_ / ("further" + (own_drives_ ? std::to_string(rank) : ""));
  }
  std::vector<std::string> stores() const {
    std::set<std::string> all;
    for (int rank = 0; rank < ranks_; ++rank) all.insert(store_of(rank));
    return {all.begin(), all.end()};
  }
  std::vector<std::string> drives() const {
    std::vector<std::string> all = stores();
    for (int rank = 0; is_striped_ && rank < (own_drives_ ? ranks_ : 1); ++rank) all.push_back(second_drive_of(rank));
    return all;
  }
  void lose_all_drives() {
    for (const std::string& drive : drives()) fs::remove_all(drive);
    store_.reset();
    is_mixed_ = is_partly_lost_ = false;
  }
  std::vector<std::string> mirrors() const {
    std::set<std::string> all;
    for (int rank = 0; rank < ranks_ && has_mirror(); ++rank) all.insert(mirror_of(rank));
    return {all.begin(), all.end()};
  }

  // --- what happens between two starts

  void happen() {
    if (!own_drives_ && rng_.below(3) == 0) ranks_ = 1 << rng_.below(3);
    say() << ranks_ << " ranks";
    const std::uint64_t events = rng_.below(10) < 5 ? 0 : rng_.below(10) < 7 ? 1 : 2;
    for (std::uint64_t event = 0; event < events; ++event) happen_once(static_cast<Event>(rng_.below(kEvents)));
  }
  void happen_once(Event event) {
    const auto of = [&](const std::vector<std::string>& all) { return all[rng_.below(all.size())]; };
    const auto name_of = [](const std::string& directory) { return fs::path(directory).filename().string(); };
    const bool of_mirror =
        event == Event::mirror_lost || event == Event::mirror_not_mounted || event == Event::files_of_mirror_away;
    if (of_mirror ? !has_mirror() || mirror_is_away_ : store_is_away_) return;
    const std::string chosen = of(of_mirror ? mirrors() : event == Event::files_of_store_away ? stores() : drives());
    switch (event) {
      case Event::all_stores_lost:
        say() << ", all stores are lost";
        lose_all_drives();
        return;
      case Event::drive_lost: {
        say() << ", lost: " << name_of(chosen);
        fs::remove_all(chosen);
        const bool has_others = drives().size() > 1;
        is_mixed_ = is_mixed_ && has_others;
        is_partly_lost_ = is_partly_lost_ || (has_others && store_);
        store_.reset();
        return;
      }
      case Event::mirror_lost:
        say() << ", lost: " << name_of(chosen);
        fs::remove_all(chosen);
        mirror_.reset();
        may_be_mirrored_ = own_mirrors_;  // the other ranks' parts are there
        return;
      case Event::drive_not_mounted:
      case Event::mirror_not_mounted:
        if (!fs::exists(chosen)) return;
        say() << ", not mounted: " << name_of(chosen);
        unmounted_.emplace_back(chosen, chosen + "-away");
        (of_mirror ? mirror_is_away_ : store_is_away_) = true;
        is_part_of_mirror_away_ = of_mirror && own_mirrors_;
        return;
      case Event::files_of_store_away:
      case Event::files_of_mirror_away:
        take_files(chosen, !of_mirror);
        return;
    }
  }
  // Those of one rank, in the newest store there.
  void take_files(const std::string& directory, bool of_store) {
    if (!fs::is_directory(directory)) return;
    const auto found = detail::store_directories(directory);
    if (found.empty()) return;
    const std::string newest = found.front().in(directory);
    std::set<std::string> manifests;
    for (const auto& entry : fs::directory_iterator(newest))
      if (entry.path().extension() == ".manifest") manifests.insert(entry.path().string());
    if (manifests.empty()) return;
    const std::string chosen = *std::next(manifests.begin(), static_cast<std::ptrdiff_t>(rng_.below(manifests.size())));
    say() << ", files away: " << fs::relative(chosen, directory_.path()).string();
    std::vector<std::string> files{chosen};
    if (rng_.below(2) == 0) files.push_back(fs::path(chosen).replace_extension(".data").string());
    for (const std::string& file : files) {
      const std::string aside = directory_ / ("file-" + std::to_string(next_aside_++));
      if (!fs::exists(file)) continue;
      fs::rename(file, aside);
      returned_.emplace_back(file, aside);
    }
    (of_store ? store_is_away_ : mirror_is_away_) = true;
    is_part_of_mirror_away_ = is_part_of_mirror_away_ || !of_store;
  }
  void return_files() {
    for (const auto& [file, aside] : returned_) {
      // Otherwise its store has been replaced, or made anew.
      if (fs::is_directory(fs::path(file).parent_path()) && !fs::exists(file)) fs::rename(aside, file);
    }
    returned_.clear();
  }

  // --- a start, and what it may come to

  void start() {
    const bool whole = store_ && !store_is_away_ && !is_mixed_;
    const bool mirrored = has_mirror() && mirror_ && !mirror_is_away_;
    std::string from;
    if (whole && rng_.below(4) == 0 && !names_.empty()) from = names_.begin()->first;  // a session makes one at most
    plan_session(!from.empty());
    if (!from.empty()) say() << ", from '" << from << "'";
    Outcome restored = session(from);
    if (restored.refused.empty()) {
      say() << ", from step " << restored.step << (restored.from_mirror ? " (mirror)" : "") << " to " << last_step_
            << (restored.failure.empty() ? "" : ", FAILED");
      if (!from.empty()) {
        EXPECT_EQ(restored.step, names_.at(from));
      } else if (whole) {
        EXPECT_TRUE(store_->has(restored.step)) << restored.step << ", not " << store_->low << " to " << store_->high;
        EXPECT_FALSE(restored.from_mirror);
      } else if (mirrored) {
        EXPECT_GE(restored.step, mirror_->low);
      } else {
        EXPECT_TRUE(store_is_away_ || mirror_is_away_ || is_mixed_ || is_partly_lost_ || may_be_mirrored_)
            << "step " << restored.step << " of a run that has no files left";
      }
      note(restored, from);
      return;
    }
    say() << ", refused" << (speaks_ ? ": " + restored.refused : "");
    if (restored.is_fault) {
      if (!from.empty()) store_->low = std::min(store_->low, names_.at(from));  // it may have gone back before
      names_.clear();
      return;
    }
    if (whole && mirrored &&
        mirror_->high > store_->low) {  // the run has gone back: the error says to remove the mirror
      for (const std::string& mirror : mirrors()) fs::remove_all(mirror);
      mirror_.reset();
      return;
    }
    EXPECT_FALSE(whole && !mirror_is_away_) << restored.refused;
    if (!whole && mirrored && !store_is_away_ && !store_ && !is_mixed_ && !is_partly_lost_)
      ADD_FAILURE() << "the mirror holds step " << mirror_->low << ": " << restored.refused;
    if (is_mixed_ && !store_is_away_ && !mirror_is_away_) {  // a person removes the stores then
      lose_all_drives();
      return;
    }
    if (store_ || mirror_ || may_be_mirrored_ || store_is_away_ || mirror_is_away_ || is_partly_lost_) return;
    begin();
  }

  using Names = std::map<std::string, std::uint64_t>;  // the steps of named checkpoints

  struct Outcome {
    std::uint64_t step = 0;
    bool from_mirror = false;
    std::string refused;  // by restore()
    std::string failure;  // after it
    bool is_fault = false;
    std::optional<std::uint64_t> committed, mirrored;
    Names names;
  };

  void plan_session(bool must_train) {
    trains_ = must_train ? 1 + rng_.below(3) : rng_.below(4);
    saves_at_ = rng_.below(2) == 0 ? std::optional(rng_.below(trains_ + 1)) : std::nullopt;
    mirrors_at_ = has_mirror() && rng_.below(2) == 0 ? std::optional(rng_.below(trains_ + 1)) : std::nullopt;
    fails_ = rng_.below(6) == 0;
    faulty_rank_ = static_cast<int>(rng_.below(static_cast<std::uint64_t>(ranks_)));
    faults_ = std::make_shared<Faults>(rng_.bits());
    if (fails_)
      faults_->add({.kind = Fault::Kind::error,
                    .operation = aio::Operation::write,
                    .first = rng_.below(60),
                    .count = Faults::kForever});
    ++session_;
  }

  ToySetup of_rank(int rank) const {
    ToySetup setup = setup_;
    setup.engine.store_directory = store_of(rank);
    if (is_striped_) setup.engine.stripe_directories = {second_drive_of(rank)};
    if (has_mirror()) setup.engine.mirror.directory = mirror_of(rank);
    if (fails_ && rank == faulty_rank_)
      setup.runtime.make_aio_backend = [faults = faults_](const auto& io) { return make_faulty_backend(io, faults); };
    return setup;
  }

  Outcome session(const std::string& from) {
    Outcome outcome;
    std::set<std::uint64_t> steps;
    int refused = 0;
    std::mutex mutex;
    last_step_ = 0;
    try {
      on_ranks(ranks_, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(of_rank(rank), join);
        model.equal_gradients = true;
        bool is_restored = false;
        try {
          const RestoreReport report = model.restore({.from = from});
          is_restored = true;
          {
            const std::lock_guard lock(mutex);
            outcome.step = report.step;
            outcome.from_mirror = !report.mirror.empty();
            steps.insert(report.step);
          }
          if (report.step > 0) {
            EXPECT_EQ(state_digests(model), undisturbed_.at(report.step)) << "rank " << rank;
          }
          train(model, report.step, rank, outcome);
        } catch (const Error&) {
          const std::lock_guard lock(mutex);
          refused += is_restored ? 0 : 1;
          throw;
        }
      });
    } catch (const Error& error) {
      (refused > 0 ? outcome.refused : outcome.failure) = error.what();
    }
    outcome.is_fault = fails_;
    if (!fails_) {
      EXPECT_TRUE(refused == 0 || refused == ranks_)
          << "refused on " << refused << " of " << ranks_ << " ranks: " << outcome.refused;
      EXPECT_TRUE(steps.size() <= 1) << "ranks go on from different steps";
      EXPECT_EQ(outcome.failure, "");
    }
    return outcome;
  }

  void train(ToyModel& model, std::uint64_t step, int rank, Outcome& outcome) {
    Engine& engine = model.engine();
    const auto save = [&](const std::string& name, bool mirror) {
      const std::string state = "step " + std::to_string(step);
      engine.save(name, bytes_of(state), {.mirror = mirror}).wait();
      if (rank == 0 && !name.empty()) outcome.names[name] = step;
    };
    for (std::uint64_t done = 0; done <= trains_; ++done) {
      if (done > 0) {
        model.pass(++step);
        const std::string state = "step " + std::to_string(step);
        engine.step({.caller_state = bytes_of(state)});
        if (rank == 0) last_step_ = step;
      }
      if (saves_at_ == done) save("s" + std::to_string(session_), false);
      if (mirrors_at_ == done) save("", true);
    }
    if (!on_nvme_ && trains_ > 0) save("", false);
    engine.settle();
    if (rank != 0) return;
    outcome.committed = engine.committed_step();
    outcome.mirrored = engine.mirror().step;
    last_step_ = step;
  }

  // The model after a session that went on.
  void note(const Outcome& outcome, const std::string& from) {
    const bool goes_back = !from.empty();
    const bool failed = !outcome.failure.empty() || fails_;
    const std::uint64_t begin = outcome.step, end = std::max(last_step_, begin);
    if (outcome.from_mirror && drives().size() > 1) is_partly_lost_ = true;  // healthy drives keep older files
    if (commits_nothing()) return;
    if (goes_back && mirror_) mirror_->low = std::min(mirror_->low, begin);
    names_ = failed || store_is_away_ ? Names{} : outcome.names;
    if (failed) {
      store_ = Steps{begin, std::max(end, store_ && goes_back ? store_->high : begin)};
      note_mirror({}, end);
      if (store_is_away_ || (outcome.from_mirror && !on_nvme_)) is_mixed_ = true;
      return;
    }
    if (store_is_away_) {  // its newest store is hidden now, or a part of it
      store_.reset();
      is_mixed_ = true;
    } else {
      const std::uint64_t step = on_nvme_ ? end : outcome.committed.value_or(begin);
      store_ = Steps{step, step};
    }
    note_mirror(outcome, end);
  }

  bool commits_nothing() const { return !on_nvme_ && trains_ == 0 && !saves_at_ && !mirrors_at_; }

  void begin() {
    plan_session(false);
    fails_ = false;
    Outcome outcome;
    try {
      on_ranks(ranks_, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(of_rank(rank), join);
        model.equal_gradients = true;
        model.initialize();
        train(model, 0, rank, outcome);
      });
    } catch (const Error& error) {
      ADD_FAILURE() << "a run without files does not begin: " << error.what();
      return;
    }
    say() << ", begun anew to " << last_step_;
    if (!commits_nothing()) store_ = Steps{last_step_, last_step_};
    names_ = outcome.names;
    note_mirror(outcome, last_step_);
  }
  // A copy may be whole after the engine was asked for the last time. Where a part of the mirror is away, a new copy
  // replaces what the other ranks have of the older one, and what comes back is useless.
  void note_mirror(const Outcome& outcome, std::uint64_t end) {
    if (!has_mirror() || (mirror_is_away_ && !is_part_of_mirror_away_)) return;
    if (is_part_of_mirror_away_) mirror_.reset();
    if (outcome.mirrored && !is_part_of_mirror_away_)
      mirror_ = Steps{*outcome.mirrored, std::max(mirror_ ? mirror_->high : 0, end)};
    else if (mirror_)
      mirror_->high = std::max(mirror_->high, end);
    else
      may_be_mirrored_ = true;
  }

  TempDirectory directory_;
  Rng rng_;
  const std::map<std::uint64_t, Digests>& undisturbed_;
  const bool speaks_;
  std::ostringstream story_;
  ToySetup setup_;
  bool on_nvme_ = false, own_drives_ = false, own_mirrors_ = false, is_striped_ = false;
  std::uint32_t keeps_ = 0;
  int ranks_ = 1;

  // The model: what there is, if anything.
  std::optional<Steps> store_, mirror_;
  bool is_mixed_ = false;         // drives that were away have come back beside a newer store
  bool is_partly_lost_ = false;   // some ranks have files of a store that others have lost
  bool may_be_mirrored_ = false;  // there may be a copy that the model does not count on
  Names names_;                   // made in the last session, so that they must be there

  std::vector<Unmounted> unmounted_;
  std::vector<std::pair<std::string, std::string>> returned_;
  std::uint64_t next_aside_ = 0;
  bool store_is_away_ = false, mirror_is_away_ = false, is_part_of_mirror_away_ = false;

  // The session.
  std::uint64_t trains_ = 0, last_step_ = 0, session_ = 0;
  std::optional<std::uint64_t> saves_at_, mirrors_at_;
  bool fails_ = false;
  int faulty_rank_ = 0;
  std::shared_ptr<Faults> faults_;
};

class RandomLives : public MirrorRun {
 public:
  static const std::map<std::uint64_t, Digests>& states() { return undisturbed(kSteps); }
  void TestBody() override {}
};

std::uint64_t number(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(RandomLivesOfARun, GoOnFromTheNewestCopy) {
  const auto& states = RandomLives::states();
  if (const std::uint64_t seed = number("HOIST_TEST_SEED", 0)) {
    Life(seed, states, true).live();
    return;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(number("HOIST_TEST_SECONDS", 4));
  const std::uint64_t first = number("HOIST_TEST_FIRST_SEED", 1);
  for (std::uint64_t seed = first; seed < first + 6 || std::chrono::steady_clock::now() < end; ++seed) {
    Life life(seed, states, false);
    life.live();
    if (HasFailure()) {
      std::cout << "HOIST_TEST_SEED=" << seed << '\n' << life.story();
      return;
    }
  }
}

}  // namespace
}  // namespace hoist::test::random_lives_test
