// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of the convolution and of its gradients share: where a token stands in its
// sequence, tiles of tokens in shared memory, and the sum of taps.
//
// A block works on kConvChannels channels of some neighboring tokens of a batch row, whatever
// sequences they belong to. Their x lies in shared memory as fp32 rows, one per token, so that both
// layouts of x are read coalesced, each byte once but for the W - 1 tokens before the tile. A
// thread has a quad of channels and a run of tokens.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/causal_conv1d.h"
#include "cuda/load.cuh"

namespace deltanet::cuda::conv {

constexpr int kThreads = 256;
constexpr int kChannels = 64;               // of a block
constexpr int kQuads = kChannels / 4;       // of a row
constexpr int kGroups = kThreads / kQuads;  // threads that have the same channels
constexpr int kRun = 4;                     // tokens of a thread at a time

// ---- where a token stands
// ------------------------------------------------------------------------

struct Place {
  int behind;    // tokens of its sequence right before it, counted up to W - 1
  int ahead;     // and right after it
  int sequence;  // whose state lies before the sequence; -1: the token belongs to nobody
};

template <int kRank>
__device__ __forceinline__ int64_t index_at(const IndexView<kRank>& x, int64_t offset) {
  return x.is_int64 ? static_cast<const int64_t*>(x.data)[offset]
                    : static_cast<const int32_t*>(x.data)[offset];
}

__device__ __forceinline__ int clamp_to(int64_t x, int most) {
  return int(x < 0 ? 0 : x < most ? x : most);
}

__device__ __forceinline__ int64_t cu_seqlens_at(const ConvSequences& s, int64_t n,
                                                 int64_t tokens) {
  const int64_t x = index_at(s.cu_seqlens, n * s.cu_seqlens.stride[0]);
  return x < 0 ? 0 : x < tokens ? x : tokens;
}

// The tokens of sequence n, [begin, end). Not with seq_idx.
struct Span {
  int64_t batch, begin, end;
};
__device__ __forceinline__ Span span_of(const ConvSequences& s, int64_t n, int64_t tokens) {
  if (!s.cu_seqlens.data) return {n, 0, tokens};
  const int64_t begin = cu_seqlens_at(s, n, tokens), end = cu_seqlens_at(s, n + 1, tokens);
  return {0, begin, end < begin ? begin : end};
}

__device__ __forceinline__ Place place_in(const Span& span, int64_t n, int64_t t, int past) {
  return {clamp_to(t - span.begin, past), clamp_to(span.end - 1 - t, past), int(n)};
}

__device__ __forceinline__ Place place_by_index(const IndexView<2>& x, int64_t b, int64_t t,
                                                int64_t tokens, int past) {
  const auto at = [&](int64_t i) { return index_at(x, b * x.stride[0] + i * x.stride[1]); };
  const int64_t number = at(t);
  Place place = {0, 0, number < 0 ? -1 : 0};
  while (place.behind < past && t > place.behind && at(t - place.behind - 1) == number)
    ++place.behind;
  while (place.ahead < past && t + place.ahead + 1 < tokens && at(t + place.ahead + 1) == number)
    ++place.ahead;
  return place;
}

// Token t of batch row b.
__device__ __forceinline__ Place place_of(const CausalConv1dParams& p, const ConvSequences& s,
                                          int64_t b, int64_t t) {
  const int past = p.width - 1;
  if (s.seq_idx.data) return place_by_index(s.seq_idx, b, t, p.tokens, past);
  if (!s.cu_seqlens.data) return place_in({b, 0, p.tokens}, b, t, past);
  // The last sequence that starts at or before t; empty ones start with their successor.
  int64_t low = 0, high = s.states - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (cu_seqlens_at(s, middle, p.tokens) <= t)
      low = middle;
    else
      high = middle - 1;
  }
  if (high < 0) return {0, 0, -1};
  const Span span = span_of(s, low, p.tokens);
  if (t < span.begin || t >= span.end) return {0, 0, -1};
  return place_in(span, low, t, past);
}

