// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/tiers/activation_offload.hpp>
#include <hoist/tiers/pinned_pool.hpp>

namespace hoist::tiers {

ActivationOffload::ActivationOffload(platform::Device& device, Budget& pinned, const ActivationOffloadOptions& options)
    : device_(device),
      options_(options),
      pool_(std::make_unique<PinnedPool>(pinned, platform::HostMemoryOptions{.bytes = bytes(options),
                                                                             .huge_pages = options.huge_pages,
                                                                             .numa_nodes = options.numa_nodes,
                                                                             .touch_cpus = options.touch_cpus})),
      offloaded_(options.items),
      down_(device.create_stream("offload")),
      up_(device.create_stream("reload")) {
  device_.register_host(pool_->memory().bytes());
}

ActivationOffload::~ActivationOffload() {
  down_.reset();  // drained: nothing is in flight when the memory goes
  up_.reset();
  device_.unregister_host(pool_->memory().bytes());
}

std::uint64_t ActivationOffload::bytes(const ActivationOffloadOptions& options) {
  constexpr std::uint64_t kCountedMax = std::numeric_limits<std::uint64_t>::max();
  if (options.items > 0 && options.item_bytes > round_down(kCountedMax / options.items, kBlockAlignment))
    throw UsageError(
        fmt::format("ActivationOffloadOptions::items ({}) of item_bytes ({}) are more bytes than 64 bits can count",
                    options.items, options.item_bytes));
  return options.items * PinnedPlan::piece_bytes(options.item_bytes);
}

std::byte* ActivationOffload::place(std::size_t item) const {
  if (item >= offloaded_.size())
    throw UsageError(fmt::format("there is no item {} of offloaded activations: ActivationOffloadOptions::items is {}",
                                 item, offloaded_.size()));
  return pool_->memory().bytes().data() + item * PinnedPlan::piece_bytes(options_.item_bytes);
}

platform::StreamEvent ActivationOffload::offload(std::size_t item, const std::byte* source,
                                                 platform::StreamRef compute) {
  std::byte* const target = place(item);
  down_->wait(last_reloaded_, WaitCause::none);
  down_->wait(compute->record(), WaitCause::none);
  down_->copy(target, source, options_.item_bytes, platform::CopyKind::device_to_host);
  offloaded_[item] = true;
  last_offloaded_ = down_->record();
  return last_offloaded_;
}

platform::StreamEvent ActivationOffload::reload(std::size_t item, std::byte* target, platform::StreamRef compute) {
  const std::byte* const source = place(item);
  if (!offloaded_[item]) throw UsageError(fmt::format("item {} of activations was never offloaded", item));
  up_->wait(last_offloaded_, WaitCause::none);
  up_->wait(compute->record(), WaitCause::none);
  up_->copy(target, source, options_.item_bytes, platform::CopyKind::host_to_device);
  last_reloaded_ = up_->record();
  return last_reloaded_;
}

}  // namespace hoist::tiers
