// SPDX-License-Identifier: Apache-2.0
// The options structs that a configuration becomes, rule by rule.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/config/config.hpp>
#include <hoist/config/setting.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "samples.hpp"

namespace hoist::options_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

Config parse(const std::string& text) { return Config::parse(text, "test.json"); }

Config sample(const std::string& name) {
  return Config::load((test::data_directory() / "accept" / (name + ".json")).string());
}

void expect_equal(const RuntimeOptions& a, const RuntimeOptions& b) {
  EXPECT_EQ(a.device, b.device);
  EXPECT_EQ(a.device_ordinal, b.device_ordinal);
  EXPECT_EQ(a.host_device.poison, b.host_device.poison);
  EXPECT_EQ(a.host_device.chaos_seed, b.host_device.chaos_seed);
  EXPECT_EQ(a.host_device.link_bytes_per_second, b.host_device.link_bytes_per_second);
  EXPECT_EQ(a.device_memory_bytes, b.device_memory_bytes);
  EXPECT_EQ(a.pinned_memory_bytes, b.pinned_memory_bytes);
  EXPECT_EQ(a.huge_pages, b.huge_pages);
  EXPECT_EQ(a.aio_backend, b.aio_backend);
  EXPECT_EQ(a.aio_block_bytes, b.aio_block_bytes);
  EXPECT_EQ(a.aio_queue_depth, b.aio_queue_depth);
  EXPECT_EQ(a.aio_threads, b.aio_threads);
  EXPECT_EQ(a.update_threads, b.update_threads);
  EXPECT_EQ(a.communicator, b.communicator);
  EXPECT_EQ(a.comm_scratch_bytes, b.comm_scratch_bytes);
  EXPECT_EQ(a.comm_timeout, b.comm_timeout);
  EXPECT_EQ(a.aio_answer_timeout, b.aio_answer_timeout);
}

TEST(Options, AnEmptyFileIsTheDefaults) {
  const Config config = parse("{}");
  expect_equal(config.runtime, RuntimeOptions{});
  const EngineOptions standard;
  EXPECT_EQ(config.engine.stage, standard.stage);
  EXPECT_EQ(config.engine.parameters, standard.parameters);
  EXPECT_EQ(config.engine.optimizer, standard.optimizer);
  EXPECT_EQ(config.engine.store_directory, "");
  EXPECT_EQ(config.engine.caller_state_bytes_max, standard.caller_state_bytes_max);
  EXPECT_EQ(config.engine.lock_timeout, standard.lock_timeout);
  EXPECT_EQ(config.engine.sub_group_elements, standard.sub_group_elements);
  EXPECT_EQ(config.engine.update_buffer_count, standard.update_buffer_count);
  EXPECT_EQ(config.engine.staging_buffer_count, standard.staging_buffer_count);
  EXPECT_EQ(config.engine.prefetch_elements, standard.prefetch_elements);
  EXPECT_EQ(config.engine.live_elements_max, standard.live_elements_max);
  EXPECT_EQ(config.engine.reuse_distance_elements, standard.reuse_distance_elements);
  EXPECT_EQ(config.engine.persistence_elements, standard.persistence_elements);
  EXPECT_EQ(config.engine.secondary_shard_ranks, 1);
  EXPECT_EQ(config.engine.gradient_clipping, standard.gradient_clipping);
  const optim::OptimizerOptions& adam = config.engine.optimizer_defaults;
  EXPECT_EQ(adam.kind, standard.optimizer_defaults.kind);
  EXPECT_EQ(adam.learning_rate, standard.optimizer_defaults.learning_rate);
  EXPECT_EQ(adam.beta1, standard.optimizer_defaults.beta1);
  EXPECT_EQ(adam.beta2, standard.optimizer_defaults.beta2);
  EXPECT_EQ(adam.epsilon, standard.optimizer_defaults.epsilon);
  EXPECT_EQ(adam.bias_correction, standard.optimizer_defaults.bias_correction);
  EXPECT_EQ(adam.weight_decay, 0.0) << "DeepSpeed's default, not PyTorch's";
}

