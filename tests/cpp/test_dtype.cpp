// SPDX-License-Identifier: Apache-2.0
//
// Conversions to and from the 16-bit types, against the formulas of their formats.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dtype.h"

namespace deltanet {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A format with this many exponent and mantissa bits behind the sign.
struct Format {
  int exponent_bits, mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint16_t sign_of(uint16_t h) const { return h & 0x8000; }
  int exponent(uint16_t h) const { return (h & 0x7fff) >> mantissa_bits; }
  int mantissa(uint16_t h) const { return h & ((1 << mantissa_bits) - 1); }
  bool is_special(uint16_t h) const { return exponent(h) == (1 << exponent_bits) - 1; }

  double value(uint16_t h) const {
    const double sign = sign_of(h) ? -1 : 1;
    if (is_special(h)) return mantissa(h) ? std::nan("") : sign * INFINITY;
    if (exponent(h) == 0) return sign * std::ldexp(mantissa(h), 1 - bias() - mantissa_bits);
    return sign *
           std::ldexp((1 << mantissa_bits) + mantissa(h), exponent(h) - bias() - mantissa_bits);
  }
};
constexpr Format kBf16{8, 7}, kF16{5, 10};

// Every 16-bit pattern is turned into a float, and the float halfway to its upper neighbor, and
// those one float beside it, are rounded back: the nearest pattern must come out, the even one from
// the middle.
void check_rounding(const Format& format, float (*to_float)(uint16_t),
                    uint16_t (*from_float)(float)) {
  const uint16_t infinity = uint16_t(((1 << format.exponent_bits) - 1) << format.mantissa_bits);
  for (uint32_t sign : {0u, 0x8000u})
    for (uint32_t magnitude = 0; magnitude < infinity; ++magnitude) {
      const uint16_t h = uint16_t(sign | magnitude), above = uint16_t(h + 1);
      ASSERT_EQ(from_float(to_float(h)), h);
      // One step above the largest finite number counts as its power of two, which is infinity's
      // place.
      const double here = format.value(h);
      const double next = above == (sign | infinity) ? here * 2 - format.value(uint16_t(h - 1))
                                                     : format.value(above);
      const float middle = float((here + next) / 2);  // exact: one bit more than the format has
      ASSERT_EQ(double(middle), (here + next) / 2);
      const float toward_zero = std::nextafterf(middle, 0.f);
      const float away = std::nextafterf(middle, sign ? -kInfinity : kInfinity);
      ASSERT_EQ(from_float(toward_zero), h) << "below the middle above pattern " << h;
      ASSERT_EQ(from_float(away), above) << "above the middle above pattern " << h;
      ASSERT_EQ(from_float(middle), (h & 1) ? above : h) << "in the middle above pattern " << h;
    }
}

void check_values(const Format& format, float (*to_float)(uint16_t)) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const double want = format.value(uint16_t(h));
    const float got = to_float(uint16_t(h));
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got)) << h;
      ASSERT_EQ(std::signbit(got), (h & 0x8000) != 0) << h;
    } else {
      ASSERT_EQ(double(got), want) << h;
      ASSERT_EQ(std::signbit(got), (h & 0x8000) != 0) << h;
    }
  }
}

void check_specials(float (*to_float)(uint16_t), uint16_t (*from_float)(float)) {
  EXPECT_EQ(to_float(from_float(kInfinity)), kInfinity);
  EXPECT_EQ(to_float(from_float(-kInfinity)), -kInfinity);
  EXPECT_EQ(to_float(from_float(std::numeric_limits<float>::max())), kInfinity);
  EXPECT_EQ(to_float(from_float(-std::numeric_limits<float>::max())), -kInfinity);
  EXPECT_EQ(from_float(0.f), 0);
  EXPECT_EQ(from_float(-0.f), 0x8000);
  // Half of the smallest number is a tie with zero, and zero is even; a little more is not.
  const float smallest = to_float(1);
  EXPECT_EQ(from_float(smallest / 2), 0);
  EXPECT_EQ(from_float(std::nextafterf(smallest / 2, 1.f)), 1);
  EXPECT_EQ(from_float(std::numeric_limits<float>::denorm_min()), 0);
}

void check_nans(const Format& format, float (*to_float)(uint16_t), uint16_t (*from_float)(float)) {
  // All payloads of one bit, quiet and signaling; the ones that only fill low bits must not become
  // infinity.
  for (uint32_t sign : {0u, 0x80000000u})
    for (int bit = 0; bit < 23; ++bit)
      for (uint32_t bits : {sign | 0x7f800000u | (1u << bit), sign | 0x7fffffffu}) {
        const uint16_t h = from_float(bits_to_float(bits));
        ASSERT_TRUE(format.is_special(h) && format.mantissa(h)) << std::hex << bits;
        ASSERT_TRUE(std::isnan(to_float(h))) << std::hex << bits;
        ASSERT_EQ(format.sign_of(h) != 0, sign != 0) << std::hex << bits;
      }
}

TEST(Bf16, EveryPatternHasTheValueOfItsFormat) { check_values(kBf16, bf16_to_float); }
TEST(Bf16, RoundsToNearestWithTiesToEven) { check_rounding(kBf16, bf16_to_float, float_to_bf16); }
TEST(Bf16, KeepsInfinitiesAndSignedZeros) { check_specials(bf16_to_float, float_to_bf16); }
TEST(Bf16, ANanStaysANan) { check_nans(kBf16, bf16_to_float, float_to_bf16); }

TEST(Fp16, EveryPatternHasTheValueOfItsFormat) { check_values(kF16, f16_to_float); }
TEST(Fp16, RoundsToNearestWithTiesToEven) { check_rounding(kF16, f16_to_float, float_to_f16); }
TEST(Fp16, KeepsInfinitiesAndSignedZeros) { check_specials(f16_to_float, float_to_f16); }
TEST(Fp16, ANanStaysANan) { check_nans(kF16, f16_to_float, float_to_f16); }

TEST(Elements, AreStoredAndLoadedInEveryType) {
  for (DType t : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    unsigned char raw[4 * 8] = {};
    store_element(raw, t, 3, -1.5);
    EXPECT_EQ(load_element<double>(raw, t, 3), -1.5);
    EXPECT_EQ(load_element<float>(raw, t, 3), -1.5f);
    EXPECT_EQ(load_element<double>(raw, t, 2), 0);
  }
}

TEST(Elements, Fp64KeepsAllItsBits) {
  double raw[1];
  store_element(raw, DType::kFloat64, 0, 0.1);
  EXPECT_EQ(load_element<double>(raw, DType::kFloat64, 0), 0.1);
}

}  // namespace
}  // namespace deltanet
