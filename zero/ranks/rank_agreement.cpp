// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <exception>
#include <optional>
#include <random>
#include <vector>

#include <fmt/format.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/digest.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/ranks/common_options.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>

namespace hoist::detail {

namespace {

// A run's number. Its highest bits differ between sharding groups, and its lowest, to which ranks are added, between
// stores. Those between are the training's: a store that takes over from another keeps them.
constexpr int kGroupBits = 16;
constexpr std::uint64_t kTrainingBits = 0x0000'FFFF'FF00'0000, kHighestOfStore = 0x0000'0000'0080'0000;

std::uint64_t of_first_rank(comm::Communicator& ranks, std::uint64_t mine) {
  return comm::values_of_all(ranks, mine).front();
}

// The model as ranks have it alike: in a store it may be grouped anew when a run goes on.
std::string with_groups(const UnitTable& table) {
  std::string text = table.identity();
  for (const Unit& unit : table.units())
    for (const ParameterId id : unit.parameters)
      text += fmt::format("{} | {} | parameter group {}\n", unit.name, table.spec(id).name, table.spec(id).group.index);
  return text;
}

}  // namespace

std::uint64_t text_hash(std::string_view text) {
  Digest digest;
  digest.update(std::as_bytes(std::span(text)));
  return digest.value();
}

std::uint64_t job_part(std::uint64_t run) { return run & (~std::uint64_t{0} >> kGroupBits); }

bool are_of_one_training(std::uint64_t a, std::uint64_t b) { return ((a ^ b) & kTrainingBits) == 0; }

RankWait::RankWait(Runtime& runtime, const comm::Communicator& ranks)
    : ledger_(ranks.size() > 1 ? &runtime.ledger() : nullptr), began_(Clock::now()) {}

RankWait::~RankWait() {
  if (ledger_ != nullptr) ledger_->waited(WaitCause::comm, Clock::now() - began_);
}

std::string RankAgreement::name_in_job(int rank) const {
  return fmt::format("rank {}{}", rank, has_several_groups() ? " of the norm group" : "");
}

void RankAgreement::run(comm::Communicator& ranks, const char* what, const std::function<void()>& part) const {
  std::exception_ptr error;
  try {
    part();
  } catch (...) {
    error = std::current_exception();
  }
  std::optional<comm::Problem> problem;
  try {
    const RankWait wait(runtime_, ranks);
    problem = first_problem(ranks, error);
    if (problem && &ranks != &group()) notifier_.all_ranks_told();
    if (error) notifier_.told_in_exchange();
  } catch (const CommError& lost) {
    if (!error) throw CommError(fmt::format("{} (whether all could {})", lost.what(), what));
  } catch (...) {
    if (!error) throw;
  }
  if (error) std::rethrow_exception(error);
  if (!problem) return;
  const std::string who = &ranks == &job() ? name_in_job(problem->rank) : fmt::format("rank {}", problem->rank);
  const std::string text = fmt::format("{} could not {}: {}", who, what, problem->text);
  if (&ranks != &job() && has_several_groups()) throw CommError(text);  // the other groups do not know yet
  throw ExchangedError(text);
}

void RankAgreement::check_in_job(const char* what, const std::function<void()>& check) const {
  std::optional<std::string> refusal;
  try {
    check();
  } catch (const UsageError& error) {
    refusal = error.what();
  }
  const RankWait wait(runtime_, job());
  const auto first = comm::first_problem(job(), refusal);
  if (refusal) throw UsageError(*refusal);
  if (first) throw UsageError(fmt::format("{} could not {}: {}", name_in_job(first->rank), what, first->text));
}

void RankAgreement::compare_groups(const EngineOptions& options, const std::function<void()>& check_model) const {
  if (!has_several_groups()) return;
  run_in_job("lay out its model", check_model);
  const bool has_store = !options.store_directory.empty();
  const std::string mirror =
      options.mirror.directory.empty() ? "" : fmt::format(", a mirror every {}", counted(options.mirror.every, "step"));
  const std::string rules = !has_store ? "no store"
                                       : fmt::format("{}, durability {}, a commit every {}, room to keep {}{}",
                                                     options.uses_nvme() ? "a store of steps" : "a store of saves",
                                                     options.durability == tiers::Durability::step ? "step" : "none",
                                                     counted(options.commit_every, "step"), options.keep_steps, mirror);
  comm::agree(job(), text_hash(rules), rules);
}

void RankAgreement::agree_on_call(std::string_view call) const {
  comm::agree(group(), text_hash(call), call);
  if (has_several_groups()) comm::agree(job(), text_hash(call), call);
}

void RankAgreement::agree_on_model(std::string_view call, const UnitTable& table, const EngineOptions& options,
                                   std::span<const GroupOptions> groups) const {
  if (group().size() == 1) return;
  comm::agree(group(), text_hash(with_groups(table)),
              fmt::format("{}: {} units, {} parameters", call, table.units().size(), table.model().parameter_count()),
              [&] { return with_groups(table); });
  agree_on_options(group(), common_options(options, runtime_.options(), groups));
}

void RankAgreement::agree_on_beginning(const char* call, const InitialState& state) const {
  constexpr std::uint64_t kStepMax = std::uint64_t{1} << 62;
  const auto refuse = [&] {
    if (state.step > kStepMax) throw UsageError(fmt::format("{} at step {}: no run is as long", call, state.step));
    const std::string problem = state.loss_scale ? LossScaler::problem_of(*state.loss_scale) : "";
    if (!problem.empty()) throw UsageError(fmt::format("{} with a loss scale that cannot be: {}", call, problem));
  };
  if (job().size() == 1) return refuse();
  const LossScaler::State scaler = state.loss_scale.value_or(LossScaler::State{});
  std::uint64_t hash = random_bits(state.step, state.loss_scale.has_value());
  hash = random_bits(hash, std::bit_cast<std::uint64_t>(scaler.scale));
  hash = random_bits(hash, scaler.steps_without_overflow);
  hash = random_bits(hash, scaler.hysteresis_left);
  const std::string scale = state.loss_scale ? fmt::format(", loss scale {} ({}, {})", scaler.scale,
                                                           scaler.steps_without_overflow, scaler.hysteresis_left)
                                             : std::string();
  comm::agree(job(), hash, fmt::format("{} at step {}{}", call, state.step, scale));
  refuse();
}

std::uint64_t RankAgreement::agree_on_run(std::optional<std::uint64_t> former) const {
  std::random_device device;
  std::uint64_t run = of_first_rank(job(), ((std::uint64_t{device()} << 32) | device() | 1) & ~kHighestOfStore);
  if (former) run = (run & ~kTrainingBits) | (*former & kTrainingBits);
  if (!has_several_groups()) return run;
  // Two groups have different numbers, so that a file of one is never taken for a file of the other.
  const std::uint64_t first = of_first_rank(group(), static_cast<std::uint64_t>(job().rank()));
  return (first << (64 - kGroupBits)) | job_part(run);
}

bool RankAgreement::all_true_in_job(bool mine) const {
  if (job().size() == 1) return mine;
  const RankWait wait(runtime_, job());
  const auto here = static_cast<std::uint8_t>(mine ? 1 : 0);
  return std::ranges::all_of(comm::values_of_all(job(), here), [](std::uint8_t there) { return there != 0; });
}

Nanoseconds RankAgreement::meeting_interval() const {
  return std::min<Nanoseconds>(runtime_.options().comm_timeout / 4, std::chrono::seconds(10));
}

std::uint64_t RankAgreement::smallest(std::uint64_t mine) const {
  if (group().size() == 1) return mine;
  return std::ranges::min(comm::values_of_all(group(), mine));
}

std::vector<JobBarrier::State> JobBarrier::meet(State mine) {
  std::vector<State> states = comm::values_of_all(*channel_, mine);
  next_meeting_ = Clock::now() + interval_;
  return states;
}

bool JobBarrier::meet_when_due() {
  if (Clock::now() < next_meeting_) return true;
  const std::vector<State> states = meet(State::working);
  return std::ranges::find(states, State::failed) == states.end();
}

void JobBarrier::agree(const std::exception_ptr& problem) {
  std::optional<comm::Problem> first;
  try {
    const auto some_work = [](const std::vector<State>& states) {
      return std::ranges::find(states, State::working) != states.end();
    };
    while (interval_ > Nanoseconds(0) && some_work(meet(problem ? State::failed : State::well))) {
    }
    first = first_problem(*channel_, problem);
  } catch (const CommError& lost) {
    throw CommError(fmt::format("{} (whether all could {})", lost.what(), what_));
  }
  if (!first || problem) return;
  throw CommError(fmt::format("{} could not {}: {}", ranks_.name_in_job(first->rank), what_, first->text));
}

void JobBarrier::tell(const std::exception_ptr& problem) noexcept {
  if (closed_) return;
  try {
    agree(problem);
  } catch (...) {  // the error that counts is this rank's own
  }
}

std::uint64_t JobBarrier::largest(std::uint64_t mine) {
  if (channel_->size() == 1) return mine;
  return std::ranges::max(comm::values_of_all(*channel_, mine));
}

MeetingThread::MeetingThread(JobBarrier& barrier, const RankAgreement& ranks) : barrier_(barrier) {
  if (ranks.job().size() > 1) thread_ = start_thread("hoist-meetings", [this] { meet(); });
}

void MeetingThread::end() noexcept {
  {
    const MutexLock lock(mutex_);
    ended_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

bool MeetingThread::others_are_well() const {
  const MutexLock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  return others_are_well_;
}

// It goes on after another rank has failed, which waits until this one's work has ended.
void MeetingThread::meet() {
  while (true) {
    {
      MutexLock lock(mutex_);
      if (wake_.wait_until(lock, barrier_.next_meeting(), [&]() HOIST_REQUIRES(mutex_) { return ended_; })) return;
    }
    bool well = false;
    std::exception_ptr error;
    try {
      well = barrier_.meet_when_due();
    } catch (...) {  // agree() hears of it as well
      error = std::current_exception();
    }
    const MutexLock lock(mutex_);
    others_are_well_ = others_are_well_ && well;
    error_ = error;
    if (error) return;
  }
}

}  // namespace hoist::detail
