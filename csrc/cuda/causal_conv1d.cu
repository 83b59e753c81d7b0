// SPDX-License-Identifier: Apache-2.0
//
// The causal convolution: docs/algorithm.md, equation (29).
//
//   z_t = bias + sum_j weight_j x_{t - (W - 1) + j},   y_t = z_t, or z_t sigmoid(z_t)
//
// Work split:  causal_conv1d_kernel: one block = kTokens tokens and kChannels channels of a batch
// row.
//              conv_final_states_kernel, causal_conv1d_update_kernel: one thread = one channel of a
//              sequence.
// Numerics:    fp32, one order of taps everywhere, so that prefill, continuation and update agree
//              bit for bit, alone, in a batch and packed.
// Memory:      x is read once, but for the W - 1 tokens before a tile; y is written once,
//              channels-last, eight or sixteen bytes at a time.
#include "cuda/causal_conv1d.cuh"

#include "cuda/launch.cuh"
#include "cuda/silu.cuh"

namespace deltanet::cuda {
namespace {

using namespace conv;

constexpr int kTokens = 128;

template <int kTaps>
struct ForwardShared {
  alignas(16) float tile[(kTaps + kTokens) * kChannels];
  alignas(16) Taps taps;
  Place places[kTokens];
};

__device__ __forceinline__ float4 silu_of(float4 z) {
  return make_float4(silu(z.x), silu(z.y), silu(z.z), silu(z.w));
}

// Two blocks of a multiprocessor for many taps: with the registers of three, one is spilled.
template <int kTaps>
__global__ void __launch_bounds__(kThreads, kTaps > 4 ? 2 : 3)
    causal_conv1d_kernel(const __grid_constant__ ConvParams p, Layout layout, bool output_quads) {
  __shared__ ForwardShared<kTaps> shared;
  const unsigned channel_blocks = unsigned((p.channels + kChannels - 1) / kChannels);
  const unsigned token_blocks = unsigned((p.tokens + kTokens - 1) / kTokens);
  const int64_t channel = int64_t(blockIdx.x % channel_blocks) * kChannels;
  const int64_t first = int64_t(blockIdx.x / channel_blocks % token_blocks) * kTokens;
  const int64_t b = blockIdx.x / channel_blocks / token_blocks;

  load_taps(p, channel, shared.taps);
  if (threadIdx.x < kTokens)
    shared.places[threadIdx.x] =
        first + threadIdx.x < p.tokens ? place_of(p, p, b, first + threadIdx.x) : Place{0, 0, -1};
  load_tile<kTaps>(p.x, layout, b, channel, p.channels, first, kTokens, p.tokens, shared.tile);
  __syncthreads();  // the tile, the taps and the places are complete

  const int c = int(threadIdx.x) % kQuads * 4;
  const int channels_left = clamp_to(p.channels - channel - c, 4);
  for (int t = int(threadIdx.x) / kQuads * kRun; t < kTokens; t += kGroups * kRun) {
    float4 z[kRun];
    convolve<kTaps>(p, shared.tile, shared.taps, shared.places + t, kTaps + t, channel, c, z);
#pragma unroll
    for (int r = 0; r < kRun; ++r) {
      if (first + t + r >= p.tokens) continue;
      const auto& y = p.output;
      store_quad(y.data, y.dtype,
                 b * y.stride[0] + (channel + c) * y.stride[1] + (first + t + r) * y.stride[2],
                 y.stride[1], channels_left, output_quads, p.silu ? silu_of(z[r]) : z[r]);
    }
  }
}

// Which channel of which of some rows this thread has; most threads of a block share the row.
struct RowChannel {
  int64_t row, channel;
};
__device__ __forceinline__ RowChannel row_channel(int64_t channels) {
  const unsigned blocks = unsigned((channels + kThreads - 1) / kThreads);
  return {blockIdx.x / blocks, int64_t(blockIdx.x % blocks) * kThreads + threadIdx.x};
}
int64_t row_channel_blocks(int64_t rows, int64_t channels) {
  return rows * ((channels + kThreads - 1) / kThreads);
}

__device__ __forceinline__ float input_at(const CausalConv1dParams& p, int64_t b, int64_t d,
                                          int64_t t) {
  return load_float(p.x.data, p.x.dtype, b * p.x.stride[0] + d * p.x.stride[1] + t * p.x.stride[2]);
}

__global__ void __launch_bounds__(kThreads)
    conv_final_states_kernel(const __grid_constant__ ConvParams p) {
  const auto [n, d] = row_channel(p.channels);
  if (d >= p.channels) return;
  const Span span = span_of(p, n, p.tokens);
  const auto& to = p.final_states;
  for (int64_t i = 0; i < p.state_tokens; ++i) {
    const int64_t t = span.end - p.state_tokens + i;
    const float x =
        t >= span.begin ? input_at(p, span.batch, d, t) : past_input(p, n, d, int(span.begin - t));
    store_float(to.data, to.dtype, n * to.stride[0] + d * to.stride[1] + i * to.stride[2], x);
  }
}

// The four numbers of a row that lie side by side, the last one first, or as many as there are.
__device__ __forceinline__ void load_row(const void* data, DType dtype, int64_t at, int64_t stride,
                                         int count, bool quads, float (&x)[kMaxConvWidth]) {
  if (quads) {
    const float4 quad = load_quad(data, dtype, at, 1, 4, true);
    x[0] = quad.w, x[1] = quad.z, x[2] = quad.y, x[3] = quad.x;
  }
#pragma unroll
  for (int i = 0; i < kMaxConvWidth; ++i)
    if (!quads || i >= 4)
      x[i] = i < count ? load_float(data, dtype, at + (count - 1 - i) * stride) : 0.f;
}

// A warp reads 32 rows of a state and of the weights. Rows of four numbers side by side, which is
// what models have, are one access each, and whole sectors together.
__global__ void __launch_bounds__(kThreads)
    causal_conv1d_update_kernel(const __grid_constant__ ConvParams p, bool state_quads,
                                bool weight_quads) {
  const auto [b, d] = row_channel(p.channels);
  if (d >= p.channels) return;
  const auto& y = p.output;
  const int64_t to = b * y.stride[0] + d * y.stride[1];
  const int64_t slot = p.slots.data ? index_at(p.slots, b * p.slots.stride[0]) : b;
  if (slot < 0 || slot >= p.states) {
    for (int64_t t = 0; t < p.tokens; ++t) store_float(y.data, y.dtype, to + t * y.stride[2], 0.f);
    return;
  }

  // By distance from the token at hand: the newest tokens of the state come first.
  const auto& state = p.final_states;
  const int64_t at = slot * state.stride[0] + d * state.stride[1];
  const int kept = clamp_to(p.state_tokens, kMaxConvWidth - 1);  // by registers
  float x[kMaxConvWidth + 1], taps[kMaxConvWidth];
  load_row(p.weight.data, p.weight.dtype, d * p.weight.stride[0], p.weight.stride[1], p.width,
           weight_quads, taps);
  {
    float past[kMaxConvWidth];
    load_row(state.data, state.dtype, at + (p.state_tokens - kept) * state.stride[2],
             state.stride[2], kept, state_quads, past);
#pragma unroll
    for (int i = 0; i < kMaxConvWidth; ++i) x[i + 1] = past[i];
  }
  const float bias =
      p.bias.data ? load_float(p.bias.data, p.bias.dtype, d * p.bias.stride[0]) : 0.f;
  for (int64_t t = 0; t < p.tokens; ++t) {
    x[0] = input_at(p, b, d, t);
    float z = bias;
#pragma unroll
    for (int i = kMaxConvWidth - 1; i >= 0; --i)
      if (i < p.width) z = fmaf(taps[i], x[i], z);
    store_float(y.data, y.dtype, to + t * y.stride[2], p.silu ? silu(z) : z);
#pragma unroll
    for (int i = kMaxConvWidth; i > 0; --i) x[i] = x[i - 1];
  }

  if (state_quads) {
    store_quad(state.data, state.dtype, at, 1, 4, true, make_float4(x[4], x[3], x[2], x[1]));
    return;
  }
  // From the oldest on: what is read lies behind what is written.
  for (int64_t i = 0; i < p.state_tokens - kept; ++i) {
    const int64_t from = i + p.tokens - p.state_tokens;  // below 0: a token that is kept
    store_float(state.data, state.dtype, at + i * state.stride[2],
                from >= 0 ? input_at(p, b, d, from) : past_input(p, slot, d, int(-from)));
  }
#pragma unroll
  for (int i = 1; i < kMaxConvWidth; ++i)
    if (i <= kept)
      store_float(state.data, state.dtype, at + (p.state_tokens - i) * state.stride[2], x[i]);
}

template <int kTaps>
void run_forward(const ConvParams& p, cudaStream_t stream) {
  const int64_t blocks =
      p.batch * ((p.tokens + kTokens - 1) / kTokens) * ((p.channels + kChannels - 1) / kChannels);
  launch("causal_conv1d_fn", causal_conv1d_kernel<kTaps>, blocks, kThreads, /*dynamic_shared=*/0,
         stream, p, layout_of(p.x), quads_along(p.output, 1));
}

}  // namespace

void causal_conv1d(const ConvParams& p, cudaStream_t stream) {
  check_supported("causal_conv1d_fn", p);
  p.width <= 4 ? run_forward<4>(p, stream) : run_forward<8>(p, stream);
  if (p.final_states && p.state_tokens > 0)
    launch("causal_conv1d_fn", conv_final_states_kernel, row_channel_blocks(p.states, p.channels),
           kThreads, /*dynamic_shared=*/0, stream, p);
}

void causal_conv1d_update(const ConvParams& p, cudaStream_t stream) {
  check_supported("causal_conv1d_update", p);
  launch("causal_conv1d_update", causal_conv1d_update_kernel,
         row_channel_blocks(p.batch, p.channels), kThreads,
         /*dynamic_shared=*/0, stream, p, p.state_tokens == 4 && quads_along(p.final_states, 2),
         p.width == 4 && quads_along(p.weight, 1));
}

}  // namespace deltanet::cuda
