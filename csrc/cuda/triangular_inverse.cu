// SPDX-License-Identifier: Apache-2.0
//
// unit_lower_triangular_inverse: one block = one matrix, padded with zero rows to 16, 32, 64 or
// 128. Substitution throughout: at 128 rows merges would cost a digit. Reads L once and writes T
// once, coalesced.
#include "cuda/triangular_inverse.h"

#include <stdexcept>
#include <string>

#include "cuda/block_triangular_inverse.cuh"
#include "cuda/launch.cuh"
#include "cuda/load.cuh"

namespace deltanet::cuda {
namespace {

template <int kSize>
struct InverseTraits {
  static constexpr int kThreads = kSize < 64 ? 64 : kSize == 64 ? 128 : 256;
  using Inverse = BlockTriangularInverse<kSize, kThreads, BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION>;
  struct Shared {
    alignas(16) float matrix[Inverse::kMatrixSize];
    typename Inverse::TempStorage inverse;
  };
};

template <int kSize>
__global__ void __launch_bounds__(InverseTraits<kSize>::kThreads)
    triangular_inverse_kernel(const __grid_constant__ TriangularInverseParams p) {
  using Traits = InverseTraits<kSize>;
  using Inverse = typename Traits::Inverse;
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<typename Traits::Shared*>(memory);
  const int64_t base = int64_t(blockIdx.x) * p.size * p.size;

  // Blocks above the diagonal are never read. Threads follow the rows of global memory.
  for (int e = threadIdx.x; e < kSize * kSize; e += Traits::kThreads) {
    const int i = e / kSize, j = e % kSize;
    if (j / 16 > i / 16) continue;
    shared.matrix[Inverse::Offset(i, j)] =
        j < i && i < p.size ? load_float(p.lower, p.dtype, base + i * p.size + j) : 0.f;
  }
  __syncthreads();  // L is complete

  Inverse(shared.inverse).Invert(shared.matrix);

  for (int e = threadIdx.x; e < kSize * kSize; e += Traits::kThreads) {
    const int i = e / kSize, j = e % kSize;
    if (i < p.size && j < p.size)
      store_float(p.inverse, p.dtype, base + i * p.size + j,
                  j <= i ? shared.matrix[Inverse::Offset(i, j)] : 0.f);
  }
}

template <int kSize>
void run(const TriangularInverseParams& p, cudaStream_t stream) {
  using Traits = InverseTraits<kSize>;
  launch("unit_lower_triangular_inverse", triangular_inverse_kernel<kSize>, p.count,
         Traits::kThreads, sizeof(typename Traits::Shared), stream, p);
}

}  // namespace

void triangular_inverse(const TriangularInverseParams& p, cudaStream_t stream) {
  const std::string op = "unit_lower_triangular_inverse: ";
  if (p.dtype == DType::kFloat64)
    throw std::invalid_argument(op +
                                "L is float64; supported on CUDA: float32, bfloat16, float16 "
                                "(float64 runs on the CPU)");
  if (p.size < 1 || p.size > kMaxInverseSize)
    throw std::invalid_argument(op + "L has size " + std::to_string(p.size) + "; supported: 1 to " +
                                std::to_string(kMaxInverseSize));
  if (p.size <= 16) return run<16>(p, stream);
  if (p.size <= 32) return run<32>(p, stream);
  if (p.size <= 64) return run<64>(p, stream);
  return run<128>(p, stream);
}

}  // namespace deltanet::cuda
