// SPDX-License-Identifier: Apache-2.0
// The CPU optimizers on tensors that lie in memory.
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <hoist/core/error.hpp>
#include <hoist/optim_cpu/update.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/tiers/record_layout.hpp>
#include <hoist/zero/types.hpp>

#include "bindings.hpp"

namespace hoist::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::uint64_t kTile = tiers::kTileElements;

// One parameter's arrays, as addresses of dense CPU tensors.
struct Arrays {
  std::uintptr_t weight = 0;
  std::uintptr_t remainder = 0;  // bf16 weights only
  std::uintptr_t moment1 = 0;    // 0: the optimizer keeps none
  std::uintptr_t moment2 = 0;
  std::uintptr_t gradient = 0;
  DType weight_dtype = DType::fp32;
  DType gradient_dtype = DType::fp32;
  std::uint64_t count = 0;
};

template <typename T>
T* at(std::uintptr_t address, std::uint64_t first) {
  return address == 0 ? nullptr : reinterpret_cast<T*>(address) + first;
}

constexpr std::array kKinds{optim::OptimizerKind::adamw, optim::OptimizerKind::adam, optim::OptimizerKind::adagrad,
                            optim::OptimizerKind::lion, optim::OptimizerKind::sgd};

GroupOptions defaults_of(const std::string& name) {
  for (const optim::OptimizerKind kind : kKinds)
    if (name == optim::optimizer_name(kind)) return optim::default_options(kind);
  throw UsageError("there is no optimizer '" + name + "': choose AdamW, Adam, Adagrad, Lion or SGD");
}

GroupOptions of_kind(const GroupOptions& settings, const std::string& name) {
  GroupOptions options = defaults_of(name);
  if (options.kind == settings.kind) return settings;
  options.moments = settings.moments;
  options.remainder = settings.remainder;
  options.rounding_seed = settings.rounding_seed;
  return options;
}

// Values that are not finite are stored, as in PyTorch.
void update(const optim::UpdateCoefficients& c, const Arrays& a, std::uint64_t first, std::uint64_t count) {
  const optim::TileState state{
      .moment1 = at<float>(a.moment1, first),
      .moment2 = at<float>(a.moment2, first),
      .gradient = reinterpret_cast<const void*>(a.gradient + first * dtype_bytes(a.gradient_dtype)),
      .gradient_dtype = a.gradient_dtype,
      .count = count};
  if (a.weight_dtype == DType::fp32)
    static_cast<void>(optim::update_tile(c, optim::WholeTile{state, at<float>(a.weight, first)}));
  else
    static_cast<void>(optim::update_tile(
        c, optim::SplitTile{state, at<bf16>(a.weight, first), at<std::int16_t>(a.remainder, first)}));
}

struct Piece {
  const Arrays* arrays;
  std::uint64_t first;
};

}  // namespace

void bind_optim(nb::module_& module) {
  nb::class_<GroupOptions>(module, "OptimizerOptions", "Settings that parameters share.")
      .def(nb::init<>())
      .def(nb::init<const GroupOptions&>(), "other"_a)
      .def_rw("learning_rate", &GroupOptions::learning_rate)
      .def_rw("beta1", &GroupOptions::beta1)
      .def_rw("beta2", &GroupOptions::beta2)
      .def_rw("epsilon", &GroupOptions::epsilon)
      .def_rw("weight_decay", &GroupOptions::weight_decay)
      .def_rw("bias_correction", &GroupOptions::bias_correction)
      .def_rw("momentum", &GroupOptions::momentum)
      .def_rw("dampening", &GroupOptions::dampening)
      .def_rw("nesterov", &GroupOptions::nesterov)
      .def_rw("learning_rate_decay", &GroupOptions::learning_rate_decay)
      .def_rw("initial_accumulator", &GroupOptions::initial_accumulator)
      .def_prop_ro("kind", [](const GroupOptions& o) { return std::string(optim::optimizer_name(o.kind)); })
      .def_prop_ro(
          "moments",
          [](const GroupOptions& o) {
            const optim::OptimizerState state = optim::state_of(o);
            return std::make_pair(optim::has_moment1(state), optim::has_moment2(state));
          },
          "Whether a first and a second moment are kept of every parameter.")
      .def("check", &optim::check, "Errors: UsageError naming a setting that cannot be.")
      .def("of_kind", &of_kind, "kind"_a,
           "These settings. For another kind: its defaults, with state in the same types.")
      .def_static("defaults_of", &defaults_of, "kind"_a, "PyTorch's defaults of AdamW, Adam, Adagrad, Lion or SGD.");

  nb::class_<Arrays>(module, "Arrays", "One parameter's arrays: addresses of dense CPU tensors.")
      .def(
          "__init__",
          [](Arrays* self, std::uintptr_t weight, std::uintptr_t remainder, std::uintptr_t moment1,
             std::uintptr_t moment2, std::uintptr_t gradient, DType weight_dtype, DType gradient_dtype,
             std::uint64_t count) {
            new (self) Arrays{weight, remainder, moment1, moment2, gradient, weight_dtype, gradient_dtype, count};
          },
          "weight"_a, "remainder"_a, "moment1"_a, "moment2"_a, "gradient"_a, "weight_dtype"_a, "gradient_dtype"_a,
          "count"_a);

  nb::class_<optim::UpdatePool>(module, "UpdatePool", "The threads that update.")
      .def(
          "__init__",
          [](optim::UpdatePool* self, unsigned threads) {
            new (self) optim::UpdatePool(optim::UpdatePoolOptions{.threads = threads});
          },
          "threads"_a = 0)
      .def(
          "update",
          [](optim::UpdatePool& pool, const GroupOptions& options, std::uint64_t step,
             const std::vector<Arrays>& parameters) {
            const nb::gil_scoped_release release;
            optim::check(options);
            const optim::UpdateCoefficients coefficients(options, step, 1.0);
            std::vector<Piece> pieces;
            for (const Arrays& arrays : parameters) {
              for (std::uint64_t first = 0; first < arrays.count; first += kTile) pieces.push_back({&arrays, first});
            }
            pool.run(pieces.size(), [&](std::size_t i) {
              const auto& [arrays, first] = pieces[i];
              update(coefficients, *arrays, first, std::min(kTile, arrays->count - first));
            });
          },
          "options"_a, "step"_a, "parameters"_a, "One step over all of them.");

  module.def(
      "split_master",
      [](std::uintptr_t values, std::uintptr_t weight, std::uintptr_t remainder, std::uint64_t count) {
        const nb::gil_scoped_release release;
        for (std::uint64_t i = 0; i < count; ++i) {
          const SplitMaster split = split_master(*at<const float>(values, i));
          *at<bf16>(weight, i) = split.weight;
          *at<std::int16_t>(remainder, i) = split.remainder;
        }
      },
      "values"_a, "weight"_a, "remainder"_a, "count"_a, "fp32 values as bf16 weights and 16-bit remainders.");
  module.def(
      "join_master",
      [](std::uintptr_t weight, std::uintptr_t remainder, std::uintptr_t values, std::uint64_t count) {
        const nb::gil_scoped_release release;
        for (std::uint64_t i = 0; i < count; ++i)
          *at<float>(values, i) = join_master(*at<const bf16>(weight, i), *at<const std::int16_t>(remainder, i));
      },
      "weight"_a, "remainder"_a, "values"_a, "count"_a);
}

}  // namespace hoist::python