// ---- tiles
// ---------------------------------------------------------------------------------------

// Offset of an element of a tile. The quads of a row change places by row / 4, so that eight lanes
// that have a quad of tokens each meet other banks.
__device__ __forceinline__ int tile_at(int row, int channel) {
  return row * kChannels + (channel ^ (row & 28));
}
__device__ __forceinline__ float4 tile_quad(const float* tile, int row, int channel) {
  return *reinterpret_cast<const float4*>(tile + tile_at(row, channel));
}
__device__ __forceinline__ void set_tile_quad(float* tile, int row, int channel, float4 x) {
  *reinterpret_cast<float4*>(tile + tile_at(row, channel)) = x;
}

// How the elements of a [B, D, T] tensor are moved: lanes run along the axis whose neighbors lie
// side by side.
struct Layout {
  bool along_tokens = false;
  bool quads = false;  // quads_along that axis
};
template <class View3>
Layout layout_of(const View3& x) {
  const bool along_tokens = x.stride[2] == 1 && x.stride[1] != 1;
  return {along_tokens, quads_along(x, along_tokens ? 2 : 1)};
}

// Tokens first - kBefore to first + rows of batch row b as fp32 rows; zeros outside of [0, tokens),
// and for channels that are not there. `first`, kBefore and `rows` are multiples of 4.
template <int kBefore>
__device__ __forceinline__ void load_tile(const View<3>& x, Layout layout, int64_t b,
                                          int64_t channel, int64_t channels, int64_t first,
                                          int rows, int64_t tokens, float* tile) {
  const int64_t base = b * x.stride[0] + channel * x.stride[1];
  if (!layout.along_tokens) {
    const int c = int(threadIdx.x) % kQuads * 4;
    const int count = clamp_to(channels - channel - c, 4);
    for (int row = int(threadIdx.x) / kQuads; row < kBefore + rows; row += kGroups) {
      const int64_t t = first - kBefore + row;
      const bool there = t >= 0 && t < tokens;
      set_tile_quad(tile, row, c,
                    load_quad(x.data, x.dtype, base + c * x.stride[1] + t * x.stride[2],
                              x.stride[1], there ? count : 0, layout.quads));
    }
    return;
  }
  const auto move_tokens = [&](int row, int c) {
    const int64_t t = first - kBefore + row;
    const bool there = t >= 0 && c < channels - channel;
    const float4 quad = load_quad(x.data, x.dtype, base + c * x.stride[1] + t * x.stride[2],
                                  x.stride[2], there ? clamp_to(tokens - t, 4) : 0, layout.quads);
    tile[tile_at(row, c)] = quad.x;
    tile[tile_at(row + 1, c)] = quad.y;
    tile[tile_at(row + 2, c)] = quad.z;
    tile[tile_at(row + 3, c)] = quad.w;
  };
  // Eight lanes along 32 tokens, from `first` on: whole sectors. Four lanes along channels.
  for (int i = int(threadIdx.x); i < (rows + 31) / 32 * 8 * kChannels; i += kThreads) {
    const int row = i / (8 * kChannels) * 32 + i % 8 * 4;
    if (row < rows) move_tokens(kBefore + row, i / 8 % kChannels);
  }
  for (int i = int(threadIdx.x); i < kBefore / 4 * kChannels; i += kThreads)
    move_tokens(i / kChannels * 4, i % kChannels);
}

// ---- taps
// ----------------------------------------------------------------------------------------

// By distance: what multiplies the token i before. Behind the last one the bias.
using Taps = float[kMaxConvWidth + 1][kChannels];

__device__ __forceinline__ void load_taps(const CausalConv1dParams& p, int64_t channel,
                                          Taps& taps) {
  const auto& w = p.weight;
  for (int i = int(threadIdx.x); i < p.width * kChannels; i += kThreads) {
    const int c = i / p.width, j = i % p.width;
    taps[p.width - 1 - j][c] =
        channel + c < p.channels
            ? load_float(w.data, w.dtype, (channel + c) * w.stride[0] + j * w.stride[1])
            : 0.f;
  }
  for (int c = int(threadIdx.x); c < kChannels; c += kThreads)
    taps[kMaxConvWidth][c] =
        p.bias.data && channel + c < p.channels
            ? load_float(p.bias.data, p.bias.dtype, (channel + c) * p.bias.stride[0])
            : 0.f;
}