TEST(Options, EverythingOnNvme) {
  const Config config = sample("everything_on_nvme");
  EXPECT_EQ(config.engine.parameters, Placement::nvme);
  EXPECT_EQ(config.engine.optimizer, Placement::nvme);
  EXPECT_EQ(config.engine.store_directory, "/local_nvme/hoist");
  EXPECT_EQ(config.engine.durability, tiers::Durability::step);
  EXPECT_EQ(config.engine.staging_buffer_count, 6u);
  EXPECT_EQ(config.engine.update_buffer_count, 5u);
  EXPECT_EQ(config.engine.sub_group_elements, 1'000'000'000u);
  EXPECT_EQ(config.engine.secondary_shard_ranks, 8);
  EXPECT_EQ(config.runtime.aio_block_bytes, 262144u);
  EXPECT_EQ(config.runtime.aio_queue_depth, 32u);
  EXPECT_EQ(config.runtime.aio_threads, 1u);
  EXPECT_EQ(config.engine.optimizer_defaults.kind, optim::OptimizerKind::adamw) << "Adam means AdamW in DeepSpeed";
  EXPECT_EQ(config.engine.optimizer_defaults.learning_rate, 0.0002);
  EXPECT_EQ(config.engine.optimizer_defaults.beta2, 0.95);
  EXPECT_EQ(config.engine.optimizer_defaults.weight_decay, 0.1);
  ASSERT_EQ(config.warnings.size(), 1u);
  for (const char* key : {"pipeline_read", "overlap_comm", "steps_per_print", "aio.single_submit"}) {
    EXPECT_THAT(config.warnings[0], HasSubstr(key));
  }
  EXPECT_THAT(config.warnings[0], ::testing::Not(HasSubstr("block_size")));
}

TEST(Options, AutoIsResolvedAndSaid) {
  const Config config = sample("trainer_auto");
  EXPECT_EQ(config.engine.parameters, Placement::pinned);
  EXPECT_EQ(config.engine.optimizer, Placement::pinned);
  EXPECT_EQ(config.engine.store_directory, "");
  EXPECT_EQ(config.engine.durability, tiers::Durability::none);
  EXPECT_EQ(config.engine.prefetch_elements, 50'000'000u);
  EXPECT_FALSE(config.training.train_batch_size.has_value());
  EXPECT_THAT(config.notes, Contains(HasSubstr("stage3_prefetch_bucket_size")));
}

// As templates for trainers have them.
TEST(Options, ASwitchOfAutoIsOff) {
  for (const char* section :
       {R"("amp": {"enabled": "auto", "opt_level": "auto"})", R"("elasticity": {"enabled": "auto"})",
        R"("torch_autocast": {"enabled": "auto"})", R"("autotuning": {"enabled": "auto"})"}) {
    const Config config = parse(fmt::format("{{{}}}", section));
    EXPECT_TRUE(config.warnings.empty()) << section;
  }
}

TEST(Options, TheOldNameOfBf16MayStandBesideTheNewOne) {
  EXPECT_EQ(parse(R"({"bfloat16": {"enabled": true}})").engine.weights_dtype, DType::bf16);
  EXPECT_EQ(parse(R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": true}})").engine.weights_dtype, DType::bf16);
  EXPECT_THROW(parse(R"({"bf16": {"enabled": true}, "bfloat16": {"enabled": false}})"), ConfigError);
  EXPECT_NO_THROW(parse(R"({"data_types": {"grad_accum_dtype": "float"}})"));
}

// Its default changed in DeepSpeed.
TEST(Options, ClippingThatTheFileDoesNotSetIsSaid) {
  const auto says_so = Contains(HasSubstr("gradient_clipping is 1.0 (0 in DeepSpeed before June 2026)"));
  EXPECT_THAT(parse("{}").notes, says_so);
  for (const char* set : {"0", "1.0", "\"auto\""})
    EXPECT_THAT(parse(fmt::format(R"({{"gradient_clipping": {}}})", set)).notes, ::testing::Not(says_so)) << set;
}

TEST(Options, BareNamesAreTheSameKeys) {
  const Config config = sample("bare_names");
  EXPECT_EQ(config.engine.prefetch_elements, 11u);
  EXPECT_EQ(config.engine.live_elements_max, 12u);
  EXPECT_EQ(config.engine.reuse_distance_elements, 13u);
  EXPECT_EQ(config.engine.persistence_elements, 14u);
  EXPECT_EQ(config.runtime.aio_threads, 3u);
}

TEST(Options, HoistSection) {
  const Config config = sample("hoist_section");
  RuntimeOptions expected;
  expected.device = platform::DeviceKind::host;
  expected.device_ordinal = 0;
  expected.device_memory_bytes = 8 * kGiB;
  expected.pinned_memory_bytes = 499'998'720;  // 5e8 rounded down to 4 KiB
  expected.huge_pages = false;
  expected.comm_scratch_bytes = kMiB;
  expected.host_device.chaos_seed = 42;
  expected.host_device.link_bytes_per_second = 16 * kGiB;
  expected.update_threads = 2;
  expected.aio_backend = aio::BackendKind::threads;
  expected.communicator = CommunicatorKind::self;
  expected.comm_timeout = std::chrono::seconds(30);
  expected.aio_answer_timeout = std::chrono::milliseconds(20'500);
  expect_equal(config.runtime, expected);
  EXPECT_EQ(config.engine.store_directory, "/data/checkpoints/hoist");
  EXPECT_EQ(config.engine.durability, tiers::Durability::none);
  EXPECT_EQ(config.engine.caller_state_bytes_max, 1024u);
  EXPECT_EQ(config.engine.lock_timeout, std::chrono::milliseconds(500));
}

// Python's sys.maxsize stands for "no limit" in many files.
TEST(Options, TheLargestCountIsOne) {
  const Config config = parse(R"({"zero_optimization": {"stage3_max_live_parameters": 9223372036854775807},
                                  "hoist": {"device_memory": "22.3GiB"}})");
  EXPECT_EQ(config.engine.live_elements_max, 9223372036854775807u);
  EXPECT_EQ(config.runtime.device_memory_bytes, round_down(23944442675, 4096));
  EXPECT_THROW(parse(R"({"train_batch_size": 9223372036854775808})"), ConfigError);
}

TEST(Options, CudaAndOtherChoices) {
  const Config config = parse(R"({"hoist": {"device": "cuda", "device_ordinal": 3, "io_engine": "io_uring",
                                            "communicator": "mpi"}})");
  EXPECT_EQ(config.runtime.device, platform::DeviceKind::cuda);
  EXPECT_EQ(config.runtime.device_ordinal, 3);
  EXPECT_EQ(config.runtime.aio_backend, aio::BackendKind::io_uring);
  EXPECT_EQ(config.runtime.communicator, CommunicatorKind::mpi);
}

