#include "kernels/gemm.h"

#include <cublasLt.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>

#include "kernels/cuda/common.cuh"

#define FENWICK_CUBLASLT_CHECK(call)                                                                                   \
    do {                                                                                                               \
        const cublasStatus_t fenwick_status = (call);                                                                  \
        if (fenwick_status != CUBLAS_STATUS_SUCCESS) [[unlikely]]                                                      \
            fail("[gemm] {} failed at {}:{}: {}", #call, __FILE__, __LINE__, cublasLtGetStatusString(fenwick_status)); \
    } while (false)

namespace fenwick::kernels::cuda {
namespace {

// ---- the plain product -----------------------------------------------------------------------------------------------

constexpr int tile = 16;

// Block (16, 16): tiles of C, one after another. For products that cuBLASLt does not take; slow.
template <class T, class C>
__global__ void gemm_plain_kernel(Gemm args) {
    __shared__ float as[tile][tile + 1], bs[tile][tile + 1];
    const std::int64_t row_tiles = (args.m + tile - 1) / tile, column_tiles = (args.n + tile - 1) / tile;
    for (std::int64_t index = blockIdx.x; index < args.batch * row_tiles * column_tiles; index += gridDim.x) {
        const std::int64_t batch = index / (row_tiles * column_tiles), within = index - batch * row_tiles * column_tiles;
        const std::int64_t first_row = within / column_tiles * tile, first_column = within % column_tiles * tile;
        const T* a = static_cast<const T*>(args.a) + batch * args.stride_a;
        const T* b = static_cast<const T*>(args.b) + batch * args.stride_b;
        const int x = threadIdx.x, y = threadIdx.y;
        float sum = 0;
        for (std::int64_t k = 0; k < args.k; k += tile) {
            {
                const std::int64_t i = first_row + y, j = k + x;
                as[y][x] =
                    i < args.m && j < args.k ? convert<float>(a[args.transpose_a ? j * args.lda + i : i * args.lda + j]) : 0;
            }
            {
                const std::int64_t i = k + y, j = first_column + x;
                bs[y][x] =
                    i < args.k && j < args.n ? convert<float>(b[args.transpose_b ? j * args.ldb + i : i * args.ldb + j]) : 0;
            }
            __syncthreads();
            for (int i = 0; i < tile; ++i) sum += as[y][i] * bs[i][x];
            __syncthreads();
        }
        const std::int64_t i = first_row + y, j = first_column + x;
        if (i < args.m && j < args.n) {
            C* c = static_cast<C*>(args.c) + batch * args.stride_c + i * args.ldc + j;
            sum *= static_cast<float>(args.alpha);
            if (args.beta != 0.0) sum += static_cast<float>(args.beta) * convert<float>(*c);
            *c = convert<C>(sum);
        }
    }
}

void gemm_plain(const Exec& exec, const Gemm& args) {
    const std::int64_t tiles = args.batch * ceil_div(args.m, tile) * ceil_div(args.n, tile);
    const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(tiles, 1 << 30))), block(tile, tile);
    if (args.dtype == DType::float32)
        launch("gemm", exec, gemm_plain_kernel<float, float>, grid, block, 0, args);
    else if (args.c_dtype == DType::float32)
        launch("gemm", exec, gemm_plain_kernel<Bfloat16, float>, grid, block, 0, args);
    else
        launch("gemm", exec, gemm_plain_kernel<Bfloat16, Bfloat16>, grid, block, 0, args);
}

// ---- cuBLASLt --------------------------------------------------------------------------------------------------------

constexpr std::size_t workspace_bytes = std::size_t{64} << 20;

cudaDataType_t cuda_type(DType dtype) { return dtype == DType::float32 ? CUDA_R_32F : CUDA_R_16BF; }

std::int64_t alignment_of(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    return std::min<std::int64_t>(static_cast<std::int64_t>(address & ~(address - 1)), 256);
}

// What cuBLASLt needs to run one product; the matrices are swapped, because it counts in columns:
// row-major C = A B is column-major C' = B' A'.
struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;  // of B, A, C
    std::optional<cublasLtMatmulAlgo_t> algorithm;                               // none: cuBLASLt does not take this product
};

using PlanKey = std::array<std::int64_t, 17>;

struct Library {
    std::mutex mutex;
    std::map<int, cublasLtHandle_t> handles;             // by device
    std::map<std::pair<int, void*>, Buffer> workspaces;  // by device and stream: products on a stream follow each other
    std::map<PlanKey, Plan> plans;
};
Library& library() {
    static auto* instance = new Library;  // never destroyed: the CUDA runtime may be gone by then
    return *instance;
}

