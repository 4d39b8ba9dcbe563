// SPDX-License-Identifier: Apache-2.0
// python/src/tensor.hpp - arrays that cross between Python and C++, by DLPack: nothing here knows PyTorch's ABI.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/types.hpp>

namespace hoist::python {

namespace nb = nanobind;

// Dense CPU memory of any type.
using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
using ConstArray = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;

inline nb::dlpack::dtype dlpack_type(DType dtype) {
  if (dtype == DType::fp32) return nb::dtype<float>();
  const auto code = dtype == DType::bf16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  return {static_cast<std::uint8_t>(code), 16, 1};
}

inline DType type_of(const nb::dlpack::dtype& type) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    if (type == dlpack_type(dtype)) return dtype;
  throw UsageError("an array is neither float32, bfloat16 nor float16");
}

}  // namespace hoist::python
