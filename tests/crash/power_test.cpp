// SPDX-License-Identifier: Apache-2.0
// P3 at the engine's face against power cuts and failing drives: three steps are cut at every operation in turn.
//
// A life trains on a drive that stops answering at operation `dies_at`. After a power cut, every write that no flush
// covered is kept, lost or torn by seed; writes survive in any order. The judge resumes with a healthy drive: it must
// find a commit not older than the newest that was reported durable nor newer than the last step() called, with
// that step's caller state, and training on from there must end in the digests of an undisturbed run. That the judge
// would notice is tested, too: each flush, and the agreement between ranks, is taken away in turn.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/forgetful_backend.hpp>
#include <hoist/tests/support/lost_names.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>

#include "rank_life.hpp"

namespace hoist::test {
namespace {

constexpr std::uint64_t kCutSteps = 3;  // that are cut
constexpr std::uint64_t kLastStep = 5;  // that the judge trains to
const ToyShape kShape{.matrices = {3000, 5000}, .norm = 40};

struct PowerSetup {
  Placement parameters = Placement::nvme;
  UpdateMode update_mode = UpdateMode::forward;
  int ranks = 1;
  bool keeps = false;  // every step is saved under a name as well, and one of them stays
  unsigned commit_every = 1;
  int cut_ranks = 0;    // of the life that is cut, when it is not as many as began
  int judge_ranks = 0;  // likewise
  double pinned_fraction = 0;
  int groups = 1;  // sharding groups of so many ranks each, with a store each
};

// What the judge has to know.
struct History {
  std::atomic<std::int64_t> committed{-1};
  std::atomic<std::int64_t> begun{-1};
  std::atomic<std::int64_t> kept{-1};  // the newest step that was reported durable under its name
  std::atomic<bool> went_back{false};  // a rank's restore() of a kept step returned
};

void raise_to(std::atomic<std::int64_t>& value, std::int64_t to) {
  std::int64_t seen = value;
  while (seen < to && !value.compare_exchange_weak(seen, to)) {
  }
}

// Which agreements a Boastful makes up.
using Boasts = std::function<bool()>;

// Says of some agreements that all ranks came as far as this one, and asks none of them.
class Boastful final : public comm::Communicator {
 public:
  // `own`: of this communicator; `of_commits`: of its duplicates, on which commits are agreed.
  Boastful(std::unique_ptr<comm::Communicator> inner, Boasts own, Boasts of_commits)
      : inner_(std::move(inner)), boasts_(std::move(own)), of_commits_(std::move(of_commits)) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string_view name() const override { return inner_->name(); }
  // Whoever does not wait for the others has its own shard only.
  void all_gather(std::span<const comm::GatherPiece> pieces, platform::Stream& stream) override {
    if (!boasts()) inner_->all_gather(pieces, stream);
  }
  void reduce_scatter(std::span<const comm::ReducePiece> pieces, platform::Stream& stream) override {
    if (!boasts()) inner_->reduce_scatter(pieces, stream);
  }
  void all_reduce_sum(std::span<float> values, platform::Stream& stream) override {
    if (!boasts()) inner_->all_reduce_sum(values, stream);
  }
  void broadcast(std::span<std::byte> bytes, int root, platform::Stream& stream) override {
    if (!boasts()) inner_->broadcast(bytes, root, stream);
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    if (!boasts()) return inner_->exchange(mine, all);
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(size()); ++rank)
      std::memcpy(all.data() + rank * mine.size(), mine.data(), mine.size());
  }
  void broadcast_host(std::span<std::byte> bytes, int root) override { inner_->broadcast_host(bytes, root); }
  void barrier() override {
    if (!boasts()) inner_->barrier();
  }
  std::unique_ptr<comm::Communicator> duplicate() override {
    return std::make_unique<Boastful>(inner_->duplicate(), of_commits_, Boasts());
  }
  std::unique_ptr<comm::Communicator> split(int ranks) override { return inner_->split(ranks); }
  std::uint64_t sent_bytes() const override { return inner_->sent_bytes(); }
  void abort(std::string_view why) noexcept override { inner_->abort(why); }
  std::optional<std::string> broken() override { return inner_->broken(); }

 private:
  bool boasts() const { return boasts_ && boasts_(); }

