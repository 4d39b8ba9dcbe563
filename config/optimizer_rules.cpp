// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <hoist/config/detail/rules.hpp>

namespace hoist::config::detail {

namespace {

using optim::OptimizerKind;
using optim::OptimizerOptions;

constexpr std::string_view kOptimizerParams = "optimizer.params.";

struct OptimizerType {
  OptimizerKind kind;
  std::vector<std::string_view> parameters;
};

// The parameters that PyTorch's (Lion: DeepSpeed's) constructors have. Refused keys and hints are the same for all
// types.
const std::vector<OptimizerType>& optimizer_types() {
  static const std::vector<std::string_view> adam{"lr",          "betas",     "eps", "weight_decay", "bias_correction",
                                                  "adam_w_mode", "torch_adam"};
  static const std::vector<OptimizerType> types{
      {OptimizerKind::adamw, adam},
      {OptimizerKind::adam, adam},
      {OptimizerKind::adagrad, {"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}},
      {OptimizerKind::lion, {"lr", "betas", "weight_decay"}},
      {OptimizerKind::sgd, {"lr", "momentum", "dampening", "weight_decay", "nesterov"}},
  };
  return types;
}

class OptimizerRules {
 public:
  OptimizerRules(Draft& draft, ReadResult& read, RuleNotes& notes)
      : draft_(draft), read_(read), notes_(notes), options_(draft.engine.optimizer_defaults) {}

  void apply() {
    for (const OptimizerType& type : optimizer_types()) {
      if (optim::optimizer_name(type.kind) != draft_.optimizer_type) continue;
      options_.kind = type.kind;
      refuse_other_parameters(read_, kOptimizerParams, draft_.optimizer_type, type.parameters);
      std::erase_if(read_.settings, [&](const ConfigSetting& s) {
        return s.row->path.starts_with(kOptimizerParams) && s.row->status == KeyStatus::implemented &&
               std::ranges::find(type.parameters, last_part(s.row->path)) == type.parameters.end();
      });
    }
    if (options_.kind == OptimizerKind::adamw || options_.kind == OptimizerKind::adam) return adam();
    if (options_.kind != OptimizerKind::lion) defaults();  // DeepSpeed's Lion has Adam's, not its paper's
    nesterov();
  }

 private:
  void adam() {
    const bool named_adam = options_.kind == OptimizerKind::adam;
    const bool decoupled = !named_adam || draft_.adam_w_mode;
    options_.kind = decoupled ? OptimizerKind::adamw : OptimizerKind::adam;
    if (!named_adam && !draft_.adam_w_mode) {
      notes_.warnings.push_back(
          "optimizer.params.adam_w_mode: false has no effect on type AdamW, as in DeepSpeed; say type Adam for L2 "
          "decay");
    }
    if (draft_.torch_adam && decoupled && !read_.in_file("optimizer.params.weight_decay")) {
      standard("optimizer.params.weight_decay", options_.weight_decay, 0.01);
      notes_.notes.push_back("optimizer.params.weight_decay is 0.01, the default that torch_adam brings in DeepSpeed");
    }
  }

  // A setting that the file leaves out gets the type's own default.
  void defaults() {
    const OptimizerOptions own = optim::default_options(options_.kind);
    standard("optimizer.params.lr", options_.learning_rate, own.learning_rate);
    standard("optimizer.params.eps", options_.epsilon, own.epsilon);
  }

  void standard(std::string_view path, double& option, double value) {
    if (read_.in_file(path)) return;
    option = value;
    if (ConfigSetting* found = read_.setting(path)) found->value = value;
  }

  void nesterov() {
    if (!options_.nesterov || (options_.momentum > 0 && options_.dampening == 0)) return;
    constexpr std::string_view kPath = "optimizer.params.nesterov";
    if (read_.setting(kPath) == nullptr) return;  // not SGD; already refused
    read_.refuse(kPath, "needs a momentum above 0 and no dampening, as in PyTorch");
  }

  Draft& draft_;
  ReadResult& read_;
  RuleNotes& notes_;
  OptimizerOptions& options_;
};

}  // namespace

void apply_optimizer(Draft& draft, ReadResult& read, RuleNotes& notes) { OptimizerRules(draft, read, notes).apply(); }

}  // namespace hoist::config::detail
