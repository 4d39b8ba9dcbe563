// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include <hoist/core/assert.hpp>
#include <hoist/optim_cpu/block_fp8.hpp>
#include <hoist/zero/layout/tile_values.hpp>

namespace hoist::detail {

using tiers::Region;
using tiers::Tile;

tiers::StateTileView TileAccess::view() const {
  tiers::StateTileView arrays = tiers::view_state_tile(segment->record(), tile->elements, state);
  if (!segment->has(State::moment1)) {  // a second moment alone lies first
    std::swap(arrays.moments[0], arrays.moments[1]);
    std::swap(arrays.scales[0], arrays.scales[1]);
  }
  return arrays;
}

namespace {

// One moment's arrays.
struct MomentArrays {
  void* values = nullptr;
  std::uint8_t* scales = nullptr;  // of fp8
  optim::Moment moment = optim::Moment::first;
};
MomentArrays moment_of(const TileAccess& tile, State state) {
  const tiers::StateTileView arrays = tile.view();
  const std::size_t i = state == State::moment1 ? 0 : 1;
  HOIST_ASSERT(tile.segment->has(state), "segment without moment {}", i + 1);
  return {.values = arrays.moments[i],
          .scales = arrays.scales[i],
          .moment = i == 0 ? optim::Moment::first : optim::Moment::second};
}

void load_moments(const TileAccess& tile, State state, std::uint64_t first, std::span<float> out) {
  const MomentArrays arrays = moment_of(tile, state);
  switch (tile.segment->state.moments) {
    case MomentType::fp32:
      return load_elements(static_cast<const std::byte*>(arrays.values), DType::fp32, first, out);
    case MomentType::bf16:
      return load_elements(static_cast<const std::byte*>(arrays.values), DType::bf16, first, out);
    case MomentType::fp8:
      for (std::uint64_t i = 0; i < out.size(); ++i)
        out[i] = optim::decode_moment(static_cast<const std::uint8_t*>(arrays.values)[first + i],
                                      arrays.scales[(first + i) / kMomentBlock], arrays.moment);
      return;
  }
}

void load_masters(const TileAccess& tile, std::uint64_t first, std::span<float> out) {
  const DType dtype = tile.segment->dtype;
  if (tile.state == nullptr || dtype == DType::fp32) return load_elements(tile.weights, dtype, first, out);
  const tiers::StateTileView arrays = tile.view();
  if (dtype == DType::fp16) {
    std::ranges::copy(std::span(arrays.master + first, out.size()), out.begin());
    return;
  }
  const auto* const weights = reinterpret_cast<const bf16*>(tile.weights) + first;
  if (arrays.remainder8 != nullptr)
    std::ranges::transform(std::span(weights, out.size()), std::span(arrays.remainder8 + first, out.size()),
                           out.begin(), join_master24);
  else
    std::ranges::transform(std::span(weights, out.size()), std::span(arrays.remainder + first, out.size()), out.begin(),
                           join_master);
}

// Block by block, since its elements share an exponent.
void store_fp8(const MomentArrays& arrays, std::uint64_t first, std::span<const float> values) {
  auto* const codes = static_cast<std::uint8_t*>(arrays.values);
  while (!values.empty()) {
    const std::uint64_t block = first / kMomentBlock;
    const std::uint64_t begin = block * kMomentBlock;
    const std::uint64_t count = std::min<std::uint64_t>(values.size(), begin + kMomentBlock - first);
    std::array<float, kMomentBlock> whole{};
    for (std::uint64_t i = 0; i < kMomentBlock; ++i)
      whole[i] = optim::decode_moment(codes[begin + i], arrays.scales[block], arrays.moment);
    std::ranges::copy(values.first(count), whole.begin() + static_cast<std::ptrdiff_t>(first - begin));
    if (!optim::encode_block(whole, optim::kAllNearest, arrays.moment, codes + begin, arrays.scales[block])) {
      // To nearest, an element becomes infinite: the block is rounded down instead.
      constexpr std::array<std::uint32_t, kMomentBlock> kDown{};
      (void)optim::encode_block(whole, kDown, arrays.moment, codes + begin, arrays.scales[block]);
    }
    first += count;
    values = values.subspan(count);
  }
}

void store_moment(const TileAccess& tile, State state, std::uint64_t first, std::span<const float> values) {
  const MomentArrays arrays = moment_of(tile, state);
  switch (tile.segment->state.moments) {
    case MomentType::fp32:
      std::ranges::copy(values, static_cast<float*>(arrays.values) + first);
      return;
    case MomentType::bf16:
      std::ranges::transform(values, static_cast<bf16*>(arrays.values) + first, to_bf16);
      return;
    case MomentType::fp8:
      return store_fp8(arrays, first, values);
  }
}

void store_masters(const TileAccess& tile, std::uint64_t first, std::span<const float> values) {
  const tiers::StateTileView arrays = tile.state != nullptr ? tile.view() : tiers::StateTileView{};
  switch (tile.segment->dtype) {
    case DType::fp32:
      std::ranges::copy(values, reinterpret_cast<float*>(tile.weights) + first);
      return;
    case DType::fp16:
      std::ranges::transform(values, reinterpret_cast<std::uint16_t*>(tile.weights) + first, float_to_fp16);
      if (arrays.master != nullptr) std::ranges::copy(values, arrays.master + first);
      return;
    case DType::bf16:
      auto* const weights = reinterpret_cast<bf16*>(tile.weights);
      for (std::uint64_t i = 0; i < values.size(); ++i) {
        const SplitMaster split = split_master(arrays.remainder8 != nullptr ? to_master24(values[i]) : values[i]);
        weights[first + i] = split.weight;
        if (arrays.remainder != nullptr) arrays.remainder[first + i] = split.remainder;
        if (arrays.remainder8 != nullptr)
          arrays.remainder8[first + i] = static_cast<std::int8_t>(split.remainder / 256);
      }
      return;
  }
}

}  // namespace

void load_elements(const std::byte* elements, DType dtype, std::uint64_t first, std::span<float> out) {
  switch (dtype) {
    case DType::bf16:
      std::ranges::transform(std::span(reinterpret_cast<const bf16*>(elements) + first, out.size()), out.begin(),
                             [](bf16 value) { return to_float(value); });
      return;
    case DType::fp16:
      std::ranges::transform(std::span(reinterpret_cast<const std::uint16_t*>(elements) + first, out.size()),
                             out.begin(), fp16_to_float);
      return;
    case DType::fp32:
      std::ranges::copy(std::span(reinterpret_cast<const float*>(elements) + first, out.size()), out.begin());
      return;
  }
}

void load_values(const TileAccess& tile, State state, std::uint64_t first, std::span<float> out) {
  if (state != State::master) return load_moments(tile, state, first, out);
  load_masters(tile, first, out);
}

void store_values(const TileAccess& tile, State state, std::uint64_t first, std::span<const float> values) {
  if (state != State::master) return store_moment(tile, state, first, values);
  store_masters(tile, first, values);
}

void begin_state(const TileAccess& tile, const GroupOptions& group) {
  if (tile.tile->s_bytes == 0) return;  // there may be no memory for it
  std::memset(tile.state, 0, tile.tile->s_bytes);
  if (group.kind != optim::OptimizerKind::adagrad || group.initial_accumulator == 0) return;
  const std::vector<float> values(tile.tile->elements, static_cast<float>(group.initial_accumulator));
  store_values(tile, State::moment2, 0, values);
}

TileRun tile_run(const tiers::RecordLayout& layout, Region region, std::uint32_t first, std::uint32_t count) {
  return {.region = region,
          .first = first,
          .count = count,
          .offset_bytes = layout.tile_bytes(region, 0, first),
          .length_bytes = layout.tile_bytes(region, first, count)};
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
    const auto index = static_cast<std::uint32_t>(run - tiles.begin());
    const auto tile_count = static_cast<std::uint32_t>(run_end - run);
    const std::byte* weights = fetch(tile_run(layout, Region::weights, index, tile_count));
    const TileRun states = tile_run(layout, Region::state, index, tile_count);
    const std::byte* state = with_state && states.length_bytes > 0 ? fetch(states) : nullptr;
    visit(std::span(run, run_end), weights, state);
    run = run_end;
  }
}

}  // namespace

void read_values(const tiers::RecordLayout& layout, const Segment& segment, State state, std::uint64_t first,
                 std::span<float> out, const FetchTiles& fetch) {
  for_each_run(
      layout, segment, first, out.size(), segment.trainable, fetch,
      [&](std::span<const Tile> tiles, const std::byte* weights, const std::byte* states) {
        for (const Tile& tile : tiles) {
          // Only looked at; TileAccess has one form for reading and writing.
          const TileAccess access{
              .segment = &segment,
              .tile = &tile,
              .weights = const_cast<std::byte*>(weights + (tile.w_offset - tiles.front().w_offset)),
              .state = states == nullptr ? nullptr
                                         : const_cast<std::byte*>(states + (tile.s_offset - tiles.front().s_offset))};
          const ElementRange range = overlap(tile, first, out.size());
          load_values(access, state, range.first, out.subspan(tile.first_element + range.first - first, range.count));
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