  const std::unique_ptr<comm::Communicator> inner_;
  const Boasts boasts_, of_commits_;
};

// Calls `seen` for each block on its way.
class SeeingBackend final : public aio::Backend {
 public:
  using Seen = std::function<void(const aio::Block&)>;
  SeeingBackend(std::unique_ptr<aio::Backend> inner, Seen seen) : inner_(std::move(inner)), seen_(std::move(seen)) {}
  std::string description() const override { return inner_->description(); }
  void submit(aio::Block& block) override {
    seen_(block);
    inner_->submit(block);
  }
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override { return inner_->reap(done, timeout); }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<aio::Backend> inner_;
  const Seen seen_;
};

class Power : public testing::TestWithParam<PowerSetup> {
 protected:
  struct Mutation {
    ForgetfulBackend::Drops drops{};
    LostNames::Forgets forgets{};
    bool no_barrier = false;        // commits are not agreed
    bool no_first_barrier = false;  // the first one is not
    bool no_keep_barrier = false;   // what is kept is not
    bool no_adopt_barrier = false;  // from its first manifest on, a rank does without the others
    bool slow_manifest = false;     // rank 1, or with several groups the second one's first, is late with its manifest
    bool makes_up_agreements() const { return no_barrier || no_first_barrier || no_keep_barrier || no_adopt_barrier; }
  };

  static std::filesystem::path scratch() {
    // Power cuts are modelled, so memory will do, and the flushes of hundreds of runs cost nothing there.
    std::error_code error;
    return std::filesystem::is_directory("/dev/shm", error) ? "/dev/shm" : std::filesystem::current_path();
  }

  ToySetup toy(int group) const {
    ToySetup toy = toy_setup(GetParam().parameters, Placement::nvme,
                             store_of_group(directory_ / "place/store", GetParam().groups, group));
    toy.runtime.aio_backend = aio::BackendKind::threads;  // everywhere the same, and cheap to start hundreds of times
    toy.runtime.aio_threads = 2;
    toy.runtime.update_threads = 1;
    toy.runtime.device_memory_bytes = 4 * kMiB;  // mapping them was the most of a short life
    toy.runtime.comm_scratch_bytes = kMiB;
    toy.engine.update_mode = GetParam().update_mode;
    toy.engine.keep_steps = GetParam().keeps || !from_.empty() ? 1 : 0;
    toy.engine.commit_every = GetParam().commit_every;
    toy.engine.optimizer_pinned_fraction = GetParam().pinned_fraction;
    // The norm's last bits depend on the partition; and mode `backward` cannot clip.
    if (elastic_ || GetParam().update_mode == UpdateMode::backward) toy.engine.gradient_clipping = 0;
    return toy;
  }

  std::unique_ptr<ToyModel> make_model(Engine& engine, int group) const {
    ToyShape shape = kShape;
    shape.seed += static_cast<std::uint64_t>(group);
    auto model = std::make_unique<ToyModel>(engine, shape);
    model->equal_gradients = elastic_;
    return model;
  }

  // So many ranks of each group. What body() says of a group on its first rank is returned: the first that is anything.
  using Body = std::function<std::string(int group, const Runtime::Groups& joins)>;
  static std::string on_job(int ranks, const Body& body) {
    std::vector<std::string> said(static_cast<std::size_t>(GetParam().groups));
    on_groups(std::vector<int>(said.size(), ranks), [&](int group, int rank, const Runtime::Groups& joins) {
      std::string text = body(group, joins);
      if (rank == 0) said[static_cast<std::size_t>(group)] = std::move(text);
    });
    const auto first = std::ranges::find_if(said, [](const std::string& text) { return !text.empty(); });
    return first == said.end() ? "" : *first;
  }

  // What every life before a cut begins with: a training that came to `step`.
  void begin_all_with(std::uint64_t step) {
    start_over();
    on_job(GetParam().ranks, [&](int group, const Runtime::Groups& joins) {
      const ToySetup healthy = toy(group);
      Runtime runtime(healthy.runtime, joins);
      Engine engine(runtime, healthy.engine);
      const auto model = make_model(engine, group);
      engine.initialize(model->fill());
      for (std::uint64_t s = 1; s <= step; ++s) {
        model->train(s, s);
        if (from_ == std::to_string(s)) engine.save(from_, std::as_bytes(std::span(&s, 1))).wait();
      }
      engine.settle();
      return "";
    });
    std::filesystem::rename(directory_ / "place", directory_ / "begun");
    begun_with_ = step;
  }

