// SPDX-License-Identifier: Apache-2.0
// tests/support/counting_backend.hpp - a drive that counts the bytes read from, or written to, a store's data files.
//
// Threading  As aio::Backend; the count may be looked at from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include <hoist/tests/support/observed_backend.hpp>

namespace hoist::test {

class CountingBackend final : public ObservedBackend {
 public:
  CountingBackend(std::unique_ptr<aio::Backend> inner, aio::Operation counted, std::atomic<std::uint64_t>& bytes)
      : ObservedBackend(std::move(inner), [counted, &bytes](const aio::Block& block) {
          if (block.operation == counted && block.file->path().ends_with(".data")) bytes += block.length_bytes;
        }) {}
};

}  // namespace hoist::test
