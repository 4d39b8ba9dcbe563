// SPDX-License-Identifier: Apache-2.0
// interchange/export.hpp - writes one commit of a store as safetensors files.
//
// Every byte read from the store is verified before it is written. A parameter is written once, under its own name,
// also where other units are tied to it; frozen parameters are included. Large parameters that hoist.optim has cut
// into pieces are whole again. Moments are not exported: they belong to the store.
//
// Threading  The caller's thread reads and converts, a second one writes.
// Memory     A fixed 8 MiB of values in transit, beside the tables of StoredModel and the headers of the files.
// Errors     Those of StoredModel::read and SafetensorsWriter; no file that looks complete remains.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/dtype.hpp>
#include <hoist/interchange/safetensors.hpp>

namespace hoist {
class StoredModel;
}

namespace hoist::interchange {

struct ExportOptions {
  std::string directory;  // created if it does not exist; refused if it already holds a model
  // fp32: the masters, bit by bit; an import of them loses only the moments. bf16: the weights that the forward pass
  // uses, rounded as the engine rounds. fp16: the same for a model whose 16-bit weights are fp16.
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

TensorType tensor_type(DType dtype);
// Errors: UsageError if `dtype` is fp16 and the weights are bf16, which have a larger range.
void refuse_lost_range(const std::string& parameter, DType weights, DType dtype);
// Masters as weights of 16 bits, rounded as the engine rounds for the forward pass; 2 bytes each go to `out`. Errors:
// UsageError for one that fp16 cannot hold.
void narrow(std::span<const float> masters, DType dtype, const std::string& parameter, std::byte* out);

// Exports one store's model, or the slices of several sharding groups, at one step, as one. Errors: UsageError for fp16
// if the model has weights of a larger range; also if two slices have a parameter of the same name: only the program
// knows whether these are copies or parts of one tensor, and how it was cut.
ExportReport export_model(std::span<StoredModel* const> slices, const ExportOptions& options);

}  // namespace hoist::interchange
