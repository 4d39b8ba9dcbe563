// SPDX-License-Identifier: Apache-2.0
// tiers/store_changed_error.hpp - the error of a store that somebody changes while this process uses it.
#pragma once

#include <hoist/core/error.hpp>

namespace hoist::tiers {

// Another process has trained in the store, or its files were removed, replaced or cut off, while this process read or
// wrote it. Other StoreErrors are about a store as it was found.
class StoreChangedError : public StoreError {
 public:
  using StoreError::StoreError;
};

}  // namespace hoist::tiers