  void SetUp() override {
    start_over();
    expected_.resize(static_cast<std::size_t>(GetParam().groups));
    on_job(GetParam().ranks, [&](int group, const Runtime::Groups& joins) {
      const ToySetup undisturbed = toy(group);
      Runtime runtime(undisturbed.runtime, joins);
      Engine engine(runtime, undisturbed.engine);
      const auto model = make_model(engine, group);
      engine.initialize(model->fill());
      model->train(1, last_step_);
      const std::string digests = digests_without_losses(engine, *model);
      if (runtime.rank() == 0) expected_[static_cast<std::size_t>(group)] = digests;
      return "";
    });
  }

  static std::string digests_without_losses(Engine& engine, ToyModel& model) {
    model.losses.clear();
    const Digests d = digests_of(engine, model);
    return fmt::format("{} {} {}", d.master, d.moment1, d.moment2);
  }

  void start_over() const {
    std::filesystem::remove_all(directory_ / "place");
    if (begun_with_)
      std::filesystem::copy(directory_ / "begun", directory_ / "place", std::filesystem::copy_options::recursive);
    else
      std::filesystem::create_directories(directory_ / "place");
  }

  // Trains `count` steps from what is there, recording what was promised. Returns whether the drive died.
  bool live(const std::shared_ptr<Faults>& faults, std::uint64_t count, const Mutation& mutation, History& history) {
    try {
      on_job(cut_ranks(), [&](int group, const Runtime::Groups& joins) {
        std::atomic<bool> has_written_manifest{false};
        const auto see = [&](const aio::Block& block) {
          if (block.operation == aio::Operation::write && block.file->path().ends_with(".manifest"))
            has_written_manifest = true;
        };
        ToySetup toy = this->toy(group);
        // A mutant may wait for somebody who never comes, and is judged by what it left then.
        toy.runtime.comm_timeout = std::chrono::milliseconds(mutation.makes_up_agreements() ? 500 : 5000);
        toy.runtime.make_aio_backend = [&](const aio::EngineOptions& options) {
          return std::make_unique<SeeingBackend>(
              std::make_unique<ForgetfulBackend>(make_faulty_backend(options, faults), mutation.drops), see);
        };
        std::uint64_t agreements = 0;  // the first commit; with keeps then, in turns, a commit and what is kept
        const Boasts own = [&] { return mutation.no_adopt_barrier && has_written_manifest; };
        const Boasts of_commits = [&] {
          ++agreements;
          return mutation.no_barrier || (agreements == 1 && mutation.no_first_barrier) ||
                 (agreements > 1 && agreements % 2 == 1 && mutation.no_keep_barrier);
        };
        const auto boasting = [&](const Runtime::MakeCommunicator& join) -> Runtime::MakeCommunicator {
          if (!join) return {};
          return [&](const auto& options) { return std::make_unique<Boastful>(join(options), own, of_commits); };
        };
        Runtime runtime(toy.runtime, {.sharding = boasting(joins.sharding), .norm = boasting(joins.norm)});
        Engine engine(runtime, toy.engine);
        const auto model = make_model(engine, group);
        train(engine, *model, count, history, /*together=*/!mutation.no_adopt_barrier);
        return "";
      });
    } catch (const IoError&) {
      return true;
    } catch (const CommError&) {  // the other rank's drive died
      return true;
    }
    return false;
  }

  // `together`: what restore() says goes for all ranks.
  void train(Engine& engine, ToyModel& model, std::uint64_t count, History& history, bool together) const {
    std::uint64_t first = 1;
    if (engine.find_commit()) {
      first = engine.restore({.from = from_}).step + 1;
      if (!from_.empty() && together) history.went_back = true;
    } else {
      raise_to(history.begun, 0);
      engine.initialize(model.fill());
      raise_to(history.committed, 0);
    }
    for (std::uint64_t step = first; step < first + count; ++step) {
      model.pass(step);
      raise_to(history.begun, static_cast<std::int64_t>(step));
      engine.step({.caller_state = std::as_bytes(std::span(&step, 1))}).committed.then([&, step](std::exception_ptr e) {
        if (!e && step % GetParam().commit_every == 0) raise_to(history.committed, static_cast<std::int64_t>(step));
      });
      if (!GetParam().keeps) continue;
      engine.save(fmt::format("step {}", step), std::as_bytes(std::span(&step, 1)))
          .then([&, step](std::exception_ptr e) {
            if (!e) raise_to(history.kept, static_cast<std::int64_t>(step));
          });
    }
    engine.settle();
  }