cublasLtMatrixLayout_t make_layout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                                   std::int64_t batch, std::int64_t batch_stride) {
    cublasLtMatrixLayout_t layout = nullptr;
    FENWICK_CUBLASLT_CHECK(cublasLtMatrixLayoutCreate(&layout, cuda_type(dtype), static_cast<std::uint64_t>(rows),
                                                      static_cast<std::uint64_t>(columns), stride));
    if (batch > 1) {
        const auto count = static_cast<std::int32_t>(batch);
        FENWICK_CUBLASLT_CHECK(
            cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)));
        FENWICK_CUBLASLT_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                                &batch_stride, sizeof(batch_stride)));
    }
    return layout;
}

Plan make_plan(cublasLtHandle_t handle, const Gemm& args, bool tf32) {
    Plan plan;
    const auto compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    FENWICK_CUBLASLT_CHECK(cublasLtMatmulDescCreate(&plan.operation, compute, CUDA_R_32F));
    const cublasOperation_t first_operation = args.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second_operation = args.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    FENWICK_CUBLASLT_CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &first_operation,
                                                          sizeof(first_operation)));
    FENWICK_CUBLASLT_CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &second_operation,
                                                          sizeof(second_operation)));
    plan.first = make_layout(args.dtype, args.transpose_b ? args.k : args.n, args.transpose_b ? args.n : args.k, args.ldb,
                             args.batch, args.stride_b);
    plan.second = make_layout(args.dtype, args.transpose_a ? args.m : args.k, args.transpose_a ? args.k : args.m, args.lda,
                              args.batch, args.stride_a);
    plan.result = make_layout(args.c_dtype, args.n, args.m, args.ldc, args.batch, args.stride_c);

    cublasLtMatmulPreference_t preference = nullptr;
    FENWICK_CUBLASLT_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        FENWICK_CUBLASLT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes});
    // Parts of a split sum are added in float32, in order.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(alignment_of(args.b)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(alignment_of(args.a)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(alignment_of(args.c)));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(alignment_of(args.c)));
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, plan.operation, plan.first, plan.second,
                                                                 plan.result, plan.result, preference, 1, &found, &count);
    if (status == CUBLAS_STATUS_SUCCESS && count == 1 && found.state == CUBLAS_STATUS_SUCCESS) plan.algorithm = found.algo;
    FENWICK_CUBLASLT_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    return plan;
}

}  // namespace

void gemm(const Exec& exec, const Gemm& given) {
    const OperatorScope scope("gemm", exec);
    FENWICK_CHECK(given.dtype == DType::float32 || given.dtype == DType::bfloat16,
                  "[gemm] dtype {} is not available on CUDA; use float32 or bfloat16", name_of(given.dtype));
    FENWICK_CHECK(given.c_dtype == given.dtype || given.c_dtype == DType::float32,
                  "[gemm] c is {}, operands are {}; c must have their dtype or float32", name_of(given.c_dtype),
                  name_of(given.dtype));
    if (given.m == 0 || given.n == 0 || given.batch == 0) return;
    if (given.k == 0) {  // C = beta C
        gemm_plain(exec, given);
        return;
    }
    Gemm args = given;
    // The distance between rows is idle where there is one row, but the library checks it.
    args.lda = std::max(args.lda, args.transpose_a ? args.m : args.k);
    args.ldb = std::max(args.ldb, args.transpose_b ? args.k : args.n);
    args.ldc = std::max(args.ldc, args.n);

    const bool tf32 = args.dtype == DType::float32 && tf32_allowed();
    const PlanKey key{exec.device.index,
                      static_cast<std::int64_t>(args.dtype),
                      static_cast<std::int64_t>(args.c_dtype),
                      args.transpose_a,
                      args.transpose_b,
                      args.m,
                      args.n,
                      args.k,
                      args.lda,
                      args.ldb,
                      args.ldc,
                      args.batch,
                      args.stride_a,
                      args.stride_b,
                      args.stride_c,
                      tf32,
                      (alignment_of(args.a) << 32) | (alignment_of(args.b) << 16) | alignment_of(args.c)};
    Library& all = library();
    const std::lock_guard lock(all.mutex);
    auto& handle = all.handles[exec.device.index];
    if (handle == nullptr) FENWICK_CUBLASLT_CHECK(cublasLtCreate(&handle));
    auto plan = all.plans.find(key);
    if (plan == all.plans.end()) plan = all.plans.emplace(key, make_plan(handle, args, tf32)).first;
    if (!plan->second.algorithm) {
        gemm_plain(exec, args);
        return;
    }
    Buffer& scratch = all.workspaces[{exec.device.index, exec.stream}];
    if (scratch.data() == nullptr) scratch = workspace(exec, workspace_bytes);
    const auto alpha = static_cast<float>(args.alpha), beta = static_cast<float>(args.beta);
    FENWICK_CUBLASLT_CHECK(cublasLtMatmul(handle, plan->second.operation, &alpha, args.b, plan->second.first, args.a,
                                          plan->second.second, &beta, args.c, plan->second.result, args.c,
                                          plan->second.result, &*plan->second.algorithm, scratch.data(), scratch.bytes(),
                                          stream_of(exec)));
}

}  // namespace fenwick::kernels::cuda