struct OptimizerCase {
  const char* optimizer;
  optim::OptimizerKind variant;
  double weight_decay;
};

TEST(Options, AdamIsAdamWUnlessToldOtherwise) {
  using optim::OptimizerKind;
  const OptimizerCase cases[] = {
      {R"({"type": "AdamW"})", OptimizerKind::adamw, 0},
      {R"({"type": "Adam"})", OptimizerKind::adamw, 0},
      {R"({"type": "adam", "params": {"adam_w_mode": true}})", OptimizerKind::adamw, 0},
      {R"({"type": "Adam", "params": {"adam_w_mode": false, "weight_decay": 0.2}})", OptimizerKind::adam, 0.2},
      {R"({"type": "AdamW", "params": {"adam_w_mode": false}})", OptimizerKind::adamw, 0},
      {R"({"type": "AdamW", "params": {"torch_adam": true}})", OptimizerKind::adamw, 0.01},
      {R"({"type": "AdamW", "params": {"torch_adam": true, "weight_decay": 0.0}})", OptimizerKind::adamw, 0},
      {R"({"type": "Adam", "params": {"torch_adam": true, "adam_w_mode": false}})", OptimizerKind::adam, 0},
  };
  for (const OptimizerCase& c : cases) {
    const Config config = parse("{\"optimizer\": " + std::string(c.optimizer) + "}");
    EXPECT_EQ(config.engine.optimizer_defaults.kind, c.variant) << c.optimizer;
    EXPECT_EQ(config.engine.optimizer_defaults.weight_decay, c.weight_decay) << c.optimizer;
  }
}

TEST(Options, EveryOptimizerHasItsOwnDefaults) {
  using optim::OptimizerKind;
  const auto options_of = [](const std::string& optimizer) {
    return parse("{\"optimizer\": " + optimizer + "}").engine.optimizer_defaults;
  };
  const auto adagrad = options_of(R"({"type": "Adagrad"})");
  EXPECT_EQ(adagrad.kind, OptimizerKind::adagrad);
  EXPECT_EQ(adagrad.learning_rate, 0.01);
  EXPECT_EQ(adagrad.epsilon, 1e-10);
  EXPECT_EQ(adagrad.weight_decay, 0);
  const auto accumulating = options_of(
      R"({"type": "adagrad", "params": {"lr": 0.5, "lr_decay": 0.1, "initial_accumulator_value": 2, "eps": 1e-6}})");
  EXPECT_EQ(accumulating.learning_rate, 0.5);
  EXPECT_EQ(accumulating.learning_rate_decay, 0.1);
  EXPECT_EQ(accumulating.initial_accumulator, 2);
  EXPECT_EQ(accumulating.epsilon, 1e-6);
  const auto lion = options_of(R"({"type": "Lion", "params": {"weight_decay": 0.3}})");
  EXPECT_EQ(lion.kind, OptimizerKind::lion);
  EXPECT_EQ(lion.learning_rate, 1e-3);  // DeepSpeed's
  EXPECT_EQ(lion.beta1, 0.9);
  EXPECT_EQ(lion.beta2, 0.999);
  EXPECT_EQ(lion.weight_decay, 0.3);
  EXPECT_EQ(options_of(R"({"type": "Lion", "params": {"betas": [0.95, 0.98]}})").beta2, 0.98);
  const auto plain = options_of(R"({"type": "SGD"})");
  EXPECT_EQ(plain.kind, OptimizerKind::sgd);
  EXPECT_EQ(plain.learning_rate, 1e-3);
  EXPECT_EQ(optim::state_of(plain), optim::OptimizerState::none);
  const auto nesterov = options_of(R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true}})");
  EXPECT_EQ(nesterov.momentum, 0.9);
  EXPECT_TRUE(nesterov.nesterov);
  EXPECT_EQ(options_of(R"({"type": "SGD", "params": {"momentum": 0.9, "dampening": 0.2}})").dampening, 0.2);
}

