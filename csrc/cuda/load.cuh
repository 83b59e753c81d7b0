// SPDX-License-Identifier: Apache-2.0
//
// How kernels read and write tensors: elements and quads of any float dtype at any stride, gates
// and betas with their options. Arithmetic happens in fp32 behind these functions. Offsets are
// 64-bit throughout.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/params.h"
#include "cuda/rule_params.cuh"

namespace deltanet::cuda {

// ---- element types
// -------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// Round to nearest, ties to even; fp16 overflows to infinity.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

// ---- one element of a run-time dtype
// ---------------------------------------------------------------

__device__ __forceinline__ double load_double(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[at];
    case DType::kFloat64:
      return static_cast<const double*>(data)[at];
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    default:
      return to_float(static_cast<const __half*>(data)[at]);
  }
}

__device__ __forceinline__ float load_float(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[at];
    case DType::kFloat64:
      return float(static_cast<const double*>(data)[at]);
    case DType::kBFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[at]);
    default:
      return to_float(static_cast<const __half*>(data)[at]);
  }
}

// fp32, bf16 or fp16: results are never fp64 on CUDA.
__device__ __forceinline__ void store_float(void* data, DType dtype, int64_t at, float x) {
  if (dtype == DType::kFloat32)
    static_cast<float*>(data)[at] = x;
  else if (dtype == DType::kBFloat16)
    static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(x);
  else
    static_cast<__half*>(data)[at] = from_float<__half>(x);
}

// ---- four elements
// -------------------------------------------------------------------------------

// Whether four neighbours along axis `along` can be moved at once, wherever a multiple of four
// starts: they lie side by side, and every other stride keeps the alignment.
template <class AnyView, int kRank>
bool quads_along(const AnyView& x, const int64_t (&stride)[kRank], int along) {
  if (x.dtype == DType::kFloat64 || stride[along] != 1) return false;
  for (int i = 0; i < kRank; ++i)
    if (i != along && stride[i] % 4 != 0) return false;
  return reinterpret_cast<uintptr_t>(x.data) % (4 * size_of(x.dtype)) == 0;
}
template <int kRank>
bool quads_along(const View<kRank>& x, int along) {
  return quads_along(x, x.stride, along);
}
template <int kRank>
bool quads_along(const MutableView<kRank>& x, int along) {
  return quads_along(x, x.stride, along);
}

__device__ __forceinline__ float4 unpack_bf16(uint2 x) {
  return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                     __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}
__device__ __forceinline__ float4 unpack_f16(uint2 x) {
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&x.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&x.y));
  return make_float4(a.x, a.y, b.x, b.y);
}
__device__ __forceinline__ uint2 pack_bf16(float4 x) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(x.x, x.y), b = __floats2bfloat162_rn(x.z, x.w);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
}
__device__ __forceinline__ uint2 pack_f16(float4 x) {
  const __half2 a = __floats2half2_rn(x.x, x.y), b = __floats2half2_rn(x.z, x.w);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
}

// Elements at, at + stride, ...; `count` of them exist (0 to 4), the others are 0. `quads`: what
// quads_along said of this tensor and axis; `at` is then the offset of a multiple of four.
__device__ __forceinline__ float4 load_quad(const void* data, DType dtype, int64_t at,
                                            int64_t stride, int count, bool quads) {
  if (quads && count >= 4) {
    if (dtype == DType::kFloat32)
      return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
    const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at);
    return dtype == DType::kBFloat16 ? unpack_bf16(x) : unpack_f16(x);
  }
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (count > 0) x.x = load_float(data, dtype, at);
  if (count > 1) x.y = load_float(data, dtype, at + stride);
  if (count > 2) x.z = load_float(data, dtype, at + 2 * stride);
  if (count > 3) x.w = load_float(data, dtype, at + 3 * stride);
  return x;
}

// Inline assembly: the compiler would merge the first of four scalar stores of another branch into
// a vector store, and leave four scalars.
__device__ __forceinline__ void store_16_bytes(float* to, float4 x) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(to)), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_8_bytes(uint16_t* to, uint2 x) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y)
               : "memory");
}

