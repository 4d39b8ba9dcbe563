// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <span>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/comm/detail/mpi_liveness_probe.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::comm::detail {

namespace {

constexpr int kTag = 0;
// The longest time for the last messages, which are small and need no receiver.
constexpr std::chrono::milliseconds kLastMessagesMax{100};

}  // namespace

LivenessProbe::LivenessProbe(MPI_Comm communicator) : communicator_(communicator) {
  MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(communicator_, &rank_);
  MPI_Comm_size(communicator_, &size_);
  answers_.resize(static_cast<std::size_t>(size_));
  world_ranks_.resize(static_cast<std::size_t>(size_));
  std::vector<int> ranks(static_cast<std::size_t>(size_));
  std::iota(ranks.begin(), ranks.end(), 0);
  MPI_Group mine = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  MPI_Comm_group(communicator_, &mine);
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_translate_ranks(mine, size_, ranks.data(), world, world_ranks_.data());
  MPI_Group_free(&mine);
  MPI_Group_free(&world);
}

std::string LivenessProbe::name_of(int rank) const {
  const int in_world = world_ranks_[static_cast<std::size_t>(rank)];
  return in_world == rank ? fmt::format("rank {}", rank) : fmt::format("rank {} of MPI_COMM_WORLD", in_world);
}

LivenessProbe::~LivenessProbe() {
  const MutexLock lock(mutex_);
  clear_sent();
  if (sent_.empty()) {
    MPI_Comm_free(&communicator_);
  } else {  // a message that is still in transit keeps its memory, and its communicator, permanently
    static_cast<void>(new std::deque<Sent>(std::move(sent_)));
  }
}

void LivenessProbe::send(int peer, Kind kind, int number, std::string_view text) {
  Sent& sent = sent_.emplace_back();
  sent.message.kind = kind;
  sent.message.number = number;
  text.copy(sent.message.text.data(), sent.message.text.size() - 1);  // zeros follow
  MPI_Isend(&sent.message, static_cast<int>(sizeof(Message)), MPI_BYTE, peer, kTag, communicator_, &sent.request);
}

// Sent messages, the oldest first; one that never ends keeps those behind it.
void LivenessProbe::clear_sent() {
  while (!sent_.empty()) {
    int done = 1;
    if (MPI_Test(&sent_.front().request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done == 0) return;
    sent_.pop_front();
  }
}

void LivenessProbe::take(int peer, const Message& message, std::string_view waits_for) {
  const std::string text(message.text.data(), ::strnlen(message.text.data(), message.text.size()));
  if (message.kind == Kind::question) send(peer, Kind::answer, message.number, waits_for);
  if (message.kind == Kind::answer && message.number == question_) answers_[static_cast<std::size_t>(peer)] = text;
  if (message.kind == Kind::verdict && !verdict_) verdict_ = fmt::format("{} reports: {}", name_of(peer), text);
  if (message.kind == Kind::failure && !verdict_) verdict_ = fmt::format("{} failed: {}", name_of(peer), text);
}

std::optional<std::string> LivenessProbe::serve(std::string_view waits_for) {
  if (!mutex_.try_lock()) return std::nullopt;
  const MutexLock lock(mutex_, std::adopt_lock);
  clear_sent();
  int there = 0;
  MPI_Status status;
  while (MPI_Iprobe(MPI_ANY_SOURCE, kTag, communicator_, &there, &status) == MPI_SUCCESS && there != 0) {
    Message message;
    if (MPI_Recv(&message, static_cast<int>(sizeof message), MPI_BYTE, status.MPI_SOURCE, kTag, communicator_,
                 MPI_STATUS_IGNORE) != MPI_SUCCESS)
      break;
    take(status.MPI_SOURCE, message, waits_for);
  }
  return verdict_;
}

void LivenessProbe::ask(Nanoseconds pause) {
  const MutexLock lock(mutex_);
  if (asked_ && Clock::now() - *asked_ < pause) return;
  asked_ = Clock::now();
  ++question_;
  std::ranges::fill(answers_, std::nullopt);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) send(peer, Kind::question, question_, {});
  }
}

std::optional<std::string> LivenessProbe::answer_of(int rank) const {
  const MutexLock lock(mutex_);
  return answers_[static_cast<std::size_t>(rank)];
}

std::string LivenessProbe::findings(std::chrono::milliseconds timeout) const {
  const MutexLock lock(mutex_);
  std::vector<std::string> silent, elsewhere;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto& answer = answers_[static_cast<std::size_t>(peer)];
    if (!answer) silent.push_back(name_of(peer));
    if (answer) elsewhere.push_back(fmt::format("{} waits in {}", name_of(peer), *answer));
  }
  constexpr std::size_t kNamed = 3;
  const std::string others =
      elsewhere.empty()
          ? ""
          : fmt::format("; {}", fmt::join(std::span(elsewhere).first(std::min(kNamed, elsewhere.size())), ", "));
  if (silent.empty())
    return fmt::format("not all ranks came within {} ms, though all answer: they have diverged{}", timeout.count(),
                       others);
  return fmt::format("{} did not come within {} ms and {} not answer: ended, hanging or busy elsewhere{}",
                     fmt::join(silent, ", "), timeout.count(), silent.size() == 1 ? "does" : "do", others);
}

void LivenessProbe::tell(News news, std::string_view why) {
  const MutexLock lock(mutex_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) send(peer, news == News::failed ? Kind::failure : Kind::verdict, 0, why);
  }
  for (const TimePoint end = Clock::now() + kLastMessagesMax; !sent_.empty() && Clock::now() < end;) {
    clear_sent();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void LivenessProbes::add(const std::shared_ptr<LivenessProbe>& liveness_probe) {
  const MutexLock lock(mutex_);
  std::erase_if(all_, [](const std::weak_ptr<LivenessProbe>& one) { return one.expired(); });
  all_.push_back(liveness_probe);
}

std::vector<std::shared_ptr<LivenessProbe>> LivenessProbes::live() {
  const MutexLock lock(mutex_);
  std::vector<std::shared_ptr<LivenessProbe>> live;
  for (const auto& weak : all_) {
    if (auto one = weak.lock()) live.push_back(std::move(one));
  }
  return live;
}

std::optional<std::string> LivenessProbes::serve(std::string_view waits_for) {
  for (const auto& liveness_probe : live()) {
    if (auto verdict = liveness_probe->serve(waits_for)) return verdict;
  }
  return std::nullopt;
}

void LivenessProbes::tell(LivenessProbe::News news, std::string_view why) {
  for (const auto& liveness_probe : live()) liveness_probe->tell(news, why);
}

}  // namespace hoist::comm::detail
