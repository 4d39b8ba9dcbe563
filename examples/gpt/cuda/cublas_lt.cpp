// SPDX-License-Identifier: Apache-2.0
#include "cublas_lt.hpp"

#include <array>
#include <string>

#include <dlfcn.h>
#include <fmt/format.h>

#include <hoist/core/error.hpp>

namespace hoist::gpt {
namespace {

std::string library_name() { return fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR); }

// The linker's search path, then the directory of the toolkit that this was built with.
void* open_library() {
  for (const std::string& name : std::array{library_name(), HOIST_CUBLASLT_DIRECTORY "/" + library_name()}) {
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  const char* why = dlerror();
  throw DeviceError(
      "loading cuBLASLt", 0, why != nullptr ? why : library_name(),
      fmt::format("install {}, or put its folder on LD_LIBRARY_PATH, or choose the host device", library_name()));
}

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function != nullptr) return;
  throw DeviceError(fmt::format("looking for {} in {}", name, library_name()), 0, "there is no such function",
                    "install the version of cuBLAS that hoist was built with");
}

CublasLt load_all() {
  void* const library = open_library();
  CublasLt lt{};
  find(library, "cublasLtCreate", lt.create);
  find(library, "cublasLtDestroy", lt.destroy);
  find(library, "cublasLtGetStatusString", lt.status_string);
  find(library, "cublasLtMatmulDescCreate", lt.desc_create);
  find(library, "cublasLtMatmulDescDestroy", lt.desc_destroy);
  find(library, "cublasLtMatmulDescSetAttribute", lt.desc_set);
  find(library, "cublasLtMatrixLayoutCreate", lt.layout_create);
  find(library, "cublasLtMatrixLayoutDestroy", lt.layout_destroy);
  find(library, "cublasLtMatmulPreferenceCreate", lt.preference_create);
  find(library, "cublasLtMatmulPreferenceDestroy", lt.preference_destroy);
  find(library, "cublasLtMatmulPreferenceSetAttribute", lt.preference_set);
  find(library, "cublasLtMatmulAlgoGetHeuristic", lt.heuristic);
  find(library, "cublasLtMatmul", lt.matmul);
  return lt;
}

}  // namespace

const CublasLt& CublasLt::load() {
  static const CublasLt lt = load_all();
  return lt;
}

void CublasLt::check(cublasStatus_t status, const char* call) const {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const char* remedy = status == CUBLAS_STATUS_NOT_INITIALIZED
                           ? "check that nvidia-smi lists the card, and that cuBLAS and the driver fit together"
                           : "see the cuBLAS documentation of this status; CUBLASLT_LOG_LEVEL=2 says more";
  throw DeviceError(call, static_cast<int>(status), status_string(status), remedy);
}

}  // namespace hoist::gpt
