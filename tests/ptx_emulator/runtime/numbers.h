// SPDX-License-Identifier: Apache-2.0
// Arithmetic of PTX that C++ does not have by itself: number formats, rounding modes, saturation,
// bit fields. Registers are unsigned integers; as_float and float_bits reinterpret them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace ptx {

enum Rounding { kNearest, kDown, kUp, kTowardZero };

inline float as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
inline uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
inline double as_double(uint64_t x) { return __builtin_bit_cast(double, x); }
inline uint64_t double_bits(double x) { return __builtin_bit_cast(uint64_t, x); }

// The same for translated code, which has thousands: nothing to look up, nothing to inline.
#define AS_FLOAT(x) __builtin_bit_cast(float, x)
#define FLOAT_BITS(x) __builtin_bit_cast(uint32_t, x)
#define AS_DOUBLE(x) __builtin_bit_cast(double, x)
#define DOUBLE_BITS(x) __builtin_bit_cast(uint64_t, x)

// ---- float and double ----

template <class T>
T flush(T x) {
  return std::fabs(x) < std::numeric_limits<T>::min() ? std::copysign(T(0), x) : x;
}
// NaN becomes +0.
template <class T>
T saturate(T x) {
  return x > T(0) ? (x < T(1) ? x : T(1)) : T(0);
}
template <class T>
T relu(T x) {
  return x > T(0) || x != x ? x : T(0);
}
template <class T>
bool unordered(T x, T y) {
  return x != x || y != y;
}
// One NaN: the other operand. -0 counts as less than +0.
template <class T>
T minimum(T x, T y) {
  if (x != x) return y;
  if (y != y) return x;
  return x == y ? (std::signbit(x) ? x : y) : x < y ? x : y;
}
template <class T>
T maximum(T x, T y) {
  if (x != x) return y;
  if (y != y) return x;
  return x == y ? (std::signbit(x) ? y : x) : x > y ? x : y;
}
inline float minimum_nan(float x, float y) {
  return unordered(x, y) ? as_float(0x7fffffff) : minimum(x, y);
}
inline float maximum_nan(float x, float y) {
  return unordered(x, y) ? as_float(0x7fffffff) : maximum(x, y);
}
inline float reciprocal_root(float x) { return float(1 / std::sqrt(double(x))); }
inline double reciprocal_root(double x) { return 1 / std::sqrt(x); }

template <class T>
bool is_finite(T x) {
  return std::isfinite(x);
}
template <class T>
bool is_infinite(T x) {
  return std::isinf(x);
}
template <class T>
bool is_number(T x) {
  return x == x;
}
template <class T>
bool is_notanumber(T x) {
  return x != x;
}
template <class T>
bool is_normal(T x) {
  return std::isnormal(x);
}
template <class T>
bool is_subnormal(T x) {
  return std::fpclassify(x) == FP_SUBNORMAL;
}

// The directed modes change the state of the floating-point unit: out of line, in rounding.cpp.
#define PTX_ROUNDED(T)                         \
  T add_rounded(T x, T y, Rounding mode);      \
  T subtract_rounded(T x, T y, Rounding mode); \
  T multiply_rounded(T x, T y, Rounding mode); \
  T divide_rounded(T x, T y, Rounding mode);   \
  T fma_rounded(T x, T y, T z, Rounding mode); \
  T root_rounded(T x, Rounding mode);          \
  T reciprocal_rounded(T x, Rounding mode);
PTX_ROUNDED(float)
PTX_ROUNDED(double)
#undef PTX_ROUNDED
template <class To, class From>
To convert_rounded(From x, Rounding mode);

// ---- 16-bit floats ----

inline float bfloat_value(uint16_t x) { return as_float(uint32_t(x) << 16); }
inline float half_value(uint16_t x) { return float(__builtin_bit_cast(_Float16, x)); }

struct Half {
  static constexpr uint16_t kNan = 0x7fff, kInfinity = 0x7c00, kLargest = 0x7bff,
                            kSmallestNormal = 0x0400;
  static float value(uint16_t x) { return half_value(x); }
  static uint16_t nearest(float x) { return __builtin_bit_cast(uint16_t, _Float16(x)); }
};
struct Bfloat {
  static constexpr uint16_t kNan = 0x7fff, kInfinity = 0x7f80, kLargest = 0x7f7f,
                            kSmallestNormal = 0x0080;
  static float value(uint16_t x) { return bfloat_value(x); }
  static uint16_t nearest(float x) {
    const uint32_t u = float_bits(x);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
  }
};

