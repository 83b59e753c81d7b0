// SPDX-License-Identifier: Apache-2.0
// Conversions between integers, fp32 and fp64.
#pragma once
#include "cases.cuh"

namespace ops_convert {

using real = long double;
template <class T>
static T to_int(real x, bool wide) {
  if (x != x) return wide ? T(T(1) << (8 * sizeof(T) - 1)) : T(0);
  if (x <= real(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (x >= real(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return T(x);
}
template <class T, class F>
static T clamped(F x) {
  const __int128 v = x, low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  return T(v < low ? low : v > high ? high : v);
}
// The float on the wanted side of an exact value.
static float toward(real x, int side) {
  const float r = float(x);
  if (r != r || real(r) == x) return r;
  const float inf = std::numeric_limits<float>::infinity();
  if (side > 0 && real(r) < x) return std::nextafter(r, inf);
  if (side < 0 && real(r) > x) return std::nextafter(r, -inf);
  return r;
}

CASE1("cvt.u16.u32", u16, u32, a)
CASE1("cvt.s64.s32", s64, s32, a)
CASE1("cvt.u64.u32", u64, u32, a)
CASE1("cvt.s32.s16", s32, s16, a)
CASE1("cvt.u32.s16", u32, s16, int32_t(a))
CASE1("cvt.u32.u64", u32, u64, a)
CASE1("cvt.s32.s64", s32, s64, a)
CODE2("cvt.s32.s8", "cvt.s32.s8 %0, %1;", s32, s32, s32, int8_t(a))
CODE2("cvt.u32.u8", "cvt.u32.u8 %0, %1;", u32, u32, u32, uint8_t(a))
CODE2("cvt.s16.s8", "cvt.s16.s8 %0, %1;", s16, s32, s32, int8_t(a))
CASE1("cvt.sat.s16.s32", s16, s32, clamped<int16_t>(a))
CASE1("cvt.sat.u16.s32", u16, s32, clamped<uint16_t>(a))
CASE1("cvt.sat.u32.s32", u32, s32, clamped<uint32_t>(a))
CASE1("cvt.sat.s32.u32", s32, u32, clamped<int32_t>(a))
CASE1("cvt.sat.s32.s64", s32, s64, clamped<int32_t>(a))
CODE2("cvt.sat.u8.s32", "{ .reg .u32 t; cvt.sat.u8.s32 t, %1; cvt.u32.u8 %0, t; }", u32, s32, s32,
      clamped<uint8_t>(a))
CASE1("cvt.rni.s32.f32", s32, f32, to_int<int32_t>(std::nearbyint(real(a)), false))
CASE1("cvt.rzi.s32.f32", s32, f32, to_int<int32_t>(std::trunc(real(a)), false))
CASE1("cvt.rmi.s32.f32", s32, f32, to_int<int32_t>(std::floor(real(a)), false))
CASE1("cvt.rpi.s32.f32", s32, f32, to_int<int32_t>(std::ceil(real(a)), false))
CASE1("cvt.rzi.u32.f32", u32, f32, to_int<uint32_t>(std::trunc(real(a)), false))
CASE1("cvt.rni.u32.f32", u32, f32, to_int<uint32_t>(std::nearbyint(real(a)), false))
CASE1("cvt.rzi.s64.f32", s64, f32, to_int<int64_t>(std::trunc(real(a)), true))
CASE1("cvt.rzi.u64.f64", u64, f64, to_int<uint64_t>(std::trunc(real(a)), true))
CASE1("cvt.rni.s32.f64", s32, f64, to_int<int32_t>(std::nearbyint(real(a)), true))
CASE1("cvt.rmi.s64.f64", s64, f64, to_int<int64_t>(std::floor(real(a)), true))
CASE1("cvt.rzi.ftz.s32.f32", s32, f32, to_int<int32_t>(std::trunc(real(a)), false))
CASE1("cvt.rn.f32.s32", f32, s32, real(a))
CASE1("cvt.rz.f32.s32", f32, s32, toward(a, a < 0 ? 1 : -1))
CASE1("cvt.rm.f32.s32", f32, s32, toward(a, -1))
CASE1("cvt.rp.f32.u32", f32, u32, toward(a, 1))
CASE1("cvt.rn.f32.u32", f32, u32, real(a))
CASE1("cvt.rn.f32.s64", f32, s64, real(a))
CASE1("cvt.rn.f32.u64", f32, u64, real(a))
CASE1("cvt.rz.f32.u64", f32, u64, toward(a, -1))
CASE1("cvt.rn.f64.s32", f64, s32, a)
CASE1("cvt.rn.f64.u64", f64, u64, real(a))
CASE1("cvt.f64.f32", f64, f32, a)
CASE1("cvt.rn.f32.f64", f32, f64, real(a))
CASE1("cvt.rz.f32.f64", f32, f64, std::isinf(a) ? float(a) : toward(a, a < 0 ? 1 : -1))
CASE1("cvt.rm.f32.f64", f32, f64, std::isinf(a) ? float(a) : toward(a, -1))
CASE1("cvt.rp.f32.f64", f32, f64, std::isinf(a) ? float(a) : toward(a, 1))
CASE1("cvt.rni.f32.f32", f32, f32, std::nearbyint(a))
CASE1("cvt.rzi.f32.f32", f32, f32, std::trunc(a))
CASE1("cvt.rmi.f32.f32", f32, f32, std::floor(a))
CASE1("cvt.rpi.f64.f64", f64, f64, std::ceil(a))
CASE1("cvt.sat.f32.f32", f32, f32, a >= 1 ? 1.f : a > 0 ? a : 0.f)
CASE1("cvt.rn.sat.f32.s32", f32, s32, a >= 1 ? 1.f : 0.f)

}  // namespace ops_convert
