// SPDX-License-Identifier: Apache-2.0
// Bits, shifts, fields, permutations, comparisons and selection of integers.
#pragma once
#include "cases.cuh"

namespace ops_bits {

static uint32_t bit(uint64_t x, int i) { return uint32_t(x >> i & 1); }
static int highest(uint64_t x) {
  int top = -1;
  for (int i = 0; i < 64; i++)
    if (bit(x, i)) top = i;
  return top;
}
template <class T>
static T reversed(T x) {
  T r = 0;
  for (int i = 0; i < int(8 * sizeof(T)); i++) r = T(r << 1 | (x >> i & 1));
  return r;
}
static int ones(uint64_t x) {
  int n = 0;
  for (int i = 0; i < 64; i++) n += bit(x, i);
  return n;
}
// Bit by bit, as the PTX manual spells it: beyond the word, and beyond the field, stands the sign
// of the field's last bit.
template <class T>
static T field(T x, uint32_t at, uint32_t length, bool is_signed) {
  const int width = 8 * sizeof(T);
  at &= 255, length &= 255;
  if (!length) return 0;
  const int last = int(at + length - 1 < uint32_t(width) - 1 ? at + length - 1 : width - 1);
  const uint32_t fill = is_signed ? bit(uint64_t(x), last) : 0;
  uint64_t r = 0;
  for (int i = 0; i < width; i++) {
    const uint32_t b = uint32_t(i) < length && at + uint32_t(i) < uint32_t(width)
                           ? bit(uint64_t(x), int(at) + i)
                           : fill;
    r |= uint64_t(b) << i;
  }
  return T(r);
}
template <class T>
static T inserted(T f, T x, uint32_t at, uint32_t length) {
  at &= 255, length &= 255;
  for (uint32_t i = 0; i < length && at + i < 8 * sizeof(T); i++)
    x = T((x & ~(T(1) << (at + i))) | T(bit(f, int(i))) << (at + i));
  return x;
}
static uint32_t pick(uint32_t a, uint32_t b, int i) {
  return uint32_t((uint64_t(b) << 32 | a) >> (8 * i)) & 0xff;
}
static uint32_t permuted(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t s = c >> (4 * i) & 15, v = pick(a, b, int(s & 7));
    r |= (s & 8 ? (v & 0x80 ? 0xffu : 0u) : v) << (8 * i);
  }
  return r;
}
static uint32_t four(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  return x | y << 8 | z << 16 | w << 24;
}

CASE2("and.b32", u32, u32, u32, a& b)
CASE2("or.b64", u64, u64, u64, a | b)
CASE2("xor.b32", u32, u32, u32, a ^ b)
CASE2("and.b16", u16, u16, u16, a& b)
CASE1("not.b32", u32, u32, ~a)
CASE1("not.b64", u64, u64, ~a)
CASE1("cnot.b32", u32, u32, a == 0)
CASE2("shl.b32", u32, u32, u32, b > 31 ? 0 : a << b)
CASE2("shl.b64", u64, u64, u32, b > 63 ? 0 : a << b)
CASE2("shl.b16", u16, u16, u32, b > 15 ? 0 : a << b)
CASE2("shr.u32", u32, u32, u32, b > 31 ? 0 : a >> b)
CASE2("shr.s32", s32, s32, u32, a >> (b > 31 ? 31 : b))
CASE2("shr.s64", s64, s64, u32, a >> (b > 63 ? 63 : b))
CASE2("shr.u64", u64, u64, u32, b > 63 ? 0 : a >> b)
CASE2("shr.s16", s16, s16, u32, a >> (b > 15 ? 15 : b))
CASE3("shf.l.wrap.b32", u32, u32, u32, u32, (c & 31) ? b << (c & 31) | a >> (32 - (c & 31)) : b)
CASE3("shf.r.wrap.b32", u32, u32, u32, u32, (c & 31) ? a >> (c & 31) | b << (32 - (c & 31)) : a)
CASE3("shf.l.clamp.b32", u32, u32, u32, u32, c >= 32 ? a : c ? b << c | a >> (32 - c) : b)
CASE3("shf.r.clamp.b32", u32, u32, u32, u32, c >= 32 ? b : c ? a >> c | b << (32 - c) : a)
CODE3("lop3.b32 0x96", "lop3.b32 %0, %1, %2, %3, 0x96;", u32, u32, u32, u32, a ^ b ^ c)
CODE3("lop3.b32 0xca", "lop3.b32 %0, %1, %2, %3, 0xca;", u32, u32, u32, u32, (a & b) | (~a & c))
CODE3("lop3.b32 0x1b", "lop3.b32 %0, %1, %2, %3, 0x1b;", u32, u32, u32, u32,
      (~a & ~b & ~c) | (~a & ~b & c) | (~a & b & c) | (a & ~b & ~c))
CASE3("prmt.b32", u32, u32, u32, u32, permuted(a, b, c))
CASE3("prmt.b32.f4e", u32, u32, u32, u32,
      four(pick(a, b, c & 3), pick(a, b, (c & 3) + 1), pick(a, b, (c & 3) + 2),
           pick(a, b, (c & 3) + 3)))
CASE3("prmt.b32.b4e", u32, u32, u32, u32,
      four(pick(a, b, c & 3), pick(a, b, ((c & 3) + 7) & 7), pick(a, b, ((c & 3) + 6) & 7),
           pick(a, b, ((c & 3) + 5) & 7)))
