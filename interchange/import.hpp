// SPDX-License-Identifier: Apache-2.0
// interchange/import.hpp - reads initial values from safetensors files.
//
//   auto engine = Engine::create(runtime, options, model, interchange::fill_from("weights/", model.parameters()));
//
// Each rank reads only the elements it owns, whatever the world size. F32 tensors become the masters bit by bit; BF16
// and F16 ones are widened, which is exact.
//
// Threading  The returned function may run on several threads at once.
// Memory     The files' headers. Values are read into the engine's own memory.
// Errors     SafetensorsError before anything is initialized, naming every parameter without a fitting tensor or with
//            two that differ, and every tensor without a parameter; IoError, also from the returned function, if a file
//            cannot be read.
#pragma once

#include <functional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <hoist/zero/types.hpp>

namespace hoist::interchange {

struct ImportOptions {
  // The names that the files may have for a parameter. Several may be there (a weight that is used under two names) if
  // their values are equal, for which every rank reads them all. Empty: the name in the model.
  std::function<std::vector<std::string>(const std::string& parameter)> tensor_names{};
  // Gives the values of parameters that the files lack; empty: a missing parameter is an error.
  Initializer otherwise{};
  // Whether the files may hold tensors without a parameter. Usually such files belong to another model.
  bool allow_unused = false;
  // Tensors without a parameter that the files may hold in any case, such as a module's buffers.
  std::set<std::string> others{};
};

// `path` as SafetensorsModel takes it. `parameters` are the engine's, in its order; only read during the call.
Initializer fill_from(const std::string& path, std::span<const ParameterSpec> parameters,
                      const ImportOptions& options = {});

}  // namespace hoist::interchange
