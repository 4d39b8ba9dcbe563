// SPDX-License-Identifier: Apache-2.0
// tests/zero/mode_placements.hpp - the placements in which the update modes are compared with mode `step`.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/remembered.hpp>

#include "toy_model.hpp"

namespace hoist::test {

struct Where {
  const char* name;
  Placement parameters, optimizer;
  double pinned_fraction = 0;
  double offload_ratio = 1;
  bool host_accessible = true;
  double pinned_weights = 0;

  bool has_store() const { return parameters == Placement::nvme || optimizer == Placement::nvme; }
};
constexpr Where kWheres[] = {{"device_pinned", Placement::device, Placement::pinned},
                             {"device_nvme", Placement::device, Placement::nvme},
                             {"pinned_pinned", Placement::pinned, Placement::pinned},
                             {"pinned_nvme", Placement::pinned, Placement::nvme},
                             {"nvme_pinned", Placement::nvme, Placement::pinned},
                             {"nvme_nvme", Placement::nvme, Placement::nvme},
                             {"nvme_half", Placement::nvme, Placement::nvme, 0.5},
                             {"pinned_third", Placement::pinned, Placement::nvme, 0.3},
                             {"device_all", Placement::device, Placement::nvme, 1},
                             {"device_pinned_ratio", Placement::device, Placement::pinned, 0, 0.5},
                             {"device_pinned_ratio_apart", Placement::device, Placement::pinned, 0, 0.3, false},
                             {"device_pinned_none_apart", Placement::device, Placement::pinned, 0, 0, false},
                             {"device_nvme_ratio_apart", Placement::device, Placement::nvme, 0.3, 0.5, false},
                             {"device_pinned_ratio_0", Placement::device, Placement::pinned, 0, 0},
                             {"device_nvme_ratio_0_apart", Placement::device, Placement::nvme, 0, 0, false},
                             {"pinned_pinned_ratio", Placement::pinned, Placement::pinned, 0, 0.3},
                             {"nvme_nvme_ratio", Placement::nvme, Placement::nvme, 0, 0.3},
                             {"nvme_half_weights_half", Placement::nvme, Placement::nvme, 0.4, 1, true, 0.6},
                             {"nvme_pinned_weights_all", Placement::nvme, Placement::pinned, 0, 1, true, 1}};

inline ToySetup setup_of(const Where& where, UpdateMode mode, const std::string& directory) {
  ToySetup setup = toy_setup(where.parameters, where.optimizer, where.has_store() ? directory : "");
  setup.engine.optimizer_pinned_fraction = where.pinned_fraction;
  setup.engine.parameters_pinned_fraction = where.pinned_weights;
  setup.engine.optimizer_offload_ratio = where.offload_ratio;
  setup.runtime.host_device.host_accessible = where.host_accessible;
  setup.engine.update_mode = mode;
  if (mode == UpdateMode::backward) setup.engine.gradient_clipping = 0;  // as it has to be
  return setup;
}

// Trainings in one placement and one update mode, and what they have to end in.
class ModePlacement : public testing::TestWithParam<std::tuple<UpdateMode, Where>> {
 protected:
  static UpdateMode mode() { return std::get<UpdateMode>(GetParam()); }
  static const Where& where() { return std::get<Where>(GetParam()); }
  ToySetup setup() const {
    ToySetup setup = setup_of(where(), mode(), directory_ / "store");
    setup.runtime.host_device.chaos_seed = 5;
    return setup;
  }
  // The same training in mode `step`, with everything in pinned memory.
  static ToySetup simplest() {
    ToySetup setup = setup_of({"", Placement::pinned, Placement::pinned}, mode(), "");
    setup.engine.update_mode = UpdateMode::step;
    return setup;
  }
  std::unique_ptr<ToyModel> fresh() const {
    auto run = std::make_unique<ToyModel>(setup());
    run->initialize();
    return run;
  }
  // What `steps` undisturbed steps end in.
  static const Digests& expected(std::uint64_t steps) {
    static std::map<std::pair<bool, std::uint64_t>, Digests> made;
    return remembered(made, {mode() == UpdateMode::backward, steps}, [&] { return train_once(simplest(), {}, steps); });
  }
  // The engine is of no more use; a new one goes on from the last commit, which `step` is, to the same bits.
  void goes_on_from(std::unique_ptr<ToyModel> failed, std::uint64_t step) const {
    EXPECT_THROW(failed->engine().settle(), Error);
    EXPECT_THROW(failed->pass(step + 1), Error);
    failed.reset();
    if (!where().has_store()) return;
    ToyModel resumed(setup());
    ASSERT_EQ(resumed.restore().step, step);
    resumed.train(step + 1, step + 2);
    Digests end = expected(step + 2);
    end.losses = resumed.losses;
    EXPECT_EQ(digests_of(resumed), end);
  }

  TempDirectory directory_;
};

inline std::string name_of(const testing::TestParamInfo<std::tuple<UpdateMode, Where>>& info) {
  const auto& [mode, where] = info.param;
  return std::string(mode == UpdateMode::forward ? "forward_" : "backward_") + where.name;
}

}  // namespace hoist::test
