// SPDX-License-Identifier: Apache-2.0
// cli/store_directory.hpp - the store that a command was pointed at, and who uses it.
//
// Errors     BadInput for a path that holds no store.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include <hoist/zero/stored_model.hpp>

namespace hoist::cli {

// Something on the command line that cannot be: exit code 2.
class BadInput : public Error {
 public:
  using Error::Error;
};

// The directory of the store: `path` itself, or its subdirectory "hoist", because people know the nvme_path of their
// configuration.
std::string find_store(const std::string& path);

// Who holds one of the store's ranks, for people ("process 4711 on node3"); nothing when nobody does. Looks by taking
// each lock for a moment, shared: a trainer that starts in that moment tries again.
std::optional<std::string> store_owner(const StoreSummary& store);

// Seconds since the newest manifest was written.
std::optional<double> store_age_seconds(const StoreSummary& store);

}  // namespace hoist::cli
