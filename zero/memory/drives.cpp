// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>

#include <fmt/format.h>

#include <hoist/aio/given_up.hpp>
#include <hoist/aio/stripe_weights.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/platform/topology.hpp>
#include <hoist/zero/memory/drives.hpp>

namespace hoist::detail {

namespace {

// The processors of a drive's I/O thread. Empty: any.
std::vector<int> io_processors(const std::vector<platform::IoPlace>& places, const std::string& path) {
  if (places.empty()) return {};
  if (places.size() == 1) return places.front().cpus;
  const auto node = platform::Topology::detect().node_of_path(path);
  const auto place = std::ranges::find_if(places, [&](const auto& one) { return one.node == node; });
  return node && place != places.end() ? place->cpus : std::vector<int>();
}

}  // namespace

std::string existing_part(const std::string& directory) {
  std::filesystem::path path = absolute_path(directory);
  std::error_code ignored;
  while (path.has_relative_path() && !std::filesystem::exists(path, ignored)) path = path.parent_path();
  return path.string();
}

std::vector<int> staging_nodes(const RuntimeOptions& runtime, const EngineOptions& options) {
  if (!runtime.staging_nodes.empty()) return runtime.staging_nodes;
  if (runtime.memory_nodes.empty() || options.store_directory.empty()) return {};
  const platform::Topology topology = platform::Topology::detect();
  std::vector<std::optional<int>> nodes;
  for (const std::string& directory : options.drive_directories())
    nodes.push_back(topology.node_of_path(existing_part(directory)));
  const auto node = platform::staging_node(runtime.memory_nodes, nodes);
  return node ? std::vector{*node} : std::vector<int>();
}

std::unique_ptr<aio::DriveQueue> make_drive_queue(const RuntimeOptions& runtime, const std::string& directory,
                                                  const std::vector<std::span<std::byte>>& registered_memory) {
  const aio::DriveQueueOptions queue{.backend = runtime.aio_backend,
                                     .block_bytes = runtime.aio_block_bytes,
                                     .queue_depth = runtime.aio_queue_depth,
                                     .thread_count = runtime.aio_threads,
                                     .cpus = io_processors(runtime.io_places, existing_part(directory)),
                                     .registered_memory = registered_memory,
                                     .answer_timeout = runtime.aio_answer_timeout};
  return runtime.make_aio_backend ? std::make_unique<aio::DriveQueue>(queue, runtime.make_aio_backend(queue))
                                  : std::make_unique<aio::DriveQueue>(queue);
}

Drives::Drives(const RuntimeOptions& runtime, const EngineOptions& options, Memory& memory)
    : memory_(memory), directories_(options.drive_directories()) {
  for (const std::string& directory : directories_)
    queues_.push_back(make_drive_queue(runtime, directory, memory.io_slices()));
}

// A drive that stopped answering may still write to memory that it was given. Its queue may notice while it ends.
Drives::~Drives() {
  const bool gave_up = std::ranges::any_of(queues_, [](const auto& queue) { return queue->gave_up(); });
  const unsigned given_up_before = aio::drives_given_up();
  queues_.clear();
  if (gave_up || aio::drives_given_up() != given_up_before) memory_.quarantine();
}

std::vector<aio::DriveQueue*> Drives::queues() const {
  std::vector<aio::DriveQueue*> queues;
  for (const auto& queue : queues_) queues.push_back(queue.get());
  return queues;
}

std::vector<std::uint32_t> Drives::measured_weights() const {
  if (queues_.size() == 1) return {};
  std::vector<aio::MeasuredDrive> drives;
  for (std::size_t d = 0; d < queues_.size(); ++d) drives.push_back({queues_[d].get(), existing_part(directories_[d])});
  try {
    return aio::measure_weights(drives).weights;
  } catch (const IoError& error) {
    if (error.where.code != ENOSPC && error.where.code != EDQUOT) throw;
    log_warning("the drives were not measured, and get equal shares of the store: {}", error.what());
    return {};
  }
}

aio::DriveQueue::Stats Drives::stats() const {
  aio::DriveQueue::Stats all;
  for (const auto& queue : queues_) {
    const aio::DriveQueue::Stats one = queue->stats();
    all.read_bytes += one.read_bytes;
    all.written_bytes += one.written_bytes;
    all.read_busy = std::max(all.read_busy, one.read_busy);
    all.write_busy = std::max(all.write_busy, one.write_busy);
    all.retries += one.retries;
  }
  return all;
}

void Drives::count_into(Ledger& ledger, bool in_steps, const OutsideBytes& outside) {
  const aio::DriveQueue::Stats now = stats();
  const std::uint64_t read = now.read_bytes - counted_.read_bytes;
  const std::uint64_t written = now.written_bytes - counted_.written_bytes;
  // A transfer may end after it was announced; the rest is taken off a later call's.
  const std::uint64_t read_outside = std::min(outside.read - counted_outside_.read, read);
  const std::uint64_t written_outside = std::min(outside.written - counted_outside_.written, written);
  counted_outside_.read += read_outside;
  counted_outside_.written += written_outside;
  constexpr auto kOutside = Ledger::Account::outside_steps;
  ledger.count(Link::nvme_read, read_outside, {}, kOutside);
  ledger.count(Link::nvme_write, written_outside, {}, kOutside);
  const Ledger::Account account = in_steps ? ledger.current_account() : kOutside;
  ledger.count(Link::nvme_read, read - read_outside, now.read_busy - counted_.read_busy, account);
  ledger.count(Link::nvme_write, written - written_outside, now.write_busy - counted_.write_busy, account);
  counted_ = now;
}

std::string Drives::describe() const {
  std::string text = queues_.front()->description();
  if (queues_.size() > 1) text += fmt::format(", {} drives", queues_.size());
  return text;
}

}  // namespace hoist::detail
