// SPDX-License-Identifier: Apache-2.0
#include "run.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/comm/communicator.hpp>
#include <hoist/core/digest.hpp>
#include <hoist/core/named_file.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/core/units.hpp>
#include <hoist/interchange/import.hpp>
#include <hoist/interchange/safetensors.hpp>
#include <hoist/tiers/store_changed_error.hpp>

#include "model.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "run_state.hpp"

namespace hoist::gpt {
namespace {

volatile std::sig_atomic_t stop_signal = 0;

// timeout(1) and shells may send the same signal twice at once: only a person asks again so much later.
constexpr double kImpatientSeconds = 0.5;
double first_signal_at = 0;  // of CLOCK_MONOTONIC

volatile std::sig_atomic_t is_complete = 0;  // on all ranks: the state is saved, and the report written

void die_by(int number) {
  ::signal(number, SIG_DFL);
  ::raise(number);
}

extern "C" void on_signal(int number) {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  const double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  if (stop_signal == 0 && is_complete == 0) {
    first_signal_at = seconds;
    stop_signal = number;
  } else if (stop_signal == 0 || seconds - first_signal_at > kImpatientSeconds) {
    die_by(number);
  }
}

// The first signal asks for an orderly end after the step under way; a second one, later, kills. A signal that the
// program was started without (nohup, a shell's &) stays ignored.
void install_signal_handlers() {
  constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};
  for (const int number : kSignals) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    for (const int other : kSignals) sigaddset(&action.sa_mask, other);
    sigaction(number, &action, nullptr);
  }
}

void complain(const std::string& text) { std::fputs(printable(fmt::format("hoist-gpt: {}\n", text)).c_str(), stderr); }

// Errors: IoError with `remedy`.
void write_output(const std::string& path, const std::string& text, const char* remedy) {
  try {
    replace_file(path, text);
  } catch (const IoError& error) {
    throw IoError(error.where, remedy);
  }
}

GptOptions gpt_options(const Arguments& a, const Config& config, const Settled& settled) {
  return {.layers = a.layers,
          .width = a.width,
          .heads = a.heads,
          .context = a.context,
          .batch = settled.batch,
          .held_micro_batches = settled.vertical ? settled.micro_batches : 1,
          .seed = a.seed,
          .threads = a.threads,
          .matrix_dtype = config.engine.weights_dtype.value_or(DType::bf16),
          .activations = a.activations};
}

EngineOptions engine_options(const Config& config, const Settled& settled) {
  EngineOptions options = config.engine;
  options.micro_batches_max = static_cast<unsigned>(settled.micro_batches);
  if (settled.vertical) options.micro_batch_order = MicroBatchOrder::vertical;
  return options;
}

class Training {
 public:
  explicit Training(const Arguments& arguments)
      : arguments_(arguments),
        text_(Text::load(arguments.text, arguments.context)),
        config_(Config::load(arguments.config)),
        runtime_(runtime_options(config_)),
        settled_(settle(arguments, config_, runtime_.world_size())),
        engine_options_(engine_options(config_, settled_)),
        gpt_(runtime_, engine_options_, gpt_options(arguments, config_, settled_)) {
    if (arguments.save_every > 0 && config_.engine.keep_steps == 0) {
      throw BadInputError(
          fmt::format("{}: --save-every needs room for what it saves: set hoist.keep_steps to the number of "
                      "steps that shall stay",
                      config_.origin()));
    }
    check_outputs();
  }

  void describe_units(const std::string& path);
  void prepare();
  void train();
  void close();
  int rank() const { return runtime_.rank(); }
  int world_size() const { return runtime_.world_size(); }

