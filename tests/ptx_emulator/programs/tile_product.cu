// SPDX-License-Identifier: Apache-2.0
// C = silu(alpha A B) in bf16: cp.async double buffering, swizzle-free padded tiles, ldmatrix
// (plain and transposed), mma.sync. A kernel with everything that the project's kernels use, and a
// place for their typical mistakes: each Bug seeds one.
#include <cuda_bf16.h>

#include "testing.cuh"
using namespace testing;
using bf16 = __nv_bfloat16;

constexpr int kRows = 64, kColumns = 128, kDepth = 32, kPitchA = kDepth + 8, kPitchB = kColumns + 8,
              kThreads = 128;

enum Bug {
  kNone,
  kWaitsTooLittle,
  kNoBarrierBeforeReading,
  kNoBarrierBeforeWriting,
  kMisaligned,
  kRowTooFar,
  kSharedTooSmall
};

struct Shared {
  bf16 a[2][kRows][kPitchA];
  bf16 b[2][kDepth][kPitchB];
};

__device__ void copy16(void* to, const void* from) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
      "l"(from)
      : "memory");
}
template <bool kTransposed>
__device__ void load4(uint32_t (&d)[4], const void* row) {
  const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

template <Bug kBug>
__global__ void __launch_bounds__(kThreads)
    tile_product(const bf16* A, const bf16* B, float* C, int columns, int depth, float alpha) {
  extern __shared__ __align__(16) char bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = blockIdx.y * kRows, column0 = blockIdx.x * kColumns, warp_row = warp / 2 * 32,
            warp_column = warp % 2 * 64;
  auto fetch = [&](int step) {
    for (int i = threadIdx.x; i < kRows * kDepth / 8; i += kThreads)
      copy16(&shared.a[step & 1][i / (kDepth / 8)][i % (kDepth / 8) * 8],
             A + size_t(row0 + i / (kDepth / 8)) * depth + step * kDepth + i % (kDepth / 8) * 8);
    for (int i = threadIdx.x; i < kDepth * kColumns / 8; i += kThreads)
      copy16(&shared.b[step & 1][i / (kColumns / 8)][i % (kColumns / 8) * 8],
             B + size_t(step * kDepth + i / (kColumns / 8)) * columns + column0 +
                 i % (kColumns / 8) * 8);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float sum[2][8][4] = {};
  const int steps = depth / kDepth;
  fetch(0);
  for (int step = 0; step < steps; step++) {
    if (step + 1 < steps) {
      fetch(step + 1);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(kBug == kWaitsTooLittle ? 1 : 0) : "memory");
    }
    if constexpr (kBug != kNoBarrierBeforeReading) __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      uint32_t a[2][4], b[4][4];
      const int skew = kBug == kMisaligned;
      for (int i = 0; i < 2; i++)
        load4<false>(a[i],
                     &shared.a[step & 1][warp_row + i * 16 + lane % 16][k + lane / 16 * 8 + skew]);
      for (int j = 0; j < 4; j++)
        load4<true>(b[j], &shared.b[step & 1][k + lane % 16][warp_column + j * 16 + lane / 16 * 8]);
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 8; j++) {
          float (&c)[4] = sum[i][j];
          asm volatile(
              "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
              "{%8,%9}, {%0,%1,%2,%3};"
              : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
              : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[j / 2][j % 2 * 2]),
                "r"(b[j / 2][j % 2 * 2 + 1]));
        }
    }
    if constexpr (kBug != kNoBarrierBeforeWriting)
      __syncthreads();  // the next fetch overwrites what was read here
  }
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 8; j++)
      for (int h = 0; h < 2; h++) {
        int row = row0 + warp_row + i * 16 + lane / 4 + 8 * h;
        if (kBug == kRowTooFar && row == row0 + kRows - 1) row++;
        const int column = column0 + warp_column + j * 8 + lane % 4 * 2;
        const float x = sum[i][j][2 * h] * alpha, y = sum[i][j][2 * h + 1] * alpha;
        *reinterpret_cast<float2*>(C + size_t(row) * columns + column) =
            make_float2(x / (1 + __expf(-x)), y / (1 + __expf(-y)));
      }
}

int main(int argc, char** argv) {
  const int M = argc > 1 ? std::atoi(argv[1]) : 64, N = argc > 2 ? std::atoi(argv[2]) : 128,
            K = argc > 3 ? std::atoi(argv[3]) : 128;
  const float alpha = 0.7f;
  auto rounded = [](std::vector<float> v) {
    std::vector<bf16> r(v.size());
    for (size_t i = 0; i < v.size(); i++) r[i] = __float2bfloat16(v[i]);
    return r;
  };
  const auto A = rounded(numbers(size_t(M) * K, 3)), B = rounded(numbers(size_t(K) * N, 5));
  Array<bf16> a(A), b(B);
  Array<float> c(size_t(M) * N);
  const Bug bug = Bug(argc > 4 ? std::atoi(argv[4]) : 0);
  const int shared = sizeof(Shared) - (bug == kSharedTooSmall ? 32 : 0);
  auto launch = [&](auto kernel) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    kernel<<<dim3(N / kColumns, M / kRows), kThreads, shared>>>(a, b, c, N, K, alpha);
  };
  if (bug == kNone || bug == kSharedTooSmall) launch(tile_product<kNone>);
  if (bug == kWaitsTooLittle) launch(tile_product<kWaitsTooLittle>);
  if (bug == kNoBarrierBeforeReading) launch(tile_product<kNoBarrierBeforeReading>);
  if (bug == kNoBarrierBeforeWriting) launch(tile_product<kNoBarrierBeforeWriting>);
  if (bug == kMisaligned) launch(tile_product<kMisaligned>);
  if (bug == kRowTooFar) launch(tile_product<kRowTooFar>);
  const auto got = c.host();
  // In the order of memory: host code is compiled without optimization.
  std::vector<double> want(size_t(M) * N);
  std::vector<float> right(B.size());
  for (size_t i = 0; i < B.size(); i++) right[i] = __bfloat162float(B[i]);
  for (int m = 0; m < M; m++) {
    double* row = &want[size_t(m) * N];
    for (int k = 0; k < K; k++) {
      const double left = alpha * double(__bfloat162float(A[m * K + k]));
      const float* factors = &right[size_t(k) * N];
      for (int n = 0; n < N; n++) row[n] += left * factors[n];
    }
    for (int n = 0; n < N; n++) row[n] /= 1 + std::exp(-row[n]);
  }
  report_error("tile product", difference(got, want), 1e-4);
  return finish();
}
