// SPDX-License-Identifier: Apache-2.0
// scheduler/places.hpp - where each item lies in the gather memory, which is smaller than all items together. Pure.
//
// Every item has a home: one range of the gather memory, the same in every pass, so that its address never changes.
// Items whose homes overlap take turns. An item leaves its home only if a pinned item is in the way when it is needed,
// and returns with the next pass. Equal calls give equal places on every rank.
//
// Threading  One thread at a time.
// Errors     None of its own: pin() says that there is no room.
// Main path  choose_homes -> Places; in a pass: pin, of, unpin; then reset.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace hoist::scheduler {

// Index of something that is fetched whole: a unit.
using Item = std::uint32_t;

// A range of the gather memory, in bytes.
struct Place {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;

  std::uint64_t end() const { return begin + bytes; }
  bool overlaps(const Place& other) const { return begin < other.end() && other.begin < end(); }
  friend bool operator==(const Place&, const Place&) = default;
};

// The gather memory that an item needs.
struct ItemNeeds {
  std::uint64_t bytes = 0;            // 0: none, it has memory of its own
  std::vector<Item> gathered_with{};  // items that are pinned while this one is: their homes never overlap this item's
  bool stable_in_pass = false;        // once fetched, it does not move before the next pass
};

// The least gather memory in which every item can be pinned together with those it is gathered with.
std::uint64_t least_gather_bytes(std::span<const ItemNeeds> items);
// Enough for all items at once.
std::uint64_t most_gather_bytes(std::span<const ItemNeeds> items);
// One home for each item, such that items that follow each other in the list overlap as late as possible: they are
// expected to be used in this order, or in the reverse one. Pre: total_bytes >= least_gather_bytes(items).
std::vector<Place> choose_homes(std::span<const ItemNeeds> items, std::uint64_t total_bytes);

// Items whose ranges do not overlap, by where they begin. Allocates only while it grows.
class ItemRanges {
 public:
  struct Range {
    std::uint64_t begin;
    Item item;
  };
  using Iterator = std::vector<Range>::const_iterator;

  Iterator begin() const { return ranges_.begin(); }
  Iterator end() const { return ranges_.end(); }
  // The first that begins at `offset` or later.
  Iterator from(std::uint64_t offset) const;
  void add(const Range& range);
  void remove(std::uint64_t begin);
  void clear() { ranges_.clear(); }

 private:
  std::vector<Range> ranges_;
};

// The places of a pass.
class Places {
 public:
  // Pre: as choose_homes().
  Places(std::vector<ItemNeeds> items, std::uint64_t total_bytes);

  // A pass begins: every item is at home, and none is pinned.
  void reset();
  const Place& of(Item item) const { return places_[item]; }
  bool pinned(Item item) const { return pinned_[item]; }
  // Pins the item at its place, after moving it if a pinned item overlaps it. Returns false if there is no room for it,
  // or it may not move any more; nothing has changed then. Pre: it needs room and is not pinned.
  bool pin(Item item);
  // The same for several, of which all are pinned or none. Returns the first that was refused.
  std::optional<Item> pin(std::span<const Item> items);
  void unpin(Item item);
  // Whether no two homes overlap: every item stays once it was fetched.
  bool all_fit() const { return all_fit_; }

 private:
  bool is_free(const Place& place) const;
  bool move(Item item);

  std::vector<ItemNeeds> items_;
  std::uint64_t total_bytes_;
  std::vector<Place> homes_;
  bool all_fit_ = true;
  std::vector<Place> places_;
  std::vector<bool> pinned_;
  std::vector<bool> used_;  // in this pass
  struct Former {
    Place place;
    bool used;
  };
  std::vector<Former> former_;  // storage for pin() of several
  ItemRanges pinned_ranges_;
};

}  // namespace hoist::scheduler
