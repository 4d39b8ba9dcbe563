// SPDX-License-Identifier: Apache-2.0
// tiers/detail/manifest_view.hpp - what a manifest says; needs no lock and no queue.
//
// Threading  Any thread, also while a training writes the manifest.
// Errors     IoError if the system refuses.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_format.hpp>

namespace hoist::tiers::detail {

// A manifest on disk.
struct ManifestView {
  bool exists = false;
  std::string damage;                    // why the superblock cannot be used; empty when it can
  std::optional<Superblock> superblock;  // when it exists and is not damaged
  std::vector<SlotCheck> slots;          // of commits, then of named checkpoints; with the superblock
};
// The slots of commits are all of one moment, even while a training writes.
ManifestView view_manifest(const std::string& path);
// The same without the slots.
ManifestView view_superblock(const std::string& path);

// What a store can be continued from. Commits are sorted by incarnation, then by step and revision, newest first. A
// commit of an older incarnation with a later step than all of the newest incarnation's was abandoned. It is listed,
// because ranks return to it if a crash between their adoptions left them without a common commit. The first commit of
// a store is written to slot 1, flushed, and written to slot 0: if slot 0 is blank and no slot is valid, no commit was
// ever finished.
Store::Commits commits_in(std::span<const SlotCheck> slots);
std::vector<ManifestDamage> damaged_slots(std::span<const SlotCheck> slots, const std::string& path);

}  // namespace hoist::tiers::detail
