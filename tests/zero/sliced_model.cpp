// SPDX-License-Identifier: Apache-2.0
#include "sliced_model.hpp"

#include <cmath>
#include <limits>

#include "toy_model.hpp"

namespace hoist::test {

namespace {

constexpr std::int64_t kOwn = 5000;
constexpr std::int64_t kShared = 60;

float own_gradient(int slice, std::int64_t i) { return 0.03f * std::sin(static_cast<float>(i * (slice + 2))); }
float shared_gradient(std::int64_t i) { return 0.2f * std::cos(static_cast<float>(i)); }

double squared(float value) { return static_cast<double>(value) * static_cast<double>(value); }

}  // namespace

StepReport step_of_slice(const Runtime::Groups& groups, const Slice& slice) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  if (!slice.recorded.empty()) {
    setup.runtime.trace_path = slice.recorded + "/trace.json";
    setup.engine.metrics_path = slice.recorded + "/metrics.jsonl";
  }
  Runtime runtime(setup.runtime, groups);
  const tiers::DeviceBlock made = runtime.device_arena().allocate((kOwn + kShared) * sizeof(float), "gradients");
  auto* const own = reinterpret_cast<float*>(made.data());
  float* const shared = own + kOwn;
  for (std::int64_t i = 0; i < kOwn; ++i) own[i] = own_gradient(slice.index, i);
  for (std::int64_t i = 0; i < kShared; ++i) shared[i] = shared_gradient(i);
  if (slice.poisoned) own[17] = std::numeric_limits<float>::infinity();

  const std::vector<ParameterSpec> specs{
      {.name = "own", .shape = {kOwn}},
      {.name = "shared", .shape = {kShared}, .dtype = DType::fp32, .counts_in_norm = slice.index == 0}};
  Model model;
  const UnitId unit = model.add_unit("unit", specs);
  Engine engine = Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, 0.5f);
  });
  const auto stream = runtime.device().create_stream("compute");
  {
    const PassScope scope = engine.begin(Pass::train);
    engine.gather(unit, *stream).release(*stream);
    const std::int64_t own_shape[] = {kOwn}, shared_shape[] = {kShared};
    engine.accumulate(engine.parameter("own"), {own, DType::fp32, own_shape, 0}, *stream);
    engine.accumulate(engine.parameter("shared"), {shared, DType::fp32, shared_shape, 0}, *stream);
    engine.finish(unit, *stream);
  }
  const StepReport report = engine.step();
  engine.settle();
  return report;
}

double norm_of_slices(int count) {
  double squares = 0;
  for (int slice = 0; slice < count; ++slice)
    for (std::int64_t i = 0; i < kOwn; ++i) squares += squared(to_float(to_bf16(own_gradient(slice, i))));
  for (std::int64_t i = 0; i < kShared; ++i) squares += squared(shared_gradient(i));
  return std::sqrt(squares);
}

}  // namespace hoist::test