 private:
  bool first_rank() const { return runtime_.rank() == 0; }
  void say(const std::string& text) const {
    if (!first_rank()) return;
    std::fputs((printable(text) + "\n").c_str(), stdout);  // a full disk under a log ends no training
    std::fflush(stdout);
  }
  void check_outputs();
  void agree_on_arguments();
  Initializer initial_values() const;
  void introduce();
  RunState state_at(std::uint64_t step) const;
  double learning_rate_at(std::uint64_t step) const;
  std::uint64_t samples_per_step() const;
  std::uint64_t tokens_per_step() const;
  StepRecord one_step();
  Batch micro_batch(int index) const;
  double train_micro_batches();
  bool saves_steps() const;
  std::string why_no_commit() const;
  void save_at_end();
  void mirror_at_end();

  const Arguments arguments_;
  const Text text_;
  const Config config_;
  Runtime runtime_;
  const Settled settled_;
  const EngineOptions engine_options_;
  Gpt gpt_;
  std::optional<Engine> engine_;  // made by prepare()
  std::uint64_t step_ = 0;        // steps done
  bool stopping_ = false;
  Completion committed_;  // of the newest step
  RunRecord record_;
};

// The other ranks would wait for a rank 0 that cannot go on, so it tells them.
void Training::check_outputs() {
  if (!first_rank()) return;
  try {
    const std::vector<OutputPath> outputs{{"--report", arguments_.report}, {"--units", arguments_.units}};
    std::vector<std::string> inputs{arguments_.config, arguments_.text, arguments_.init};
    std::error_code ignored;  // as when --init is no directory
    for (std::filesystem::directory_iterator file(arguments_.init, ignored), end; file != end; file.increment(ignored))
      inputs.push_back(file->path().string());
    check_outputs_apart(outputs, inputs);
    for (const OutputPath& output : outputs)
      if (!output.path.empty()) check_replaceable(output.path, "name another file with " + output.option);
  } catch (const std::exception& error) {
    runtime_.communicator().abort(error.what());
    throw;
  }
}

// Rank 0 writes the form that hoist check --units reads.
void Training::describe_units(const std::string& path) {
  if (!first_rank()) return;
  using Json = nlohmann::ordered_json;
  Json units = Json::array();
  const Model& model = gpt_.model();
  for (const ModelUnit& unit : model.units()) {
    Json parameters = Json::array();
    for (const ParameterId parameter : unit.parameters) {
      const ParameterSpec& spec = model.parameters()[parameter.index];
      parameters.push_back({{"name", spec.name},
                            {"shape", spec.shape},
                            {"dtype", std::string(dtype_name(spec.dtype))},
                            {"trainable", spec.trainable},
                            {"group", spec.group.index},
                            {"counts_in_norm", spec.counts_in_norm}});
    }
    Json tied = Json::array();
    for (const ParameterId owner : unit.tied) tied.push_back(model.parameters()[owner.index].name);
    units.push_back({{"name", unit.name}, {"parameters", parameters}, {"tied", tied}});
  }
  // No engine was made yet: only activation offload has taken part of the pinned budget.
  const Json description{{"program_device_bytes", gpt_.device_bytes()},
                         {"program_pinned_bytes", runtime_.pinned_budget().held_bytes()},
                         {"units", units}};
  write_output(path, description.dump(1) + "\n", "free space, or name another file with --units");
  say(fmt::format("{} units are described in {}", model.units().size(), path));
}

// Every rank has a command line and a text of its own. With different ones they would train a mixture of two runs.
void Training::agree_on_arguments() {
  const std::string mine =
      fmt::format("--seed {}\n--batch {}\n--resume {}\n--from {}\n--init {}\ntext {:x} of {} bytes", arguments_.seed,
                  settled_.batch, arguments_.resume ? "yes" : "no", arguments_.from, arguments_.init,
                  text_.fingerprint(), text_.byte_count());
  Digest digest;
  digest.update(std::as_bytes(std::span(mine)));
  comm::agree(runtime_.communicator(), digest.value(), "the arguments of hoist-gpt", [&] { return mine; });
}

