// SPDX-License-Identifier: Apache-2.0
// zero/engine_restore.cpp - restore(): brings the engine to life from a commit, in the store that holds it.
#include <algorithm>
#include <functional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/detail/restore_source.hpp>

namespace hoist {

using tiers::CommitHeader;

RestoreReport Engine::Impl::restore(const RestoreOptions& restore_options) {
  return enliven([&] {
    compare_groups();
    if (options.store_directory.empty()) {
      throw UsageError(
          "nothing can be restored: the configuration names no store (nvme_path or hoist.checkpoint_path)");
    }
    agree_on_model("restore()");
    const auto newest = find_source(std::nullopt, /*strict=*/restore_options.from.empty());
    const auto source = restore_options.from.empty() ? newest : find_source(restore_options.from, /*strict=*/false);
    if (!source) throw nothing_to_restore(restore_options.from);
    const bool in_place =
        source->same_ranks && source->has_room && (!newest || newest->place.order == source->place.order);
    const std::vector<std::uint64_t> passed_over = newest ? newest->passed_over : std::vector<std::uint64_t>();
    if (in_place) {
      place = source->place;
      restore_in_place(restore_options);
    } else {
      reshard(*source, restore_options, passed_over);
    }
    committed_step = static_cast<std::int64_t>(step_count);
    remove_older_places(passed_over);
    book_io();
    return RestoreReport{.step = step_count, .caller_state = step_state.program, .world_size = source->world_size};
  });
}

void Engine::Impl::restore_in_place(const RestoreOptions& restore_options) {
  seal(/*create_store=*/false);
  const Ledger::Apart apart(runtime.ledger());
  const CommonCommit chosen = choose_commit(restore_options.from);
  all_together("adopt the commit", [&] {
    std::vector<CommitHeader> all = live.store->kept();
    const auto commits = live.store->commits();
    all.insert(all.end(), commits.begin(), commits.end());
    const auto abandoned = live.store->abandoned();
    all.insert(all.end(), abandoned.begin(), abandoned.end());
    live.store->adopt(*std::ranges::find_if(all, [&](const CommitHeader& c) { return chosen.is(c); }));
  });
  forget_what_others_lack();
  all_together("read the commit", [&] {
    try {
      for (std::uint32_t u = 0; u < table.units().size(); ++u) live.record_io->load(UnitId{u});
    } catch (const CorruptionError& error) {
      throw CorruptionError(error.where, remedy_for(error.where));
    }
    auto state = detail::decode(live.store->caller_state());
    if (!state) throw StoreError(fmt::format("the commit in {} was not made by this engine", options.store_directory));
    step_state = std::move(*state);
  });
  if (step_state.scaler) scaler.restore(*step_state.scaler);
  step_count = chosen.step;
}

// A crash while a step was being kept leaves it on some ranks only, or beside the one it was to replace.
void Engine::Impl::forget_what_others_lack() {
  const std::vector<CommitHeader> kept = live.store->kept();
  auto common = agree_on_commits(kept, live.store->store_number());
  std::ranges::sort(common, std::greater{}, &CommonCommit::kept_serial);
  all_together("give up kept steps", [&] {
    std::vector<std::string> names;
    for (auto k = kept.rbegin(); k != kept.rend(); ++k) {  // newest first
      const bool shared = std::ranges::any_of(common, [&](const CommonCommit& c) { return c.is(*k); });
      const bool replaced = std::ranges::find(names, k->name) != names.end();
      if (shared && !replaced && names.size() < live.store->kept_steps_max())
        names.push_back(k->name);
      else
        live.store->forget(k->kept_serial);
    }
  });
}

std::string Engine::Impl::remedy_for(const CorruptionError::Where& damage) const {
  if (!live.store || live.store->kept().empty()) return {};
  std::vector<std::string> names;
  for (const CommitHeader& kept : live.store->kept_apart_from(damage))
    names.push_back(fmt::format("'{}' (step {})", kept.name, kept.step));
  if (names.empty()) return "every kept step holds the same bytes: none of them is whole";
  return fmt::format(
      "kept steps that do not hold these bytes: {}; when `hoist inspect --verify` has found one whole, go back to it "
      "with --resume --from NAME",
      fmt::join(names, ", "));
}

RestoreReport Engine::restore(const RestoreOptions& options) { return impl_->restore(options); }

}  // namespace hoist