// The input `back` tokens (1 or more) before the first one of a sequence.
__device__ __forceinline__ float past_input(const CausalConv1dParams& p, int64_t sequence,
                                            int64_t channel, int back) {
  const auto& s = p.initial_states;
  if (!s.data || channel >= p.channels) return 0.f;
  return load_float(
      s.data, s.dtype,
      sequence * s.stride[0] + channel * s.stride[1] + (p.state_tokens - back) * s.stride[2]);
}

// The one order of a sum over taps: the farthest token first, so that every kernel has the same
// bits.
__device__ __forceinline__ float4 add_tap(float4 z, float4 tap, float4 x) {
  return make_float4(fmaf(tap.x, x.x, z.x), fmaf(tap.y, x.y, z.y), fmaf(tap.z, x.z, z.z),
                     fmaf(tap.w, x.w, z.w));
}

__device__ __forceinline__ float4 quad_of(const float* row) {
  return *reinterpret_cast<const float4*>(row);
}

// z of the tokens in tile rows row to row + kRun, which stand at `places`, for the quad of channels
// from c on. kTaps is W or more, and `row` at least kTaps. Zero for tokens of nobody.
template <int kTaps>
__device__ __forceinline__ void convolve(const CausalConv1dParams& p, const float* tile,
                                         const Taps& taps, const Place* places, int row,
                                         int64_t channel, int c, float4 (&z)[kRun]) {
  const float4 bias = quad_of(&taps[kMaxConvWidth][c]);
  bool whole = true;  // every tap meets a token of the tile
#pragma unroll
  for (int r = 0; r < kRun; ++r)
    whole = whole && places[r].behind == p.width - 1 && places[r].sequence >= 0;
  if (whole) {
    float4 x[kTaps - 1 + kRun];
#pragma unroll
    for (int i = 0; i < kTaps - 1 + kRun; ++i) x[i] = tile_quad(tile, row - (kTaps - 1) + i, c);
#pragma unroll
    for (int r = 0; r < kRun; ++r) z[r] = bias;
#pragma unroll
    for (int i = kTaps - 1; i >= 0; --i) {
      if (i >= p.width) continue;
      const float4 tap = quad_of(&taps[i][c]);
#pragma unroll
      for (int r = 0; r < kRun; ++r) z[r] = add_tap(z[r], tap, x[r + kTaps - 1 - i]);
    }
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kRun; ++r) {
    const Place place = places[r];
    float4 sum = bias;
    if (place.sequence < 0) sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int i = place.sequence < 0 ? -1 : p.width - 1; i >= 0; --i) {
      const int back = i - place.behind;
      const auto past = [&](int n) { return past_input(p, place.sequence, channel + c + n, back); };
      sum = add_tap(sum, quad_of(&taps[i][c]),
                    back <= 0 ? tile_quad(tile, row + r - i, c)
                              : make_float4(past(0), past(1), past(2), past(3)));
    }
#pragma unroll
    for (int k = 0; k < kRun; ++k)  // z stays in registers
      if (k == r) z[k] = sum;
  }
}

inline void check_supported(const char* op, const CausalConv1dParams& p) {
  if (p.is_double())
    throw std::invalid_argument(std::string(op) +
                                ": x is float64; supported on CUDA: float32, bfloat16, float16 "
                                "(float64 runs on the CPU)");
  if (p.width < 1 || p.width > kMaxConvWidth)
    throw std::invalid_argument(std::string(op) + ": weight has width " + std::to_string(p.width) +
                                "; supported: 1 to " + std::to_string(kMaxConvWidth));
}

}  // namespace deltanet::cuda::conv
