// SPDX-License-Identifier: Apache-2.0
// 16-bit floats, scalar and in pairs, against a rounding that is done digit by digit on a long
// double.
#pragma once
#include "cases.cuh"

namespace ops_half {

using real = long double;
// value = significand * 2^exponent with `digits` binary digits; ties to even.
static real rounded(real x, int digits, int smallest_exponent, real largest) {
  if (x != x || std::isinf(x) || x == 0) return x;
  int exponent;
  std::frexp(x, &exponent);
  const int unit = std::max(exponent - digits, smallest_exponent);
  const real scaled = std::ldexp(x, -unit), r = std::ldexp(std::nearbyint(scaled), unit);
  return std::fabs(r) > largest ? std::copysign(std::numeric_limits<real>::infinity(), x)
         : r == 0               ? std::copysign(real(0), x)
                                : r;
}
struct F16 {
  static real value(uint16_t x) {
    const int e = x >> 10 & 31, m = x & 1023;
    const real v = e == 31 ? (m ? std::numeric_limits<real>::quiet_NaN()
                                : std::numeric_limits<real>::infinity())
                   : e     ? std::ldexp(real(1024 + m), e - 25)
                           : std::ldexp(real(m), -24);
    return x & 0x8000 ? -v : v;
  }
  static real round(real x) { return rounded(x, 11, -24, 65504); }
};
struct Bf16 {
  static real value(uint16_t x) { return cases::bits_as<float>(uint64_t(x) << 16); }
  static real round(real x) { return rounded(x, 8, -133, std::ldexp(real(255), 120)); }
};
template <class F>
static uint16_t pack(real x) {  // by search: the encoding whose value is the rounded one
  const real r = F::round(x);
  if (r != r) return 0x7fff;
  const uint16_t sign = std::signbit(r) ? 0x8000 : 0;
  uint16_t low = 0, high = sizeof(F) && F::value(0x7c00) > 1e30L && std::isinf(F::value(0x7c00))
                               ? 0x7c00
                               : 0x7f80;
  while (low < high) {
    const uint16_t mid = uint16_t((low + high) / 2);
    if (F::value(mid) < std::fabs(r))
      low = uint16_t(mid + 1);
    else
      high = mid;
  }
  return uint16_t(low | sign);
}
template <class F, class Op>
static uint32_t pair(uint32_t a, uint32_t b, uint32_t c, Op op) {
  const uint32_t low =
      pack<F>(op(F::value(uint16_t(a)), F::value(uint16_t(b)), F::value(uint16_t(c))));
  return low | uint32_t(pack<F>(op(F::value(uint16_t(a >> 16)), F::value(uint16_t(b >> 16)),
                                   F::value(uint16_t(c >> 16)))))
                   << 16;
}
static real lesser(real x, real y) {
  return x != x ? y : y != y ? x : x == y ? (std::signbit(x) ? x : y) : std::min(x, y);
}
static real greater(real x, real y) { return -lesser(-x, -y); }
// NaN has many encodings: compare halves by value.
static uint32_t canonical(uint32_t x, uint16_t infinity) {
  const uint32_t l = x & 0x7fff, h = x >> 16 & 0x7fff;
  return (l > infinity ? 0x7fff : x & 0xffff) | (h > infinity ? 0x7fff0000u : x & 0xffff0000u);
}
#define HALF2(OP, SUFFIX, F, INF, BODY)                                                        \
  CODE2(OP "." SUFFIX "x2", "{ .reg .b32 t; " OP "." SUFFIX "x2 %0, %1, %2; }", u32, u32, u32, \
        pair<F>(a, b, 0, [](real x, real y, real) -> real { return (void)y, BODY; }))          \
  CODE2(OP "." SUFFIX,                                                                         \
        "{ .reg .b16 x, y, u, v, r; mov.b32 {x, u}, %1; mov.b32 {y, v}, %2; " OP "." SUFFIX    \
        " r, x, y; mov.b32 %0, {r, 0}; }",                                                     \
        u32, u32, u32, pair<F>(a & 0xffff, b & 0xffff, 0, [](real x, real y, real) -> real {   \
                         return (void)y, BODY;                                                 \
                       }) & 0xffff)
#define BOTH(OP, BODY) HALF2(OP, "f16", F16, 0x7c00, BODY) HALF2(OP, "bf16", Bf16, 0x7f80, BODY)
#define ONLY16(OP, BODY) HALF2(OP, "f16", F16, 0x7c00, BODY)

ONLY16("add.rn", x + y)
ONLY16("sub.rn", x - y)
ONLY16("mul.rn", x* y)
ONLY16("add.sat", greater(real(0), lesser(real(1), x + y == x + y ? x + y : real(0))))
BOTH("min", lesser(x, y))
BOTH("max", greater(x, y))
CODE3("fma.rn.f16x2", "fma.rn.f16x2 %0, %1, %2, %3;", u32, u32, u32, u32,
      pair<F16>(a, b, c, [](real x, real y, real z) { return x * y + z; }))
CODE3("fma.rn.bf16x2", "fma.rn.bf16x2 %0, %1, %2, %3;", u32, u32, u32, u32,
      pair<Bf16>(a, b, c, [](real x, real y, real z) { return x * y + z; }))
CODE3("fma.rn.relu.f16x2", "fma.rn.relu.f16x2 %0, %1, %2, %3;", u32, u32, u32, u32,
      pair<F16>(a, b, c,
                [](real x, real y, real z) { return x * y + z < 0 ? real(0) : x * y + z; }))
CASE1("neg.f16x2", u32, u32, a ^ 0x80008000u)
CASE1("abs.bf16x2", u32, u32, a & 0x7fff7fffu)
CODE2("setp.lt.f16",
      "{ .reg .b16 x, y, u, v; .reg .pred p; mov.b32 {x, u}, %1; mov.b32 {y, v}, %2; setp.lt.f16 "
      "p, x, y; selp.b32 %0, 1, 0, p; }",
      u32, u32, u32, F16::value(uint16_t(a)) < F16::value(uint16_t(b)))
CODE2("cvt.f32.f16", "{ .reg .b16 x, u; mov.b32 {x, u}, %1; cvt.f32.f16 %0, x; }", f32, u32, s32,
      F16::value(uint16_t(a)))
CODE2("cvt.f32.bf16", "{ .reg .b16 x, u; mov.b32 {x, u}, %1; cvt.f32.bf16 %0, x; }", f32, u32, s32,
      Bf16::value(uint16_t(a)))
CODE2("cvt.rn.f16.f32", "{ .reg .b16 x; cvt.rn.f16.f32 x, %1; mov.b32 %0, {x, 0}; }", u32, f32, s32,
      pack<F16>(a))
CODE2("cvt.rn.bf16.f32", "{ .reg .b16 x; cvt.rn.bf16.f32 x, %1; mov.b32 %0, {x, 0}; }", u32, f32,
      s32, pack<Bf16>(a))
CODE2("cvt.rn.f16.f64", "{ .reg .b16 x; cvt.rn.f16.f64 x, %1; mov.b32 %0, {x, 0}; }", u32, f64, s32,
      pack<F16>(a))
CODE2("cvt.rn.f16x2.f32 (first source above)", "cvt.rn.f16x2.f32 %0, %1, %2;", u32, f32, f32,
      uint32_t(pack<F16>(a)) << 16 | pack<F16>(b))
CODE2("cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 %0, %1, %2;", u32, f32, f32,
      uint32_t(pack<Bf16>(a)) << 16 | pack<Bf16>(b))
CODE2("cvt.rn.relu.bf16x2.f32", "cvt.rn.relu.bf16x2.f32 %0, %1, %2;", u32, f32, f32,
      uint32_t(pack<Bf16>(a <= 0 ? 0 : a)) << 16 | pack<Bf16>(b <= 0 ? 0 : b))
static uint16_t toward_zero(float x, int digits_kept_from_32, bool half) {
  if (!half)
    return cases::bits_as<uint32_t>([](float v) {
             uint32_t u;
             std::memcpy(&u, &v, 4);
             return u;
           }(x)) >>
           digits_kept_from_32;
  uint16_t r = pack<F16>(x);
  while (std::fabs(F16::value(r)) > std::fabs(real(x))) r--;
  return r;
}
CODE2("cvt.rz.bf16x2.f32", "cvt.rz.bf16x2.f32 %0, %1, %2;", u32, f32, f32,
      uint32_t(a != a ? 0x7fff : toward_zero(a, 16, false)) << 16 |
          uint32_t(b != b ? 0x7fff : toward_zero(b, 16, false)))
CODE2("cvt.rz.f16.f32", "{ .reg .b16 x; cvt.rz.f16.f32 x, %1; mov.b32 %0, {x, 0}; }", u32, f32, s32,
      a != a          ? 0x7fff
      : std::isinf(a) ? pack<F16>(a)
                      : toward_zero(a, 0, true))
CODE2("cvt.rna.tf32.f32 keeps 10 bits", "cvt.rna.tf32.f32 %0, %1;", u32, f32, s32,
      [](float x) -> uint32_t {
        uint32_t u;
        std::memcpy(&u, &x, 4);
        if (x != x) return 0x7fffffff;
        if (std::isinf(x)) return u;
        const double unit = std::ldexp(1.0, std::max(std::ilogb(x == 0 ? 1e-38f : x), -126) - 10);
        const float r =
            float(std::copysign(std::floor(std::fabs(double(x)) / unit + 0.5) * unit, double(x)));
        std::memcpy(&u, &r, 4);
        return u;
      }(a))
CODE2("cvt.rni.f16.f16",
      "{ .reg .b16 x, u; mov.b32 {x, u}, %1; cvt.rni.f16.f16 x, x; mov.b32 %0, {x, 0}; }", u32, u32,
      s32, pack<F16>(std::nearbyint(F16::value(uint16_t(a)))))
CODE2("cvt.rn.f16.s32", "{ .reg .b16 x; cvt.rn.f16.s32 x, %1; mov.b32 %0, {x, 0}; }", u32, s32, s32,
      pack<F16>(a))
CODE2("cvt.rzi.s32.f16", "{ .reg .b16 x, u; mov.b32 {x, u}, %1; cvt.rzi.s32.f16 %0, x; }", s32, u32,
      s32, [](real v) -> int64_t {
        return v != v                ? 0
               : v >= 2147483647.0L  ? INT32_MAX
               : v <= -2147483648.0L ? INT32_MIN
                                     : int64_t(v);
      }(F16::value(uint16_t(a))))

}  // namespace ops_half
