// SPDX-License-Identifier: Apache-2.0
#include "gate_cumsum.cuh"

#include <cub/block/block_scan.cuh>

#include <stdexcept>
#include <string>

#include "cuda/launch.cuh"
#include "cuda/load.cuh"

namespace deltanet::cuda {
namespace {

template <int kChunk>
struct Traits {
  static_assert(kChunk % 16 == 0 && kChunk <= 1024, "one token per thread");
  static constexpr int kThreads = kChunk;
  // Raking: the order of the sums depends on the chunk alone, so two runs agree bit for bit.
  using Scan = cub::BlockScan<double, kThreads, cub::BLOCK_SCAN_RAKING>;
  struct Shared {
    typename Scan::TempStorage scan;
  };
};

constexpr float kSmallestGate = -120.f;

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    gate_cumsum_kernel(const __grid_constant__ GateCumsumParams p) {
  __shared__ typename Traits::Shared shared;
  const int64_t chunks = (p.tokens + Traits::kThreads - 1) / Traits::kThreads;
  const int64_t sequence = blockIdx.x / chunks, h = sequence % p.heads, b = sequence / p.heads;
  const int64_t t = blockIdx.x % chunks * Traits::kThreads + threadIdx.x;

  // The last chunk may be short. Its idle threads must still join the scan, so they contribute the
  // identity instead of leaving early.
  double sum = 0;
  if (t < p.tokens) {
    const int64_t at = b * p.g.stride[0] + t * p.g.stride[1] + h * p.g.stride[2];
    const float x = load_float(p.g.data, p.g.dtype, at);
    sum = x < kSmallestGate ? kSmallestGate : x;  // a NaN stays one
  }

  typename Traits::Scan(shared.scan).InclusiveSum(sum, sum);

  if (t < p.tokens) {
    const int64_t at = sequence * p.tokens + t;
    const float high = float(sum);
    p.high[at] = high;
    p.low[at] = float(sum - double(high));
  }
}

template <int kChunk>
void run(const GateCumsumParams& p, cudaStream_t stream) {
  const int64_t chunks = (p.tokens + kChunk - 1) / kChunk;
  launch("gate_cumsum", gate_cumsum_kernel<Traits<kChunk>>, p.batch * p.heads * chunks,
         Traits<kChunk>::kThreads, /*dynamic_shared=*/0, stream, p);
}

}  // namespace

void gate_cumsum(const GateCumsumParams& p, int chunk, cudaStream_t stream) {
  if (p.g.dtype == DType::kFloat64)
    throw std::invalid_argument("gate_cumsum: g is float64; supported: float32, bfloat16, float16");
  switch (chunk) {
    case 16:
      return run<16>(p, stream);
    case 32:
      return run<32>(p, stream);
    case 64:
      return run<64>(p, stream);
    case 128:
      return run<128>(p, stream);
    default:
      throw std::invalid_argument("gate_cumsum: chunk size " + std::to_string(chunk) +
                                  " is not built; supported: 16, 32, 64, 128");
  }
}

}  // namespace deltanet::cuda
