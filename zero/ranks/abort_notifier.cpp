// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/zero/ranks/abort_notifier.hpp>

namespace hoist::detail {

namespace {

template <typename Kind>
bool is_a(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Kind&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

bool is_comm_error(const std::exception_ptr& error) { return is_a<CommError>(error); }
bool is_exchanged_error(const std::exception_ptr& error) { return is_a<ExchangedError>(error); }

std::optional<comm::Problem> first_problem(comm::Communicator& communicator, const std::exception_ptr& mine) {
  if (!mine) return comm::first_problem(communicator, std::nullopt);
  return comm::first_problem(communicator, text_of(mine));
}

AbortNotifier::AbortNotifier(Runtime& runtime) : runtime_(&runtime) {
  sharding_group_told_ = runtime.world_size() == 1;
  norm_group_told_ = &runtime.norm_group() == &runtime.communicator() || runtime.norm_group().size() == 1;
}

// Under the mutex throughout: an abort ends soon, and the runtime does not go before it has.
void AbortNotifier::notify(const std::exception_ptr& error, std::string_view where) noexcept {
  try {
    const MutexLock lock(mutex_);
    if (runtime_ == nullptr) return;
    const bool from_others = is_comm_error(error);
    if (!from_others && !cause_) cause_ = error;
    const bool tell_sharding = !from_others && !std::exchange(sharding_group_told_, true);
    const bool tell_norm = !std::exchange(norm_group_told_, true);
    if (!tell_sharding && !tell_norm) return;
    const std::string text = where.empty() ? text_of(error) : fmt::format("unit '{}': {}", where, text_of(error));
    if (tell_sharding) runtime_->communicator().abort(text);
    if (tell_norm) runtime_->norm_group().abort(text);
  } catch (...) {  // no memory for the words: the others notice by waiting
  }
}

void AbortNotifier::watch(const platform::StreamEvent& event, const std::string& unit) {
  {
    const MutexLock lock(mutex_);
    if (sharding_group_told_ && norm_group_told_) return;
  }
  event.completion().then([abort_notifier = shared_from_this(), unit](std::exception_ptr error) {
    if (error) abort_notifier->notify(error, unit);
  });
}

void AbortNotifier::told_in_exchange() noexcept {
  const MutexLock lock(mutex_);
  sharding_group_told_ = true;
}

void AbortNotifier::all_ranks_told() noexcept {
  const MutexLock lock(mutex_);
  sharding_group_told_ = norm_group_told_ = true;
}

void AbortNotifier::disarm() noexcept {
  const MutexLock lock(mutex_);
  runtime_ = nullptr;
}

std::exception_ptr AbortNotifier::cause_of(const std::exception_ptr& error) const {
  const MutexLock lock(mutex_);
  return cause_ && is_comm_error(error) ? cause_ : error;
}

}  // namespace hoist::detail
