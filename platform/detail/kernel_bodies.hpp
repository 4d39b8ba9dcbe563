// SPDX-License-Identifier: Apache-2.0
// platform/detail/kernel_bodies.hpp - the work of one thread of each kernel, index arithmetic included. Read by the C++
// compiler and by nvcc.
//
// A GPU runs these under a `__global__` wrapper that provides the thread's index (cuda_kernels.cu); the host device
// runs them as a launch of one thread, and tests as launches of many, in any order. Only a GPU runs the wrappers, the
// intrinsics of core/arithmetic.hpp and the conversions of AsFp16.
#pragma once

#include <hoist/core/norm_order.hpp>
#include <hoist/core/update_formula.hpp>
#include <hoist/platform/detail/kernel_arguments.hpp>
#include <hoist/platform/elements.hpp>

namespace hoist::platform::detail {

// A thread's index in a launch, and the number of threads.
struct ThreadPlace {
  std::uint64_t thread = 0;
  std::uint64_t threads = 1;
};

// --- scale_into ------------------------------------------------------------------------------------------------------

template <typename Target, typename Source, bool kAdd, std::uint64_t kCount>
HOIST_HOST_DEVICE void scale_run(const ScaleArguments& a, std::uint64_t first) {
  float values[kCount];
  load_floats<Source>(a.source, first, values);
  for (std::uint64_t j = 0; j < kCount; ++j) values[j] = exact::mul(a.scale, values[j]);
  if constexpr (kAdd) {
    float sums[kCount];
    load_floats<Target>(a.target, first, sums);
    for (std::uint64_t j = 0; j < kCount; ++j) values[j] = exact::add(sums[j], values[j]);
  }
  store_floats<Target>(a.target, first, values);
}

// Target and source may be the same memory: a thread reads its elements before it writes them, and touches no others.
template <typename Target, typename Source, bool kAdd>
HOIST_HOST_DEVICE void scale_thread(const ScaleArguments& a, const PackSpan& span, const ThreadPlace& place) {
  for (std::uint64_t pack = place.thread; pack < span.packs; pack += place.threads)
    scale_run<Target, Source, kAdd, kPackElements>(a, span.head + pack * kPackElements);
  for (std::uint64_t k = place.thread; k < rest_of(span, a.count); k += place.threads)
    scale_run<Target, Source, kAdd, 1>(a, rest_element(span, k));
}

// --- sums_of_squares -------------------------------------------------------------------------------------------------

// A thread has one lane of one chunk; 16 neighbours read 16 adjacent elements.
inline constexpr unsigned kNormThreads = 256;  // a block's
inline constexpr std::uint64_t kNormChunksPerBlock = kNormThreads / kNormLanes;

// The lane of thread `thread` of a block that works on the chunks from `first_chunk` on.
template <typename Source>
HOIST_HOST_DEVICE double lane_of_chunk(const NormArguments& a, std::uint64_t first_chunk, unsigned thread) {
  const std::uint64_t first = (first_chunk + thread / kNormLanes) * kNormChunkElements;
  const std::uint64_t end = first + kNormChunkElements < a.count ? first + kNormChunkElements : a.count;
  double sum = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 8
#endif
  for (std::uint64_t i = first + thread % kNormLanes; i < end; i += kNormLanes) {
    float value[1];
    load_floats<Source>(a.source, i, value);
    const double x = value[0];
    sum = exact::add(sum, exact::mul(x, x));
  }
  return sum;
}

// Once all lanes are there, the first thread of a chunk adds them up.
HOIST_HOST_DEVICE inline void finish_chunk(const NormArguments& a, std::uint64_t first_chunk, unsigned thread,
                                           double* lanes) {
  const std::uint64_t chunk = first_chunk + thread / kNormLanes;
  if (thread % kNormLanes == 0 && chunk * kNormChunkElements < a.count) a.partial[chunk] = sum_of_lanes(lanes + thread);
}

// --- update ----------------------------------------------------------------------------------------------------------

// The position of an element's state: the bytes before its tile, and its index within it.
struct StatePlace {
  std::uint64_t tile_bytes = 0;
  std::uint64_t element = 0;
};
HOIST_HOST_DEVICE inline StatePlace state_place(const UpdateArrays& a, std::uint64_t element) {
  if (a.tile_elements == 0) return {0, element};
  return {element / a.tile_elements * a.tile_stride_bytes, element % a.tile_elements};
}

// Masters, by the type of the weights.
struct SplitMasters {
  static constexpr std::uint32_t kLimitBits = kMasterLimitBits;
  template <std::uint64_t kCount>
  HOIST_HOST_DEVICE static void load(const UpdateArrays& a, std::uint64_t first, const StatePlace& state,
                                     float (&masters)[kCount]) {
    std::uint16_t weights[kCount], remainders[kCount];
    load_stored<kCount>(a.weights, first, weights);
    load_stored<kCount>(a.master + state.tile_bytes, state.element, remainders);
    for (std::uint64_t j = 0; j < kCount; ++j)
      masters[j] = join_master(bf16{weights[j]}, static_cast<std::int16_t>(remainders[j]));
  }
  template <std::uint64_t kCount>
  HOIST_HOST_DEVICE static void store(const UpdateArrays& a, std::uint64_t first, const StatePlace& state,
                                      const float (&masters)[kCount]) {
    std::uint16_t weights[kCount], remainders[kCount];
    for (std::uint64_t j = 0; j < kCount; ++j) {
      const SplitMaster parts = split_master(masters[j]);
      weights[j] = parts.weight.bits;
      remainders[j] = static_cast<std::uint16_t>(parts.remainder);
    }
    store_stored<kCount>(a.weights, first, weights);
    store_stored<kCount>(a.master + state.tile_bytes, state.element, remainders);
  }
};

struct Fp16Masters {
  static constexpr std::uint32_t kLimitBits = kFp16MasterLimitBits;
  template <std::uint64_t kCount>
  HOIST_HOST_DEVICE static void load(const UpdateArrays& a, std::uint64_t, const StatePlace& state,
                                     float (&masters)[kCount]) {
    load_floats<AsFp32>(a.master + state.tile_bytes, state.element, masters);
  }
  template <std::uint64_t kCount>
  HOIST_HOST_DEVICE static void store(const UpdateArrays& a, std::uint64_t first, const StatePlace& state,
                                      const float (&masters)[kCount]) {
    store_floats<AsFp32>(a.master + state.tile_bytes, state.element, masters);
    store_floats<AsFp16>(a.weights, first, masters);
  }
};

struct WholeMasters {
  static constexpr std::uint32_t kLimitBits = kMasterLimitBits;
  template <std::uint64_t kCount>
  HOIST_HOST_DEVICE static void load(const UpdateArrays& a, std::uint64_t first, const StatePlace&,
                                     float (&masters)[kCount]) {
    load_floats<AsFp32>(a.weights, first, masters);
  }
  template <std::uint64_t kCount>
  HOIST_HOST_DEVICE static void store(const UpdateArrays& a, std::uint64_t first, const StatePlace&,
                                      const float (&masters)[kCount]) {
    store_floats<AsFp32>(a.weights, first, masters);
  }
};

// Moments, by their type.
struct MomentsOfFp32 {
  static constexpr std::uint32_t kLimitBits = kInfinityBits;
  using As = AsFp32;
  HOIST_HOST_DEVICE static float stored1(float moment) { return moment; }
  HOIST_HOST_DEVICE static float stored2(float moment, const Rounding&, std::uint64_t) { return moment; }
};
struct MomentsOfBf16 {
  static constexpr std::uint32_t kLimitBits = kBf16MomentLimitBits;
  using As = AsBf16;
  HOIST_HOST_DEVICE static std::uint16_t stored1(float moment) { return moment_as_bf16(moment, kHalfOfBf16); }
  HOIST_HOST_DEVICE static std::uint16_t stored2(float moment, const Rounding& rounding, std::uint64_t element) {
    const auto index = static_cast<std::uint32_t>(rounding.first + element);
    return moment_as_bf16(moment, rounding_bits(rounding.key, index));
  }
};

// Elements [first, first + kCount), all of one tile; whether one of them may not be committed.
template <typename Masters, typename Moments, typename Gradient, std::uint64_t kCount>
HOIST_HOST_DEVICE bool update_run(const UpdateFactors& c, const UpdateArrays& a, std::uint64_t first) {
  using Stored = typename Moments::As::Stored;
  const StatePlace state = state_place(a, first);
  const bool has1 = uses_moment1(c.formula), has2 = uses_moment2(c.formula);
  float masters[kCount], gradients[kCount], moments1[kCount] = {}, moments2[kCount] = {};
  Masters::template load<kCount>(a, first, state, masters);
  load_floats<Gradient>(a.gradient, first, gradients);
  if (has1) load_floats<typename Moments::As>(a.moment1 + state.tile_bytes, state.element, moments1);
  if (has2) load_floats<typename Moments::As>(a.moment2 + state.tile_bytes, state.element, moments2);
  Stored stored1[kCount], stored2[kCount];
  bool refused = false;
  for (std::uint64_t j = 0; j < kCount; ++j) {
    UpdateNumbers n{gradients[j], masters[j], moments1[j], moments2[j]};
    apply_update(c, n);
    masters[j] = n.master;
    stored1[j] = Moments::stored1(exact::without_denormals(n.moment1));
    stored2[j] = Moments::stored2(exact::without_denormals(n.moment2), a.rounding, first + j);
    refused = refused || reaches(n.master, Masters::kLimitBits) || (has1 && reaches(n.moment1, Moments::kLimitBits)) ||
              (has2 && reaches(n.moment2, Moments::kLimitBits));
  }
  Masters::template store<kCount>(a, first, state, masters);
  if (has1) store_stored<kCount>(a.moment1 + state.tile_bytes, state.element, stored1);
  if (has2) store_stored<kCount>(a.moment2 + state.tile_bytes, state.element, stored2);
  return refused;
}

template <typename Masters, typename Moments, typename Gradient>
HOIST_HOST_DEVICE void update_thread(const UpdateFactors& c, const UpdateArrays& a, const PackSpan& span,
                                     const ThreadPlace& place) {
  bool refused = false;
  for (std::uint64_t pack = place.thread; pack < span.packs; pack += place.threads) {
    const std::uint64_t first = span.head + pack * kPackElements;
    refused |= update_run<Masters, Moments, Gradient, kPackElements>(c, a, first);
  }
  for (std::uint64_t k = place.thread; k < rest_of(span, a.count); k += place.threads)
    refused |= update_run<Masters, Moments, Gradient, 1>(c, a, rest_element(span, k));
  if (refused && a.refused != nullptr) *a.refused = a.refused_value;  // all threads that write it write the same value
}

// Calls use(masters, moments, gradient) with values of the types that select the kernel.
template <typename Use>
auto with_update_types(const UpdateArrays& a, const Use& use) {
  const auto with_masters = [&](auto masters) {
    return with_elements(a.gradient_dtype, [&](auto gradient) {
      return a.moment_dtype == DType::bf16 ? use(masters, MomentsOfBf16(), gradient)
                                           : use(masters, MomentsOfFp32(), gradient);
    });
  };
  switch (a.weights_dtype) {
    case DType::bf16:
      return with_masters(SplitMasters());
    case DType::fp16:
      return with_masters(Fp16Masters());
    case DType::fp32:
      break;
  }
  return with_masters(WholeMasters());
}

}  // namespace hoist::platform::detail
