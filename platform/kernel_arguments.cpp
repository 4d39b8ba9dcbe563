// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/assert.hpp>
#include <hoist/platform/detail/kernel_arguments.hpp>

namespace hoist::platform::detail {

namespace {

bool aligned(const void* pointer, std::uint64_t bytes) {
  return pointer != nullptr && reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

}  // namespace

void check_arguments(const ScaleArguments& a) {
  HOIST_ASSERT(aligned(a.target, dtype_bytes(a.target_dtype)) && aligned(a.source, dtype_bytes(a.source_dtype)),
               "target {}, source {}", static_cast<void*>(a.target), static_cast<const void*>(a.source));
}

void check_arguments(const NormArguments& a) {
  HOIST_ASSERT(aligned(a.partial, sizeof(double)) && aligned(a.source, dtype_bytes(a.dtype)), "sums {}, source {}",
               static_cast<void*>(a.partial), static_cast<const void*>(a.source));
}

void check_arguments(const UpdateArguments& arguments) {
  const UpdateArrays& a = arguments.arrays;
  const UpdateFormula formula = arguments.factors.formula;
  HOIST_ASSERT(a.moment_dtype != DType::fp16, "moments of fp16");
  HOIST_ASSERT(aligned(a.weights, dtype_bytes(a.weights_dtype)), "weights {}", static_cast<void*>(a.weights));
  HOIST_ASSERT(a.weights_dtype == DType::fp32 || aligned(a.master, a.weights_dtype == DType::bf16 ? 2 : 4),
               "masters {}", static_cast<void*>(a.master));
  HOIST_ASSERT(aligned(a.gradient, dtype_bytes(a.gradient_dtype)), "gradient {}", static_cast<const void*>(a.gradient));
  HOIST_ASSERT(!uses_moment1(formula) || aligned(a.moment1, dtype_bytes(a.moment_dtype)), "first moment {}",
               static_cast<void*>(a.moment1));
  HOIST_ASSERT(!uses_moment2(formula) || aligned(a.moment2, dtype_bytes(a.moment_dtype)), "second moment {}",
               static_cast<void*>(a.moment2));
  HOIST_ASSERT(a.tile_elements == 0 || a.tile_stride_bytes % 4 == 0, "tiles {} bytes apart", a.tile_stride_bytes);
}

}  // namespace hoist::platform::detail
