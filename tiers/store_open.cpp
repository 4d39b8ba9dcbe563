// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <random>

#include <fmt/format.h>
#include <sys/stat.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tiers/detail/store_impl.hpp>
#include <hoist/tiers/store.hpp>

namespace hoist::tiers {

namespace {

using detail::AlignedBytes;
using detail::StorePaths;

std::uint64_t random_store_number() {
  std::random_device device;
  std::uint64_t number = 0;
  while (number == 0) number = (std::uint64_t{device()} << 32) | device();
  return number;
}

// Everything but the store number, which only create() chooses.
Superblock superblock_for(const StoreOptions& options) {
  if (options.directory.empty()) throw UsageError("a store needs a directory");
  const StoreIdentity& identity = options.identity;
  if (identity.world_size < 1 || identity.rank < 0 || identity.rank >= identity.world_size)
    throw UsageError(fmt::format("rank {} of {} ranks cannot have a store", identity.rank, identity.world_size));
  Superblock s;
  s.rank = static_cast<std::uint32_t>(identity.rank);
  s.world_size = static_cast<std::uint32_t>(identity.world_size);
  s.durability = options.durability == Durability::step ? kDurabilityStep : kDurabilityNone;
  s.extents_per_record = options.durability == Durability::step ? 2 : 1;
  s.tile_elements = kTileElements;
  s.caller_state_bytes_max = options.caller_state_bytes_max;
  s.record_count = static_cast<std::uint32_t>(options.records.size());
  for (const StoreRecord& record : options.records) {
    s.tile_count += record.layout.tiles().size();
    s.data_bytes += s.extents_per_record * record.layout.bytes();
  }
  s.geometry_checksum = detail::geometry_checksum(options.records);
  s.layout = identity.layout;
  return s;
}

const char* durability_name(std::uint32_t durability) { return durability == kDurabilityNone ? "none" : "step"; }

// Refuses a stored superblock that is not what `options` describe.
void check_same_model(const Superblock& stored, const Superblock& mine, const StorePaths& paths) {
  const auto refuse = [&](const std::string& why) {
    throw StoreError(fmt::format("the store in {} {}; nothing was changed", paths.directory, why));
  };
  if (stored.world_size != mine.world_size)
    refuse(fmt::format("was written by {} ranks and cannot be continued by {}: start {} ranks", stored.world_size,
                       mine.world_size, stored.world_size));
  if (stored.rank != mine.rank)
    refuse(fmt::format("was written by rank {}, and its file has the name of rank {}'s: restore its own name",
                       stored.rank, mine.rank));
  if (stored.layout != mine.layout) refuse("holds another model: " + first_difference(stored.layout, mine.layout));
  if (stored.tile_elements != mine.tile_elements || stored.record_count != mine.record_count ||
      stored.tile_count != mine.tile_count || stored.geometry_checksum != mine.geometry_checksum)
    refuse(
        fmt::format("holds the same parameters in other records: stored: {} records of {} tiles / yours: {} records "
                    "of {} tiles",
                    stored.record_count, stored.tile_count, mine.record_count, mine.tile_count));
  if (stored.durability == kDurabilityNone)
    refuse("was made with durability 'none' and can hold no commit: remove the directory to start anew");
  if (stored.durability != mine.durability)
    refuse(fmt::format("was made with durability '{}' and cannot be continued with '{}'",
                       durability_name(stored.durability), durability_name(mine.durability)));
  if (stored.caller_state_bytes_max < mine.caller_state_bytes_max)
    refuse(fmt::format("has room for {} bytes of caller state, and {} are asked for", stored.caller_state_bytes_max,
                       mine.caller_state_bytes_max));
}

[[noreturn]] void throw_unreadable(const StorePaths& paths, const std::string& problem) {
  throw StoreError(
      fmt::format("{} cannot be used: {}; nothing was changed, and whatever it holds is not overwritten: "
                  "move the directory away, or remove it",
                  paths.manifest, problem));
}

// Refuses to replace what holds, or may hold, somebody's training.
void refuse_if_committed(const detail::ManifestView& view, const Superblock& mine, const StorePaths& paths) {
  if (!view.damage.empty()) throw_unreadable(paths, view.damage);
  if (!view.ever_committed()) return;
  const auto commits = detail::usable_commits(view.slots);
  if (commits.empty())
    throw_unreadable(paths, "it held commits and none can be read any more (" +
                                detail::damaged_slots(view.slots, paths.manifest).front() + ")");
  const bool same = view.superblock->layout == mine.layout;
  throw StoreError(fmt::format(
      "the store in {} holds step {} of {} model; {}", paths.directory, commits.front().step, same ? "this" : "another",
      same ? "resume with --resume, or remove the directory" : "use another directory, or remove this one"));
}

std::uint64_t blocks_bytes(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

// The files of a store that never committed give way.
void remove_files(const StorePaths& paths) {
  for (const std::string& path : {paths.manifest, paths.manifest_new, paths.data, paths.lock_info})
    detail::remove_file(path);
}

void write_superblock(aio::Engine& engine, const aio::File& manifest, const Superblock& superblock) {
  const AlignedBytes buffer(superblock.superblock_bytes());
  encode_superblock(superblock, buffer.span());
  engine.write(manifest, 0, buffer.span(), aio::Priority::foreground).wait();
  engine.sync(manifest).wait();
}

Superblock read_superblock(aio::Engine& engine, const aio::File& manifest, const StorePaths& paths) {
  std::string problem = fmt::format("it is {} bytes long", manifest.size_bytes());
  if (manifest.size_bytes() < kBlockAlignment) throw_unreadable(paths, problem);
  const AlignedBytes head(kBlockAlignment);
  engine.read(manifest, 0, head.span(), aio::Priority::foreground).wait();
  const auto length = superblock_length(head.span(), manifest.size_bytes(), problem);
  if (!length) throw_unreadable(paths, problem);
  const AlignedBytes whole(*length);
  engine.read(manifest, 0, whole.span(), aio::Priority::foreground).wait();
  auto superblock = decode_superblock(whole.span(), problem);
  if (!superblock) throw_unreadable(paths, problem);
  return std::move(*superblock);
}

void check_length(const aio::File& file, std::uint64_t expected_bytes) {
  if (file.size_bytes() == expected_bytes) return;
  throw StoreError(fmt::format("{} is {} bytes long and should be {}: it was cut off or replaced; nothing was changed",
                               file.path(), file.size_bytes(), expected_bytes));
}

std::unique_ptr<aio::File> make_data(detail::Creation& creation, const StorePaths& paths,
                                     const Superblock& superblock) {
  try {
    return creation.make_data(superblock.data_bytes);
  } catch (const IoError& error) {
    const std::uint64_t have_bytes = detail::free_bytes(paths.directory);
    const std::uint64_t need_bytes = superblock.data_bytes + superblock.manifest_bytes();
    if (error.where.code == ENOSPC && have_bytes < need_bytes)
      throw detail::too_little_space(paths.directory, have_bytes, need_bytes);
    throw;
  }
}

}  // namespace

Store::Found Store::look(const std::string& directory, int rank) {
  const StorePaths paths(directory, rank);
  const detail::ManifestView view = detail::view_manifest(paths.manifest);
  Found found;
  found.exists = view.exists;
  if (!view.damage.empty()) found.damage.push_back(fmt::format("{} cannot be used: {}", paths.manifest, view.damage));
  if (view.superblock) {
    found.identity = {.layout = view.superblock->layout,
                      .rank = static_cast<int>(view.superblock->rank),
                      .world_size = static_cast<int>(view.superblock->world_size)};
    found.durability = view.superblock->durability == kDurabilityNone ? Durability::none : Durability::step;
    found.data_bytes = view.superblock->data_bytes;
  }
  found.commits = detail::usable_commits(view.slots);
  for (std::string& problem : detail::damaged_slots(view.slots, paths.manifest))
    found.damage.push_back(std::move(problem));
  return found;
}

std::vector<int> Store::ranks_in(const std::string& directory) { return detail::ranks_in(directory); }

Store::Cost Store::cost(const StoreOptions& options) {
  const Superblock superblock = superblock_for(options);
  return {Impl::memory_bytes(options, superblock), superblock.data_bytes + superblock.manifest_bytes()};
}

std::unique_ptr<Store> Store::create(const StoreOptions& options, aio::Engine& engine) {
  Superblock superblock = superblock_for(options);
  superblock.store_number = options.store_number != 0 ? options.store_number : random_store_number();
  const StorePaths paths(options.directory, options.identity.rank);
  detail::Creation creation(paths);
  creation.make_directories();

  const auto previous = detail::open_locked(paths, options.lock_timeout);
  refuse_if_committed(detail::view_manifest(paths.manifest), superblock, paths);
  const std::uint64_t need_bytes = superblock.data_bytes + superblock.manifest_bytes();
  const std::uint64_t have_bytes =
      detail::free_bytes(paths.directory) + blocks_bytes(paths.data) + blocks_bytes(paths.manifest);
  if (have_bytes < need_bytes) throw detail::too_little_space(paths.directory, have_bytes, need_bytes);
  remove_files(paths);

  Impl::Files files;
  files.data = make_data(creation, paths, superblock);
  const auto new_manifest = creation.make_new_manifest(superblock.manifest_bytes());
  write_superblock(engine, *new_manifest, superblock);
  creation.name_manifest();
  files.manifest = std::make_unique<aio::File>(paths.manifest, aio::FileOptions{});
  auto impl = std::make_unique<Impl>(options, std::move(superblock), paths, engine);
  impl->start_new(std::move(files), creation.keep());
  detail::write_lock_info(paths);
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

std::unique_ptr<Store> Store::open(const StoreOptions& options, aio::Engine& engine) {
  const Superblock mine = superblock_for(options);
  const StorePaths paths(options.directory, options.identity.rank);
  Impl::Files files;
  files.data = detail::open_locked(paths, options.lock_timeout);
  struct stat status {};
  if (::lstat(paths.manifest.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR))
    throw StoreError(fmt::format("there is no store in {}: {} does not exist", paths.directory, paths.manifest));
  if (!files.data)
    throw StoreError(fmt::format("the store in {} has lost its data: {} does not exist", paths.directory, paths.data));
  files.manifest = std::make_unique<aio::File>(paths.manifest, aio::FileOptions{});
  Superblock stored = read_superblock(engine, *files.manifest, paths);
  check_same_model(stored, mine, paths);
  check_length(*files.manifest, stored.manifest_bytes());
  check_length(*files.data, stored.data_bytes);
  auto impl = std::make_unique<Impl>(options, std::move(stored), paths, engine);
  impl->start_existing(std::move(files));
  detail::write_lock_info(paths);
  return std::unique_ptr<Store>(new Store(std::move(impl)));
}

}  // namespace hoist::tiers