TEST(Options, MomentsMayBeHalf) {
  const auto half = parse(R"({"hoist": {"moments_dtype": "bf16", "moments_seed": 7}})").engine.optimizer_defaults;
  EXPECT_EQ(half.moments, MomentType::bf16);
  EXPECT_EQ(half.rounding_seed, 7u);
  EXPECT_EQ(parse("{}").engine.optimizer_defaults.moments, MomentType::fp32);
}

TEST(Options, StateMayHaveEightBits) {
  const auto moments = parse(R"({"hoist": {"moments_dtype": "fp8"}})").engine.optimizer_defaults;
  EXPECT_EQ(moments.moments, MomentType::fp8);
  EXPECT_EQ(moments.remainder, RemainderType::int16);
  const auto master = parse(R"({"hoist": {"remainder_dtype": "int8"}})").engine.optimizer_defaults;
  EXPECT_EQ(master.moments, MomentType::fp32);
  EXPECT_EQ(master.remainder, RemainderType::int8);
}

TEST(Options, Fp16IsWeightsAndALossScale) {
  const EngineOptions standard = parse("{}").engine;
  EXPECT_EQ(standard.weights_dtype, std::nullopt);
  EXPECT_FALSE(standard.loss_scale.dynamic);
  EXPECT_EQ(standard.loss_scale.scale, 1);
  EXPECT_EQ(parse(R"({"bf16": {"enabled": true}})").engine.weights_dtype, DType::bf16);
  EXPECT_EQ(parse(R"({"bf16": {"enabled": false}})").engine.weights_dtype, DType::fp32);
  EXPECT_EQ(parse(R"({"bf16": {"enabled": "auto"}})").engine.weights_dtype, std::nullopt);
  EXPECT_EQ(parse(R"({"bf16": {"enabled": false}, "fp16": {"enabled": true}})").engine.weights_dtype, DType::fp16);
  EXPECT_EQ(parse(R"({"bf16": {"enabled": false}, "fp16": {"enabled": false}})").engine.weights_dtype, DType::fp32);

  const EngineOptions dynamic = parse(R"({"fp16": {"enabled": true}})").engine;
  EXPECT_EQ(dynamic.weights_dtype, DType::fp16);
  EXPECT_TRUE(dynamic.loss_scale.dynamic);
  EXPECT_EQ(dynamic.loss_scale.scale, 65536);
  EXPECT_EQ(dynamic.loss_scale.window, 1000u);
  EXPECT_EQ(dynamic.loss_scale.hysteresis, 2u);
  EXPECT_FALSE(dynamic.loss_scale.consecutive_hysteresis);
  EXPECT_EQ(dynamic.loss_scale.scale_min, 1);

  const LossScaleOptions own =
      parse(R"({"bf16": {"enabled": false}, "fp16": {"enabled": true, "initial_scale_power": 20,
                "loss_scale_window": 7, "hysteresis": 3, "consecutive_hysteresis": true, "min_loss_scale": 8}})")
          .engine.loss_scale;
  EXPECT_TRUE(own.dynamic);
  EXPECT_EQ(own.scale, 1 << 20);
  EXPECT_EQ(own.window, 7u);
  EXPECT_EQ(own.hysteresis, 3u);
  EXPECT_TRUE(own.consecutive_hysteresis);
  EXPECT_EQ(own.scale_min, 8);

  const LossScaleOptions fixed = parse(R"({"fp16": {"enabled": true, "loss_scale": 0.5}})").engine.loss_scale;
  EXPECT_FALSE(fixed.dynamic);
  EXPECT_EQ(fixed.scale, 0.5);
}

