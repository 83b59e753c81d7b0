// SPDX-License-Identifier: Apache-2.0
// fp32 and fp64: every rounding mode against the exact error of the operation, saturation,
// flushing, NaN, comparisons.
#pragma once
#include "cases.cuh"

namespace ops_float {

using real = long double;  // 64 bits of fraction: products of floats are exact
enum Mode { kNear, kZero, kDown, kUp };

// The float that a mode wants, for the exact value high + low (low far below high).
template <class T>
static T round_to(real high, real low, Mode mode) {
  if (high != high || std::isinf(high)) return T(high);
  T r = T(high);  // nearest
  // Where is the exact value, seen from r?
  const real off = std::isinf(r) ? -std::copysign(real(1), real(r)) : (high - real(r)) + low;
  if (mode == kNear) {
    if (off == 0 || low == 0 || std::isinf(r)) return r;
    // high alone was a tie: low decides.
    const T other = std::nextafter(
        r, off > 0 ? std::numeric_limits<T>::infinity() : -std::numeric_limits<T>::infinity());
    const real half = (real(other) - real(r)) / 2;
    return std::fabs(high - real(r)) == std::fabs(half) && (off > 0) == (half > 0) &&
                   std::fabs(off) > std::fabs(half)
               ? other
               : r;
  }
  const bool negative = high + low < 0;
  if (off > 0 && (mode == kUp || (mode == kZero && negative)))
    return std::nextafter(r, std::numeric_limits<T>::infinity());
  if (off < 0 && (mode == kDown || (mode == kZero && !negative)))
    return std::nextafter(r, -std::numeric_limits<T>::infinity());
  return r;
}
static real two_sum_error(real x, real y) {
  const real s = x + y, z = s - x;
  return (x - (s - z)) + (y - z);
}
// A sum that is exactly zero from terms of unlike sign is -0 when rounding down, +0 otherwise.
template <class T>
static T add(T x, T y, Mode mode) {
  if (x == -y && x == x && !std::isinf(x))
    return x == 0 && std::signbit(x) == std::signbit(y) ? x : mode == kDown ? T(-0.0) : T(0);
  return round_to<T>(real(x) + real(y), std::isinf(x) || std::isinf(y) ? 0 : two_sum_error(x, y),
                     mode);
}
static float mul(float x, float y, Mode mode) {
  if (x == 0 || y == 0) return x * y;
  return round_to<float>(real(x) * real(y), 0, mode);
}
static float fma(float x, float y, float z, Mode mode) {
  const real p = real(x) * real(y);
  if (p == -real(z) && p == p && !std::isinf(p))
    return p == 0 && std::signbit(p) == std::signbit(z) ? z : mode == kDown ? -0.f : 0.f;
  if (p != p || std::isinf(p) || std::isinf(z)) return float(p + z);
  return round_to<float>(p + z, two_sum_error(p, z), mode);
}
static float divide(float x, float y, Mode mode) {
  const real q = real(x) / real(y);
  if (x == 0 || y == 0 || std::isinf(x) || std::isinf(y) || q != q) return x / y;
  return round_to<float>(q, std::fma(-q, real(y), real(x)) / real(y), mode);
}
static float root(float x, Mode mode) {
  const real s = std::sqrt(real(x));
  if (!(x > 0) || std::isinf(x)) return std::sqrt(x);
  return round_to<float>(s, std::fma(-s, s, real(x)) / (2 * s), mode);
}
static double add64(double x, double y, Mode mode) {
  const double r = x + y;
  if (r != r || std::isinf(x) || std::isinf(y)) return r;
  if (r == 0) return x == 0 && std::signbit(x) == std::signbit(y) ? x : mode == kDown ? -0.0 : 0.0;
  if (std::isinf(r))
    return mode == kZero || (mode == kDown && r > 0) || (mode == kUp && r < 0)
               ? std::copysign(std::numeric_limits<double>::max(), r)
               : r;
  const double z = r - x, off = (x - (r - z)) + (y - z);
  const double inf = std::numeric_limits<double>::infinity();
  if (off > 0 && (mode == kUp || (mode == kZero && r < 0))) return std::nextafter(r, inf);
  if (off < 0 && (mode == kDown || (mode == kZero && r > 0))) return std::nextafter(r, -inf);
  return r;
}
template <class T>
static T sat(T x) {
  return x >= 1 ? T(1) : x > 0 ? x : T(0);
}
static float ftz(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
template <class T>
static T lesser(T x, T y) {
  if (x != x) return y;
  if (y != y) return x;
  if (x == 0 && y == 0) return std::signbit(x) ? x : y;
  return x < y ? x : y;
}
template <class T>
static T greater(T x, T y) {
  return -lesser<T>(-x, -y);
}
static float nan_or(float r, float x, float y) {
  return x != x || y != y ? std::numeric_limits<float>::quiet_NaN() : r;
}

CASE2("add.f32", f32, f32, f32, add(a, b, kNear))
CASE2("add.rz.f32", f32, f32, f32, add(a, b, kZero))
CASE2("add.rm.f32", f32, f32, f32, add(a, b, kDown))
CASE2("add.rp.f32", f32, f32, f32, add(a, b, kUp))
CASE2("add.sat.f32", f32, f32, f32, sat(a + b))
CASE2("add.ftz.f32", f32, f32, f32, ftz(ftz(a) + ftz(b)))
CASE2("sub.rn.f32", f32, f32, f32, add(a, -b, kNear))
CASE2("sub.rm.f32", f32, f32, f32, add(a, -b, kDown))
CASE2("mul.rn.f32", f32, f32, f32, mul(a, b, kNear))
CASE2("mul.rz.f32", f32, f32, f32, mul(a, b, kZero))
CASE2("mul.rm.f32", f32, f32, f32, mul(a, b, kDown))
CASE2("mul.rp.f32", f32, f32, f32, mul(a, b, kUp))
CASE2("mul.ftz.sat.f32", f32, f32, f32, sat(ftz(ftz(a) * ftz(b))))
CASE3("fma.rn.f32", f32, f32, f32, f32, fma(a, b, c, kNear))
CASE3("fma.rz.f32", f32, f32, f32, f32, fma(a, b, c, kZero))
CASE3("fma.rm.f32", f32, f32, f32, f32, fma(a, b, c, kDown))
CASE3("fma.rp.f32", f32, f32, f32, f32, fma(a, b, c, kUp))
CASE3("fma.rn.sat.f32", f32, f32, f32, f32, sat(fma(a, b, c, kNear)))
CASE3("mad.rn.f32", f32, f32, f32, f32, fma(a, b, c, kNear))
CASE2("div.rn.f32", f32, f32, f32, divide(a, b, kNear))
CASE2("div.rz.f32", f32, f32, f32, divide(a, b, kZero))
CASE2("div.rp.f32", f32, f32, f32, divide(a, b, kUp))
CASE1("sqrt.rn.f32", f32, f32, root(a, kNear))
CASE1("sqrt.rz.f32", f32, f32, root(a, kZero))
CASE1("sqrt.rp.f32", f32, f32, root(a, kUp))
CASE1("rcp.rn.f32", f32, f32, divide(1, a, kNear))
CASE1("rcp.rm.f32", f32, f32, divide(1, a, kDown))
CASE2("min.f32", f32, f32, f32, lesser(a, b))
CASE2("max.f32", f32, f32, f32, greater(a, b))
CASE2("min.NaN.f32", f32, f32, f32, nan_or(lesser(a, b), a, b))
CASE2("max.NaN.f32", f32, f32, f32, nan_or(greater(a, b), a, b))
CASE1("abs.f32", f32, f32, cases::bits_as<float>([](float x) {
        uint32_t u;
        std::memcpy(&u, &x, 4);
        return u & 0x7fffffff;
      }(a)))
CASE1("neg.f32", f32, f32, -a)
CASE2("copysign.f32", f32, f32, f32, std::copysign(b, a))
CASE2("copysign.f64", f64, f64, f64, std::copysign(b, a))
CASE2("add.f64", f64, f64, f64, a + b)
CASE2("add.rz.f64", f64, f64, f64, add64(a, b, kZero))
CASE2("add.rm.f64", f64, f64, f64, add64(a, b, kDown))
CASE2("add.rp.f64", f64, f64, f64, add64(a, b, kUp))
CASE2("mul.f64", f64, f64, f64, a* b)
CASE3("fma.rn.f64", f64, f64, f64, f64, std::fma(a, b, c))
CASE2("div.rn.f64", f64, f64, f64, a / b)
CASE1("sqrt.rn.f64", f64, f64, std::sqrt(a))
CASE1("rcp.rn.f64", f64, f64, 1 / a)
CASE2("min.f64", f64, f64, f64, lesser(a, b))
CASE2("max.f64", f64, f64, f64, greater(a, b))
// The approximations: the emulator gives the rounded value, a GPU something near it.
NEAR1(1, "ex2.approx.f32", f32, f32, std::exp2(double(a)))
NEAR1(1, "lg2.approx.f32", f32, f32, std::log2(double(a)))
NEAR1(1, "rsqrt.approx.f32", f32, f32, 1 / std::sqrt(double(a)))
NEAR1(1, "rcp.approx.f32", f32, f32, 1 / double(a))
NEAR1(1, "sqrt.approx.f32", f32, f32, std::sqrt(double(a)))
NEAR1(1, "sin.approx.f32", f32, f32, std::sin(double(a)))
NEAR1(1, "cos.approx.f32", f32, f32, std::cos(double(a)))
NEAR1(1, "tanh.approx.f32", f32, f32, std::tanh(double(a)))
NEAR1(1, "ex2.approx.ftz.f32", f32, f32, ftz(std::exp2(double(ftz(a)))))
NEAR2(1, "div.approx.f32", f32, f32, f32, a / b)
NEAR2(1, "div.full.f32", f32, f32, f32, a / b)
#define TEST_P(NAME, ...)                                                                          \
  CODE2("testp." NAME ".f32", "{ .reg .pred p; testp." NAME ".f32 p, %1; selp.b32 %0, 1, 0, p; }", \
        s32, f32, s32, __VA_ARGS__)
TEST_P("finite", std::isfinite(a))
TEST_P("infinite", std::isinf(a))
TEST_P("number", a == a)
TEST_P("notanumber", a != a)
TEST_P("normal", std::isnormal(a))
TEST_P("subnormal", a != 0 && std::fabs(a) < 1.17549435e-38f)
#define COMPARE(NAME, T, ...)                                                                 \
  CODE2("setp." NAME "." #T,                                                                  \
        "{ .reg .pred p; setp." NAME "." #T " p, %1, %2; selp.b32 %0, 1, 0, p; }", s32, T, T, \
        __VA_ARGS__)
COMPARE("eq", f32, a == b)
COMPARE("ne", f32, a<b || a> b)
COMPARE("lt", f32, a < b)
COMPARE("le", f32, a <= b)
COMPARE("gt", f32, a > b)
COMPARE("ge", f32, a >= b)
COMPARE("equ", f32, !(a < b || a > b))
COMPARE("neu", f32, !(a == b))
COMPARE("ltu", f32, !(a >= b))
COMPARE("leu", f32, !(a > b))
COMPARE("gtu", f32, !(a <= b))
COMPARE("geu", f32, !(a < b))
COMPARE("num", f32, a == a && b == b)
COMPARE("nan", f32, a != a || b != b)
COMPARE("eq.ftz", f32, ftz(a) == ftz(b))
COMPARE("lt", f64, a < b)
COMPARE("neu", f64, !(a == b))
CODE3("selp.f32", "{ .reg .pred p; setp.gt.f32 p, %3, 0f00000000; selp.f32 %0, %1, %2, p; }", f32,
      f32, f32, f32, c > 0 ? a : b)
CODE3("slct.f32.f32", "slct.f32.f32 %0, %1, %2, %3;", f32, f32, f32, f32, c >= 0 ? a : b)

}  // namespace ops_float
