// SPDX-License-Identifier: Apache-2.0
// Integer arithmetic, against 128-bit formulas.
#pragma once
#include "cases.cuh"

namespace ops_integer {

using i128 = __int128;
using u128 = unsigned __int128;
static int64_t clamp(i128 x, int64_t low, int64_t high) {
  return int64_t(x < low ? low : x > high ? high : x);
}

CASE2("add.s16", s16, s16, s16, a + b)
CASE2("add.u16", u16, u16, u16, a + b)
CASE2("add.s32", s32, s32, s32, uint32_t(a) + uint32_t(b))
CASE2("add.u32", u32, u32, u32, a + b)
CASE2("add.s64", s64, s64, s64, uint64_t(a) + uint64_t(b))
CASE2("add.sat.s32", s32, s32, s32, clamp(i128(a) + b, INT32_MIN, INT32_MAX))
CASE2("sub.s16", s16, s16, s16, a - b)
CASE2("sub.s32", s32, s32, s32, uint32_t(a) - uint32_t(b))
CASE2("sub.u64", u64, u64, u64, a - b)
CASE2("sub.sat.s32", s32, s32, s32, clamp(i128(a) - b, INT32_MIN, INT32_MAX))
CASE2("mul.lo.s16", s16, s16, s16, int32_t(a) * b)
CASE2("mul.hi.s16", s16, s16, s16, (int32_t(a) * b) >> 16)
CASE2("mul.hi.u16", u16, u16, u16, (uint32_t(a) * b) >> 16)
CASE2("mul.wide.s16", s32, s16, s16, int32_t(a) * b)
CASE2("mul.wide.u16", u32, u16, u16, uint32_t(a) * b)
CASE2("mul.lo.s32", s32, s32, s32, i128(a) * b)
CASE2("mul.hi.s32", s32, s32, s32, (i128(a) * b) >> 32)
CASE2("mul.hi.u32", u32, u32, u32, (u128(a) * b) >> 32)
CASE2("mul.wide.s32", s64, s32, s32, i128(a) * b)
CASE2("mul.wide.u32", u64, u32, u32, u128(a) * b)
CASE2("mul.lo.s64", s64, s64, s64, u128(a) * u128(b))
CASE2("mul.hi.s64", s64, s64, s64, (i128(a) * b) >> 64)
CASE2("mul.hi.u64", u64, u64, u64, (u128(a) * b) >> 64)
CASE2("mul24.lo.s32", s32, s32, s32,
      (int64_t(int32_t(uint32_t(a) << 8) >> 8) * (int32_t(uint32_t(b) << 8) >> 8)))
CASE2("mul24.lo.u32", u32, u32, u32, uint64_t(a & 0xffffff) * (b & 0xffffff))
CASE2("mul24.hi.s32", s32, s32, s32,
      (int64_t(int32_t(uint32_t(a) << 8) >> 8) * (int32_t(uint32_t(b) << 8) >> 8)) >> 16)
CASE3("mad.lo.s32", s32, s32, s32, s32, i128(a) * b + c)
CASE3("mad.hi.s32", s32, s32, s32, s32, ((i128(a) * b) >> 32) + c)
CASE3("mad.hi.u32", u32, u32, u32, u32, ((u128(a) * b) >> 32) + c)
CASE3("mad.hi.sat.s32", s32, s32, s32, s32, clamp(((i128(a) * b) >> 32) + c, INT32_MIN, INT32_MAX))
CASE3("mad.wide.s32", s64, s32, s32, s64, u128(i128(a) * b) + u128(c))
CASE3("mad.wide.u32", u64, u32, u32, u64, u128(a) * b + c)
CASE3("mad.lo.u64", u64, u64, u64, u64, u128(a) * b + c)
CASE3("mad24.lo.u32", u32, u32, u32, u32, uint64_t(a & 0xffffff) * (b & 0xffffff) + c)
CASE2_IF(b != 0, "div.s32", s32, s32, s32, int64_t(a) / b)
CASE2_IF(b != 0, "div.u32", u32, u32, u32, a / b)
CASE2_IF(b != 0, "div.s64", s64, s64, s64, i128(a) / b)
CASE2_IF(b != 0, "div.u64", u64, u64, u64, a / b)
CASE2_IF(b != 0, "rem.s32", s32, s32, s32, int64_t(a) % b)
CASE2_IF(b != 0, "rem.u32", u32, u32, u32, a % b)
CASE2_IF(b != 0, "rem.s64", s64, s64, s64, i128(a) % b)
CASE2_IF(b != 0, "rem.u64", u64, u64, u64, a % b)
CASE1("neg.s32", s32, s32, 0u - uint32_t(a))
CASE1("neg.s64", s64, s64, 0ull - uint64_t(a))
CASE1("abs.s16", s16, s16, a < 0 ? -int32_t(a) : a)
CASE1("abs.s32", s32, s32, a < 0 ? 0u - uint32_t(a) : a)
CASE1("abs.s64", s64, s64, a < 0 ? 0ull - uint64_t(a) : a)
CASE2("min.s32", s32, s32, s32, a < b ? a : b)
CASE2("min.u32", u32, u32, u32, a < b ? a : b)
CASE2("max.s32", s32, s32, s32, a > b ? a : b)
CASE2("max.u32", u32, u32, u32, a > b ? a : b)
CASE2("min.s64", s64, s64, s64, a < b ? a : b)
CASE2("max.u64", u64, u64, u64, a > b ? a : b)
CASE2("max.s16", s16, s16, s16, a > b ? a : b)
CASE3("sad.s32", s32, s32, s32, s32, (a < b ? i128(b) - a : i128(a) - b) + c)
CASE3("sad.u32", u32, u32, u32, u32, (a < b ? b - a : a - b) + c)
CODE2("add.cc.u32, addc.u32 (128 bits from 64)",
      "{ .reg .u32 l, h, x, y, u, v; mov.b64 {x, y}, %1; mov.b64 {u, v}, %2; add.cc.u32 l, x, u; "
      "addc.u32 h, y, v; mov.b64 %0, {l, h}; }",
      u64, u64, u64, a + b)
CODE2("addc.cc.u64 (the carry out)", "{ .reg .u64 l; add.cc.u64 l, %1, %2; addc.u64 %0, 0, 0; }",
      u64, u64, u64, (u128(a) + b) >> 64)
CODE2("sub.cc.u32, subc.u32",
      "{ .reg .u32 l, h, x, y, u, v; mov.b64 {x, y}, %1; mov.b64 {u, v}, %2; sub.cc.u32 l, x, u; "
      "subc.u32 h, y, v; mov.b64 %0, {l, h}; }",
      u64, u64, u64, a - b)
CODE3("mad.lo.cc.u32, madc.hi.u32",
      "{ .reg .u32 l, h; mad.lo.cc.u32 l, %1, %2, %3; madc.hi.u32 h, %1, %2, 0; mov.b64 %0, {l, "
      "h}; }",
      u64, u32, u32, u32, u128(a) * b + c)
static int byte(uint32_t x, int i) { return int(int8_t(x >> (8 * i))); }
static int ubyte(uint32_t x, int i) { return int(uint8_t(x >> (8 * i))); }
CASE3("dp4a.s32.s32", s32, s32, s32, s32,
      uint32_t(byte(a, 0) * byte(b, 0) + byte(a, 1) * byte(b, 1) + byte(a, 2) * byte(b, 2) +
               byte(a, 3) * byte(b, 3)) +
          uint32_t(c))
CASE3("dp4a.u32.u32", u32, u32, u32, u32,
      uint32_t(ubyte(a, 0) * ubyte(b, 0) + ubyte(a, 1) * ubyte(b, 1) + ubyte(a, 2) * ubyte(b, 2) +
               ubyte(a, 3) * ubyte(b, 3)) +
          c)
CASE3("dp4a.s32.u32", s32, s32, u32, s32,
      uint32_t(byte(a, 0) * ubyte(b, 0) + byte(a, 1) * ubyte(b, 1) + byte(a, 2) * ubyte(b, 2) +
               byte(a, 3) * ubyte(b, 3)) +
          uint32_t(c))
CASE3("dp2a.hi.s32.s32", s32, s32, s32, s32,
      uint32_t(int16_t(a) * byte(b, 2) + int16_t(a >> 16) * byte(b, 3)) + uint32_t(c))
CASE3("dp2a.lo.s32.s32", s32, s32, s32, s32,
      uint32_t(int16_t(a) * byte(b, 0) + int16_t(a >> 16) * byte(b, 1)) + uint32_t(c))

}  // namespace ops_integer