  // What is wrong with what is left; nothing when all is well.
  std::string judge(const History& history) const {
    std::string problem;
    try {
      problem = on_job(judge_ranks(), [&](int group, const Runtime::Groups& joins) {
        const ToySetup healthy = toy(group);
        Runtime runtime(healthy.runtime, joins);
        Engine engine(runtime, healthy.engine);
        const auto model = make_model(engine, group);
        return judge_rank(engine, *model, history, expected_[static_cast<std::size_t>(group)]);
      });
      if (problem.empty() && GetParam().keeps) problem = judge_kept(history);
    } catch (const Error& error) {
      return error.what();
    }
    return problem;
  }

  // What is kept is a step that was saved, and training on from it ends as it should.
  std::string judge_kept(const History& history) const {
    return on_job(GetParam().ranks, [&](int group, const Runtime::Groups& joins) {
      const ToySetup healthy = toy(group);
      Runtime runtime(healthy.runtime, joins);
      Engine engine(runtime, healthy.engine);
      const auto model = make_model(engine, group);
      const auto kept = engine.find_kept();
      std::string found;
      if (kept.size() > 1) found = fmt::format("{} steps are kept", kept.size());
      if (kept.empty() && history.kept >= 0) found = "the kept step is gone";
      if (!kept.empty() && found.empty()) {
        const auto step = static_cast<std::int64_t>(kept.front().step);
        if (step < history.kept || step > history.begun)
          found = fmt::format("step {} is kept, {} was", step, history.kept.load());
        engine.restore({.from = kept.front().name});
        model->train(kept.front().step + 1, last_step_);
        if (digests_without_losses(engine, *model) != expected_[static_cast<std::size_t>(group)] && found.empty())
          found = "from the kept step it ends elsewhere";
      }
      return found;
    });
  }

  std::string judge_rank(Engine& engine, ToyModel& model, const History& history, const std::string& expected) const {
    std::uint64_t first = 1;
    if (const auto step = engine.find_commit()) {
      const auto found = static_cast<std::int64_t>(*step);
      if (found < history.committed)
        return fmt::format("step {} came back, {} was durable", found, history.committed.load());
      if (history.went_back && *step == begun_with_) return "the step that was gone back from is there again";
      if (found > history.begun) return fmt::format("step {} came out of nothing", found);
      const RestoreReport report = engine.restore();
      std::uint64_t state = 0;
      if (report.caller_state.size() == sizeof(state)) std::memcpy(&state, report.caller_state.data(), sizeof(state));
      if (state != *step) return fmt::format("the caller state of step {} is step {}'s", *step, state);
      first = *step + 1;
    } else if (history.committed >= 0) {
      return "the last commit is gone";
    } else {
      engine.initialize(model.fill());
    }
    model.train(first, last_step_);
    const std::string digests = digests_without_losses(engine, model);
    return digests == expected ? "" : fmt::format("ended in {} instead of {}", digests, expected);
  }

  // From this operation on, the drive answers nothing but EIO, and does nothing.
  static void die_at(Faults& faults, std::uint64_t operation) {
    faults.clear();
    faults.add({.kind = Fault::Kind::error, .first = operation, .count = Faults::kForever, .code = EIO});
  }