TEST(Options, LossScaleKeysWithoutUseAreNamed) {
  const Config absent = parse(R"({"fp16": {"loss_scale": 128, "hysteresis": 5}})");
  EXPECT_EQ(absent.engine.loss_scale.scale, 1);
  EXPECT_THAT(absent.notes,
              ::testing::Contains("not used, as fp16.enabled is not true: fp16.loss_scale, fp16.hysteresis"));
  for (const char* off : {"false", "\"auto\""})
    EXPECT_THAT(parse(fmt::format(R"({{"fp16": {{"enabled": {}, "loss_scale": 128}}}})", off)).notes,
                ::testing::Not(Contains(HasSubstr("not used"))));
  EXPECT_NO_THROW(parse(R"({"fp16": {"enabled": false, "fp16_master_weights_and_grads": true}})"));
  EXPECT_THROW(parse(R"({"fp16": {"enabled": false, "hysteresis": 0}})"), ConfigError) << "not a value";
  const Config fixed = parse(R"({"fp16": {"enabled": true, "loss_scale": 128, "hysteresis": 5}})");
  EXPECT_EQ(fixed.engine.loss_scale.scale, 128);
  EXPECT_THAT(fixed.notes, ::testing::Contains("not used, as fp16.loss_scale is a fixed one: fp16.hysteresis"));
}

TEST(Options, TheReferenceListsTheOptimizersOwnSettings) {
  const Config config = parse(R"({"optimizer": {"type": "Lion"}})");
  std::vector<std::string> names;
  for (const ConfigSetting& setting : config.settings()) {
    if (setting.row->path.starts_with("optimizer.params.") && setting.row->status == config::KeyStatus::implemented)
      names.emplace_back(config::last_part(setting.row->path));
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("lr", "betas", "weight_decay"));
}

TEST(Options, PathsAreTheSamePlaceHoweverWritten) {
  const Config config = parse(R"({"zero_optimization": {
      "offload_param": {"device": "nvme", "nvme_path": "/a/./b//"},
      "offload_optimizer": {"device": "nvme", "nvme_path": ["/a/b"]}}, "hoist": {"checkpoint_path": "/a/b/"}})");
  EXPECT_EQ(config.engine.store_directory, "/a/b/hoist");
}

TEST(Options, ADriveIsNamedOnceAlsoThroughALink) {
  const test::TempDirectory directory;
  std::filesystem::create_directory(directory / "a");
  std::filesystem::create_directory_symlink(directory / "a", directory / "link");
  const auto parse_drives = [&](const std::string& second) {
    parse(fmt::format(
        R"({{"zero_optimization": {{"offload_optimizer": {{"device": "nvme", "nvme_path": ["{}", "{}"]}}}}}})",
        directory / "a", directory / second));
  };
  EXPECT_NO_THROW(parse_drives("b"));
  for (const char* second : {"a/.", "link"}) EXPECT_THROW(parse_drives(second), ConfigError) << second;
}

TEST(Options, AMirrorIsAStoreBelowItsPath) {
  const Config config = parse(R"({"zero_optimization": {
      "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}},
      "hoist": {"mirror": {"path": "/b/", "every": 50, "bytes_per_second": "200MB"}}})");
  EXPECT_EQ(config.engine.mirror.directory, "/b/hoist");
  EXPECT_EQ(config.engine.mirror.every, 50u);
  EXPECT_EQ(config.engine.mirror.bytes_per_second, 200'000'000u);
}

