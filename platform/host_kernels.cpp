// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include <hoist/core/float_environment.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/detail/host_kernels.hpp>
#include <hoist/platform/detail/kernel_bodies.hpp>

namespace hoist::platform::detail {

namespace {

// A plain loop over elements, which the compiler vectorises, instead of a GPU's packs: every gradient passes here.
// Inlined into a function for each instruction set. FMA is in none of them: the same bits everywhere.
template <typename Target, typename Source, bool kAdd>
[[gnu::always_inline]] inline void scale_loop(const ScaleArguments& a) {
  auto* target = reinterpret_cast<typename Target::Stored*>(a.target);
  const auto* source = reinterpret_cast<const typename Source::Stored*>(a.source);
  const float factor = a.scale;  // of its own: a target of floats could be the argument's
  const std::uint64_t count = a.count;
  for (std::uint64_t i = 0; i < count; ++i) {
    const float product = exact::mul(factor, Source::load(source[i]));
    target[i] = Target::store(kAdd ? exact::add(Target::load(target[i]), product) : product);
  }
}

#if defined(__x86_64__)
template <typename Target, typename Source, bool kAdd>
[[gnu::target("avx2")]] void scale_avx2(const ScaleArguments& a) {
  scale_loop<Target, Source, kAdd>(a);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

template <typename Target, typename Source, bool kAdd>
void scale(const ScaleArguments& a) {
#if defined(__x86_64__)
  if (has_avx2()) return scale_avx2<Target, Source, kAdd>(a);
#endif
  scale_loop<Target, Source, kAdd>(a);
}

}  // namespace

void scale_on_host(const ScaleArguments& a) {
  const FloatEnvironment environment;
  with_scale_types(a, [&](auto target, auto source, auto add) {
    scale<decltype(target), decltype(source), decltype(add)::value>(a);
  });
}

void sums_of_squares_on_host(const NormArguments& a) {
  const FloatEnvironment environment;
  with_elements(a.dtype, [&](auto source) {
    std::array<double, kNormThreads> lanes{};
    const std::uint64_t chunks = divide_up(a.count, std::uint64_t{kNormChunkElements});
    for (std::uint64_t first = 0; first < chunks; first += kNormChunksPerBlock) {
      const auto threads = static_cast<unsigned>(std::min(kNormChunksPerBlock, chunks - first) * kNormLanes);
      for (unsigned t = 0; t < threads; ++t) lanes[t] = lane_of_chunk<decltype(source)>(a, first, t);
      for (unsigned t = 0; t < threads; ++t) finish_chunk(a, first, t, lanes.data());
    }
  });
}

void update_on_host(const UpdateArguments& a) {
  const FloatEnvironment environment;
  with_update_types(a.arrays, [&](auto masters, auto moments, auto gradient) {
    update_thread<decltype(masters), decltype(moments), decltype(gradient)>(a.factors, a.arrays, pack_span(a.arrays),
                                                                            ThreadPlace{});
  });
}

}  // namespace hoist::platform::detail
