// SPDX-License-Identifier: Apache-2.0
// cli/doctor/gpus.hpp - the NVIDIA GPUs on the PCI bus, with or without a driver.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "finding.hpp"

namespace hoist::cli {

struct PciGpu {
  std::string address;  // "0000:17:00.0"
  std::optional<int> node;
  std::optional<std::uint64_t> lanes, lanes_max;  // PCIe
};

std::vector<PciGpu> find_gpus(const MachineSources& machine);

}  // namespace hoist::cli
