// SPDX-License-Identifier: Apache-2.0
// platform/detail/kernel_arguments.hpp - the arguments of kernels, the division of their work, and the choice of a
// template's kernel. Read by the C++ compiler and by nvcc.
#pragma once

#include <initializer_list>
#include <type_traits>

#include <hoist/platform/elements.hpp>
#include <hoist/platform/update_arrays.hpp>

namespace hoist::platform::detail {

// Stream::scale_into. Both pointers are aligned to their element.
struct ScaleArguments {
  std::byte* target = nullptr;
  DType target_dtype = DType::fp32;
  const std::byte* source = nullptr;
  DType source_dtype = DType::fp32;
  std::uint64_t count = 0;
  float scale = 1;
  bool add = false;
};

// Stream::sums_of_squares.
struct NormArguments {
  double* partial = nullptr;
  const std::byte* source = nullptr;
  DType dtype = DType::fp32;
  std::uint64_t count = 0;
};

// Stream::update.
struct UpdateArguments {
  UpdateFactors factors;
  UpdateArrays arrays;
};

// The preconditions of Stream's kernels, the same on every device.
void check_arguments(const ScaleArguments& arguments);
void check_arguments(const NormArguments& arguments);
void check_arguments(const UpdateArguments& arguments);

// An array's address and the width of its elements; null arrays are ignored.
struct ArrayStart {
  const void* data = nullptr;
  std::uint64_t element_bytes = 0;
};

// Skips elements until every array is at a multiple of 16 bytes; if that never happens, uses no packs.
inline PackSpan pack_span(std::initializer_list<ArrayStart> arrays, std::uint64_t count) {
  for (std::uint64_t head = 0; head < kPackElements && head < count; ++head) {
    bool aligned = true;
    for (const ArrayStart& array : arrays)
      aligned &= array.data == nullptr ||
                 (reinterpret_cast<std::uintptr_t>(array.data) + head * array.element_bytes) % 16 == 0;
    if (aligned) return {head, (count - head) / kPackElements};
  }
  return {};
}

inline PackSpan pack_span(const ScaleArguments& a) {
  return pack_span({{a.target, dtype_bytes(a.target_dtype)}, {a.source, dtype_bytes(a.source_dtype)}}, a.count);
}

// Without a head if the state is in tiles: a pack must not cross two of them.
inline PackSpan pack_span(const UpdateArrays& a) {
  const std::uint64_t master_bytes = a.weights_dtype == DType::bf16 ? 2 : 4;
  const PackSpan span = pack_span({{a.weights, dtype_bytes(a.weights_dtype)},
                                   {a.master, master_bytes},
                                   {a.moment1, dtype_bytes(a.moment_dtype)},
                                   {a.moment2, dtype_bytes(a.moment_dtype)},
                                   {a.gradient, dtype_bytes(a.gradient_dtype)}},
                                  a.count);
  if (a.tile_elements == 0) return span;
  const bool fits = span.head == 0 && a.tile_elements % kPackElements == 0 && a.tile_stride_bytes % 16 == 0;
  return fits ? span : PackSpan{};
}

// --- from types at run time to types of templates --------------------------------------------------------------------

template <typename Use>
auto with_elements(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::bf16:
      return use(AsBf16());
    case DType::fp16:
      return use(AsFp16());
    case DType::fp32:
      break;
  }
  return use(AsFp32());
}

// Calls use(target, source, add) with values of the types that select the kernel.
template <typename Use>
auto with_scale_types(const ScaleArguments& a, const Use& use) {
  return with_elements(a.target_dtype, [&](auto target) {
    return with_elements(a.source_dtype, [&](auto source) {
      return a.add ? use(target, source, std::true_type()) : use(target, source, std::false_type());
    });
  });
}

}  // namespace hoist::platform::detail
