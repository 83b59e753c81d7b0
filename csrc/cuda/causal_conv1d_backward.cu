// SPDX-License-Identifier: Apache-2.0
//
// The gradients of the causal convolution: docs/algorithm.md, equations (31) to (33).
//
//   dz_t = dy_t silu'(z_t),   dx_t = sum_i weight_{W-1-i} dz_{t+i},   dweight_j = sum_t dz_t
//   x_{t-(W-1)+j},   dbias = sum_t dz_t
//
// Nothing is kept by the forward pass: z is computed again.
//
// Work split:  causal_conv1d_backward_kernel: one block = kStripTiles tiles of kTileTokens tokens
//              and kChannels channels of a batch row. column_sums_kernel adds up what blocks leave
//              of the sums.
//              conv_state_gradient_kernel: one thread = one channel of a sequence.
// Numerics:    fp32; sums over a strip in fp32, these sums in double. No order but that of shapes.
// Memory:      x and dy are read once, but for W - 1 tokens beside a tile; dx is written once, and
//              W + 1 sums per channel and strip.
#include <cstdint>

#include "cuda/causal_conv1d.cuh"
#include "cuda/column_sums.cuh"
#include "cuda/launch.cuh"
#include "cuda/silu.cuh"

namespace deltanet::cuda {
namespace {

using namespace conv;

constexpr int kTileTokens = 64;
constexpr int kStripTiles = 4;
constexpr int kStrip = kStripTiles * kTileTokens;
constexpr int kSumGroups = kThreads / kChannels;  // threads that sum over tokens of one channel
constexpr int kSums = kMaxConvWidth + 1;

template <int kTaps>
struct BackwardShared {
  static constexpr int kRows = kTileTokens + kTaps;  // of a tile, and those behind it
  alignas(16) float x[(kTaps + kRows) * kChannels];
  union {
    alignas(16) float dz[kRows * kChannels];
    float sums[kSumGroups][kSums][kChannels];
  };
  alignas(16) Taps taps;
  Place places[kRows];
};

struct BackwardOptions {
  Layout x, grad_output;
  bool d_x_quads;
  float* sums;  // [B * strips, W + 1, D]  taps by distance, then the bias; null: not wanted
};

// dz <- dy silu'(z), zero where no token is.
template <int kTaps>
__device__ __forceinline__ void apply_slope(const ConvBackwardParams& p,
                                            BackwardShared<kTaps>& shared, int64_t channel) {
  const int c = int(threadIdx.x) % kQuads * 4;
  for (int row = int(threadIdx.x) / kQuads * kRun; row < shared.kRows; row += kGroups * kRun) {
    float4 z[kRun];
    if (p.silu)
      convolve<kTaps>(p, shared.x, shared.taps, shared.places + row, kTaps + row, channel, c, z);
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      float4 d = tile_quad(shared.dz, row + r, c);
      if (shared.places[row + r].sequence < 0) {
        d = make_float4(0.f, 0.f, 0.f, 0.f);
      } else if (p.silu) {
        float value, slope;
        silu_and_slope(z[r].x, value, slope), d.x *= slope;
        silu_and_slope(z[r].y, value, slope), d.y *= slope;
        silu_and_slope(z[r].z, value, slope), d.z *= slope;
        silu_and_slope(z[r].w, value, slope), d.w *= slope;
      }
      set_tile_quad(shared.dz, row + r, c, d);
    }
  }
}

// The gradient of final state `row` of a sequence, or zero.
__device__ __forceinline__ float final_gradient(const ConvBackwardParams& p, int64_t sequence,
                                                int64_t channel, int64_t row) {
  const auto& g = p.grad_final_states;
  if (!g.data || channel >= p.channels) return 0.f;
  return load_float(g.data, g.dtype,
                    sequence * g.stride[0] + channel * g.stride[1] + row * g.stride[2]);
}

template <int kTaps>
__device__ __forceinline__ float4 input_gradient(const ConvBackwardParams& p,
                                                 const BackwardShared<kTaps>& shared, int row,
                                                 int64_t channel, int c) {
  const Place place = shared.places[row];
  float4 d = make_float4(0.f, 0.f, 0.f, 0.f);
  if (place.sequence < 0) return d;
#pragma unroll
  for (int i = 0; i < kTaps; ++i)
    if (i <= place.ahead)  // at most W - 1
      d = add_tap(d, quad_of(&shared.taps[i][c]), tile_quad(shared.dz, row + i, c));
  const int last = p.width - 2 - place.ahead;  // this token's row of the final state
  if (last >= 0 && p.grad_final_states.data) {
    d.x += final_gradient(p, place.sequence, channel + c, last);
    d.y += final_gradient(p, place.sequence, channel + c + 1, last);
    d.z += final_gradient(p, place.sequence, channel + c + 2, last);
    d.w += final_gradient(p, place.sequence, channel + c + 3, last);
  }
  return d;
}

// Adds the products of a tile's dz with x, for one channel and a part of the tokens.
template <int kTaps>
__device__ __forceinline__ void add_products(const ConvBackwardParams& p,
                                             const BackwardShared<kTaps>& shared, int64_t channel,
                                             float (&sums)[kTaps + 1]) {
  constexpr int kPart = kTileTokens / kSumGroups;
  const int c = int(threadIdx.x) % kChannels, first = int(threadIdx.x) / kChannels * kPart;
  float x[kTaps];  // by distance from the token at hand
#pragma unroll
  for (int i = 1; i < kTaps; ++i) x[i - 1] = shared.x[tile_at(kTaps + first - i, c)];
#pragma unroll 2
  for (int row = first; row < first + kPart; ++row) {
#pragma unroll
    for (int i = kTaps - 1; i > 0; --i) x[i] = x[i - 1];
    x[0] = shared.x[tile_at(kTaps + row, c)];
    const Place place = shared.places[row];
    if (place.sequence < 0) continue;
    const float d = shared.dz[tile_at(row, c)];
#pragma unroll
    for (int i = 0; i < kTaps; ++i)
      if (i < p.width && i <= place.behind) sums[i] = fmaf(d, x[i], sums[i]);
    sums[kTaps] += d;
    if (place.behind == p.width - 1) continue;
#pragma unroll
    for (int i = 1; i < kTaps; ++i)
      if (i < p.width && i > place.behind)
        sums[i] = fmaf(d, past_input(p, place.sequence, channel + c, i - place.behind), sums[i]);
  }
}

template <int kTaps>
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_backward_kernel(const __grid_constant__ ConvBackwardParams p,
                                  const __grid_constant__ BackwardOptions options) {
  __shared__ BackwardShared<kTaps> shared;
  constexpr int kRows = BackwardShared<kTaps>::kRows;
  const unsigned channel_blocks = unsigned((p.channels + kChannels - 1) / kChannels);
  const unsigned strips = unsigned((p.tokens + kStrip - 1) / kStrip);
  const int64_t channel = int64_t(blockIdx.x % channel_blocks) * kChannels;
  const int64_t strip = blockIdx.x / channel_blocks;  // of all batch rows
  const int64_t begin = int64_t(strip % strips) * kStrip, b = strip / strips;
  const int64_t end = begin + kStrip < p.tokens ? begin + kStrip : p.tokens;

  load_taps(p, channel, shared.taps);
  float sums[kTaps + 1] = {};
  for (int64_t first = begin; first < end; first += kTileTokens) {
    if (threadIdx.x < kRows)
      shared.places[threadIdx.x] =
          first + threadIdx.x < p.tokens ? place_of(p, p, b, first + threadIdx.x) : Place{0, 0, -1};
    load_tile<kTaps>(p.x, options.x, b, channel, p.channels, first, kRows, p.tokens, shared.x);
    if (p.grad_output.data)
      load_tile<0>(p.grad_output, options.grad_output, b, channel, p.channels, first, kRows,
                   p.tokens, shared.dz);
    else
      for (int i = int(threadIdx.x); i < kRows * kChannels; i += kThreads) shared.dz[i] = 0.f;
    __syncthreads();  // x, dy and the places are complete (first: the taps)

    apply_slope<kTaps>(p, shared, channel);
    __syncthreads();  // dz is complete

    if (p.d_x.data) {
      const int c = int(threadIdx.x) % kQuads * 4;
      const int channels_left = clamp_to(p.channels - channel - c, 4);
      for (int row = int(threadIdx.x) / kQuads; row < kTileTokens; row += kGroups) {
        const auto& d = p.d_x;
        if (first + row < p.tokens)
          store_quad(d.data, d.dtype,
                     b * d.stride[0] + (channel + c) * d.stride[1] + (first + row) * d.stride[2],
                     d.stride[1], channels_left, options.d_x_quads,
                     input_gradient<kTaps>(p, shared, row, channel, c));
      }
    }
    if (options.sums) add_products<kTaps>(p, shared, channel, sums);
    __syncthreads();  // the tile has been read
  }

  if (!options.sums) return;
  const int c = int(threadIdx.x) % kChannels, group = int(threadIdx.x) / kChannels;
#pragma unroll
  for (int i = 0; i <= kTaps; ++i) shared.sums[group][i][c] = sums[i];
  __syncthreads();  // every group's sums are there
  for (int i = group; i <= p.width; i += kSumGroups) {
    if (channel + c >= p.channels) continue;
    float sum = 0.f;
    for (int g = 0; g < kSumGroups; ++g) sum += shared.sums[g][i < p.width ? i : kTaps][c];
    options.sums[(strip * (p.width + 1) + i) * p.channels + channel + c] = sum;
  }
}

struct StoreWeights {
  int64_t channels;
  int width;
  MutableView<2> d_weight;
  MutableView<1> d_bias;

