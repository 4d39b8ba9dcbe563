// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>

#include <hoist/aio/detail/transfer_error.hpp>
#include <hoist/core/error.hpp>

namespace hoist::aio::detail {

const char* operation_name(Operation operation) {
  static constexpr std::array kNames{"read", "write", "fdatasync"};
  return kNames[static_cast<std::size_t>(operation)];
}

namespace {

const char* remedy_of(Operation operation, int code) {
  switch (code) {
    case 0:
      return operation == Operation::read ? "the file is shorter than the requested range, or the drive gave up"
                                          : "the drive gave up; check its free space and its health";
    case EAGAIN:
      return "the system stayed short of resources through every retry; lower the queue depth";
    case EINVAL:
      return "this file system probably cannot do direct transfers of this block size";
    case EOPNOTSUPP:
      return "this drive or file system cannot do this kind of transfer";
    case EBADF:
      return "the file was not opened for this kind of transfer";
    case ETIMEDOUT:
      return "the drive did not answer; the buffer may still be written to and must not be used again";
    default:
      return usual_remedy(code);
  }
}

}  // namespace

std::exception_ptr transfer_error(Operation operation, const File& file, std::uint64_t offset_bytes,
                                  std::uint64_t length_bytes, int code) {
  return std::make_exception_ptr(
      IoError({operation_name(operation), file.path(), offset_bytes, length_bytes, code}, remedy_of(operation, code)));
}

}  // namespace hoist::aio::detail