// A double as a float whose last bit says that something was cut off. Rounding that again to fewer
// bits rounds once.
inline float round_to_odd(double x) {
  const float f = float(x);
  if (f != f || std::isinf(x) || double(f) == x) return f;
  uint32_t u = std::isinf(f) ? (std::signbit(x) ? 0xff7fffffu : 0x7f7fffffu) : float_bits(f);
  if (!std::isinf(f) && std::fabs(double(f)) > std::fabs(x)) u--;
  return as_float(u | 1);
}
template <class Format>
uint16_t round_to(double x, Rounding mode) {
  if (x != x) return Format::kNan;
  uint16_t r = Format::nearest(round_to_odd(x));
  if (mode == kNearest) return r;
  const double value = Format::value(r);
  const bool negative = std::signbit(x);
  if (value == x) return r;
  // The neighbour on the wanted side. Infinity from a finite value falls back to the largest one.
  const bool above = value > x, want_above = mode == kUp || (mode == kTowardZero && negative);
  if (above == want_above) return r;
  const bool toward_zero = above != negative;
  if (!(r & 0x7fff)) return uint16_t((want_above ? 0 : 0x8000) | 1);
  return uint16_t(toward_zero ? r - 1 : r + 1);
}
inline uint16_t round_half(float x, Rounding mode) {
  if (mode == kNearest) return x != x ? Half::kNan : Half::nearest(x);
  return round_to<Half>(x, mode);
}
inline uint16_t round_half(double x, Rounding mode) { return round_to<Half>(x, mode); }
inline uint16_t round_bfloat(float x, Rounding mode) {
  if (mode == kNearest) return x != x ? Bfloat::kNan : Bfloat::nearest(x);
  return round_to<Bfloat>(x, mode);
}
inline uint16_t round_bfloat(double x, Rounding mode) { return round_to<Bfloat>(x, mode); }
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
uint16_t round_half(T x, Rounding mode) {
  return round_to<Half>(double(x), mode);
}
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
uint16_t round_bfloat(T x, Rounding mode) {
  return round_to<Bfloat>(double(x), mode);
}
// Two to a register, the first one above.
inline uint32_t half_pair(float high, float low, Rounding mode) {
  return uint32_t(round_half(high, mode)) << 16 | round_half(low, mode);
}
inline uint32_t bfloat_pair(float high, float low, Rounding mode) {
  return uint32_t(round_bfloat(high, mode)) << 16 | round_bfloat(low, mode);
}
// tf32 keeps 10 bits of the fraction. rna: nearest, ties away from zero.
inline uint32_t round_tf32(float x, bool away, Rounding mode) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7f800000) == 0x7f800000) return x != x ? 0x7fffffff : u;
  if (mode == kTowardZero) return u & 0xffffe000;
  if (away) return (u + 0x1000) & 0xffffe000;
  return (u + 0xfff + ((u >> 13) & 1)) & 0xffffe000;
}

// Applies f to one value, or to both halves of a pair.
template <class Word, class F>
Word each_half(Word x, Word y, Word z, F f) {
  if constexpr (sizeof(Word) == 2) {
    return f(x, y, z);
  } else {
    return Word(f(uint16_t(x), uint16_t(y), uint16_t(z))) |
           Word(f(uint16_t(x >> 16), uint16_t(y >> 16), uint16_t(z >> 16))) << 16;
  }
}
// x y + z with one rounding: the product is exact in double, the sum is rounded to odd.
template <class Format>
uint16_t fma_once(double x, double y, double z) {
  const double p = x * y, sum = p + z, z_part = sum - p,
               error = (p - (sum - z_part)) + (z - z_part);
  if (error == 0 || sum != sum || std::isinf(sum)) return round_to<Format>(sum, kNearest);
  uint64_t u = double_bits(sum);
  if (!(u & 1)) u += (error > 0) == (sum > 0) ? 1 : -1;
  return round_to<Format>(as_double(u), kNearest);
}
#define PTX_HALF2(name, expression)                                                      \
  template <class Format, class Word>                                                    \
  Word name(Word a, Word b) {                                                            \
    return each_half<Word>(a, b, 0, [](uint16_t a_, uint16_t b_, uint16_t) -> uint16_t { \
      const float x = Format::value(a_), y = Format::value(b_);                          \
      return round_to<Format>(expression, kNearest);                                     \
    });                                                                                  \
  }
#define PTX_HALF1(name, expression)                                                   \
  template <class Format, class Word>                                                 \
  Word name(Word a) {                                                                 \
    return each_half<Word>(a, 0, 0, [](uint16_t a_, uint16_t, uint16_t) -> uint16_t { \
      const float x = Format::value(a_);                                              \
      (void)x;                                                                        \
      return expression;                                                              \
    });                                                                               \
  }
