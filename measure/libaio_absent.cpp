// SPDX-License-Identifier: Apache-2.0
// Compiled instead of libaio_contender.cpp if libaio is not installed.
#include <hoist/measure/contender.hpp>

namespace hoist::measure {

bool have_libaio() { return false; }

std::unique_ptr<Contender> make_libaio_contender(std::span<Drive* const>, const StopFlag*) {
  throw UsageError("--compare libaio: this build has no libaio; install libaio-dev and build again");
}

}  // namespace hoist::measure