__device__ __forceinline__ void store_quad(void* data, DType dtype, int64_t at, int64_t stride,
                                           int count, bool quads, float4 x) {
  if (quads && count >= 4) {
    if (dtype == DType::kFloat32)
      store_16_bytes(static_cast<float*>(data) + at, x);
    else
      store_8_bytes(static_cast<uint16_t*>(data) + at,
                    dtype == DType::kBFloat16 ? pack_bf16(x) : pack_f16(x));
    return;
  }
  if (count > 0) store_float(data, dtype, at, x.x);
  if (count > 1) store_float(data, dtype, at + stride, x.y);
  if (count > 2) store_float(data, dtype, at + 2 * stride, x.z);
  if (count > 3) store_float(data, dtype, at + 3 * stride, x.w);
}

// ---- gates
// ---------------------------------------------------------------------------------------

// Below this log decay exp is 0 in fp32 anyway, and -inf would turn differences of prefix sums into
// NaN.
constexpr float kSmallestLogDecay = -120.f;

// Log decay of one token and value head, options applied; at least kSmallestLogDecay, NaN stays.
// The gate's functions are in double: a large A_log and a tiny softplus must not meet as inf * 0.
__device__ __forceinline__ float load_log_decay(const RuleParams& p, int64_t b, int64_t t,
                                                int64_t head) {
  if (!p.g.data) return 0.f;
  const int64_t at = b * p.g.stride[0] + t * p.g.stride[1] + head * p.g.stride[2];
  float g;
  if (p.gate_in_kernel) {
    const double rate = -exp(load_double(p.A_log.data, p.A_log.dtype, head * p.A_log.stride[0]));
    double x = load_double(p.g.data, p.g.dtype, at);
    if (p.dt_bias.data)
      x += load_double(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride[0]);
    const double softplus = (x > 0 ? x : 0) + log1p(exp(x > 0 ? -x : x));
    g = float(rate * softplus);
  } else {
    g = load_float(p.g.data, p.g.dtype, at);
  }
  return g < kSmallestLogDecay ? kSmallestLogDecay : g;
}

// Write strength of one token and value head, options applied.
__device__ __forceinline__ float load_beta(const RuleParams& p, int64_t b, int64_t t,
                                           int64_t head) {
  if (!p.beta.data) return 1.f;
  const int64_t at = b * p.beta.stride[0] + t * p.beta.stride[1] + head * p.beta.stride[2];
  if (!p.beta_sigmoid) return load_float(p.beta.data, p.beta.dtype, at);
  const double x = load_double(p.beta.data, p.beta.dtype, at);
  return float((p.beta_doubled ? 2 : 1) / (1 + exp(-x)));
}

__device__ __forceinline__ double sigmoid(double x) { return 1 / (1 + exp(-x)); }

// Equation (27): the gradient of the raw gate, from that of the log decay.
__device__ __forceinline__ double raw_gate_gradient(const RuleParams& p, int64_t b, int64_t t,
                                                    int64_t head, double d) {
  if (d == 0) return 0;  // a rate of -inf has gates that nothing passes
  const int64_t at = b * p.g.stride[0] + t * p.g.stride[1] + head * p.g.stride[2];
  double x = load_double(p.g.data, p.g.dtype, at);
  if (p.dt_bias.data) x += load_double(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride[0]);
  return -exp(load_double(p.A_log.data, p.A_log.dtype, head * p.A_log.stride[0])) * d * sigmoid(x);
}

// Equation (28): the gradient of beta as it was given, from that of the write strength.
__device__ __forceinline__ float raw_beta_gradient(const RuleParams& p, int64_t b, int64_t t,
                                                   int64_t head, float d) {
  if (!p.beta_sigmoid) return d;
  const int64_t at = b * p.beta.stride[0] + t * p.beta.stride[1] + head * p.beta.stride[2];
  const double x = load_double(p.beta.data, p.beta.dtype, at);
  return float(d * (p.beta_doubled ? 2 : 1) * sigmoid(x) * sigmoid(-x));
}

// What a row is multiplied by to normalize it, from the sum of its squares: eps stands inside the
// root.
__device__ __forceinline__ float reciprocal_norm(float sum_of_squares) {
  return __frsqrt_rn(sum_of_squares + 1e-6f);
}

}  // namespace deltanet::cuda
