// SPDX-License-Identifier: Apache-2.0
#include "finding.hpp"

namespace hoist::cli {

const char* verdict_name(Verdict verdict) {
  switch (verdict) {
    case Verdict::well:
      return "ok";
    case Verdict::lacking:
      return "lacking";
    case Verdict::missing:
      return "missing";
  }
  return "";
}

}  // namespace hoist::cli
