// SPDX-License-Identifier: Apache-2.0
// hoist.hpp - the one header that a program includes: #include <hoist/hoist.hpp>.
//
// Its headers, in the order in which to read them; what else they include is support for them:
//
//   zero/engine.hpp               training: passes, gathers, gradients, steps, commits
//   zero/lease.hpp                a gathered unit's weights
//   zero/model.hpp, types.hpp     what is trained: units, parameters, groups
//   zero/options.hpp, runtime.hpp what an engine may use; what a process owns once
//   config/config.hpp             options from a DeepSpeed JSON file
//   interchange/import.hpp        initial weights from safetensors files
//   core/rng.hpp                  random initial weights, the same on any ranks
//   zero/predict/prediction.hpp   what an engine will hold and move; step_time.hpp: how long it will take
//   platform/device.hpp, stream.hpp, tiers/device_arena.hpp    the program's own work on the device
//   tiers/activation_offload.hpp  activations kept in pinned memory
//   comm/communicator.hpp         not included: for a program that starts ranks of its own
//   core/error.hpp                every exception
#pragma once

#include <hoist/config/config.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/interchange/import.hpp>
#include <hoist/tiers/activation_offload.hpp>
#include <hoist/zero/engine.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_time.hpp>
