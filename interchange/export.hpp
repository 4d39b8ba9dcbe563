// SPDX-License-Identifier: Apache-2.0
// interchange/export.hpp - one commit of a store as safetensors files.
//
// Every byte read from the store is verified before it is written. A parameter is written once, under its own name,
// also where other units are tied to it; frozen parameters are included. Moments are not exported: they belong to the
// store.
//
// Threading  The caller's thread reads and converts, a second one writes.
// Memory     A fixed 8 MiB of values on the way, beside the tables of StoredModel and the headers of the files.
// Errors     Those of StoredModel::read and SafetensorsWriter; nothing that looks whole is left behind.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/dtype.hpp>

namespace hoist {
class StoredModel;
}

namespace hoist::interchange {

struct ExportOptions {
  std::string directory;  // made when it does not exist; refused when it holds a model already
  // fp32: the masters, bit by bit; importing them continues with nothing lost but the moments. bf16: what the forward
  // pass computes with, rounded as the engine rounds. fp16: the same of a model whose 16-bit weights are fp16.
  DType dtype = DType::fp32;
  std::uint64_t shard_bytes_max = 5'000'000'000;
  // Called with bytes written and bytes in all; an exception from it ends the export.
  std::function<void(std::uint64_t done, std::uint64_t total)> progress{};
};

struct ExportReport {
  std::vector<std::string> files;
  std::uint64_t tensor_count = 0;
  std::uint64_t element_count = 0;
  std::uint64_t data_bytes = 0;
};

// Errors: UsageError for fp16 where the model has weights of a larger range.
ExportReport export_model(StoredModel& model, const ExportOptions& options);
// The slices of several sharding groups, of one step, as one model. Errors: UsageError also where two have a parameter
// of one name: whether these are copies or the parts of one tensor, and how it was cut, is the program's to know.
ExportReport export_model(std::span<StoredModel* const> slices, const ExportOptions& options);

}  // namespace hoist::interchange