  // Cuts the power at one operation; what is wrong then. `died`: whether the run came to that operation.
  std::string cut_at(std::uint64_t dies_at, std::uint64_t seed, const Mutation& mutation, bool& died) {
    start_over();
    const auto faults = std::make_shared<Faults>(seed);
    faults->track_unflushed();
    die_at(*faults, dies_at);
    if (mutation.slow_manifest)
      faults->add({.kind = Fault::Kind::delay,
                   .operation = aio::Operation::write,
                   .path_contains = GetParam().groups > 1 ? "group-1/rank-00000.manifest" : "rank-00001.manifest",
                   // Without the others from its first manifest on, the other rank needs this one alone to be late.
                   .count = mutation.no_adopt_barrier ? 1 : Faults::kForever,
                   .delay = mutation.no_adopt_barrier ? std::chrono::milliseconds(20) : std::chrono::milliseconds(4)});
    History history;
    if (begun_with_) {
      history.begun = static_cast<std::int64_t>(*begun_with_);
      history.committed = from_.empty() ? history.begun.load() : std::stoll(from_);
    }
    {
      LostNames names(directory_ / "place", directory_ / "vault", mutation.forgets);
      died = live(faults, kCutSteps, mutation, history);
      faults->power_cut(random_bits(seed, dies_at));
      names.power_cut(random_bits(seed, dies_at));
    }
    std::string problem = judge(history);
    return problem.empty() ? problem : fmt::format("seed {}, dies at operation {}: {}", seed, dies_at, problem);
  }

  std::string first_problem(std::uint64_t seeds, const Mutation& mutation, std::uint64_t& cuts) {
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
      bool died = true;
      for (std::uint64_t dies_at = 0; died; ++dies_at, ++cuts) {
        if (std::string problem = cut_at(dies_at, seed, mutation, died); !problem.empty()) return problem;
      }
    }
    return {};
  }

  static int cut_ranks() { return GetParam().cut_ranks == 0 ? GetParam().ranks : GetParam().cut_ranks; }
  static int judge_ranks() { return GetParam().judge_ranks == 0 ? cut_ranks() : GetParam().judge_ranks; }
  // More with HOIST_CRASH_SEEDS, for the long form.
  static std::uint64_t seeds_wanted() {
    const char* const seeds = std::getenv("HOIST_CRASH_SEEDS");
    return seeds == nullptr ? 1 : std::strtoull(seeds, nullptr, 10);
  }
  // Takes something away, and looks for a cut that shows it.
  std::string found(const Mutation& mutation) {
    std::uint64_t cuts = 0;
    const std::string problem = first_problem(12, mutation, cuts);
    fmt::print("{}\n", problem);
    return problem;
  }

  const TempDirectory directory_{scratch()};
  std::vector<std::string> expected_;  // by group
  std::uint64_t last_step_ = kLastStep;
  std::optional<std::uint64_t> begun_with_;  // the step that the lives begin with
  std::string from_;                         // the kept step they go back to
  bool elastic_ = false;                     // the state does not depend on the number of ranks
};

TEST_P(Power, CutAtEveryOperationOfThreeSteps) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(seeds_wanted(), {}, cuts), "");
  EXPECT_GT(cuts, 40u);
  fmt::print("{} power cuts\n", cuts);
}

// A dead process keeps what it wrote; nothing is lost or torn.
TEST_P(Power, KilledAtEveryOperationOfThreeSteps) {
  bool died = true;
  for (std::uint64_t dies_at = 0; died; ++dies_at) {
    start_over();
    const auto faults = std::make_shared<Faults>(0);
    die_at(*faults, dies_at);
    History history;
    died = live(faults, kCutSteps, {}, history);
    ASSERT_EQ(judge(history), "") << "dies at operation " << dies_at;
  }
}

// One operation fails, once. A short transfer is finished by trying again. An error of a write or a flush ends the
// step and the engine; one of a read does, too, unless nobody came to want what was read ahead.
TEST_P(Power, OneFailureAtEveryOperationOfThreeSteps) {
  struct Case {
    const char* name;
    Fault::Kind kind;
    std::optional<aio::Operation> operation;
  };
  for (const Case& one : {Case{"a failed read", Fault::Kind::error, aio::Operation::read},
                          Case{"a failed write", Fault::Kind::error, aio::Operation::write},
                          Case{"a failed flush", Fault::Kind::error, aio::Operation::sync},
                          Case{"a short transfer", Fault::Kind::short_transfer, std::nullopt}}) {
    std::uint64_t hits = 0;
    for (std::uint64_t at = 0;; ++at, ++hits) {
      SCOPED_TRACE(fmt::format("{}: number {}", one.name, at));
      start_over();
      const auto faults = std::make_shared<Faults>(0);
      faults->add({.kind = one.kind, .operation = one.operation, .first = at, .count = 1, .code = EIO});
      History history;
      const bool failed = live(faults, kCutSteps, {}, history);
      if (faults->hits(one.kind) == 0) break;
      const bool may_fail = one.kind == Fault::Kind::error;
      const bool may_pass = !may_fail || one.operation == aio::Operation::read;
      EXPECT_TRUE(failed ? may_fail : may_pass);
      if (!failed) {
        EXPECT_EQ(history.committed, static_cast<std::int64_t>(kCutSteps - kCutSteps % GetParam().commit_every));
      }
      ASSERT_EQ(judge(history), "");
    }
    EXPECT_GT(hits, GetParam().commit_every == 1 ? 8u : 4u) << one.name;
  }
}

