// SPDX-License-Identifier: Apache-2.0
#include <filesystem>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/rng.hpp>
#include <hoist/tests/support/lost_names.hpp>

namespace hoist::test {

namespace fs = std::filesystem;

namespace {

std::uint64_t inode_of(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

std::pair<std::string, std::string> split(const std::string& path) {
  const fs::path whole = fs::absolute(path).lexically_normal();
  return {whole.parent_path().string(), whole.filename().string()};
}

}  // namespace

LostNames::LostNames(std::string root, std::string vault, Forgets forgets)
    : root_(fs::canonical(root).string()), vault_(std::move(vault)), forgets_(std::move(forgets)) {
  fs::create_directories(vault_);
  durable_[root_] = names_in(root_);
  for (const auto& entry : fs::recursive_directory_iterator(root_)) {
    if (entry.is_directory()) durable_[entry.path().string()] = names_in(entry.path().string());
    if (entry.is_regular_file()) flushed_.insert(inode_of(entry.path().string()));
  }
  previous_ = observe_system_calls(this);
}

LostNames::~LostNames() { observe_system_calls(previous_); }

LostNames::Names LostNames::names_in(const std::string& directory) {
  Names names;
  for (const auto& entry : fs::directory_iterator(directory))
    names[entry.path().filename().string()] = inode_of(entry.path().string());
  return names;
}

bool LostNames::before(const SystemCall& call) {
  if (cutting_) return true;
  if (call.kind == SystemCall::Kind::sync) return !(forgets_ && forgets_(call.path));
  const bool renames = call.kind == SystemCall::Kind::rename;
  if (!renames && call.kind != SystemCall::Kind::remove) return true;
  const std::string& path = renames ? call.target : call.path;
  const std::lock_guard lock(mutex_);
  if (is_below_root(fs::absolute(path).string())) keep_what_is_at(path);
  return true;
}

// For a name that is about to be replaced or removed.
void LostNames::keep_what_is_at(const std::string& path) {
  if (inode_of(path) == 0) return;
  const auto [directory, name] = split(path);
  const auto durable = durable_.find(directory);
  const bool lasts = durable != durable_.end() && durable->second.contains(name);
  if (!lasts || kept_.contains({directory, name})) return;  // only what would come back is worth keeping
  const std::string copy = fmt::format("{}/{}", vault_, next_kept_++);
  if (::link(path.c_str(), copy.c_str()) == 0) kept_[{directory, name}] = copy;
}

void LostNames::after(const SystemCall& call, int result) {
  if (cutting_ || call.kind != SystemCall::Kind::sync || result != 0) return;
  const std::lock_guard lock(mutex_);
  if (!is_below_root(call.path)) return;
  if (!fs::is_directory(call.path)) {
    flushed_.insert(inode_of(call.path));
    return;
  }
  durable_[call.path] = names_in(call.path);
  std::erase_if(kept_, [&](const auto& kept) { return kept.first.first == call.path; });
}

std::uint64_t LostNames::power_cut(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  std::uint64_t lost = 0;
  cutting_ = true;
  cut(root_, seed, lost);
  cutting_ = false;
  return lost;
}

void LostNames::cut(const std::string& directory, std::uint64_t seed, std::uint64_t& lost) {
  const auto durable = durable_.find(directory);
  for (const auto& [place, copy] : kept_) {
    const std::string path = place.first + "/" + place.second;
    if (place.first != directory || inode_of(path) != 0 || random_bits(seed, decisions_++) % 2 != 0) continue;
    fs::rename(copy, path);  // it was removed, and that is lost
    ++lost;
  }
  for (const auto& [name, inode] : names_in(directory)) {
    const std::string path = directory + "/" + name;
    const bool lasts = durable != durable_.end() && durable->second.contains(name) && durable->second.at(name) == inode;
    if (!lasts && random_bits(seed, decisions_++) % 2 == 0) {
      ++lost;
      fs::remove_all(path);
      if (const auto kept = kept_.find({directory, name}); kept != kept_.end()) fs::rename(kept->second, path);
      continue;
    }
    if (fs::is_directory(path)) {
      cut(path, seed, lost);
    } else if (path.ends_with(".label") && !flushed_.contains(inode) && random_bits(seed, decisions_++) % 2 == 0) {
      ++lost;
      fs::resize_file(path, 0);
    }
  }
}

}  // namespace hoist::test