TEST(Options, AMirrorNeedsCommitsAndAPlaceOfItsOwn) {
  const auto refusal = [](const std::string& device, const std::string& hoist) {
    try {
      parse(R"({"zero_optimization": {"stage": 3, "offload_optimizer": )" + device + R"(}, "hoist": )" + hoist + "}");
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  const std::string nvme = R"({"device": "nvme", "nvme_path": "/a"})", memory = R"({"device": "cpu"})";
  EXPECT_THAT(refusal(nvme, R"({"mirror": {"path": "/a/."}})"), HasSubstr("where the store itself is"));
  EXPECT_THAT(refusal(nvme, R"({"durability": "none", "mirror": {"path": "/b"}})"), HasSubstr("no commits to copy"));
  EXPECT_THAT(refusal(memory, R"({"mirror": {"path": "/b"}})"), HasSubstr("no store to copy"));
  EXPECT_EQ(refusal(memory, R"({"checkpoint_path": "/a", "mirror": {"path": "/b"}})"), "accepted");
}

TEST(Options, AListOfPathsSpreadsTheStore) {
  const Config config = sample("several_drives");
  EXPECT_EQ(config.engine.store_directory, "/nvme0/hoist");
  EXPECT_EQ(config.engine.stripe_directories, std::vector<std::string>{"/nvme1/hoist"});
}

TEST(Options, OldOffloadIsTheSectionThatReplacedIt) {
  const Config config = sample("old_offload");
  EXPECT_EQ(config.engine.parameters, Placement::pinned);
  EXPECT_EQ(config.engine.optimizer, Placement::pinned);
  EXPECT_THAT(config.warnings, Contains(HasSubstr("zero_optimization.cpu_offload is deprecated")));
  for (const ConfigSetting& setting : config.settings()) {
    if (setting.row->path != "zero_optimization.offload_optimizer.device") continue;
    EXPECT_EQ(to_text(setting.value), "\"cpu\"") << "what is in effect is shown";
    EXPECT_EQ(setting.line, 1u);
  }
}

TEST(Options, ReportsAndMeasurements) {
  const Config config = sample("tuned_and_reported");
  EXPECT_EQ(config.engine.metrics_path, "run/metrics.jsonl");
  EXPECT_EQ(config.runtime.trace_path, "run/trace.json");
  EXPECT_EQ(config.measured.read_bytes_per_second, 6'800'000'000u);
  EXPECT_EQ(config.measured.mixed_bytes_per_second, 5'200'000'000u);
  EXPECT_FALSE(parse("{}").measured.read_bytes_per_second.has_value());
}

TEST(Options, UpdateMode) {
  const auto mode = [](const char* name) {
    return parse("{\"hoist\": {\"update_mode\": \"" + std::string(name) + "\"}}").engine.update_mode;
  };
  EXPECT_EQ(mode("auto"), UpdateMode::automatic);
  EXPECT_EQ(mode("step"), UpdateMode::step);
  EXPECT_EQ(mode("forward"), UpdateMode::forward);
  const Config backward = parse(R"({"gradient_clipping": 0, "hoist": {"update_mode": "backward"},
                                    "zero_optimization": {"offload_optimizer": {"device": "cpu"}}})");
  EXPECT_EQ(backward.engine.update_mode, UpdateMode::backward);
}

TEST(Options, ASubGroupOfZeroIsTheDefault) {
  EXPECT_EQ(parse(R"({"zero_optimization": {"sub_group_size": 0}})").engine.sub_group_elements,
            EngineOptions{}.sub_group_elements);
}

TEST(Options, OneOfTwoOnNvmeDecidesTheStore) {
  const Config config = parse(
      R"({"zero_optimization": {"offload_param": {"device": "cpu"},
                                "offload_optimizer": {"device": "nvme", "nvme_path": "relative"}},
          "hoist": {"durability": "none"}})");
  EXPECT_EQ(config.engine.parameters, Placement::pinned);
  EXPECT_EQ(config.engine.store_directory, "relative/hoist");
  EXPECT_EQ(config.engine.durability, tiers::Durability::none);
}

TEST(Options, AnUnusedPathIsSaid) {
  const Config config = parse(R"({"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/x"}}})");
  EXPECT_EQ(config.engine.store_directory, "");
  EXPECT_THAT(config.warnings, Contains(HasSubstr("offload_param.nvme_path is not used")));
}

// Projects keep keys of their own in the file, and DeepSpeed ignores them.
TEST(Options, KeysUnlikeAnyAreIgnoredAtTheTopLevelAndSaid) {
  const Config config = parse(R"({"train_batch_size": 8, "cuda_visible_devices": null, "log": {"file": "x"}})");
  EXPECT_THAT(config.warnings, Contains(HasSubstr("DeepSpeed 0.19 knows such keys: cuda_visible_devices, log")));
  const Config similar = parse(R"({"train_batch_size": 8, "eval_batch_size": 8, "weight_decay": 0.1})");
  EXPECT_THAT(similar.warnings, Contains(HasSubstr(R"(eval_batch_size (did you mean "train_batch_size"?))")));
  EXPECT_THAT(similar.warnings,
              Contains(HasSubstr(R"(weight_decay (did you mean "weight_decay" in "optimizer.params"?))")));
  const Config profiled = parse(R"({"train_batch_size": 8, "flops_profiler": {"enabled": true, "start_step": 5}})");
  EXPECT_THAT(profiled.warnings, Contains(HasSubstr("flops_profiler.start_step")));
  EXPECT_THROW(parse(R"({"train_batch_size": 8, "train_batchsize": 8})"), ConfigError) << "a typing error";
  EXPECT_THROW(parse(R"({"train_batch_size": 8, "offload_optimizer": {"device": "cpu"}})"), ConfigError);
  EXPECT_THROW(parse(R"({"train_batch_size": 8, "device": "cpu"})"), ConfigError) << "belongs into a section";
  EXPECT_THROW(parse(R"({"train_batch_size": 8, "hoist": {"log": 1}})"), ConfigError);
  EXPECT_THROW(parse(R"({"train_batch_size": 8, "log": {"a": 1, "a": 2}})"), ConfigError) << "given twice";
  EXPECT_THROW(parse(R"({"vocab_files": 1, "log": {"file": "x"}})"), ConfigError) << "not a configuration";
}

// As DeepSpeed still reads it.
TEST(Options, ASwitchInsteadOfAStageIsStageOne) {
  const Config on = parse(R"({"zero_optimization": true, "allgather_size": 5e8})");
  EXPECT_EQ(on.engine.stage, 1);
  EXPECT_THAT(on.warnings, Contains(HasSubstr("zero_optimization: true is read as stage 1")));
  EXPECT_EQ(parse(R"({"zero_optimization": false})").engine.stage, 0);
}

// Python writes it, in Accelerate's dump of a plugin for example.
TEST(Options, InfinityIsTakenWhereItHasNoEffect) {
  const Config config = parse(R"({"steps_per_print": Infinity, "wandb": {"project": "to Infinity"}})");
  EXPECT_THAT(config.warnings, Contains(HasSubstr("steps_per_print")));
  EXPECT_NO_THROW(parse(R"({"steps_per_print": -1, "flops_profiler": {"profile_step": -1}})"));  // never
  EXPECT_THROW(parse(R"({"gradient_clipping": Infinity})"), ConfigError);
  EXPECT_THROW(parse(R"({"gradient_clipping": NaN})"), ConfigError);
}

TEST(Options, SettingsKnowWhereTheyCameFrom) {
  const Config config = parse("{\n \"aio\": {\"queue_depth\": 7,\n  \"block_size\": \"auto\"}}");
  int found = 0;
  for (const ConfigSetting& setting : config.settings()) {
    if (setting.row->path == "aio.queue_depth") {
      EXPECT_EQ(setting.source, ConfigSetting::Source::file);
      EXPECT_EQ(std::pair(setting.line, setting.column), std::pair(std::size_t{2}, std::size_t{25}));
      EXPECT_EQ(to_text(setting.value), "7");
      ++found;
    }
    if (setting.row->path == "aio.block_size") {
      EXPECT_EQ(setting.source, ConfigSetting::Source::automatic);
      EXPECT_EQ(to_text(setting.value), "1048576");
      ++found;
    }
    if (setting.row->path == "gradient_clipping") {
      EXPECT_EQ(setting.source, ConfigSetting::Source::standard);
      ++found;
    }
  }
  EXPECT_EQ(found, 3);
}

TEST(WorldSize, IsCutIntoWholeGroups) {
  const Config config = parse(R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}})");
  for (const int ranks : {1, 3, 4, 8}) EXPECT_NO_THROW(config.check_world_size(ranks));  // below 4: one group
  try {
    config.check_world_size(6);
    ADD_FAILURE() << "6 ranks in groups of 4";
  } catch (const ConfigProblems& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("zero_hpz_partition_size"));
  }
}

