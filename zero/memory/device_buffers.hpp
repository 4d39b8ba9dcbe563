// SPDX-License-Identifier: Apache-2.0
// zero/memory/device_buffers.hpp - how many buffers an engine has in device memory beside its units' regions.
//
// Threading  Pure functions on constant data. Borrows the regions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <hoist/scheduler/places.hpp>
#include <hoist/zero/memory/unit_regions.hpp>

namespace hoist::detail {

struct DeviceBuffers {
  std::uint64_t gradient_count = 0;
  std::uint64_t gather_bytes = 0;  // what gathered units share
};

class DeviceBufferChooser {
 public:
  DeviceBufferChooser(const EngineOptions& options, const UnitRegions& regions);

  // The least that trains: what a single gather() pins at most, and one unit's gradient.
  DeviceBuffers least() const;
  // As many as fit into `free_bytes` together with the units' regions; the least if that does not fit either.
  DeviceBuffers choose(std::uint64_t free_bytes) const;
  std::uint64_t bytes(const DeviceBuffers& buffers) const;  // with the units' regions
  // Calls visit(role, bytes) for every buffer.
  template <typename Visit>
  void for_each(const DeviceBuffers& buffers, const Visit& visit) const {
    for (std::uint64_t i = 0; i < buffers.gradient_count; ++i) visit(MemoryRole::gradient_buffer, gradient_bytes_);
    if (buffers.gather_bytes > 0) visit(MemoryRole::gather_memory, buffers.gather_bytes);
  }

 private:
  const UnitRegions& regions_;
  std::uint64_t gradient_bytes_ = 0;  // the largest gradient, and its sums in fp32 if those are on the device
  std::uint64_t gather_least_bytes_ = 0;
  std::uint64_t gather_most_bytes_ = 0;  // all units at once, as far as live_elements_max goes
  std::uint64_t largest_unit_bytes_ = 0;
};

// EngineOptions::live_elements_max that makes room for so many bytes of gathered weights.
std::uint64_t live_elements_for(const UnitTable& table, std::uint64_t bytes);

// The gather memory that each unit needs, by unit.
std::vector<scheduler::ItemNeeds> gather_needs(const UnitRegions& regions);

// The device memory that an engine needs at least, beside the program's own blocks.
std::uint64_t least_device_bytes(const EngineOptions& options, const UnitTable& table, DeviceAccess access);
// The smallest optimizer_offload_ratio above the present one, in hundredths, with which that is at most
// `available_bytes`; empty if none is.
std::optional<double> fitting_offload_ratio(EngineOptions options, const UnitTable& table, DeviceAccess access,
                                            std::uint64_t available_bytes);

}  // namespace hoist::detail
