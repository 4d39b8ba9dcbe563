// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <utility>

#include <fmt/format.h>
#include <sys/stat.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/pace.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/tiers/store_changed_error.hpp>
#include <hoist/tiers/store_reader.hpp>
#include <hoist/zero/checkpoint/mirror.hpp>
#include <hoist/zero/checkpoint/reshard.hpp>
#include <hoist/zero/checkpoint/restore.hpp>
#include <hoist/zero/checkpoint/store_copy.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>
#include <hoist/zero/memory/drives.hpp>

namespace hoist::detail {

Mirror::Mirror(const EngineOptions& options, const UnitTable& table, const RecordMap& records,
               const RankAgreement& ranks, std::uint64_t store_number, std::uint64_t step)
    : options_(mirror_options(options)),
      mirror_(options.mirror),
      table_(table),
      records_(records),
      ranks_(ranks),
      barrier_(ranks.job().duplicate(), ranks, "copy it", ranks.meeting_interval()),
      claimed_step_(step),
      io_(make_drive_queue(ranks.runtime().options(), options_.store_directory, {})),
      fingerprints_(records.records().size()) {
  open(store_number, step);
}

Mirror::~Mirror() { end(); }

void Mirror::end() noexcept {
  if (const MutexLock lock(mutex_); thread_.joinable() && !under_way_.done())
    log_info("waiting for the copy of step {} to the mirror in {}", claimed_step_, store_options_.directory);
  join();
  drop(std::make_exception_ptr(Error("the engine has ended")));
}

void Mirror::join() {
  std::thread ended;
  {
    const MutexLock lock(mutex_);
    ended = std::move(thread_);
  }
  if (ended.joinable()) ended.join();
}

void Mirror::abandon() {
  const MutexLock lock(mutex_);
  abandoned_ = true;
  wake_.notify_all();
}

std::optional<std::uint64_t> Mirror::step() const {
  const MutexLock lock(mutex_);
  return step_;
}

namespace {

// The file system of a directory; nullopt if it is absent. The "/" mounts a drive that is mounted when it is used.
std::optional<std::uint64_t> file_system_of(const std::filesystem::path& directory) {
  struct stat status {};
  if (::stat((directory / "").c_str(), &status) == 0) return status.st_dev;
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  throw IoError({"stat", directory.string(), 0, 0, errno});
}

bool is_on_own_file_system(const std::filesystem::path& directory) {
  const auto own = file_system_of(directory);
  return own && own != file_system_of(directory.parent_path());
}

// The deepest directory on the way to this one that is on another file system than its parent; "" if there is none.
std::string mount_point_of(const std::string& directory) {
  auto path = std::filesystem::path(absolute_path(directory)).lexically_normal();
  for (; path.has_relative_path(); path = path.parent_path())
    if (is_on_own_file_system(path)) return path.string();
  return "";
}

}  // namespace

// --- its store -------------------------------------------------------------------------------------------------------

// A store that holds a copy is of this training (refuse_unfit_mirror). One of this very run is continued, unless the
// run has given its commits up. Otherwise, after a change of the number of ranks or a step back, a new one is made
// beside it, and the old one is removed once the first copy is whole. One that no copy reached is removed at once: else
// each start before a first copy would add one.
void Mirror::open(std::uint64_t store_number, std::uint64_t step) {
  const StoreSurvey survey(ranks_, options_);
  const auto found = find_store(ranks_, options_, std::nullopt, Incomplete::pass_over);
  const bool given_up = found && survey.has_given_up(found->commits.front());
  const bool goes_back = found && (found->commits.front().step > step || given_up);
  const bool same_run = found && !goes_back && found->same_ranks && found->has_room &&
                        survey.is_of_run(found->commits.front(), store_number);
  // What says so is an empty store of the run beside that of the copy (has_given_up()). It is the mark of a step back:
  // it is kept, and its files are made anew.
  const bool uses_mark =
      given_up && ranks_.all_true_in_job(survey.directories().front().world_size == ranks_.group().size());
  const std::uint64_t mark = uses_mark ? survey.newest_order() : 0;
  if (!same_run) remove_unfinished_stores(ranks_, options_, uses_mark ? StoreOrders{.last = mark - 1} : StoreOrders{});
  const std::vector<StoreDirectory> directories = survey.directories();
  has_others_ = directories.size() > (same_run || uses_mark ? 1 : 0);
  if (same_run)
    directory_ = found->directory;
  else if (uses_mark)
    directory_ = new_store_directory(mark, ranks_.group().size());
  else if (has_others_)
    directory_ = new_store_directory(directories.front().order + 1, ranks_.group().size());
  store_options_ = store_options(options_, table_, records_, ranks_.group().rank(), directory_);
  store_options_.directory_key = "hoist.mirror.path";
  store_options_.store_number = store_number;
  if (same_run)
    open_store();
  else
    make_store(goes_back ? found->commits.front().step : std::optional<std::uint64_t>());
  if (!found && step > 0)
    log_warning(
        "the mirror in {} holds no copy that every rank has: if there was one, its drive may not have been mounted "
        "when the program started",
        options_.store_directory);
  due_step_ = step > 0 ? step : mirror_.every;
  if (!same_run) return;
  adopt_commit(ranks_, options_, *store_, choose_commit(ranks_, options_, *store_, ""));
  newest_ = Copied{found->commits.front().step, static_cast<std::uint32_t>(found->commits.front().revision)};
  due_step_ = newest_->step + mirror_.every;
  const MutexLock lock(mutex_);
  step_ = newest_->step;
}

void Mirror::open_store() {
  ranks_.run_in_job("open its mirror", [&] {
    store_ = tiers::Store::open(store_options_, drives_);
    store_options_.store_number = store_->store_number();
    mount_point_ = mount_point_of(store_options_.directory);
  });
}

// Without space beside older copies the training goes on, and each copy tries again (open_anew). A run that goes back
// needs the store at once: without it the next start would not know that the copy has been given up.
void Mirror::make_store(std::optional<std::uint64_t> given_up_step) {
  std::string lack;
  ranks_.run_in_job("make its mirror", [&] {
    mount_point_ = mount_point_of(store_options_.directory);
    try {
      store_ = tiers::Store::create(store_options_, drives_);
    } catch (const BudgetError& error) {
      if (!has_others_) throw;
      lack = error.what();
    } catch (const IoError& error) {
      if (!has_others_ || (error.where.code != ENOSPC && error.where.code != EDQUOT)) throw;
      lack = error.what();
    }
  });
  if (ranks_.all_true_in_job(lack.empty())) return;
  if (store_) store_->remove_new();
  store_.reset();
  if (given_up_step)
    throw CommonStoreError(fmt::format(
        "the mirror in {} has no space{} for a new store beside its copy of step {}, which the run has given up: make "
        "space there, or name another directory in hoist.mirror.path, and start in the same way again{}{}",
        options_.store_directory, lack.empty() ? " on another rank" : "", *given_up_step, lack.empty() ? "" : ": ",
        lack));
  has_failed_ = lacks_store_ = true;
  if (lack.empty()) return;
  log_warning(
      "the mirror in {} has no space for new copies beside older ones, which stay: nothing is copied until there is. "
      "Make space there, or name another directory in hoist.mirror.path at the next start: {}",
      options_.store_directory, lack);
}

// After a copy that failed: back to the last copy that is whole on all ranks. A rank that has lost its part of that
// copies all records anew, on top of an older commit or in new files; the other ranks keep their parts until the new
// copy is whole. No rank copies anything before all have opened their stores. Returns the number for the next revision
// of the claimed step, larger than that of any rank's store.
std::uint32_t Mirror::open_anew() {
  std::uint32_t revision = 0;
  try {
    on_all_ranks([&] { revision = reopen(); });
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (lacks_store_) give_space_back();
    std::rethrow_exception(error);
  }
  lacks_store_ = false;
  revision = static_cast<std::uint32_t>(barrier_.largest(revision));
  const bool is_whole = newest_ && barrier_.largest(has_lost_newest_ ? 1 : 0) == 0;
  const MutexLock lock(mutex_);
  step_ = is_whole ? std::optional(newest_->step) : std::nullopt;
  return revision;
}

// Returns the next revision of the claimed step in this rank's store.
std::uint32_t Mirror::reopen() {
  if (io_->gave_up())
    throw Error("the mirror's drive has stopped answering; nothing is copied until the program is started again");
  const std::string& directory = store_options_.directory;
  if (store_ && store_->remove_remains())
    log_warning("the mirror in {} has lost one of its files: what was left of this rank's is removed", directory);
  store_.reset();
  std::ranges::fill(fingerprints_, 0);
  if (!mount_point_.empty() && !is_on_own_file_system(mount_point_))
    throw Error(fmt::format("the mirror's drive is not mounted at {}: nothing is copied until it is", mount_point_));
  const tiers::Store::Found found = tiers::Store::look(directory, store_options_.identity.rank);
  std::unique_ptr<tiers::Store> store;
  std::vector<tiers::CommitHeader> commits;
  if (found.exists && found.ever_committed) {
    store = tiers::Store::open(store_options_, drives_);
    if (store->store_number() != store_options_.store_number)
      throw StoreError(fmt::format("the files in {} are another store's: move them away", directory));
    commits = store->commits_and_abandoned();
  }
  auto wanted = std::ranges::find_if(commits, [&](const auto& commit) { return newest_ && newest_->is(commit); });
  if (wanted == commits.end()) {
    if (newest_) note_loss();
    wanted = std::ranges::find_if(commits, [&](const auto& commit) { return commit.step <= claimed_step_; });
    if (store && wanted == commits.end())
      throw StoreError(fmt::format("the mirror in {} has a later step than this one: move it away", directory));
  } else {
    has_lost_newest_ = false;
  }
  const std::uint32_t revision = store && wanted->step == claimed_step_ ? wanted->revision + 1 : 0;
  if (store)
    store->adopt(*wanted);
  else
    store = tiers::Store::create(store_options_, drives_);
  store_ = std::move(store);
  return revision;
}

// On the ranks that had the space which another one lacks.
void Mirror::give_space_back() noexcept {
  try {
    on_all_ranks([&] {
      if (store_ && store_->commits().empty()) store_->remove_new();
      store_.reset();
    });
  } catch (...) {  // the next copy makes them anew
  }
}

void Mirror::note_loss() {
  {
    const MutexLock lock(mutex_);
    step_.reset();
  }
  if (std::exchange(has_lost_newest_, true)) return;
  log_warning("the mirror in {} has lost its copy of step {}: there is no whole copy until the next one",
              store_options_.directory, newest_->step);
}

// --- copies ----------------------------------------------------------------------------------------------------------

bool Mirror::is_due(std::uint64_t step) const {
  if (mirror_.every == 0 || step < due_step_) return false;
  const bool done = [&] {
    const MutexLock lock(mutex_);
    return under_way_.done() && !io_->gave_up();
  }();
  return ranks_.all_true_in_job(done);
}

Completion Mirror::claim(std::uint64_t step) {
  join();
  claimed_step_ = step;
  due_step_ = step + mirror_.every;
  const MutexLock lock(mutex_);
  promise_ = std::make_unique<Promise>();
  under_way_ = promise_->completion();
  return under_way_;
}

void Mirror::drop(const std::exception_ptr& error) {
  if (const auto promise = take_promise()) promise->fail(error);
}

std::unique_ptr<Promise> Mirror::take_promise() {
  const MutexLock lock(mutex_);
  return std::move(promise_);
}

// An error is told on the copy's thread too: the other ranks hear it where their copies end, and the next step waits
// for the thread that calls this.
void Mirror::start(tiers::Store& source) {
  std::shared_ptr<tiers::StoreReader> commit;
  std::exception_ptr error;
  try {
    commit = source.hold();
    bytes_read_ += commit->bytes_read();
  } catch (...) {
    error = std::current_exception();
  }
  auto run = [this, commit = std::move(commit), error]() mutable {
    if (error) {
      barrier_.tell(error);
    } else {
      try {
        copy(*commit);
      } catch (...) {
        error = std::current_exception();
      }
    }
    commit.reset();  // its extents are free before anybody hears of the end
    conclude(error);
  };
  try {
    const MutexLock lock(mutex_);
    thread_ = start_thread("hoist-mirror", std::move(run));
  } catch (...) {
    error = std::current_exception();
    barrier_.tell(error);
    conclude(error);
  }
}

// Nothing waits for the drive after the ranks have agreed: the others go on then, and do not meet this one any more.
void Mirror::on_all_ranks(const std::function<void()>& work) {
  std::exception_ptr problem;
  barrier_.begin();
  try {
    const MeetingThread meetings(barrier_, ranks_);
    work();
  } catch (...) {
    problem = std::current_exception();
  }
  if (!problem) return barrier_.agree(nullptr);
  barrier_.tell(problem);
  std::rethrow_exception(problem);
}

void Mirror::copy(tiers::StoreReader& commit) {
  const bool again = newest_ && newest_->step == claimed_step_;
  const std::uint32_t revision = has_failed_ ? open_anew() : again ? newest_->revision + 1 : 0;
  std::uint64_t bytes = 0;
  const TimePoint begun = Clock::now();
  bool agreed = false, another_failed = false;
  std::exception_ptr problem;
  barrier_.begin();
  try {
    // Until the store's thread, after its last flush, agrees with the other ranks.
    MeetingThread meetings(barrier_, ranks_);
    std::uint64_t counted = commit.bytes_read();  // by start()
    const auto count_read = [&] { bytes_read_ += commit.bytes_read() - std::exchange(counted, commit.bytes_read()); };
    try {
      store_->begin_step(claimed_step_, revision);
      const auto changed = [&](tiers::RecordId record) {
        return fingerprints_[record.index] != commit.fingerprint(record);
      };
      copy_records(commit, *store_, store_options_.records, changed, [&](std::uint64_t more) {
        bytes += more;
        copied_bytes_ += more;
        count_read();
        if (keep_pace(paced_time(begun, bytes, mirror_.bytes_per_second), meetings)) return;
        another_failed = true;
        throw Error("the copy of another rank failed");  // agree() says which
      });
      const Completion landed = store_->commit(commit.caller_state(), [&](const std::exception_ptr& own) {
        if (own) return;  // told below
        meetings.end();
        agreed = true;
        barrier_.agree(nullptr);
      });
      landed.wait();
    } catch (const tiers::StoreChangedError&) {
      count_read();
      throw;  // a file that is gone may be brought back before the next copy
    } catch (...) {
      count_read();
      if (!agreed) store_.reset();  // which may wait for the drive; open_anew() drops it otherwise
      throw;
    }
  } catch (...) {
    problem = std::current_exception();
  }
  if (problem) {
    if (another_failed)
      barrier_.agree(nullptr);
    else if (!agreed)
      barrier_.tell(problem);
    std::rethrow_exception(problem);
  }
  for (std::uint32_t r = 0; r < fingerprints_.size(); ++r) fingerprints_[r] = commit.fingerprint(tiers::RecordId{r});
  newest_ = Copied{claimed_step_, revision};
  has_lost_newest_ = false;
  if (std::exchange(says_next_, false))
    log_info("the mirror in {} holds step {}; {} bytes were copied in {:.1f} s", store_options_.directory,
             claimed_step_, bytes, to_seconds(Clock::now() - begun));
  if (!std::exchange(has_others_, false)) return;
  try {
    on_all_ranks([&] { remove_others(); });
  } catch (...) {  // the copy is whole
  }
}

bool Mirror::keep_pace(TimePoint not_before, const MeetingThread& meetings) {
  while (true) {
    {
      MutexLock lock(mutex_);
      // The failure of another rank is not urgent: it is looked for ten times a second.
      wake_.wait_until(lock, std::min<TimePoint>(not_before, Clock::now() + std::chrono::milliseconds(100)),
                       [&]() HOIST_REQUIRES(mutex_) { return abandoned_; });
      if (abandoned_) throw Error("the engine has failed");
    }
    if (!meetings.others_are_well()) return false;
    if (Clock::now() >= not_before) return true;
  }
}

// Other copies of this training, whole or not. A store with named checkpoints is no copy: its run was begun here. The
// first of the ranks that share a directory removes them.
void Mirror::remove_others() noexcept {
  try {
    const std::vector<int> sharing = tiers::Store::ranks_in(store_options_.directory);
    if (sharing.empty() || sharing.front() != store_options_.identity.rank) return;
    for (const StoreDirectory& other : store_directories(options_.store_directory)) {
      if (other.order == directory_.order) continue;
      const std::string directory = other.in(options_.store_directory);
      const std::vector<int> ranks = tiers::Store::ranks_in(directory);
      const auto is_useless = [&](int rank) {
        const auto found = tiers::Store::look(directory, rank);
        return found.identity && found.identity->layout == table_.identity() && found.checkpoints.empty() &&
               are_of_one_training(found.store_number, store_options_.store_number);
      };
      if (std::ranges::all_of(ranks, is_useless)) remove_store({options_.store_directory}, other, /*lock_timeout=*/{});
    }
  } catch (const std::exception& error) {
    log_warning("older copies in the mirror in {} stay there: {}", options_.store_directory, error.what());
  }
}

// Nothing of the mirror is in use by the copy any more, but for what the next one finds.
void Mirror::conclude(const std::exception_ptr& error) {
  has_failed_ = error != nullptr;
  if (error) {
    says_next_ = true;
    log_warning("step {} was not copied to the mirror in {}: {}", claimed_step_, store_options_.directory,
                text_of(error));
    if (io_->gave_up() && !std::exchange(has_said_given_up_, true))
      log_warning("the drive of {} has stopped answering: nothing is copied there until the program is started again",
                  store_options_.directory);
  } else {
    const MutexLock lock(mutex_);
    step_ = claimed_step_;
  }
  take_promise()->settle(error);
}

}  // namespace hoist::detail
