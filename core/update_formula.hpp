// SPDX-License-Identifier: Apache-2.0
// core/update_formula.hpp - the optimizers' formulas on one parameter, for the kernels of a device, which update one at
// a time. optim_cpu/update.hpp explains the formulas and their sources; its kernels give the same bits.
//
// Threading  Pure functions; on a CPU within a FloatEnvironment (core/arithmetic.hpp).
#pragma once

#include <cstdint>

#include <hoist/core/arithmetic.hpp>
#include <hoist/core/dtype.hpp>

namespace hoist {

enum class UpdateFormula : std::uint8_t { adamw, adam, adagrad, lion, momentum, sgd };

constexpr bool uses_moment1(UpdateFormula formula) {
  return formula == UpdateFormula::adamw || formula == UpdateFormula::adam || formula == UpdateFormula::lion ||
         formula == UpdateFormula::momentum;
}
constexpr bool uses_moment2(UpdateFormula formula) {
  return formula == UpdateFormula::adamw || formula == UpdateFormula::adam || formula == UpdateFormula::adagrad;
}

// The numbers of one step, the same for every parameter of a group.
struct UpdateFactors {
  UpdateFormula formula = UpdateFormula::adamw;
  float gradient_scale = 1;              // unscale times clip factor
  float beta1 = 0, one_minus_beta1 = 0;  // momentum: its factor, and 1 - dampening (1 in the first step)
  float beta2 = 0, one_minus_beta2 = 0;
  float epsilon = 0;
  float step_size = 0;   // adamw, adam: learning_rate / (1 - beta1^step); adagrad: after its decay; else learning_rate
  float root_bias2 = 1;  // sqrt(1 - beta2^step): the denominator is sqrt(v) / root_bias2 + epsilon
  float decay_factor = 1;                    // decoupled: 1 - learning_rate * weight_decay
  float l2 = 0;                              // weight_decay added to the gradient
  float gradient_part = 0, moment_part = 0;  // momentum: 0 and 1; Nesterov's: 1 and the momentum
};

// 16 random bits for parameter `index`; two neighbours share a mixer of two multiplications ("lowbias32", C. Wellons,
// hash-prospector).
constexpr std::uint32_t rounding_bits(std::uint32_t key, std::uint32_t index) {
  std::uint32_t x = (index >> 1) ^ key;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  x ^= x >> 16;
  return (index & 1) != 0 ? x >> 16 : x & 0xFFFFu;
}

// Random bits of an array's parameters: parameter i has rounding_bits(key, first + i).
struct Rounding {
  std::uint32_t key = 0;    // a different one each step
  std::uint32_t first = 0;  // index of the first parameter, relative to the key's scope
};

// A parameter's numbers; moments that the formula does not have are unchanged.
struct UpdateNumbers {
  float gradient = 0, master = 0, moment1 = 0, moment2 = 0;
};

// `magnitude`, which is positive, with the sign of `value`; zero if that is zero, and NaN if it is NaN.
HOIST_HOST_DEVICE inline float with_sign_of(float value, float magnitude) {
  const std::uint32_t sign = exact::bits_of(value) & 0x80000000u;
  const float size = exact::float_of(exact::bits_of(value) ^ sign);
  return size > 0.0f ? exact::float_of(exact::bits_of(magnitude) | sign) : size;
}

// The formula; the caller stores the moments (without_denormals, or as bf16).
HOIST_HOST_DEVICE inline void apply_update(const UpdateFactors& c, UpdateNumbers& n) {
  using namespace exact;
  n.gradient = mul(n.gradient, c.gradient_scale);
  if (c.formula == UpdateFormula::adamw || c.formula == UpdateFormula::lion) {
    n.master = mul(n.master, c.decay_factor);
  } else {
    n.gradient = add_scaled(n.gradient, c.l2, n.master);
  }
  switch (c.formula) {
    case UpdateFormula::adamw:
    case UpdateFormula::adam:
      n.moment1 = mix(c.beta1, n.moment1, c.one_minus_beta1, n.gradient);
      n.moment2 = add(mul(c.beta2, n.moment2), mul(mul(c.one_minus_beta2, n.gradient), n.gradient));
      n.master =
          sub(n.master, div(mul(c.step_size, n.moment1), add(div(exact::sqrt(n.moment2), c.root_bias2), c.epsilon)));
      return;
    case UpdateFormula::adagrad:
      n.moment2 = add(n.moment2, mul(n.gradient, n.gradient));
      n.master = sub(n.master, div(mul(c.step_size, n.gradient), add(exact::sqrt(n.moment2), c.epsilon)));
      return;
    case UpdateFormula::lion: {
      const float direction = mix(c.beta1, n.moment1, c.one_minus_beta1, n.gradient);
      n.master = sub(n.master, with_sign_of(direction, c.step_size));
      n.moment1 = mix(c.beta2, n.moment1, c.one_minus_beta2, n.gradient);
      return;
    }
    case UpdateFormula::momentum:
      n.moment1 = mix(c.beta1, n.moment1, c.one_minus_beta1, n.gradient);
      n.master =
          sub(n.master, mul(c.step_size, add_scaled(mul(c.moment_part, n.moment1), c.gradient_part, n.gradient)));
      return;
    case UpdateFormula::sgd:
      n.master = sub(n.master, mul(c.step_size, n.gradient));
      return;
  }
}

// A moment (without denormals) as bf16; `added` is added to the half that is cut off: 0x8000 for the first moment,
// random bits for the second.
HOIST_HOST_DEVICE inline std::uint16_t moment_as_bf16(float moment, std::uint32_t added) {
  return static_cast<std::uint16_t>((exact::bits_of(moment) + added) >> 16);
}
inline constexpr std::uint32_t kHalfOfBf16 = 0x8000u;

// Magnitudes (bits) from which on a moment may not be committed: infinity and NaN, and in bf16 also numbers that could
// round to infinity.
inline constexpr std::uint32_t kInfinityBits = 0x7F800000u;
inline constexpr std::uint32_t kBf16MomentLimitBits = 0x7F7F0000u;

HOIST_HOST_DEVICE inline bool reaches(float value, std::uint32_t limit_bits) {
  return (exact::bits_of(value) & 0x7FFFFFFFu) >= limit_bits;
}

}  // namespace hoist