// Makes the engine: from the newest commit, or with fresh state, which Engine::create() refuses where a commit is.
void Training::prepare() {
  for (const std::string& warning : config_.warnings) say("warning: " + warning);
  for (const std::string& note : settled_.notes) say(note);
  agree_on_arguments();
  const bool is_named = !arguments_.from.empty();  // the named checkpoint may be all that is left
  if (arguments_.resume && (is_named || Engine::find_commit(runtime_, engine_options_))) {
    const auto accept = [&](const RestoreReport& found) {
      const RunState state = decode(found.caller_state);
      check_same_run(state, state_at(0));
      step_ = state.step;
    };
    engine_ = Engine::restore(runtime_, engine_options_, gpt_.model(), {.from = arguments_.from, .accept = accept});
    say(fmt::format("resuming at step {}", step_));
  } else {
    engine_ = Engine::create(runtime_, engine_options_, gpt_.model(), initial_values(), encode(state_at(0)));
    if (arguments_.resume) say(fmt::format("nothing to resume: {}, starting at step 0", why_no_commit()));
  }
  gpt_.attach(*engine_);
  introduce();
}

Initializer Training::initial_values() const {
  if (arguments_.init.empty()) return gpt_.initial_values();
  Initializer initializer = interchange::fill_from(arguments_.init, gpt_.model().parameters());
  say("weights from " + arguments_.init);
  return initializer;
}

void Training::introduce() {
  record_.device = runtime_.device().description();
  record_.parameters = gpt_.model().parameter_count();
  record_.world_size = runtime_.world_size();
  record_.tokens_per_step = tokens_per_step();
  say(fmt::format("{} parameters in {} blocks, {} bytes of text, {} x {} bytes a step on {}, {}", record_.parameters,
                  arguments_.layers, text_.byte_count(), samples_per_step(), arguments_.context,
                  counted(record_.world_size, "rank"), record_.device));
  for (const std::string& line : engine_->describe()) say("  " + line);
}

RunState Training::state_at(std::uint64_t step) const {
  return {.step = step,
          .seed = arguments_.seed,
          .layers = arguments_.layers,
          .width = arguments_.width,
          .heads = arguments_.heads,
          .context = arguments_.context,
          .samples_per_step = samples_per_step(),
          .text_bytes = text_.byte_count(),
          .text_fingerprint = text_.fingerprint()};
}

// A pure function of the step, so that a resumed run follows the same schedule.
double Training::learning_rate_at(std::uint64_t step) const {
  if (step >= arguments_.warmup) return settled_.learning_rate;
  return settled_.learning_rate * static_cast<double>(step + 1) / static_cast<double>(arguments_.warmup);
}

std::uint64_t Training::samples_per_step() const {
  return static_cast<std::uint64_t>(settled_.batch) * static_cast<std::uint64_t>(settled_.micro_batches) *
         static_cast<std::uint64_t>(runtime_.world_size());
}

std::uint64_t Training::tokens_per_step() const {
  return samples_per_step() * static_cast<std::uint64_t>(arguments_.context);
}

void Training::train() {
  Progress progress({.first_step = step_,
                     .last_step = arguments_.steps,
                     .tokens_per_step = tokens_per_step(),
                     .rewrite = isatty(STDOUT_FILENO) == 1});
  if (step_ >= arguments_.steps) say(fmt::format("step {} is done already; nothing to train", step_));
  while (step_ < arguments_.steps && !stopping_) {
    record_.steps.push_back(one_step());
    if (first_rank()) progress.show(record_.steps.back(), tier_use(*engine_, config_.engine), Clock::now());
  }
  progress.finish();
  if (stopping_) say(fmt::format("stopped by a signal after step {}", step_));
}

Batch Training::micro_batch(int index) const {
  const auto micro_batches = static_cast<std::uint64_t>(settled_.micro_batches);
  return text_.batch({.seed = arguments_.seed,
                      .step = step_ * micro_batches + static_cast<std::uint64_t>(index),
                      .rank = runtime_.rank(),
                      .world_size = runtime_.world_size(),
                      .batch = settled_.batch,
                      .context = arguments_.context});
}