  __device__ void operator()(int64_t column, float sum) const {
    const int64_t d = column % channels, i = column / channels;
    if (i < width) {
      if (d_weight.data)
        store_float(d_weight.data, d_weight.dtype,
                    d * d_weight.stride[0] + (width - 1 - i) * d_weight.stride[1], sum);
    } else if (d_bias.data) {
      store_float(d_bias.data, d_bias.dtype, d * d_bias.stride[0], sum);
    }
  }
};

// dz of token t, which is the k-th of its sequence n.
__device__ __forceinline__ float slope_gradient(const ConvBackwardParams& p, const Span& span,
                                                int64_t n, int64_t d, int k) {
  const auto& x = p.x;
  const auto& g = p.grad_output;
  const int64_t t = span.begin + k;
  if (!g.data) return 0.f;
  const float dy =
      load_float(g.data, g.dtype, span.batch * g.stride[0] + d * g.stride[1] + t * g.stride[2]);
  if (!p.silu) return dy;
  float z = p.bias.data ? load_float(p.bias.data, p.bias.dtype, d * p.bias.stride[0]) : 0.f;
  for (int j = 0; j < p.width; ++j) {
    const int i = p.width - 1 - j;  // tokens back
    const float seen =
        i <= k ? load_float(x.data, x.dtype,
                            span.batch * x.stride[0] + d * x.stride[1] + (t - i) * x.stride[2])
               : past_input(p, n, d, i - k);
    z = fmaf(
        load_float(p.weight.data, p.weight.dtype, d * p.weight.stride[0] + j * p.weight.stride[1]),
        seen, z);
  }
  float value, slope;
  silu_and_slope(z, value, slope);
  return dy * slope;
}

// Four blocks of a multiprocessor: with the registers of eight some are spilled.
__global__ void __launch_bounds__(kThreads, 4)
    conv_state_gradient_kernel(const __grid_constant__ ConvBackwardParams p) {
  const unsigned blocks = unsigned((p.channels + kThreads - 1) / kThreads);
  const int64_t n = blockIdx.x / blocks;
  const int64_t d = int64_t(blockIdx.x % blocks) * kThreads + threadIdx.x;
  if (d >= p.channels) return;
  const Span span = span_of(p, n, p.tokens);
  const int past = p.width - 1, used = clamp_to(span.end - span.begin, past);
  float sums[kMaxConvWidth] = {};  // by row of the state
#pragma unroll 1
  for (int k = 0; k < used; ++k) {
    const float dz = slope_gradient(p, span, n, d, k);
#pragma unroll
    for (int row = 0; row < kMaxConvWidth - 1; ++row) {
      // The state's row lies past - row tokens before the first one.
      const int i = past - row + k;
      if (row < past && i <= past)
        sums[row] = fmaf(load_float(p.weight.data, p.weight.dtype,
                                    d * p.weight.stride[0] + (past - i) * p.weight.stride[1]),
                         dz, sums[row]);
    }
  }
  const auto& to = p.d_initial_states;
#pragma unroll
  for (int row = 0; row < kMaxConvWidth - 1; ++row) {
    if (row >= past) continue;
    // Where a sequence is short, the final state still holds this row.
    if (row >= used) sums[row] += final_gradient(p, n, d, row - used);
    store_float(to.data, to.dtype, n * to.stride[0] + d * to.stride[1] + row * to.stride[2],
                sums[row]);
  }
}

int64_t strips_of(const ConvBackwardParams& p) {
  return p.batch * ((p.tokens + kStrip - 1) / kStrip);
}

template <int kTaps>
void run_backward(const ConvBackwardParams& p, float* sums, cudaStream_t stream) {
  const BackwardOptions options = {layout_of(p.x), layout_of(p.grad_output), quads_along(p.d_x, 1),
                                   sums};
  launch("causal_conv1d_backward", causal_conv1d_backward_kernel<kTaps>,
         strips_of(p) * ((p.channels + kChannels - 1) / kChannels), kThreads, /*dynamic_shared=*/0,
         stream, p, options);
}

}  // namespace

size_t causal_conv1d_backward_workspace(const ConvBackwardParams& p) {
  if (!p.d_weight && !p.d_bias) return 0;
  const size_t bytes = size_t(strips_of(p) * (p.width + 1) * p.channels) * sizeof(float);
  return (bytes + 255) / 256 * 256;
}

void causal_conv1d_backward(const ConvBackwardParams& p, void* workspace, cudaStream_t stream) {
  const char* op = "causal_conv1d_backward";
  check_supported(op, p);
  const bool wants_sums = p.d_weight || p.d_bias;
  float* const sums = wants_sums ? static_cast<float*>(workspace) : nullptr;
  if (p.d_x || wants_sums)
    p.width <= 4 ? run_backward<4>(p, sums, stream) : run_backward<8>(p, sums, stream);
  if (wants_sums)
    sum_columns(op, sums, strips_of(p), (p.width + 1) * p.channels,
                StoreWeights{p.channels, p.width, p.d_weight, p.d_bias}, stream);
  if (p.d_initial_states && p.width > 1)
    launch(op, conv_state_gradient_kernel, p.states * ((p.channels + kThreads - 1) / kThreads),
           kThreads, /*dynamic_shared=*/0, stream, p);
}

}  // namespace deltanet::cuda
