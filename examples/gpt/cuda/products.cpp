// SPDX-License-Identifier: Apache-2.0
#include "products.hpp"

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>

#include "../card/column_major.hpp"

namespace hoist::gpt::card {
namespace {

constexpr std::uint32_t kOperandAlignment = 16;

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::fp16:
      return CUDA_R_16F;
    case DType::fp32:
      break;
  }
  return CUDA_R_32F;
}

bool aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kOperandAlignment == 0; }

// The requirements for an algorithm.
class Preference {
 public:
  explicit Preference(const CublasLt& lt) : lt_(lt) {
    lt.check(lt.preference_create(&preference_), "cublasLtMatmulPreferenceCreate");
  }
  ~Preference() { static_cast<void>(lt_.preference_destroy(preference_)); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  template <typename Value>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    lt_.check(lt_.preference_set(preference_, attribute, &value, sizeof value), "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  const CublasLt& lt_;
  cublasLtMatmulPreference_t preference_ = nullptr;
};

}  // namespace

struct Products::Plan {
  Plan(const CublasLt& lt, cublasLtHandle_t handle, const Product& product) : lt_(lt) {
    const ColumnMajorProduct by = by_columns(product);
    lt.check(lt.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, by.first.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, by.second.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    const auto layout = [&](cublasLtMatrixLayout_t& made, DType dtype, const ColumnMajor& matrix) {
      lt.check(lt.layout_create(&made, cuda_type(dtype), matrix.rows, matrix.columns,
                                static_cast<std::int64_t>(matrix.rows)),
               "cublasLtMatrixLayoutCreate");
    };
    layout(first, product.dtype, by.first);
    layout(second, product.dtype, by.second);
    layout(result, product.d_dtype, by.result);
    choose(handle, product);
  }
  ~Plan() {  // fails only for what was never made
    static_cast<void>(lt_.layout_destroy(result));
    static_cast<void>(lt_.layout_destroy(second));
    static_cast<void>(lt_.layout_destroy(first));
    static_cast<void>(lt_.desc_destroy(desc));
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

 private:
  void set(cublasLtMatmulDescAttributes_t attribute, cublasOperation_t operation) {
    lt_.check(lt_.desc_set(desc, attribute, &operation, sizeof operation), "cublasLtMatmulDescSetAttribute");
  }

  void choose(cublasLtHandle_t handle, const Product& product) {
    Preference wish(lt_);
    wish.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kWorkspaceBytes});
    // Parts of a sum go to the workspace and are added up in order, or there are none.
    wish.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      wish.set(attribute, kOperandAlignment);
    cublasLtMatmulHeuristicResult_t suggested{};
    int count = 0;
    lt_.check(lt_.heuristic(handle, desc, first, second, result, result, wish.get(), 1, &suggested, &count),
              "cublasLtMatmulAlgoGetHeuristic");
    if (count == 0) {
      throw DeviceError(
          fmt::format("choosing how to multiply {} x {} by {} x {}", product.m, product.k, product.k, product.n), 0,
          "cuBLASLt suggests nothing", "choose another --width or --batch, or the host device");
    }
    lt_.check(suggested.state, "cublasLtMatmulAlgoGetHeuristic");
    algorithm = suggested.algo;
  }

  const CublasLt& lt_;
};

Products::Products() : lt_(CublasLt::load()) { lt_.check(lt_.create(&handle_), "cublasLtCreate"); }

Products::~Products() {
  plans_.clear();
  static_cast<void>(lt_.destroy(handle_));
}

const Products::Plan& Products::plan_for(const Product& p) {
  std::unique_ptr<Plan>& plan = plans_[{p.m, p.n, p.k, p.transposed_a, p.transposed_b, p.add, p.dtype, p.d_dtype}];
  if (!plan) plan = std::make_unique<Plan>(lt_, handle_, p);
  return *plan;
}

void Products::multiply(const Product& p, cudaStream_t stream) {
  HOIST_ASSERT(aligned(p.a) && aligned(p.b) && aligned(p.d), "operands at {}, {} and {}", p.a, p.b, p.d);
  const Plan& plan = plan_for(p);
  const float one = 1, added = p.add ? 1.0f : 0.0f;
  lt_.check(lt_.matmul(handle_, plan.desc, &one, p.b, plan.first, p.a, plan.second, &added, p.d, plan.result, p.d,
                       plan.result, &plan.algorithm, workspace_.data(), workspace_.size(), stream),
            "cublasLtMatmul");
}

}  // namespace hoist::gpt::card