// The mean loss of this rank's micro-batches.
double Training::train_micro_batches() {
  if (settled_.vertical) {
    std::vector<Batch> all;
    for (int i = 0; i < settled_.micro_batches; ++i) all.push_back(micro_batch(i));
    return gpt_.train(all);
  }
  double loss = 0;
  for (int i = 0; i < settled_.micro_batches; ++i)
    loss += gpt_.train(micro_batch(i), {.micro_batch = i, .micro_batches = settled_.micro_batches}) /
            settled_.micro_batches;
  return loss;
}

StepRecord Training::one_step() {
  const TimePoint begin = Clock::now();
  const double own_loss = train_micro_batches();
  // One exchange for both: ranks must agree on when to stop.
  const std::array<double, 2> mine = {own_loss, stop_signal != 0 ? 1.0 : 0.0};
  std::vector<std::array<double, 2>> all(static_cast<std::size_t>(runtime_.world_size()));
  runtime_.communicator().exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  double loss = 0;
  for (const auto& [rank_loss, rank_stops] : all) {
    loss += rank_loss / static_cast<double>(all.size());
    stopping_ = stopping_ || rank_stops != 0.0;
  }
  gpt_.set_learning_rate(learning_rate_at(step_));
  const std::vector<std::byte> state = encode(state_at(step_ + 1));
  const StepReport report = engine_->step({.caller_state = state});
  committed_ = report.committed;
  ++step_;
  if (arguments_.save_every > 0 && step_ % arguments_.save_every == 0)
    committed_ = engine_->save(fmt::format("step-{}", step_), state);
  StepRecord record{
      .step = step_, .loss = loss, .seconds = to_seconds(Clock::now() - begin), .gradient_norm = report.gradient_norm};
  record.applied = report.applied;
  if (config_.engine.weights_dtype == DType::fp16) record.loss_scale = report.loss_scale;
  return record;
}

// Without a store, or with durability `none`, there is nothing to save.
bool Training::saves_steps() const {
  return !config_.engine.store_directory.empty() && (!config_.engine.uses_nvme() || config_.engine.commits_steps());
}

std::string Training::why_no_commit() const {
  if (saves_steps()) return "no commit yet";
  return config_.engine.uses_nvme()
             ? "nothing is ever committed (hoist.durability is \"none\")"
             : "nothing is ever committed: all state is in memory (set hoist.checkpoint_path, or put state on NVMe)";
}

// If steps are commits, there is nothing to do.
void Training::save_at_end() {
  committed_.wait();
  if (!saves_steps() || engine_->committed_step() == step_) return;
  engine_->save("", encode(state_at(step_))).wait();
  say(fmt::format("saved step {} in {}", step_, config_.engine.store_directory));
}

// Copies the last step to the mirror, after everything else is saved and reported: a mirror that is slow or fails costs
// no result. After a signal no copy is begun; the engine's destructor waits for the one under way, and logs that.
void Training::mirror_at_end() {
  const std::string& mirror = config_.engine.mirror.directory;
  if (mirror.empty() || !saves_steps()) return;
  const std::array<bool, 2> mine{engine_->mirror().step != step_, stop_signal != 0};
  std::vector<std::array<bool, 2>> all(static_cast<std::size_t>(runtime_.world_size()));
  // Returns when all ranks are here.
  runtime_.communicator().exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  bool behind = false;
  for (const auto& [rank_behind, rank_stops] : all) {
    behind = behind || rank_behind;
    stopping_ = stopping_ || rank_stops;
  }
  if (!behind) return;
  is_complete = 1;
  if (stop_signal != 0 && !stopping_) die_by(stop_signal);  // it came during the exchange
  if (stopping_) return say(fmt::format("after a signal, no further copy to the mirror in {} is begun", mirror));
  say(fmt::format("waiting for the mirror in {} to hold step {}, too", mirror, step_));
  const Completion copied = engine_->save("", encode(state_at(step_)), {.mirror = true});
  try {
    copied.wait();
  } catch (const std::exception& error) {
    if (first_rank())
      complain(
          fmt::format("warning: the training is complete, and step {} is in {}; the mirror in {} does not hold it: {}",
                      step_, config_.engine.store_directory, mirror, error.what()));
  }
}

