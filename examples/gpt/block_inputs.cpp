// SPDX-License-Identifier: Apache-2.0
#include "block_inputs.hpp"

#include <algorithm>
#include <utility>

#include <hoist/zero/runtime.hpp>

namespace hoist::gpt {

namespace {

// With offloading: the item being read, all micro-batches of the layer being written, and one that is being copied down
// meanwhile.
constexpr std::size_t kBuffersBesideAWrittenLayer = 2;

}  // namespace

BlockInputs::BlockInputs(Runtime& runtime, const BlockInputsOptions& options)
    : options_(options), leaving_(buffer_count(options)) {
  if (!options.offload) return;
  offload_.emplace(runtime.device(), runtime.pinned_budget(),
                   tiers::ActivationOffloadOptions{.items = options.layers * options.held_micro_batches,
                                                   .item_bytes = options.item_bytes,
                                                   .huge_pages = runtime.options().huge_pages,
                                                   .numa_nodes = runtime.options().memory_nodes,
                                                   .touch_cpus = runtime.options().update_cpus});
}

std::size_t BlockInputs::buffer_count(const BlockInputsOptions& options) {
  const std::size_t all = (options.layers + 1) * options.held_micro_batches;
  return options.offload ? std::min(all, options.held_micro_batches + kBuffersBesideAWrittenLayer) : all;
}

void BlockInputs::begin(std::size_t micro_batches, Return when) {
  micro_batches_ = micro_batches;
  return_ = when;
}

float* BlockInputs::forward_input(std::size_t layer, std::size_t micro_batch) const {
  return buffers_[item(layer, micro_batch) % buffers_.size()];
}

float* BlockInputs::output_for(std::size_t layer, std::size_t micro_batch, platform::StreamRef compute) {
  const std::size_t buffer = item(layer, micro_batch) % buffers_.size();
  compute->wait(std::exchange(leaving_[buffer], {}), WaitCause::host_to_device);
  return buffers_[buffer];
}

void BlockInputs::leave(std::size_t layer, std::size_t micro_batch, platform::StreamRef compute) {
  if (!offload_ || return_ == Return::never) return;
  const std::size_t index = item(layer, micro_batch);
  leaving_[index % buffers_.size()] =
      offload_->offload(index, reinterpret_cast<const std::byte*>(forward_input(layer, micro_batch)), compute);
}

// Turns alternate between the first two buffers: nothing in the others is needed any more.
void BlockInputs::fetch(std::size_t turn, platform::StreamRef compute) {
  const std::size_t layer = options_.layers - 1 - turn / micro_batches_;
  arriving_[turn % 2] =
      offload_->reload(item(layer, turn % micro_batches_), reinterpret_cast<std::byte*>(buffers_[turn % 2]), compute);
}

float* BlockInputs::bring(std::size_t layer, std::size_t micro_batch, platform::StreamRef compute) {
  if (!offload_) return forward_input(layer, micro_batch);
  const std::size_t turn = (options_.layers - 1 - layer) * micro_batches_ + micro_batch;
  if (turn == 0) fetch(0, compute);
  if (turn + 1 < options_.layers * micro_batches_) fetch(turn + 1, compute);
  compute->wait(std::exchange(arriving_[turn % 2], {}), WaitCause::host_to_device);
  return buffers_[turn % 2];
}

std::uint64_t BlockInputs::offloaded_bytes(std::size_t micro_batches) const {
  return offload_ ? options_.layers * micro_batches * options_.item_bytes : 0;
}

}  // namespace hoist::gpt
