// SPDX-License-Identifier: Apache-2.0
#include "power_fixture.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tests/support/observed_backend.hpp>

#include "rank_life.hpp"
#include "skipped_agreements.hpp"

namespace hoist::test {

namespace {

const ToyShape kShape{.matrices = {3000, 5000}, .norm = 40};

std::string state_of(ToyModel& model) {
  const Digests d = state_digests(model);
  return fmt::format("{} {} {}", d.master, d.moment1, d.moment2);
}

}  // namespace

std::string setup_name(const testing::TestParamInfo<PowerSetup>& info) {
  const PowerSetup& setup = info.param;
  const char* const ranks = setup.groups > 1 ? "2_groups" : setup.ranks == 1 ? "1_rank" : "2_ranks";
  std::string name = fmt::format("{}_{}_{}", setup.parameters == Placement::nvme ? "nvme" : "memory",
                                 mode_name(setup.update_mode), ranks);
  if (setup.keeps) name += "_keeps";
  if (setup.commit_every > 1) name += fmt::format("_every_{}", setup.commit_every);
  if (setup.cut_ranks > 0) name += fmt::format("_to_{}_judged_by_{}", setup.cut_ranks, setup.judge_ranks);
  if (setup.pinned_fraction > 0) name += "_half_pinned";
  return name;
}

void PrintTo(const PowerSetup& setup, std::ostream* out) { *out << setup_name({setup, 0}); }

ToySetup Power::toy(int group) const {
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
  toy.engine.optimizer_pinned_fraction = toy.engine.parameters_pinned_fraction = GetParam().pinned_fraction;
  // The norm's last bits depend on the partition; and mode `backward` cannot clip.
  if (elastic_ || GetParam().update_mode == UpdateMode::backward) toy.engine.gradient_clipping = 0;
  return toy;
}

std::unique_ptr<ToyModel> Power::make_model(Runtime& runtime, const ToySetup& setup, int group) const {
  ToyShape shape = kShape;
  shape.seed += static_cast<std::uint64_t>(group);
  auto model = std::make_unique<ToyModel>(runtime, setup.engine, shape);
  model->equal_gradients = elastic_;
  return model;
}

std::string Power::on_job(int ranks, const Body& body) {
  std::vector<std::string> said(static_cast<std::size_t>(GetParam().groups));
  on_groups(std::vector<int>(said.size(), ranks), [&](int group, int rank, const Runtime::Groups& joins) {
    std::string text = body(group, joins);
    if (rank == 0) said[static_cast<std::size_t>(group)] = std::move(text);
  });
  const auto first = std::ranges::find_if(said, [](const std::string& text) { return !text.empty(); });
  return first == said.end() ? "" : *first;
}

void Power::SetUp() {
  start_over();
  expected_.resize(static_cast<std::size_t>(GetParam().groups));
  on_job(GetParam().ranks, [&](int group, const Runtime::Groups& joins) {
    const ToySetup undisturbed = toy(group);
    Runtime runtime(undisturbed.runtime, joins);
    const auto model = make_model(runtime, undisturbed, group);
    model->initialize();
    model->train(1, last_step_);
    const std::string digests = state_of(*model);
    if (runtime.rank() == 0) expected_[static_cast<std::size_t>(group)] = digests;
    return "";
  });
}

void Power::begin_all_with(std::uint64_t step) {
  start_over();
  on_job(GetParam().ranks, [&](int group, const Runtime::Groups& joins) {
    const ToySetup healthy = toy(group);
    Runtime runtime(healthy.runtime, joins);
    const auto model = make_model(runtime, healthy, group);
    Engine& engine = model->initialize();
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

void Power::start_over() const {
  std::filesystem::remove_all(directory_ / "place");
  if (begun_with_)
    std::filesystem::copy(directory_ / "begun", directory_ / "place", std::filesystem::copy_options::recursive);
  else
    std::filesystem::create_directories(directory_ / "place");
}

bool Power::live(const std::shared_ptr<Faults>& faults, std::uint64_t count, const Mutation& mutation,
                 History& history) {
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
      toy.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& options) {
        return std::make_unique<ObservedBackend>(
            std::make_unique<ForgetfulBackend>(make_faulty_backend(options, faults), mutation.drops), see);
      };
      std::uint64_t agreements = 0;  // the first commit; with keeps then, in turns, a commit and what is kept
      const SkippedAgreements::Skips own = [&] { return mutation.no_adopt_barrier && has_written_manifest; };
      const SkippedAgreements::Skips of_commits = [&] {
        ++agreements;
        return mutation.no_barrier || (agreements > 1 && agreements % 2 == 1 && mutation.no_keep_barrier);
      };
      const auto skipping = [&](const Runtime::MakeCommunicator& join) -> Runtime::MakeCommunicator {
        if (!join) return {};
        return [&](const auto& options) { return std::make_unique<SkippedAgreements>(join(options), own, of_commits); };
      };
      Runtime runtime(toy.runtime, {.sharding = skipping(joins.sharding), .norm = skipping(joins.norm)});
      const auto model = make_model(runtime, toy, group);
      train(*model, count, history, /*together=*/!mutation.no_adopt_barrier);
      return "";
    });
  } catch (const IoError&) {
    return true;
  } catch (const CommError&) {  // the other rank's drive died
    return true;
  }
  return false;
}

