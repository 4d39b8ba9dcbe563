// SPDX-License-Identifier: Apache-2.0
// optim_cpu/update.hpp - one optimizer update of one tile, in one pass over memory. Start here.
//
// The formulas are PyTorch's (torch.optim; Lion's: its paper's), in fp32 with exact division and square root and
// without fused multiply-add, so that every instruction set gives the same bits. Sources: Kingma & Ba, arXiv 1412.6980;
// Loshchilov & Hutter, arXiv 1711.05101; Duchi et al., JMLR 12 (2011); Chen et al., arXiv 2302.06675. Every operation
// below rounds to nearest even, once, in the order of the parentheses; g, p, m, v are one parameter's gradient, master
// and moments, the rest UpdateCoefficients:
//
//   g = g * gradient_scale
//
//   adamw     p = p * decay_factor                        adam    g = g + (l2 * p)
//   both      m = (beta1 * m) + (one_minus_beta1 * g)
//             v = (beta2 * v) + ((one_minus_beta2 * g) * g)
//             p = p - ((step_size * m) / ((sqrt(v) / root_bias2) + epsilon))
//
//   adagrad   g = g + (l2 * p)
//             v = v + (g * g)
//             p = p - ((step_size * g) / (sqrt(v) + epsilon))
//
//   lion      p = p * decay_factor
//             p = p - (step_size * sign((beta1 * m) + (one_minus_beta1 * g)))      sign(0) = 0, sign(NaN) = NaN
//             m = (beta2 * m) + (one_minus_beta2 * g)
//
//   momentum  g = g + (l2 * p)
//             m = (beta1 * m) + (one_minus_beta1 * g)
//             p = p - (step_size * ((gradient_part * g) + (moment_part * m)))
//
//   sgd       g = g + (l2 * p)
//             p = p - (step_size * g)
//
//   A product with l2 or gradient_part is left out when that factor is 0: its other factor may be infinite.
//   stored: p; m and v, each as +0 when its magnitude is below 2^-126
//
// Moments of bf16 are widened exactly, and rounded when they are stored. m is rounded to nearest, halves away from
// zero, as weights are. v is rounded stochastically: 16 random bits are added to the 16 bits that fall away, and the
// carry goes into the bits that stay. Rounded to nearest, v would stand still, since an average as long as beta2 =
// 0.999 changes by less than half a bf16 step at a time. The random bits are a pure function of a key and the
// parameter's index (rounding_bits), and so the same for every tiling and thread.
//
// Moments of fp8 (block_fp8.hpp) and the 8-bit remainder of a master of 24 bits are decoded exactly, updated in fp32 by
// the formulas above, and rounded stochastically when they are stored, each to one of the two neighbouring numbers, so
// that on average they follow fp32 ones: 32 random bits an element (rounding_word), 16 of them for v, 8 for m and 8 for
// p. The weight is then the new master of 24 bits, rounded to bf16 as usual.
//
// Weights of fp16 are written from the new p, rounded to nearest even; from 65520 on that is infinity, and the tile
// must not be committed.
//
// Only the bits of a NaN are unspecified (no state with a NaN is ever committed).
//
// Denormals: arithmetic keeps them (the kernels clear flush-to-zero and denormals-are-zero for their own duration,
// whatever the host program's setting), but a moment is stored as zero when its magnitude is below 2^-126. Otherwise
// moments of idle parameters decay into denormals, which many processors handle far more slowly, and stay there. A GPU
// kernel compiled without flush-to-zero gives the same bits by the same rule.
//
// Threading  Pure functions of their arguments; any thread.
// Memory     No allocation. Pointers need the alignment of their element type only.
// Errors     None; the caller must find non-finite gradients first (see norm.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <hoist/core/dtype.hpp>
#include <hoist/core/update_formula.hpp>
#include <hoist/optim_cpu/optimizer.hpp>

namespace hoist::optim {

using Formula = UpdateFormula;
using hoist::Rounding;
using hoist::rounding_bits;

// 32 random bits for parameter `index`, different from those of rounding_bits().
constexpr std::uint32_t rounding_word(std::uint32_t key, std::uint32_t index) {
  std::uint32_t x = index ^ (key + 0x9E3779B9u);
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}
// The parts of a rounding word that are added before the low bits are dropped: an fp8 moment drops 19 bits
// (block_fp8.hpp), a 24-bit master 8. The moments' parts include half a unit of the last random bit, so that rounding
// favours neither neighbour.
constexpr std::uint32_t added_to_moment1(std::uint32_t word) { return (word >> 24) << 11 | 1u << 10; }
constexpr std::uint32_t added_to_moment2(std::uint32_t word) { return (word & 0xFFFFu) << 3 | 1u << 2; }
constexpr std::uint32_t added_to_master24(std::uint32_t word) { return word >> 16 & 0xFFu; }

// The numbers of one update of step `step` (counted from 1), derived once in double and rounded once.
// Pre: check(options).
struct UpdateCoefficients : UpdateFactors {
  UpdateCoefficients(const OptimizerOptions& options, std::uint64_t step, double gradient_scale);
};

// The arrays of a tile beside its weights and masters. They have `count` elements; arrays of scales have one for each
// block of kMomentBlock elements, counted from the tile's first element, and the last block may be shorter. Moments
// that the formula does not have are ignored.
struct TileState {
  void* moment1 = nullptr;  // of `moment_type`; fp8: codes, std::uint8_t
  void* moment2 = nullptr;
  const void* gradient = nullptr;  // of `gradient_dtype`
  DType gradient_dtype = DType::fp32;
  std::size_t count = 0;
  MomentType moment_type = MomentType::fp32;
  Rounding rounding{};             // of bf16 and fp8 moments, and of masters of 24 bits
  std::uint8_t* scale1 = nullptr;  // of fp8 moments
  std::uint8_t* scale2 = nullptr;
};

// A tile whose master is split: master = join_master(weight, remainder).
struct SplitTile : TileState {
  bf16* weight = nullptr;             // read and written
  std::int16_t* remainder = nullptr;  // or remainder8
  std::int8_t* remainder8 = nullptr;  // a master of 24 bits
};

// A tile whose weights are fp16, beside whole masters: fp16 has fewer exponent bits than a master, so the master cannot
// be split.
struct Fp16Tile : TileState {
  std::uint16_t* weight = nullptr;  // written, never read
  float* master = nullptr;
};

// A tile whose weights are fp32: they are the master.
struct WholeTile : TileState {
  float* weight = nullptr;
};

// Returns false if a resulting master or moment may not be committed (core/dtype.hpp master_is_committable, or a
// non-finite moment); the tile is written anyway.
[[nodiscard]] bool update_tile(const UpdateCoefficients& coefficients, const SplitTile& tile);
[[nodiscard]] bool update_tile(const UpdateCoefficients& coefficients, const WholeTile& tile);
[[nodiscard]] bool update_tile(const UpdateCoefficients& coefficients, const Fp16Tile& tile);

// The instruction sets of this machine, best first ("AVX3", "AVX2", ...), and the one in use.
std::vector<std::string> supported_instruction_sets();
std::string active_instruction_set();
// Tests: makes every following call use the named set; empty restores the best. Not thread-safe against updates.
void force_instruction_set(const std::string& name);

}  // namespace hoist::optim