PTX_HALF2(half_add, double(x) + double(y))
PTX_HALF2(half_sub, double(x) - double(y))
PTX_HALF2(half_mul, double(x) * double(y))
PTX_HALF2(half_min, minimum(x, y))
PTX_HALF2(half_max, maximum(x, y))
PTX_HALF2(half_min_nan, minimum_nan(x, y))
PTX_HALF2(half_max_nan, maximum_nan(x, y))
PTX_HALF1(half_neg, uint16_t(a_ ^ 0x8000))
PTX_HALF1(half_abs, uint16_t(a_ & 0x7fff))
PTX_HALF1(half_ex2, round_to<Format>(std::exp2(double(x)), kNearest))
PTX_HALF1(half_tanh, round_to<Format>(std::tanh(double(x)), kNearest))
PTX_HALF1(half_relu, x != x ? Format::kNan : x > 0 ? a_ : uint16_t(0))
PTX_HALF1(half_sat, round_to<Format>(saturate(x), kNearest))
PTX_HALF1(half_ftz, (a_ & 0x7fff) < Format::kSmallestNormal ? uint16_t(a_ & 0x8000) : a_)
#undef PTX_HALF1
#undef PTX_HALF2
template <class Format, class Word>
Word half_fma(Word a, Word b, Word c) {
  return each_half<Word>(a, b, c, [](uint16_t x, uint16_t y, uint16_t z) {
    return fma_once<Format>(Format::value(x), Format::value(y), Format::value(z));
  });
}

// ---- integers ----

template <class T>
using Wide =
    std::conditional_t<sizeof(T) == 8,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

template <class T>
T clamp_between(__int128 x) {
  const __int128 low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  return T(x < low ? low : x > high ? high : x);
}
template <class T, class From>
T clamp_integer(From x) {
  return clamp_between<T>(x);
}
template <class T>
T add_saturating(T x, T y) {
  return clamp_between<T>(__int128(x) + y);
}
template <class T>
T subtract_saturating(T x, T y) {
  return clamp_between<T>(__int128(x) - y);
}
template <class T>
T multiply_high(T x, T y) {
  return T((Wide<T>(x) * Wide<T>(y)) >> (8 * sizeof(T)));
}
template <class T>
T low24(T x) {
  return std::is_signed_v<T> ? T(int32_t(uint32_t(x) << 8) >> 8) : T(uint32_t(x) & 0xffffff);
}
template <class T>
T absolute(T x) {
  return x < 0 ? T(0 - uint64_t(x)) : x;
}
// Division by zero gives all ones, its remainder the dividend; the smallest number by -1 wraps.
template <class T>
T divide(T x, T y) {
  if (y == 0) return T(-1);
  if constexpr (std::is_signed_v<T>) {
    if (y == -1) return T(0 - uint64_t(x));
  }
  return T(x / y);
}
template <class T>
T remainder(T x, T y) {
  if (y == 0) return x;
  if constexpr (std::is_signed_v<T>) {
    if (y == -1) return 0;
  }
  return T(x % y);
}
template <class T>
T add_carry(T x, T y, uint32_t carry, uint32_t* out) {
  const unsigned __int128 sum = (unsigned __int128)x + y + carry;
  if (out) *out = uint32_t(sum >> (8 * sizeof(T))) & 1;
  return T(sum);
}
template <class T>
T subtract_borrow(T x, T y, uint32_t borrow, uint32_t* out) {
  const unsigned __int128 difference = (unsigned __int128)x - y - borrow;
  if (out) *out = uint32_t(difference >> (8 * sizeof(T))) & 1;
  return T(difference);
}
// NaN: 0, or the sign bit alone when either side has 64 bits. Everything else saturates.
template <class T, class From>
T to_integer(From x, bool wide) {
  if (x != x) return wide ? T(T(1) << (8 * sizeof(T) - 1)) : T(0);
  const From low = From(std::numeric_limits<T>::min()), high = From(std::numeric_limits<T>::max());
  if (x <= low) return std::numeric_limits<T>::min();
  if (x >= high) return std::numeric_limits<T>::max();
  return T(x);
}

// ---- bits ----