void Training::close() {
  engine_->settle();
  take_step_totals(record_, runtime_.ledger());
  const Ledger::OutsideSteps outside_steps(runtime_.ledger());
  record_.wire_in_group = engine_->wire_bytes_in_group();
  record_.formula = engine_->formula_bytes();
  record_.offloaded_bytes = gpt_.offloaded_bytes();
  record_.compute = gpt_.compute_time();
  save_at_end();
  engine_->settle();  // counts what the save has written
  record_.committed_step = engine_->committed_step();
  record_.tiers = tier_use(*engine_, config_.engine);
  if (!arguments_.report.empty()) {
    record_.digests = {.master = state_digest(*engine_, State::master),
                       .moment1 = state_digest(*engine_, State::moment1),
                       .moment2 = state_digest(*engine_, State::moment2)};
  }
  take_totals_apart(record_, runtime_.ledger());
  if (first_rank()) {
    std::fputs(closing_table(record_).c_str(), stdout);
    std::fflush(stdout);
  }
  std::exception_ptr lost_report;  // the other ranks go to the mirror's end
  try {
    if (first_rank() && !arguments_.report.empty())
      write_output(arguments_.report, report_json(record_),
                   "the training itself is complete; free space and run again with --resume to write the report");
  } catch (...) {
    lost_report = std::current_exception();
  }
  mirror_at_end();
  if (lost_report) std::rethrow_exception(lost_report);
}

// Errors that a person can correct at the command line, in the file, by another device, or with a directory's
// permissions and space.
bool is_bad_input(const std::exception& error) {
  if (dynamic_cast<const tiers::StoreChangedError*>(&error) != nullptr) return false;
  if (dynamic_cast<const BadInputError*>(&error) != nullptr || dynamic_cast<const UsageError*>(&error) != nullptr ||
      dynamic_cast<const ConfigError*>(&error) != nullptr || dynamic_cast<const BudgetError*>(&error) != nullptr ||
      dynamic_cast<const DeviceError*>(&error) != nullptr || dynamic_cast<const StoreError*>(&error) != nullptr ||
      dynamic_cast<const interchange::SafetensorsError*>(&error) != nullptr) {
    return true;
  }
  const auto* io = dynamic_cast<const IoError*>(&error);
  if (io == nullptr) return false;
  constexpr std::array kCodes = {ENOENT, EACCES, EPERM, EROFS,        ENOTDIR, EISDIR,
                                 ENOSPC, EDQUOT, ELOOP, ENAMETOOLONG, EEXIST};
  return std::ranges::find(kCodes, io->where.code) != kCodes.end();
}

int report_failure(const std::exception& error, const Training* training, int code) {
  const std::string rank =
      training != nullptr && training->world_size() > 1 ? fmt::format("rank {}: ", training->rank()) : std::string();
  complain(rank + error.what());
  return code;
}

}  // namespace

int run(const Arguments& arguments) noexcept {
  std::unique_ptr<Training> training;
  bool started = false;
  try {
    check_shape(arguments);
    install_signal_handlers();
    training = std::make_unique<Training>(arguments);
    if (!arguments.units.empty()) {
      training->describe_units(arguments.units);
      return 0;
    }
    training->prepare();
    started = true;
    training->train();
    training->close();
    return 0;
  } catch (const std::exception& error) {
    return report_failure(error, training.get(), !started && is_bad_input(error) ? kExitBadInput : kExitFailure);
  }
}

}  // namespace hoist::gpt
