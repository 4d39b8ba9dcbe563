// SPDX-License-Identifier: Apache-2.0
// hoist.hpp - the one header that a program includes: #include <hoist/hoist.hpp>.
//
// Start with zero/engine.hpp: what a training program calls. config/config.hpp reads a DeepSpeed JSON file,
// zero/predict/prediction.hpp computes what an engine will hold and move, tiers/activation_offload.hpp moves activations.
#pragma once

#include <hoist/config/config.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tiers/activation_offload.hpp>
#include <hoist/zero/engine.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_time.hpp>