template <class T>
T shift_left(T x, uint32_t n) {
  return n >= 8 * sizeof(T) ? T(0) : T(x << n);
}
template <class T>
T shift_right(T x, uint32_t n) {
  return n >= 8 * sizeof(T) ? T(x < 0 ? -1 : 0) : T(x >> n);
}
inline uint32_t funnel_shift(bool left, bool clamp, uint32_t low, uint32_t high, uint32_t n) {
  n = clamp ? (n < 32 ? n : 32) : n & 31;
  const uint64_t both = uint64_t(high) << 32 | low;
  return left ? uint32_t(n == 32 ? low : (both << n) >> 32) : uint32_t(both >> n);
}
inline uint32_t logic3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t r = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
inline uint8_t byte_of(uint32_t a, uint32_t b, uint32_t i) {
  return uint8_t((uint64_t(b) << 32 | a) >> (8 * (i & 7)));
}
inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t pick = selector >> (4 * i) & 15;
    uint32_t value = byte_of(a, b, pick);
    if (pick & 8) value = value & 0x80 ? 0xff : 0;
    r |= value << (8 * i);
  }
  return r;
}
template <class F>
uint32_t permute_by(uint32_t a, uint32_t b, F index) {
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; i++) r |= uint32_t(byte_of(a, b, index(i))) << (8 * i);
  return r;
}
inline uint32_t permute_f4e(uint32_t a, uint32_t b, uint32_t c) {
  return permute_by(a, b, [=](uint32_t i) { return (c & 3) + i; });
}
inline uint32_t permute_b4e(uint32_t a, uint32_t b, uint32_t c) {
  return permute_by(a, b, [=](uint32_t i) { return (c & 3) - i; });
}
inline uint32_t permute_rc8(uint32_t a, uint32_t b, uint32_t c) {
  return permute_by(a, b, [=](uint32_t) { return c & 3; });
}
inline uint32_t permute_ecl(uint32_t a, uint32_t b, uint32_t c) {
  return permute_by(a, b, [=](uint32_t i) { return i > (c & 3) ? i : c & 3; });
}
inline uint32_t permute_ecr(uint32_t a, uint32_t b, uint32_t c) {
  return permute_by(a, b, [=](uint32_t i) { return i < (c & 3) ? i : c & 3; });
}
inline uint32_t permute_rc16(uint32_t a, uint32_t b, uint32_t c) {
  return permute_by(a, b, [=](uint32_t i) { return (c & 1) * 2 + (i & 1); });
}
template <class T>
uint32_t count_ones(T x) {
  return uint32_t(__builtin_popcountll(x));
}
template <class T>
uint32_t leading_zeros(T x) {
  return x ? uint32_t(__builtin_clzll(uint64_t(x)) - (64 - 8 * sizeof(T))) : 8 * sizeof(T);
}
template <class T>
T reverse_bits(T x) {
  T r = 0;
  for (uint32_t i = 0; i < 8 * sizeof(T); i++) r |= ((x >> i) & 1) << (8 * sizeof(T) - 1 - i);
  return r;
}
// The highest bit that differs from the sign, or how far to shift it up; all ones when there is
// none.
template <class T>
uint32_t find_bit(T x, bool shift_amount) {
  using U = std::make_unsigned_t<T>;
  const U u = x < 0 ? U(~U(x)) : U(x);
  if (!u) return ~0u;
  const uint32_t top = 8 * sizeof(T) - 1 - leading_zeros<U>(u);
  return shift_amount ? 8 * sizeof(T) - 1 - top : top;
}
template <class T>
T extract_field(T x, uint32_t at, uint32_t length) {
  using U = std::make_unsigned_t<T>;
  const uint32_t width = 8 * sizeof(T);
  at &= 255, length &= 255;
  if (!length) return 0;
  const uint32_t top = at + length - 1 < width - 1 ? at + length - 1 : width - 1;
  const bool ones = std::is_signed_v<T> && (U(x) >> top & 1);
  const U field = at < width ? U(U(x) >> at) : U(ones ? -1 : 0);
  if (length >= width)
    return at && ones && at < width ? T(field | ~U(0) << (width - at)) : T(field);
  const U mask = (U(1) << length) - 1;
  U r = field & mask;
  if (at + length > width && at < width && ones) r |= U(~U(0) << (width - at)) & mask;
  return T(ones ? r | ~mask : r);
}
template <class T>
T insert_field(T field, T x, uint32_t at, uint32_t length) {
  at &= 255, length &= 255;
  for (uint32_t i = 0; i < length && at + i < 8 * sizeof(T); i++)
    x = (x & ~(T(1) << (at + i))) | ((field >> i & 1) << (at + i));
  return x;
}
inline uint32_t bit_mask(bool clamp, uint32_t at, uint32_t length) {
  if (!clamp) at &= 31, length &= 31;
  const uint64_t ones = length >= 32 ? 0xffffffffull : (1ull << length) - 1;
  return at >= 32 ? 0 : uint32_t(ones << at);
}
template <class A, class B>
uint32_t dot_bytes(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 4; i++) c += uint32_t(int32_t(A(a >> (8 * i))) * int32_t(B(b >> (8 * i))));
  return c;
}
template <class A, class B>
uint32_t dot_halves(uint32_t a, uint32_t b, uint32_t c, int high) {
  for (int i = 0; i < 2; i++)
    c += uint32_t(int32_t(A(a >> (16 * i))) * int32_t(B(b >> (8 * (i + 2 * high)))));
  return c;
}

}  // namespace ptx