void Power::train(ToyModel& model, std::uint64_t count, History& history, bool together) const {
  std::uint64_t first = 1;
  if (model.find_commit()) {
    first = model.restore({.from = from_}).step + 1;
    if (!from_.empty() && together) history.went_back = true;
  } else {
    raise_to(history.begun, 0);
    model.initialize();
    raise_to(history.committed, 0);
  }
  for (std::uint64_t step = first; step < first + count; ++step) {
    model.pass(step);
    raise_to(history.begun, static_cast<std::int64_t>(step));
    model.engine()
        .step({.caller_state = std::as_bytes(std::span(&step, 1))})
        .committed.then([&, step](std::exception_ptr e) {
          if (!e && step % GetParam().commit_every == 0) raise_to(history.committed, static_cast<std::int64_t>(step));
        });
    if (!GetParam().keeps) continue;
    model.engine()
        .save(fmt::format("step {}", step), std::as_bytes(std::span(&step, 1)))
        .then([&, step](std::exception_ptr e) {
          if (!e) raise_to(history.checkpoint, static_cast<std::int64_t>(step));
        });
  }
  model.engine().settle();
}

std::string Power::judge(const History& history) const {
  std::string problem;
  try {
    problem = on_job(judge_ranks(), [&](int group, const Runtime::Groups& joins) {
      const ToySetup healthy = toy(group);
      Runtime runtime(healthy.runtime, joins);
      const auto model = make_model(runtime, healthy, group);
      return judge_rank(*model, history, expected_[static_cast<std::size_t>(group)]);
    });
    if (problem.empty() && GetParam().keeps) problem = judge_checkpoints(history);
  } catch (const Error& error) {
    return error.what();
  }
  return problem;
}

std::string Power::judge_rank(ToyModel& model, const History& history, const std::string& expected) const {
  std::uint64_t first = 1;
  if (const auto step = model.find_commit()) {
    const auto found = static_cast<std::int64_t>(*step);
    if (found < history.committed)
      return fmt::format("step {} came back, {} was durable", found, history.committed.load());
    if (history.went_back && *step == begun_with_) return "the step that was gone back from is there again";
    if (found > history.begun) return fmt::format("step {} came out of nothing", found);
    const RestoreReport report = model.restore();
    std::uint64_t state = 0;
    if (report.caller_state.size() == sizeof(state)) std::memcpy(&state, report.caller_state.data(), sizeof(state));
    if (state != *step) return fmt::format("the caller state of step {} is step {}'s", *step, state);
    first = *step + 1;
  } else if (history.committed >= 0) {
    return "the last commit is gone";
  } else {
    model.initialize();
  }
  model.train(first, last_step_);
  const std::string digests = state_of(model);
  return digests == expected ? "" : fmt::format("ended in {} instead of {}", digests, expected);
}

std::string Power::judge_checkpoints(const History& history) const {
  return on_job(GetParam().ranks, [&](int group, const Runtime::Groups& joins) {
    const ToySetup healthy = toy(group);
    Runtime runtime(healthy.runtime, joins);
    const auto model = make_model(runtime, healthy, group);
    const auto checkpoints = model->find_checkpoints();
    std::string found;
    if (checkpoints.size() > 1) found = fmt::format("there are {} checkpoints", checkpoints.size());
    if (checkpoints.empty() && history.checkpoint >= 0) found = "the named checkpoint is gone";
    if (!checkpoints.empty() && found.empty()) {
      const auto step = static_cast<std::int64_t>(checkpoints.front().step);
      if (step < history.checkpoint || step > history.begun)
        found = fmt::format("step {} is there, {} was saved", step, history.checkpoint.load());
      model->restore({.from = checkpoints.front().name});
      model->train(checkpoints.front().step + 1, last_step_);
      if (state_of(*model) != expected_[static_cast<std::size_t>(group)] && found.empty())
        found = "from the named checkpoint it ends elsewhere";
    }
    return found;
  });
}

void Power::die_at(Faults& faults, std::uint64_t operation) {
  faults.clear();
  faults.add({.kind = Fault::Kind::error, .first = operation, .count = Faults::kForever, .code = EIO});
}

std::string Power::cut_at(std::uint64_t dies_at, std::uint64_t seed, const Mutation& mutation, bool& died) {
  start_over();
  const auto faults = std::make_shared<Faults>(seed);
  faults->track_unflushed();
  die_at(*faults, dies_at);
  if (mutation.slow_manifest)
    faults->add({.kind = Fault::Kind::delay,
                 .operation = aio::Operation::write,
                 .path_contains = GetParam().groups > 1 ? "group-1/rank-00000.manifest" : "rank-00001.manifest",
                 // With no_adopt_barrier the other rank does not wait after its first manifest, so one delay is enough.
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

std::string Power::first_problem(const CutPoints& points, const Mutation& mutation, std::uint64_t& cuts) {
  for (std::uint64_t seed = 0; seed < points.seeds; ++seed) {
    bool died = true;
    for (std::uint64_t dies_at = 0; died; dies_at += points.stride, ++cuts) {
      if (std::string problem = cut_at(dies_at, seed, mutation, died); !problem.empty()) return problem;
    }
  }
  return {};
}

std::string Power::found(const Mutation& mutation) {
  std::uint64_t cuts = 0;
  const std::string problem = first_problem({.seeds = 12, .stride = 1}, mutation, cuts);
  fmt::print("{}\n", problem);
  return problem;
}

Power::CutPoints Power::cut_points() {
  const char* const seeds = std::getenv("HOIST_CRASH_SEEDS");
  return seeds == nullptr ? CutPoints{} : CutPoints{.seeds = std::strtoull(seeds, nullptr, 10), .stride = 1};
}

}  // namespace hoist::test
