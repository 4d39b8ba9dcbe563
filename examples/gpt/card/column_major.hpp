// SPDX-License-Identifier: Apache-2.0
// examples/gpt/card/column_major.hpp - a row-major product, told to a library that thinks in columns.
//
// d = op(a) op(b) by rows is d' = op(b)' op(a)' by columns, and a matrix that was written by rows is its own transpose
// to who reads it by columns: b is the library's first operand, a its second, and nothing is moved.
#pragma once

#include "arguments.hpp"

namespace hoist::gpt::card {

// By columns, without gaps: the leading dimension is the number of rows.
struct ColumnMajor {
  std::uint64_t rows = 0, columns = 0;
  bool transposed = false;  // in the product
};

struct ColumnMajorProduct {
  ColumnMajor first, second, result;  // of Product's b, a and d
};

inline ColumnMajorProduct by_columns(const Product& p) {
  const auto stored = [](bool transposed, std::uint64_t rows, std::uint64_t columns) {
    return ColumnMajor{transposed ? rows : columns, transposed ? columns : rows, transposed};
  };
  return {.first = stored(p.transposed_b, p.k, p.n),
          .second = stored(p.transposed_a, p.m, p.k),
          .result = {.rows = p.n, .columns = p.m}};
}

}  // namespace hoist::gpt::card
