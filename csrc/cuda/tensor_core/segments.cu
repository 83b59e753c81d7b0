// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_core/segments.cuh"

#include "cuda/launch.cuh"
#include "cuda/load.cuh"

namespace deltanet::cuda::tensor_core {
namespace {

constexpr int kRows = 128, kSlab = 32;
constexpr int kPitchM = kSlab + 4;  // rows of 16 bytes, and float4 of 2 rows on different banks

template <int kColumns_>
struct SegmentsTraits {
  static constexpr int kColumns = kColumns_;
  static constexpr int kThreads = kRows / 4 * (kColumns / 2);  // 4 rows x 2 columns each
  // Of half a warp, which stores 8 bytes a lane, 4 rows lie kColumns banks apart.
  static constexpr int kPitchS = kColumns + kColumns / 4;
  static_assert(4 * kPitchS % 32 == kColumns, "no bank conflicts");

  struct Shared {
    alignas(16) float S[kRows * kPitchS];
    alignas(16) float M[kRows * kPitchM];  // some columns of M
  };
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    scan_segments_kernel(const __grid_constant__ Params p) {
  constexpr int kColumns = Traits::kColumns, kThreads = Traits::kThreads;
  constexpr int kPitchS = Traits::kPitchS, kPairs = kColumns / 2;
  __shared__ typename Traits::Shared shared;
  const int K = p.rule.dim_k, V = p.rule.dim_v;
  const int column_tiles = (V + kColumns - 1) / kColumns;
  const unsigned key = blockIdx.x / unsigned(column_tiles);
  const int first_column = int(blockIdx.x % unsigned(column_tiles)) * kColumns;
  const int64_t head = key % unsigned(p.rule.value_heads);
  const int64_t n = key / unsigned(p.rule.value_heads);
  const Sequence tokens = sequence_at(p.rule, n);
  const int64_t chunks = (tokens.end - tokens.begin + kChunk - 1) / kChunk;
  const int64_t segments = (chunks + p.segment_chunks - 1) / p.segment_chunks;

  float* const starts = p.starts + (n * p.rule.value_heads + head) * K * V;
  const float* const maps = p.maps + (n * p.rule.value_heads + head) * K * K;
  const int64_t keys = p.rule.sequences * p.rule.value_heads;

  // S_0
  const View<4>& initial = p.rule.initial_state;
  const int64_t base = n * initial.stride[0] + head * initial.stride[1];
  for (int e = threadIdx.x; e < kRows * kColumns; e += kThreads) {
    const int k = e / kColumns, v = first_column + e % kColumns;
    float x = 0.f;
    if (k < K && v < V) {
      if (initial.data)
        x = load_float(initial.data, initial.dtype,
                       base + k * initial.stride[2] + v * initial.stride[3]);
      else if (p.rule.initial_state_is_identity)
        x = k == v ? 1.f : 0.f;
      starts[int64_t(k) * V + v] = x;
    }
    shared.S[k * kPitchS + e % kColumns] = x;
  }

  const int row = threadIdx.x / kPairs * 4, pair = threadIdx.x % kPairs * 2;
  const int column = first_column + pair;
  for (int64_t s = 1; s < segments; ++s) {
    const float* const M = maps + (s - 1) * keys * K * K;
    float* const start = starts + s * keys * K * V;  // holds U_{s-1}
    float sum[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        sum[i][j] = row + i < K && column + j < V ? start[int64_t(row + i) * V + column + j] : 0.f;
    for (int first = 0; first < K; first += kSlab) {
      __syncthreads();  // S is complete, and the last slab is used up
      for (int e = threadIdx.x; e < kRows * kSlab; e += kThreads) {
        const int r = e / kSlab, c = first + e % kSlab;
        shared.M[r * kPitchM + e % kSlab] = r < K && c < K ? M[int64_t(r) * K + c] : 0.f;
      }
      __syncthreads();
#pragma unroll 2
      for (int c = 0; c < kSlab; c += 4) {
        float4 m[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          m[i] = *reinterpret_cast<const float4*>(&shared.M[(row + i) * kPitchM + c]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 x =
              *reinterpret_cast<const float2*>(&shared.S[(first + c + k) * kPitchS + pair]);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float f = k == 0 ? m[i].x : k == 1 ? m[i].y : k == 2 ? m[i].z : m[i].w;
            sum[i][0] = fmaf(f, x.x, sum[i][0]);
            sum[i][1] = fmaf(f, x.y, sum[i][1]);
          }
        }
      }
    }
    __syncthreads();  // everyone has read S_{s-1}
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<float2*>(&shared.S[(row + i) * kPitchS + pair]) =
          make_float2(sum[i][0], sum[i][1]);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (row + i < K && column + j < V) start[int64_t(row + i) * V + column + j] = sum[i][j];
    }
  }
}

template <int kColumns>
int64_t blocks_of(const Params& p) {
  return (p.rule.dim_v + kColumns - 1) / kColumns * p.rule.value_heads * p.rule.sequences;
}
template <int kColumns>
void launch_scan_segments(const Params& p, cudaStream_t stream) {
  using Traits = SegmentsTraits<kColumns>;
  launch("scan_segments", scan_segments_kernel<Traits>, blocks_of<kColumns>(p), Traits::kThreads,
         /*dynamic_shared=*/0, stream, p);
}

}  // namespace

void scan_segments(const Params& p, cudaStream_t stream) {
  // Narrow blocks read the maps twice as often: only where wide ones fill less than half of the
  // device. Each column is summed alike.
  if (2 * blocks_of<16>(p) <= processors())
    launch_scan_segments<8>(p, stream);
  else
    launch_scan_segments<16>(p, stream);
}

}  // namespace deltanet::cuda::tensor_core
