// SPDX-License-Identifier: Apache-2.0
//
// Element types of the operators, and scalar conversions to and from the 16-bit ones.
#pragma once
#include <cstdint>
#include <cstring>

// A copy that is compiled for a newer instruction set must never be the one that the linker keeps
// for everyone.
#define DELTANET_ALWAYS_INLINE __attribute__((always_inline)) inline

namespace deltanet {

enum class DType : uint8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

constexpr int64_t size_of(DType t) {
  return t == DType::kFloat64 ? 8 : t == DType::kFloat32 ? 4 : 2;
}

DELTANET_ALWAYS_INLINE float bits_to_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}
DELTANET_ALWAYS_INLINE uint32_t float_to_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

// bfloat16 is the upper half of a float.
DELTANET_ALWAYS_INLINE float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

// Round to nearest, ties to even. A NaN stays a (quiet) NaN: rounding its mantissa up could carry
// into the exponent and make it an infinity or even a zero.
DELTANET_ALWAYS_INLINE uint16_t float_to_bf16(float x) {
  uint32_t u = float_to_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  u += 0x7fffu + ((u >> 16) & 1u);
  return uint16_t(u >> 16);
}

DELTANET_ALWAYS_INLINE float f16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u)  // infinity or NaN: exponent all ones in both formats
    return bits_to_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400u)  // normal: rebias the exponent from 15 to 127
    return bits_to_float(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
  // Subnormal: magnitude * 2^-24, exact in a float.
  const float x = float(magnitude) * 5.9604644775390625e-8f;
  return sign ? -x : x;
}

// Round to nearest, ties to even; overflow goes to infinity.
DELTANET_ALWAYS_INLINE uint16_t float_to_f16(float x) {
  const uint32_t u = float_to_bits(x);
  const uint16_t sign = uint16_t((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above
  if (magnitude >= 0x38800000u) {                                 // normal in fp16
    const uint32_t rebiased = magnitude - ((127u - 15u) << 23);
    return uint16_t(sign | ((rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13));
  }
  // Subnormal: adding 0.5 leaves the value, rounded to a multiple of 2^-24, in the low mantissa
  // bits.
  const uint32_t shifted = float_to_bits(bits_to_float(magnitude) + 0.5f);
  return uint16_t(sign | (shifted - 0x3f000000u));
}

// Element `index` of an array of any element type.
template <class Real>
DELTANET_ALWAYS_INLINE Real load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return Real(static_cast<const float*>(data)[index]);
    case DType::kFloat64:
      return Real(static_cast<const double*>(data)[index]);
    case DType::kBFloat16:
      return Real(bf16_to_float(static_cast<const uint16_t*>(data)[index]));
    case DType::kFloat16:
      return Real(f16_to_float(static_cast<const uint16_t*>(data)[index]));
  }
  return Real(0);
}

template <class Real>
DELTANET_ALWAYS_INLINE void store_element(void* data, DType dtype, int64_t index, Real x) {
  switch (dtype) {
    case DType::kFloat32:
      static_cast<float*>(data)[index] = float(x);
      return;
    case DType::kFloat64:
      static_cast<double*>(data)[index] = double(x);
      return;
    case DType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_bf16(float(x));
      return;
    case DType::kFloat16:
      static_cast<uint16_t*>(data)[index] = float_to_f16(float(x));
      return;
  }
}

}  // namespace deltanet
