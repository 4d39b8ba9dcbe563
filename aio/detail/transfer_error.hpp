// SPDX-License-Identifier: Apache-2.0
// aio/detail/transfer_error.hpp - the error of a failed transfer: what was tried, where, and the remedy.
#pragma once

#include <exception>

#include <hoist/aio/backend.hpp>
#include <hoist/aio/file.hpp>

namespace hoist::aio::detail {

const char* operation_name(Operation operation);

// An IoError. `code` is an errno; 0: a short transfer without an errno.
std::exception_ptr transfer_error(Operation operation, const File& file, std::uint64_t offset_bytes,
                                  std::uint64_t length_bytes, int code);

}  // namespace hoist::aio::detail
