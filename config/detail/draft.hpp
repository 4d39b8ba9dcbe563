// SPDX-License-Identifier: Apache-2.0
// config/detail/draft.hpp - the options under construction: rows of the key table write here, rules.cpp finishes them.
#pragma once

#include <optional>
#include <string>

#include <hoist/config/config.hpp>

namespace hoist::config::detail {

// Values that become options only together with others.
struct Draft {
  RuntimeOptions runtime;
  EngineOptions engine;
  TrainingOptions training;

  std::string parameter_path;  // offload_param.nvme_path
  std::string optimizer_path;  // offload_optimizer.nvme_path
  std::string checkpoint_path;
  std::optional<tiers::Durability> durability;
  bool optimizer_named_adam = false;  // "Adam" leaves the choice of decay to adam_w_mode
  bool adam_w_mode = true;
  bool torch_adam = false;
};

}  // namespace hoist::config::detail
