// SPDX-License-Identifier: Apache-2.0
// scheduler/fetch_planner.hpp - follows the plan of a pass, records the pass, and fetches on demand if the program
// deviates.
//
// Every decision is a function of the calls made so far, so all ranks decide alike.
//
// Threading  One thread at a time: the program's.
// Errors     None of its own; gather() says that there is no room.
// Main path  begin(kind) -> gather/release/finish, each returning the fetches to issue now -> end().
#pragma once

#include <array>
#include <optional>

#include <hoist/scheduler/plan.hpp>

namespace hoist::scheduler {

inline constexpr std::size_t kPassKinds = 3;

class FetchPlanner {
 public:
  explicit FetchPlanner(PlanInputs inputs);
  FetchPlanner(const FetchPlanner&) = delete;
  FetchPlanner& operator=(const FetchPlanner&) = delete;

  // Starts a pass of a kind (0 .. kPassKinds - 1). The gather memory is empty at this point.
  std::span<const Fetch> begin(std::size_t kind);
  // The returned fetches are issued before anything else; valid until the next call. Empty optional: pinned items leave
  // no room for this one, and the access did not happen.
  std::optional<std::span<const Fetch>> gather(Item item);
  // Keeps room for the items, which are gathered next. Returns the first without room; nothing has changed then.
  std::optional<Item> make_room(std::span<const Item> items);
  std::span<const Fetch> release(Item item);
  std::span<const Fetch> finish(Item item);
  // Ends the pass. A complete pass (not abandoned by an exception) that was recorded becomes the plan of its kind.
  void end(bool complete);

  // Fetches that the current plan will still issue, in order; these may be read from disk ahead. Empty while
  // recording.
  std::vector<Item> upcoming_fetches() const;
  // All fetches that the plan of a kind of pass would issue, in order; empty before the first was recorded.
  std::vector<Item> planned_fetches(std::size_t kind) const;
  bool following() const { return following_; }
  // Whether the gather memory holds all items at once.
  bool all_fit() const { return places_.all_fit(); }
  const AccessTrace& trace() const { return trace_; }  // of the current pass, or of the last one
  // Fetches of each item in one pass of this kind, by its plan; empty before the first was recorded.
  std::vector<std::uint32_t> fetch_counts(std::size_t kind) const;

 private:
  std::span<const Fetch> access(Access access);
  std::span<const Fetch> serve_on_demand(Access access);
  bool has_own_memory(Item item) const { return inputs_.items[item].has_own_memory(); }
  void apply(std::span<const Fetch> fetches);

  const PlanInputs inputs_;
  Places places_;
  Residency residency_;
  std::array<std::optional<Plan>, kPassKinds> plans_;
  std::size_t kind_ = 0;
  bool following_ = false;
  AccessTrace trace_;
  std::vector<Fetch> issued_;       // storage for the answer to a fetch on demand
  std::vector<Item> without_room_;  // storage for make_room()
};

}  // namespace hoist::scheduler
