// SPDX-License-Identifier: Apache-2.0
// zero/layout/unit_table.hpp - the model as declared: units, their segments, and where everything lies.
//
// A segment is the run of a unit's parameters with one dtype, trainability, group and norm membership. Trainable
// segments come first and form one record (weights + optimizer state); frozen ones form a second, weights only, which
// is written once and never again.
//
// The layouts of a unit, all in bytes:
//   gathered   device: per segment [rank, shard], segments at multiples of 4 KiB
//   host       this rank's weights: the W region of the trainable record, then that of the frozen one
//   gradient   device: per trainable segment [rank, shard]. In vertical order behind it the same in fp32, where
//              micro-batches are added up. In memory: this rank's shards only, each at a multiple of 4 KiB, so that
//              the gradient of a tile is whole blocks
// With one rank, gathered and host are the same bytes.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/tiers/record_layout.hpp>
#include <hoist/zero/layout/partition.hpp>
#include <hoist/zero/model.hpp>
#include <hoist/zero/types.hpp>

namespace hoist::detail {

// Whether an update makes weights from their masters alone, whatever the weights were.
constexpr bool update_makes_weights(DType dtype) { return dtype == DType::fp16; }

struct Segment {
  DType dtype = DType::bf16;
  bool trainable = true;
  GroupId group{};
  bool counts_in_norm = true;
  optim::StateForm state{};          // what the group's optimizer keeps; of trainable segments
  std::uint64_t elements = 0;        // parameters and the alignment between them
  std::uint64_t shard_elements = 0;  // per rank
  std::uint32_t record_segment = 0;  // index within its record's layout
  std::uint64_t gathered_offset = 0;
  std::uint64_t host_offset = 0;
  std::uint64_t gradient_offset = 0;
  std::uint64_t gradient_sum_offset = 0;  // from the beginning of the unit's gradient memory
  std::uint64_t gradient_shard_offset = 0;
  DType gradient_shard_dtype = DType::bf16;  // as it comes down, or fp32 where micro-batches are added up

  std::uint64_t shard_bytes() const { return shard_elements * dtype_bytes(dtype); }
  tiers::RecordSegment record() const {
    return {.dtype = dtype,
            .trainable = trainable,
            .shard_elements = shard_elements,
            .moment_count = optim::moment_count(state.state),
            .moment_type = state.moments,
            .remainder = state.remainder};
  }
  bool update_makes_weights() const { return detail::update_makes_weights(dtype); }
  bool has(State moment) const;  // whether the optimizer keeps this moment
};

struct Unit {
  std::string name;
  UnitOptions options;
  std::vector<Segment> segments;
  std::vector<ParameterId> parameters;
  std::vector<UnitId> tied;              // owners of parameters this unit also uses
  bool has_own_gradient_memory = false;  // between other units' gradients, too: as of a tied parameter's owner
  tiers::RecordLayout trainable{std::span<const tiers::RecordSegment>{}};
  tiers::RecordLayout frozen{std::span<const tiers::RecordSegment>{}};
  std::uint64_t elements = 0;
  std::uint64_t gathered_bytes = 0;
  std::uint64_t gradient_bytes = 0;
  std::uint64_t gradient_sum_bytes = 0;  // 0 unless micro-batches are added up on the device
  std::uint64_t gradient_shard_bytes = 0;

  std::uint64_t host_bytes() const {
    return trainable.region_bytes(tiers::Region::weights) + frozen.region_bytes(tiers::Region::weights);
  }
  std::uint64_t frozen_offset() const { return trainable.region_bytes(tiers::Region::weights); }
  std::uint64_t gradient_buffer_bytes() const { return gradient_bytes + gradient_sum_bytes; }
  // Where the gradient of a trainable tile begins among this rank's shards.
  std::uint64_t gradient_offset(const tiers::Tile& tile) const {
    const Segment& segment = segments[tile.segment];
    return segment.gradient_shard_offset + tile.first_element * dtype_bytes(segment.gradient_shard_dtype);
  }
  // The gradient of consecutive trainable tiles, with what fills its last block up.
  struct GradientPart {
    std::uint64_t offset = 0, bytes = 0;
  };
  GradientPart gradient_part(std::uint32_t first_tile, std::uint32_t tile_count) const;
  bool is_trainable() const { return !trainable.tiles().empty(); }
  std::span<const Segment> trainable_segments() const { return std::span(segments).first(trainable.segments().size()); }
  // The chunks of this rank's shards, in which the norm is summed up (core/norm_order.hpp).
  std::uint64_t norm_chunks() const;
};

struct Parameter {
  UnitId unit{};
  std::uint32_t segment = 0;
  std::uint64_t first_element = 0;  // within the segment
  std::uint64_t count = 0;
};

// Where the gradients of a step's micro-batches are added up, in fp32.
enum class GradientSums : std::uint8_t {
  none,       // a step has one
  in_memory,  // horizontal order: in this rank's shards
  on_device,  // vertical order: in the gradient buffer
};

class UnitTable {
 public:
  // The state that the optimizer of a unit's parameters keeps.
  using StateOf = std::function<optim::StateForm(UnitId, GroupId)>;
  // `groups`: what the optimizer of each parameter group keeps. Pre: the model's parameters name no others.
  UnitTable(Model model, std::span<const optim::StateForm> groups, int world_size,
            GradientSums sums = GradientSums::none);
  UnitTable(Model model, const StateOf& state_of, int world_size, GradientSums sums = GradientSums::none);

  const Model& model() const { return model_; }
  const std::vector<Unit>& units() const { return units_; }
  const Unit& unit(UnitId id) const { return units_[id.index]; }
  const Parameter& parameter(ParameterId id) const { return parameters_[id.index]; }
  const ParameterSpec& spec(ParameterId id) const { return model_.parameters()[id.index]; }
  std::span<const ParameterSpec> specs() const { return model_.parameters(); }
  const Segment& segment_of(ParameterId id) const { return unit(parameter(id).unit).segments[parameter(id).segment]; }
  int world_size() const { return world_size_; }
  // Whether there is such a state of the parameter: a frozen one has its master only.
  bool keeps(ParameterId id, State state) const;
  void require_kept(ParameterId id, State state) const;  // UsageError
  // UsageError unless the program's id is one of the model's.
  void require(ParameterId id) const;
  void require(UnitId id) const;
  GradientSums gradient_sums() const { return sums_; }

  // The text by which a store recognises its model: one line per parameter.
  std::string identity() const;
  // What a store whose text is `stored` has and this table has not, for an error: "was trained by Lion, and ...". Pre:
  // the texts differ.
  std::string difference_from(std::string_view stored) const;
  // The table such a text describes: same parameters, segments and records. The text does not say which groups the
  // segments of a unit had and what was tied; groups are numbered by segment instead.
  // Errors: StoreError when the text is none of ours, or describes more than `elements_max` elements: nothing is made
  // for those.
  static UnitTable from_identity(std::string_view text, int world_size, std::uint64_t elements_max = ~std::uint64_t{0});

 private:
  Unit make_unit(UnitId id, const StateOf& state_of);
  tiers::RecordLayout layout_of(std::span<const tiers::RecordSegment> segments) const;
  void lay_out(Unit& unit) const;
  Model model_;
  int world_size_;
  GradientSums sums_;
  std::vector<Unit> units_;
  std::vector<Parameter> parameters_;
};

}  // namespace hoist::detail
