// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/float_environment.hpp>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <cfenv>
#endif

namespace hoist {

#if defined(__x86_64__) || defined(__i386__)

namespace {
constexpr unsigned kDefaultMxcsr = 0x1F80;  // every exception masked, round to nearest, FTZ and DAZ clear
}

FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }

#elif defined(__aarch64__)

FloatEnvironment::FloatEnvironment() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" ::"r"(std::uint64_t{0}));  // no traps, round to nearest, FZ and DN clear
}
FloatEnvironment::~FloatEnvironment() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

#else

FloatEnvironment::FloatEnvironment() : saved_(static_cast<std::uint64_t>(std::fegetround())) {
  std::fesetround(FE_TONEAREST);
}
FloatEnvironment::~FloatEnvironment() { std::fesetround(static_cast<int>(saved_)); }

#endif

}  // namespace hoist