TEST(PinnedFraction, IsANumberOrLeftOpen) {
  const auto of = [](const char* value) {
    return parse(fmt::format(R"({{"hoist": {{"optimizer_pinned_fraction": {}}}}})", value))
        .engine.optimizer_pinned_fraction;
  };
  EXPECT_EQ(of("0.25"), 0.25);
  EXPECT_EQ(of("\"auto\""), std::nullopt);
  EXPECT_EQ(parse("{}").engine.optimizer_pinned_fraction, 0.0);
  for (const char* wrong : {"1.5", "-0.1", "\"most\"", "true", "\"0.5\""})
    EXPECT_THROW(of(wrong), ConfigProblems) << wrong;
}

TEST(PinnedFraction, OfWeightsIsANumberOrLeftOpenOrALimit) {
  const auto of = [](const char* param, const char* hoist) {
    return parse(fmt::format(R"({{"zero_optimization": {{"stage": 3, "offload_param": {{{}}}}}, "hoist": {{{}}}}})",
                             param, hoist));
  };
  constexpr const char* kNvme = R"("device": "nvme", "nvme_path": "/nvme")";
  constexpr const char* kLimited = R"("device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1e9)";
  constexpr const char* kHalf = R"("parameters_pinned_fraction": 0.5)";
  const auto kUnlimited = EngineOptions{}.parameters_pinned_elements_max;
  const auto expect = [&](const Config& config, std::optional<double> fraction, std::uint64_t elements) {
    EXPECT_EQ(config.engine.parameters_pinned_fraction, fraction);
    EXPECT_EQ(config.engine.parameters_pinned_elements_max, elements);
  };
  expect(of(kNvme, ""), 0.0, kUnlimited);
  expect(of(kNvme, kHalf), 0.5, kUnlimited);
  expect(of(kNvme, R"("parameters_pinned_fraction": "auto")"), std::nullopt, kUnlimited);
  // What DeepSpeed's users write: as much as fits, up to the limit.
  expect(of(kLimited, ""), std::nullopt, 1'000'000'000);
  expect(of(kLimited, kHalf), 0.5, 1'000'000'000);
  expect(of(R"("device": "cpu", "max_in_cpu": 1e9)", ""), 0.0, kUnlimited);
  EXPECT_THAT(of(R"("device": "cpu")", kHalf).warnings, Contains(HasSubstr("parameters_pinned_fraction is not used")));
  EXPECT_THROW(of(kNvme, R"("parameters_pinned_fraction": 1.1)"), ConfigProblems);
  EXPECT_THROW(of(R"("device": "nvme", "nvme_path": "/nvme", "max_in_cpu": -1)", ""), ConfigProblems);
}

TEST(OffloadRatio, IsTheShareThatIsOffloaded) {
  const auto config = [](const char* device, const char* ratio) {
    return parse(fmt::format(R"({{"zero_optimization": {{"stage": 3, "offload_optimizer":
                                 {{"device": "{}", "nvme_path": "/nvme", "ratio": {}}}}}}})",
                             device, ratio));
  };
  EXPECT_EQ(config("cpu", "0.3").engine.optimizer_offload_ratio, 0.3);
  EXPECT_EQ(config("nvme", "0").engine.optimizer_offload_ratio, 0);
  EXPECT_EQ(parse("{}").engine.optimizer_offload_ratio, 1);
  for (const char* wrong : {"1.5", "-0.1", "true", "\"0.5\""})
    EXPECT_THROW(config("cpu", wrong), ConfigProblems) << wrong;
  EXPECT_TRUE(config("nvme", "0.3").warnings.empty());
  EXPECT_THAT(config("none", "0.3").warnings, Contains(HasSubstr("ratio is not used")));
}