CASE3("prmt.b32.rc8", u32, u32, u32, u32, pick(a, b, c & 3) * 0x01010101u)
CASE3("prmt.b32.rc16", u32, u32, u32, u32,
      (pick(a, b, (c & 1) * 2) | pick(a, b, (c & 1) * 2 + 1) << 8) * 0x00010001u)
CASE3("prmt.b32.ecl", u32, u32, u32, u32,
      four(pick(a, b, c & 3), pick(a, b, (c & 3) > 1 ? c & 3 : 1),
           pick(a, b, (c & 3) > 2 ? c & 3 : 2), pick(a, b, 3)))
CASE3("prmt.b32.ecr", u32, u32, u32, u32,
      four(pick(a, b, 0), pick(a, b, (c & 3) < 1 ? c & 3 : 1), pick(a, b, (c & 3) < 2 ? c & 3 : 2),
           pick(a, b, c & 3)))
CASE1("popc.b32", u32, u32, ones(a))
CASE1("popc.b64", u32, u64, ones(a))
CASE1("clz.b32", u32, u32, 31 - highest(a))
CASE1("clz.b64", u32, u64, 63 - highest(a))
CASE1("brev.b32", u32, u32, reversed(a))
CASE1("brev.b64", u64, u64, reversed(a))
CASE1("bfind.u32", u32, u32, highest(a))
CASE1("bfind.s32", u32, s32, highest(uint32_t(a < 0 ? ~a : a)))
CASE1("bfind.s64", u32, s64, highest(uint64_t(a < 0 ? ~a : a)))
CASE1("bfind.shiftamt.u32", u32, u32, a ? 31 - highest(a) : -1)
CASE1("bfind.shiftamt.s32", u32, s32,
      highest(uint32_t(a < 0 ? ~a : a)) < 0 ? -1 : 31 - highest(uint32_t(a < 0 ? ~a : a)))
CASE3("bfe.u32", u32, u32, u32, u32, field(a, b, c, false))
CASE3("bfe.s32", s32, s32, u32, u32, field(a, b, c, true))
CASE3("bfe.u64", u64, u64, u32, u32, field(a, b, c, false))
CASE3("bfe.s64", s64, s64, u32, u32, field(a, b, c, true))
CODE3("bfi.b32", "bfi.b32 %0, %1, 0x5a5a1234, %2, %3;", u32, u32, u32, u32,
      inserted<uint32_t>(a, 0x5a5a1234, b, c))
CODE3("bfi.b64", "bfi.b64 %0, %1, 0x5a5a12345a5a1234, %2, %3;", u64, u64, u32, u32,
      inserted<uint64_t>(a, 0x5a5a12345a5a1234, b, c))
CASE2("bmsk.clamp.b32", u32, u32, u32,
      a > 31 ? 0 : uint32_t((b > 31 ? 0xffffffffull : (1ull << b) - 1) << a))
CASE2("bmsk.wrap.b32", u32, u32, u32, uint32_t(((1ull << (b & 31)) - 1) << (a & 31)))
CODE3("selp.b32 with setp.lt.s32",
      "{ .reg .pred p; setp.lt.s32 p, %1, %2; selp.b32 %0, %3, 7, p; }", s32, s32, s32, s32,
      a < b ? c : 7)
CODE3("setp.hi.u32 (unsigned names)",
      "{ .reg .pred p; setp.hi.u32 p, %1, %2; selp.b32 %0, %3, 7, p; }", u32, u32, u32, u32,
      a > b ? c : 7)
CODE3("setp.ge.and.s64 p|q",
      "{ .reg .pred p, q, r; setp.ne.s32 r, %3, 0; setp.ge.and.s64 p|q, %1, %2, r; selp.b32 %0, 1, "
      "0, p; @q add.s32 %0, %0, 2; }",
      s32, s64, s64, s32, (a >= b && c ? 1 : 0) + (a < b && c ? 2 : 0))
CODE3("setp.eq.xor.u16",
      "{ .reg .pred p, r; setp.ne.s32 r, %3, 0; setp.eq.xor.u16 p, %1, %2, r; selp.b32 %0, 1, 0, "
      "p; }",
      s32, u16, u16, s32, (a == b) != (c != 0))
CODE3("slct.b32.s32", "slct.b32.s32 %0, %1, %2, %3;", u32, u32, u32, s32, c >= 0 ? a : b)
CASE2("set.lt.u32.s32", u32, s32, s32, a < b ? 0xffffffffu : 0)
CASE2("set.ge.f32.u32", f32, u32, u32, a >= b ? 1.f : 0.f)
CODE2("mov.b64 {lo, hi}",
      "{ .reg .b32 l, h; mov.b64 {l, h}, %1; xor.b32 l, l, %2; mov.b64 %0, {h, l}; }", u64, u64,
      u32, uint64_t(uint32_t(a) ^ b) << 32 | a >> 32)
CODE2("mov.b32 {lo, hi} of b16", "{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, l}; }", u32,
      u32, u32, a << 16 | a >> 16)
CODE2("predicates: and, or, xor, not",
      "{ .reg .pred p, q, r; setp.lt.u32 p, %1, %2; setp.gt.u32 q, %1, 3; and.pred r, p, q; "
      "xor.pred r, r, p; not.pred q, q; or.pred r, r, q; selp.b32 %0, 1, 0, r; }",
      u32, u32, u32, ((((a < b) && (a > 3)) != (a < b)) || !(a > 3)) ? 1 : 0)

}  // namespace ops_bits