std::string name_of(const testing::TestParamInfo<PowerSetup>& c) {
  return fmt::format("{}_{}_{}{}{}", c.param.parameters == Placement::nvme ? "nvme" : "memory",
                     mode_name(c.param.update_mode),
                     c.param.groups > 1   ? "2_groups"
                     : c.param.ranks == 1 ? "1_rank"
                                          : "2_ranks",
                     c.param.keeps ? "_keeps" : "",
                     c.param.commit_every == 1 ? "" : fmt::format("_every_{}", c.param.commit_every)) +
         (c.param.cut_ranks == 0 ? "" : fmt::format("_to_{}_judged_by_{}", c.param.cut_ranks, c.param.judge_ranks)) +
         (c.param.pinned_fraction > 0 ? "_half_pinned" : "");
}

INSTANTIATE_TEST_SUITE_P(
    OneRank, Power,
    testing::Values(PowerSetup{Placement::nvme, UpdateMode::forward},
                    PowerSetup{Placement::pinned, UpdateMode::forward}, PowerSetup{Placement::nvme, UpdateMode::step},
                    PowerSetup{Placement::pinned, UpdateMode::step},
                    PowerSetup{Placement::nvme, UpdateMode::forward, 1, true},
                    PowerSetup{Placement::pinned, UpdateMode::step, 1, true},
                    PowerSetup{Placement::pinned, UpdateMode::forward, 1, true, 2},
                    PowerSetup{Placement::nvme, UpdateMode::step, 1, false, 2},
                    PowerSetup{.parameters = Placement::nvme, .commit_every = 2, .pinned_fraction = 0.5},
                    PowerSetup{Placement::nvme, UpdateMode::backward},
                    PowerSetup{Placement::pinned, UpdateMode::backward, 1, true},
                    PowerSetup{Placement::pinned, UpdateMode::backward, 1, false, 2}),
    name_of);
INSTANTIATE_TEST_SUITE_P(TwoRanks, Power,
                         testing::Values(PowerSetup{Placement::nvme, UpdateMode::forward, 2},
                                         PowerSetup{Placement::nvme, UpdateMode::forward, 2, true},
                                         PowerSetup{Placement::nvme, UpdateMode::backward, 2}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(TwoGroups, Power, testing::Values(PowerSetup{.keeps = true, .groups = 2}), name_of);

class PowerMutation : public Power {
 protected:
  static ForgetfulBackend::Drops flushes_of(std::string ending) {
    return [ending = std::move(ending)](const std::string& path, std::uint64_t) { return path.ends_with(ending); };
  }
};

TEST_P(PowerMutation, WithoutFlushingTheDataTheJudgeObjects) { EXPECT_NE(found({.drops = flushes_of(".data")}), ""); }

TEST_P(PowerMutation, WithoutFlushingTheManifestTheJudgeObjects) {
  EXPECT_NE(found({.drops = flushes_of(".manifest")}), "");
}

TEST_P(PowerMutation, WithoutFlushingTheSuperblockTheJudgeObjects) {
  EXPECT_NE(found({.drops = flushes_of(".manifest-new")}), "");
}

TEST_P(PowerMutation, WithoutFlushingDirectoriesTheJudgeObjects) {
  EXPECT_NE(found({.forgets = [](const std::string& path) { return std::filesystem::is_directory(path); }}), "");
}

class PowerAgreement : public Power {};

TEST_P(PowerAgreement, WithoutItTheJudgeObjects) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(1, {.slow_manifest = true}, cuts), "");
  EXPECT_NE(found({.no_barrier = true, .slow_manifest = true}), "");
}

