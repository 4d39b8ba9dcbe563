// SPDX-License-Identifier: Apache-2.0
// examples/gpt/cuda/cublas_lt.hpp - cuBLASLt, loaded when a card is chosen: a library of half a gigabyte that runs on
// the host device need not map, and a machine without it need not have.
//
// Errors     DeviceError naming the library that is missing, or the call and its status.
#pragma once

#include <cublasLt.h>

namespace hoist::gpt {

// The functions that are used, by their own names.
struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;

  // The library stays loaded.
  static const CublasLt& load();
  void check(cublasStatus_t status, const char* call) const;
};

}  // namespace hoist::gpt
