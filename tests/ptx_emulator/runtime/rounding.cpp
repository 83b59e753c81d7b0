// SPDX-License-Identifier: Apache-2.0
// Arithmetic in the directed rounding modes. Compiled with -frounding-math; volatile keeps each
// operation between the switches.
#include <cfenv>

#include "numbers.h"

namespace ptx {
namespace {

struct Mode {
  explicit Mode(Rounding mode) {
    static const int kModes[] = {FE_TONEAREST, FE_DOWNWARD, FE_UPWARD, FE_TOWARDZERO};
    std::fesetround(kModes[mode]);
  }
  ~Mode() { std::fesetround(FE_TONEAREST); }
};

}  // namespace

#define PTX_ROUNDED2(name, T, operation) \
  T name(T x_, T y_, Rounding mode) {    \
    volatile T x = x_, y = y_;           \
    Mode switched(mode);                 \
    volatile T r = x operation y;        \
    return r;                            \
  }
#define PTX_ROUNDED(T)                             \
  PTX_ROUNDED2(add_rounded, T, +)                  \
  PTX_ROUNDED2(subtract_rounded, T, -)             \
  PTX_ROUNDED2(multiply_rounded, T, *)             \
  PTX_ROUNDED2(divide_rounded, T, /)               \
  T fma_rounded(T x_, T y_, T z_, Rounding mode) { \
    volatile T x = x_, y = y_, z = z_;             \
    Mode switched(mode);                           \
    volatile T r = std::fma(T(x), T(y), T(z));     \
    return r;                                      \
  }                                                \
  T root_rounded(T x_, Rounding mode) {            \
    volatile T x = x_;                             \
    Mode switched(mode);                           \
    volatile T r = std::sqrt(T(x));                \
    return r;                                      \
  }                                                \
  T reciprocal_rounded(T x, Rounding mode) { return divide_rounded(T(1), x, mode); }
PTX_ROUNDED(float)
PTX_ROUNDED(double)

template <class To, class From>
To convert_rounded(From x_, Rounding mode) {
  volatile From x = x_;
  Mode switched(mode);
  volatile To r = To(x);
  return r;
}
#define PTX_CONVERT(To)                                          \
  template To convert_rounded<To, float>(float, Rounding);       \
  template To convert_rounded<To, double>(double, Rounding);     \
  template To convert_rounded<To, int64_t>(int64_t, Rounding);   \
  template To convert_rounded<To, uint64_t>(uint64_t, Rounding); \
  template To convert_rounded<To, int32_t>(int32_t, Rounding);   \
  template To convert_rounded<To, uint32_t>(uint32_t, Rounding);
PTX_CONVERT(float)
PTX_CONVERT(double)

}  // namespace ptx
