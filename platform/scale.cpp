// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include <hoist/platform/detail/scale.hpp>

namespace hoist::platform::detail {

namespace {

struct AsBf16 {
  using Stored = bf16;
  static float load(Stored value) { return to_float(value); }
  // to_bf16 without its branch, so that the loop vectorises.
  static Stored store(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t quiet = (bits >> 16) | 0x0040u;
    const std::uint32_t rounded = (bits + 0x8000u) >> 16;
    return bf16{static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded)};
  }
};

struct AsFp16 {
  using Stored = std::uint16_t;
  static float load(Stored value) { return fp16_to_float(value); }
  static Stored store(float value) { return float_to_fp16(value); }
};

struct AsFp32 {
  using Stored = float;
  static float load(Stored value) { return value; }
  static Stored store(float value) { return value; }
};

// Inlined into a function for each instruction set. FMA is in none of them: the same bits everywhere.
template <typename Target, typename Source>
[[gnu::always_inline]] inline void scale_loop(const ScaleArguments& a) {
  auto* target = reinterpret_cast<typename Target::Stored*>(a.target);
  const auto* source = reinterpret_cast<const typename Source::Stored*>(a.source);
  const float factor = a.scale;  // of its own: a target of floats could be the argument's
  const std::uint64_t count = a.count;
  if (a.combine == Stream::Combine::overwrite) {
    for (std::uint64_t i = 0; i < count; ++i) target[i] = Target::store(factor * Source::load(source[i]));
  } else {
    for (std::uint64_t i = 0; i < count; ++i)
      target[i] = Target::store(Target::load(target[i]) + factor * Source::load(source[i]));
  }
}

template <typename Target, typename Source>
void scale(const ScaleArguments& a) {
  scale_loop<Target, Source>(a);
}

#if defined(__x86_64__)
template <typename Target, typename Source>
[[gnu::target("avx2")]] void scale_avx2(const ScaleArguments& a) {
  scale_loop<Target, Source>(a);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

template <typename Target, typename Source>
void scale_from(const ScaleArguments& a) {
#if defined(__x86_64__)
  if (has_avx2()) return scale_avx2<Target, Source>(a);
#endif
  scale<Target, Source>(a);
}

template <typename Target>
void scale_to(const ScaleArguments& a) {
  switch (a.source_dtype) {
    case DType::bf16:
      return scale_from<Target, AsBf16>(a);
    case DType::fp16:
      return scale_from<Target, AsFp16>(a);
    case DType::fp32:
      return scale_from<Target, AsFp32>(a);
  }
}

}  // namespace

void scale_on_host(const ScaleArguments& a) {
  switch (a.target_dtype) {
    case DType::bf16:
      return scale_to<AsBf16>(a);
    case DType::fp16:
      return scale_to<AsFp16>(a);
    case DType::fp32:
      return scale_to<AsFp32>(a);
  }
}

}  // namespace hoist::platform::detail