TEST_P(PowerAgreement, WithoutItOnKeptStepsTheJudgeObjects) {
  if (!GetParam().keeps) GTEST_SKIP() << "nothing is kept";
  EXPECT_NE(found({.no_keep_barrier = true, .slow_manifest = true}), "");
}

INSTANTIATE_TEST_SUITE_P(OneRank, PowerMutation, testing::Values(PowerSetup{}), name_of);
INSTANTIATE_TEST_SUITE_P(TwoRanks, PowerMutation,
                         testing::Values(PowerSetup{Placement::pinned, UpdateMode::step, 2},
                                         PowerSetup{Placement::pinned, UpdateMode::step, 2, true}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(TwoRanks, PowerAgreement,
                         testing::Values(PowerSetup{Placement::pinned, UpdateMode::step, 2},
                                         PowerSetup{Placement::pinned, UpdateMode::step, 2, true}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(
    TwoGroups, PowerAgreement,
    testing::Values(PowerSetup{
        .parameters = Placement::pinned, .update_mode = UpdateMode::step, .keeps = true, .groups = 2}),
    name_of);

// Two ranks go back to a kept step. Until both have adopted it, the step they came from is what they have in common.
class PowerGoingBack : public Power {
 protected:
  void SetUp() override {
    from_ = "2";
    elastic_ = true;  // so that a rank that does without the others still computes what it should
    last_step_ = 8;
    Power::SetUp();
    begin_all_with(6);
  }
};

TEST_P(PowerGoingBack, CutAtEveryOperation) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(seeds_wanted(), {.slow_manifest = true}, cuts), "");
  EXPECT_GT(cuts, 40u);
  fmt::print("{} power cuts\n", cuts);
}

TEST_P(PowerGoingBack, WhenAStepBeginsBeforeAllHaveAdoptedTheJudgeObjects) {
  EXPECT_NE(found({.no_adopt_barrier = true, .slow_manifest = true}), "");
}

INSTANTIATE_TEST_SUITE_P(TwoRanks, PowerGoingBack,
                         testing::Values(PowerSetup{Placement::nvme, UpdateMode::forward, 2},
                                         PowerSetup{Placement::pinned, UpdateMode::step, 2}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(TwoGroups, PowerGoingBack, testing::Values(PowerSetup{.groups = 2}), name_of);

// The state is dealt out to another number of ranks, into a store of its own; then the old store is removed. The judge
// comes with the new number, or with the old one.
class PowerResharding : public Power {
 protected:
  void SetUp() override {
    elastic_ = true;
    Power::SetUp();
    begin_all_with(2);
  }
};

TEST_P(PowerResharding, CutAtEveryOperation) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(seeds_wanted(), {.slow_manifest = true}, cuts), "");
  EXPECT_GT(cuts, 40u);
  fmt::print("{} power cuts\n", cuts);
}

TEST_P(PowerResharding, WhenTheOldStoreGoesBeforeAllHaveCommittedTheJudgeObjects) {
  if (GetParam().cut_ranks == 1) GTEST_SKIP() << "there is one rank";
  if (GetParam().cut_ranks > 2) GTEST_SKIP() << "two ranks show it, and sooner";
  EXPECT_NE(found({.no_first_barrier = true, .slow_manifest = true}), "");
}

INSTANTIATE_TEST_SUITE_P(
    Changes, PowerResharding,
    testing::Values(PowerSetup{.ranks = 1, .cut_ranks = 2, .judge_ranks = 2},
                    PowerSetup{.parameters = Placement::pinned, .ranks = 1, .cut_ranks = 2, .judge_ranks = 1},
                    PowerSetup{.parameters = Placement::pinned, .ranks = 2, .cut_ranks = 1, .judge_ranks = 2},
                    PowerSetup{.update_mode = UpdateMode::step, .ranks = 2, .cut_ranks = 4, .judge_ranks = 1}),
    name_of);
INSTANTIATE_TEST_SUITE_P(TwoGroups, PowerResharding,
                         testing::Values(PowerSetup{.ranks = 1, .cut_ranks = 2, .judge_ranks = 1, .groups = 2}),
                         name_of);

}  // namespace
}  // namespace hoist::test
