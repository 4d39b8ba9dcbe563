// SPDX-License-Identifier: Apache-2.0
// tests/gpt/emulated_team.hpp - a block of threads, carried out one thread after the other, step by step.
//
// What the text of a card's kernels (examples/gpt/card/team.hpp) needs of a Team, by the definitions of the PTX manual.
// Registers begin as NaN. Tiles are read as they were at the last barrier, and what was read must not have changed at
// the next one: a barrier that is missing shows in the result or ends the test. (Other shared memory, which is read
// step by step, is compute-sanitizer's to watch.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include <hoist/core/assert.hpp>

#include "card/team.hpp"

namespace hoist::gpt::card {

class EmulatedTeam {
 public:
  // Kernels declare Private values inside of the text, where no size can be given: one team at a time a thread.
  explicit EmulatedTeam(unsigned threads, bool backwards = false, std::span<std::byte> shared = {})
      : backwards_(backwards), shared_(shared), seen_(shared.begin(), shared.end()) {
    threads_ = threads;
  }

  template <typename T>
  class Private {
   public:
    Private() : values_(threads_) { std::memset(static_cast<void*>(values_.data()), 0xFF, threads_ * sizeof(T)); }
    T& operator[](unsigned thread) { return values_[thread]; }

   private:
    std::vector<T> values_;
  };

  template <typename Work>
  void each(const Work& work) {
    for (unsigned i = 0; i < threads_; ++i) work(backwards_ ? threads_ - 1 - i : i);
  }
  void barrier() {
    for (const std::size_t offset : read_) {
      HOIST_ASSERT(std::memcmp(seen_.data() + offset, shared_.data() + offset, 16) == 0,
                   "shared memory at {} was read and written between two barriers", offset);
    }
    read_.clear();
    std::copy(shared_.begin(), shared_.end(), seen_.begin());
    backwards_ = !backwards_;
  }

  template <typename Give, typename Take>
  void exchange(unsigned mask, const Give& give, const Take& take) {
    HOIST_ASSERT(mask < kWarpThreads, "lane ^ {} is not in the warp", mask);
    std::vector<decltype(give(0u))> given(threads_);
    for (unsigned t = 0; t < threads_; ++t) given[t] = give(t);
    for (unsigned t = 0; t < threads_; ++t) take(t, given[t ^ mask]);
  }

  // "ldmatrix": each of lanes 8 i ... 8 i + 7 names a row, of 16 bytes, of matrix i.
  template <bool kTransposed, typename Address, typename Out>
  void load_matrices(const Address& address, const Out& out) {
    for (unsigned warp = 0; warp < threads_; warp += kWarpThreads) {
      for (unsigned matrix = 0; matrix < 4; ++matrix) {
        std::uint16_t values[8][8];
        for (unsigned row = 0; row < 8; ++row) {
          const std::uint16_t* at = address(warp + 8 * matrix + row);
          const auto offset = static_cast<std::size_t>(reinterpret_cast<const std::byte*>(at) - shared_.data());
          HOIST_ASSERT(reinterpret_cast<std::uintptr_t>(at) % 16 == 0 && offset + 16 <= shared_.size(),
                       "ldmatrix of a row at {} of {} bytes of shared memory", offset, shared_.size());
          std::memcpy(values[row], seen_.data() + offset, sizeof values[row]);
          read_.push_back(offset);
        }
        for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
          const unsigned row = lane / 4, column = lane % 4 * 2;
          const std::uint16_t low = kTransposed ? values[column][row] : values[row][column];
          const std::uint16_t high = kTransposed ? values[column + 1][row] : values[row][column + 1];
          out(warp + lane)[matrix] = low | static_cast<std::uint32_t>(high) << 16;
        }
      }
    }
  }

  // "mma.m16n8k16", with groupID = lane / 4 and threadID_in_group = lane % 4:
  //   A, register i: row groupID, 8 more for i 1 and 3; columns 2 * threadID_in_group and the next, 8 more for i 2 and
  //   3 B, register i: rows 2 * threadID_in_group and the next, 8 more for i 1; column groupID C, value i:    row
  //   groupID, 8 more for i 2 and 3; column 2 * threadID_in_group, one more for i 1 and 3
  template <typename As, typename Sum, typename A, typename B>
  void multiply(const Sum& sum, const A& of_a, const B& of_b) {
    const auto half = [](std::uint32_t pair, unsigned upper) {
      return As::load(static_cast<std::uint16_t>(pair >> (16 * upper)));
    };
    for (unsigned warp = 0; warp < threads_; warp += kWarpThreads) {
      float a[16][16], b[16][8];
      for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
        const unsigned group = lane / 4, in_group = lane % 4;
        for (unsigned upper = 0; upper < 2; ++upper) {
          for (unsigned i = 0; i < 4; ++i)
            a[group + i % 2 * 8][2 * in_group + upper + i / 2 * 8] = half(of_a(warp + lane)[i], upper);
          for (unsigned i = 0; i < 2; ++i) b[2 * in_group + upper + 8 * i][group] = half(of_b(warp + lane)[i], upper);
        }
      }
      for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
        for (unsigned i = 0; i < 4; ++i) {
          const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
          float product = 0;
          for (unsigned k = 0; k < 16; ++k) product += a[row][k] * b[k][column];
          sum(warp + lane)[i] += product;
        }
      }
    }
  }

 private:
  static inline thread_local unsigned threads_ = 0;
  bool backwards_;
  std::span<std::byte> shared_;
  std::vector<std::byte> seen_;    // shared memory at the last barrier
  std::vector<std::size_t> read_;  // offsets that matrices were read from since
};

}  // namespace hoist::gpt::card
