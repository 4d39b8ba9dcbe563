// SPDX-License-Identifier: Apache-2.0
// python/src/tensor.hpp - arrays that cross between Python and C++, by DLPack: nothing here knows PyTorch's ABI.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace hoist::python {

namespace nb = nanobind;

// Dense CPU memory of any type.
using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
using ConstArray = nb::ndarray<nb::ro, nb::device::cpu, nb::c_contig>;
using FloatArray = nb::ndarray<float, nb::shape<-1>, nb::device::cpu, nb::c_contig>;
using ConstFloatArray = nb::ndarray<nb::ro, float, nb::shape<-1>, nb::device::cpu, nb::c_contig>;

}  // namespace hoist::python