TEST(WorldSize, TwoOfThreeImplyTheThird) {
  const Config batch = parse(R"({"train_batch_size": 12})");
  EXPECT_EQ(batch.check_world_size(4).train_micro_batch_size_per_gpu, 3u);
  EXPECT_EQ(batch.check_world_size(4).gradient_accumulation_steps, 1u);
  EXPECT_THROW(batch.check_world_size(5), ConfigProblems);
  const Config micro = parse(R"({"train_micro_batch_size_per_gpu": 3})");
  EXPECT_EQ(micro.check_world_size(4).train_batch_size, 12u);
  const Config both =
      parse(R"({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1})");
  EXPECT_EQ(both.check_world_size(4).train_batch_size, 12u);
  const Config implied = parse(R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3})");
  EXPECT_EQ(implied.check_world_size(4).gradient_accumulation_steps, 2u);
  EXPECT_EQ(implied.check_world_size(8).gradient_accumulation_steps, 1u);
  EXPECT_THROW(implied.check_world_size(3 * 8), ConfigProblems);
  EXPECT_EQ(implied.micro_batches(4), 2u);
  EXPECT_EQ(implied.micro_batches(3 * 8), 1u) << "they do not go with so many";
  Config settled = implied;
  settled.settle(2);
  EXPECT_EQ(settled.engine.micro_batches_max, 4u);
  EXPECT_EQ(settled.training.gradient_accumulation_steps, 4u);
  EXPECT_THROW(parse(R"({"train_batch_size": 4294967297, "train_micro_batch_size_per_gpu": 1})").settle(1),
               ConfigProblems);
  EXPECT_EQ(parse(R"({"gradient_accumulation_steps": 6})").engine.micro_batches_max, 6u);
  EXPECT_FALSE(parse("{}").check_world_size(4).train_batch_size.has_value());
  EXPECT_THROW(parse("{}").check_world_size(0), UsageError);
  try {
    both.check_world_size(2);  // would be two accumulation steps
    FAIL() << "accepted";
  } catch (const ConfigProblems& error) {
    EXPECT_EQ(error.key, "train_batch_size");
    EXPECT_THAT(error.what(), HasSubstr("12 is not train_micro_batch_size_per_gpu 3"));
    EXPECT_THAT(error.what(), HasSubstr("(test.json:1:22)"));
  }
}

TEST(WorldSize, MoreSamplesThanCanBeCountedAreRefused) {
  const Config config = parse(R"({"train_micro_batch_size_per_gpu": 9e18})");
  EXPECT_EQ(config.check_world_size(1).train_batch_size, 9'000'000'000'000'000'000u);
  EXPECT_THROW(config.check_world_size(2), ConfigProblems);
}

}  // namespace
}  // namespace hoist::options_test
