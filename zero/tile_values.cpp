// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>

#include <hoist/core/assert.hpp>
#include <hoist/zero/detail/tile_values.hpp>

namespace hoist::detail {

using tiers::Region;
using tiers::Tile;

StateArrays TileAccess::view() const {
  const tiers::StateTileView arrays = tiers::view_state_tile(segment->record(), tile->elements, state);
  const bool has_first = segment->has(State::moment1);
  return {.remainder = arrays.remainder,
          .master = arrays.master,
          .moment1 = has_first ? arrays.moments[0] : nullptr,
          .moment2 = segment->has(State::moment2) ? arrays.moments[has_first ? 1 : 0] : nullptr};
}

namespace {

void* moment_of(const TileAccess& tile, State state) {
  const StateArrays arrays = tile.view();
  void* const moment = state == State::moment1 ? arrays.moment1 : arrays.moment2;
  HOIST_ASSERT(moment != nullptr, "segment without moment {}", state == State::moment1 ? 1 : 2);
  return moment;
}

}  // namespace

float load_element(const std::byte* elements, DType dtype, std::uint64_t index) {
  switch (dtype) {
    case DType::bf16:
      return to_float(reinterpret_cast<const bf16*>(elements)[index]);
    case DType::fp16:
      return fp16_to_float(reinterpret_cast<const std::uint16_t*>(elements)[index]);
    case DType::fp32:
      break;
  }
  return reinterpret_cast<const float*>(elements)[index];
}

float load_value(const TileAccess& tile, State state, std::uint64_t element) {
  if (state != State::master)
    return load_element(static_cast<const std::byte*>(moment_of(tile, state)), tile.segment->state.moments, element);
  const DType dtype = tile.segment->dtype;
  if (tile.state == nullptr || dtype == DType::fp32) return load_element(tile.weights, dtype, element);
  const StateArrays state_arrays = tile.view();
  return dtype == DType::fp16
             ? state_arrays.master[element]
             : join_master(reinterpret_cast<const bf16*>(tile.weights)[element], state_arrays.remainder[element]);
}

void store_value(const TileAccess& tile, State state, std::uint64_t element, float value) {
  if (state != State::master) {
    void* const moment = moment_of(tile, state);
    if (tile.segment->state.moments == DType::bf16) {
      static_cast<bf16*>(moment)[element] = to_bf16(value);
    } else {
      static_cast<float*>(moment)[element] = value;
    }
  } else if (tile.segment->dtype == DType::fp32) {
    reinterpret_cast<float*>(tile.weights)[element] = value;
  } else if (tile.segment->dtype == DType::fp16) {
    reinterpret_cast<std::uint16_t*>(tile.weights)[element] = float_to_fp16(value);
    if (tile.state != nullptr) tile.view().master[element] = value;
  } else {
    const SplitMaster split = split_master(value);
    reinterpret_cast<bf16*>(tile.weights)[element] = split.weight;
    if (tile.state != nullptr) tile.view().remainder[element] = split.remainder;
  }
}

void begin_state(const TileAccess& tile, const GroupOptions& group) {
  if (tile.tile->s_bytes == 0) return;  // there may be no memory for it
  std::memset(tile.state, 0, tile.tile->s_bytes);
  if (group.kind != optim::OptimizerKind::adagrad || group.initial_accumulator == 0) return;
  const auto value = static_cast<float>(group.initial_accumulator);
  for (std::uint64_t i = 0; i < tile.tile->elements; ++i) store_value(tile, State::moment2, i, value);
}

ElementRange overlap(const Tile& tile, std::uint64_t first, std::uint64_t count) {
  const std::uint64_t low = std::max(first, tile.first_element);
  const std::uint64_t high = std::min(first + count, tile.first_element + tile.elements);
  return low < high ? ElementRange{low - tile.first_element, high - low} : ElementRange{};
}

namespace {

// Calls visit(tiles, weights, state) for the tiles that hold the elements, kAccessTiles at most at a time.
template <typename Visit>
void for_each_run(const tiers::RecordLayout& layout, const Segment& segment, std::uint64_t first, std::uint64_t count,
                  bool with_state, const FetchTiles& fetch, const Visit& visit) {
  const auto tiles = layout.tiles();
  const auto wanted = [&](const Tile& tile) {
    return tile.segment == segment.record_segment && overlap(tile, first, count).count > 0;
  };
  const auto begin = std::find_if(tiles.begin(), tiles.end(), wanted);
  const auto end = std::find_if_not(begin, tiles.end(), wanted);
  for (auto run = begin; run != end;) {
    const auto run_end = run + std::min<std::ptrdiff_t>(kAccessTiles, end - run);
    const Tile& last = *(run_end - 1);
    TileRun wanted_run{.first = static_cast<std::uint32_t>(run - tiles.begin()),
                       .count = static_cast<std::uint32_t>(run_end - run)};
    wanted_run.region = Region::weights;
    wanted_run.offset_bytes = run->w_offset;
    wanted_run.length_bytes = last.w_offset + last.w_bytes - run->w_offset;
    const std::byte* weights = fetch(wanted_run);
    const std::byte* state = nullptr;
    if (with_state && last.s_offset + last.s_bytes > run->s_offset) {
      wanted_run.region = Region::state;
      wanted_run.offset_bytes = run->s_offset;
      wanted_run.length_bytes = last.s_offset + last.s_bytes - run->s_offset;
      state = fetch(wanted_run);
    }
    visit(std::span(run, run_end), weights, state);
    run = run_end;
  }
}

}  // namespace

void read_values(const tiers::RecordLayout& layout, const Segment& segment, State state, std::uint64_t first,
                 std::span<float> out, const FetchTiles& fetch) {
  for_each_run(layout, segment, first, out.size(), segment.trainable, fetch,
               [&](std::span<const Tile> tiles, const std::byte* weights, const std::byte* states) {
                 for (const Tile& tile : tiles) {
                   // Only looked at; TileAccess has one form for reading and writing.
                   const TileAccess access{
                       .segment = &segment,
                       .tile = &tile,
                       .weights = const_cast<std::byte*>(weights + (tile.w_offset - tiles.front().w_offset)),
                       .state = states == nullptr
                                    ? nullptr
                                    : const_cast<std::byte*>(states + (tile.s_offset - tiles.front().s_offset))};
                   const ElementRange range = overlap(tile, first, out.size());
                   float* target = out.data() + (tile.first_element + range.first - first);
                   for (std::uint64_t i = 0; i < range.count; ++i)
                     target[i] = load_value(access, state, range.first + i);
                 }
               });
}

void read_weights(const tiers::RecordLayout& layout, const Segment& segment, std::uint64_t first,
                  std::span<std::byte> out, const FetchTiles& fetch) {
  const std::uint64_t width = dtype_bytes(segment.dtype);
  const std::uint64_t count = out.size() / width;
  for_each_run(layout, segment, first, count, /*with_state=*/false, fetch,
               [&](std::span<const Tile> tiles, const std::byte* weights, const std::byte*) {
                 for (const Tile& tile : tiles) {
                   const ElementRange range = overlap(tile, first, count);
                   std::memcpy(out.data() + (tile.first_element + range.first - first) * width,
                               weights + (tile.w_offset - tiles.front().w_offset) + range.first * width,
                               range.count * width);
                 }
               });
}

}  // namespace hoist::detail
