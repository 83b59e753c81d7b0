// SPDX-License-Identifier: Apache-2.0
//
// The vector types of every instruction set against scalar formulas: exp, conversions, sums, tails.
#include "cpu/isa_prelude.h"
#include "support.h"

namespace deltanet::cpu {
namespace {

struct VecFunctions {
  int lanes, dot_rows;
  void (*exp_of_sum)(const float*, const float*, float*, int);
  void (*one_plus_exp)(const float*, float*, int);
  void (*load_bf16)(const uint16_t*, float*, int);
  void (*load_f16)(const uint16_t*, float*, int);
  void (*store_bf16)(const float*, uint16_t*, int);
  void (*store_f16)(const float*, uint16_t*, int);
  void (*bf16_pair)(const float*, const float*, float*, int);
  void (*dot2)(const float*, const float*, float*, int);
  void (*sum)(const float*, float*, int);
  void (*copy_first)(const float*, float*, int);
  void (*store_sums)(const float*, float*, int);
};

namespace scalar_vec {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_scalar.inl.h"
using X = Scalar<float>;
#include "vec_functions.inl.h"
}  // namespace scalar_vec

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC diagnostic push
// GCC warns of its own intrinsics (bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2_vec {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_math.inl.h"
#include "cpu/vec_avx2.inl.h"
using X = Avx2;
#include "vec_functions.inl.h"
}  // namespace avx2_vec
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
namespace avx512_vec {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_math.inl.h"
#include "cpu/vec_avx512.inl.h"
using X = Avx512;
#include "vec_functions.inl.h"
}  // namespace avx512_vec
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                               \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
namespace avx512_bf16_vec {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_math.inl.h"
#include "cpu/vec_avx512.inl.h"
#include "cpu/vec_avx512_bf16.inl.h"
using X = Avx512Bf16;
#include "vec_functions.inl.h"
}  // namespace avx512_bf16_vec
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

#elif defined(__aarch64__)

namespace neon_vec {
#include "cpu/rule_inputs.inl.h"
#include "cpu/vec_math.inl.h"
#include "cpu/vec_neon.inl.h"
using X = Neon;
#include "vec_functions.inl.h"
}  // namespace neon_vec

#endif

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class Vectors : public testing_support::EveryIsa {
 protected:
  const VecFunctions& functions() const {
#if defined(__x86_64__)
    if (GetParam() == "avx2") return avx2_vec::functions;
    if (GetParam() == "avx512") return avx512_vec::functions;
    if (GetParam() == "avx512_bf16") return avx512_bf16_vec::functions;
#elif defined(__aarch64__)
    if (GetParam() == "neon") return neon_vec::functions;
#endif
    return scalar_vec::functions;
  }

  float exp_of_sum(float hi, float lo) const {
    std::vector<float> h(16, hi), l(16, lo), out(16, NAN);
    functions().exp_of_sum(h.data(), l.data(), out.data(), 16);
    return out[15];
  }

  std::vector<float> exp(const std::vector<float>& x) const {
    std::vector<float> hi(x), lo, out;
    hi.resize((x.size() + 15) / 16 * 16, 0.f);
    lo.resize(hi.size(), 0.f);
    out.resize(hi.size(), NAN);
    functions().exp_of_sum(hi.data(), lo.data(), out.data(), int(hi.size()));
    out.resize(x.size());
    return out;
  }
};

TEST_P(Vectors, ExpIsRightToOneUnitInTheLastPlace) {
  std::vector<float> x;
  for (double at = -87.3; at < 88.7; at += 0.00317) x.push_back(float(at));
  for (float tiny = 1; tiny > 1e-38f; tiny /= 3) x.insert(x.end(), {tiny, -tiny});
  x.insert(x.end(), {0.f, -0.f});
  const std::vector<float> got = exp(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(double(x[i]));
    ASSERT_NEAR(got[i], want, want * 1.19e-7) << "exp(" << x[i] << ")";
  }
}

TEST_P(Vectors, OnePlusExpIsRightToOneUnitInTheLastPlace) {
  std::vector<float> x;
  for (double at = -87; at < 200; at += 0.00317) x.push_back(float(at));
  for (float tiny = 1; tiny > 1e-38f; tiny /= 3) x.insert(x.end(), {tiny, -tiny});
  x.insert(x.end(), {0.f, -0.f, 1e4f, 3e38f, kInfinity});
  x.resize((x.size() + 15) / 16 * 16, 0.f);
  std::vector<float> got(x.size(), NAN);
  functions().one_plus_exp(x.data(), got.data(), int(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = 1 + std::exp(-double(x[i]));
    ASSERT_NEAR(got[i], want, want * 1.19e-7) << "1 + exp(-" << x[i] << ")";
  }
}

TEST_P(Vectors, ExpOfZeroIsExactlyOne) {
  EXPECT_EQ(exp_of_sum(0.f, 0.f), 1.f);
  EXPECT_EQ(exp_of_sum(-0.f, 0.f), 1.f);
}

TEST_P(Vectors, ExpOverflowsToInfinity) {
  for (float x : {88.73f, 89.f, 100.f, 1e4f, 3e38f, kInfinity})
    EXPECT_EQ(exp_of_sum(x, 0.f), kInfinity) << x;
  EXPECT_LT(exp_of_sum(88.72f, 0.f), kInfinity);
}

TEST_P(Vectors, ExpUnderflowsToZeroOrADenormal) {
  // Vector types flush results that are not normal floats; the scalar one may keep them.
  for (float x : {-87.4f, -90.f, -103.f, -120.f}) {
    const float got = exp_of_sum(x, 0.f);
    EXPECT_GE(got, 0.f) << x;
    EXPECT_LE(got, float(std::exp(double(x)) * 1.0001) + 1e-45f) << x;
  }
  for (float x : {-104.f, -150.f, -1280.f, -1e4f, -3e38f, -kInfinity})
    EXPECT_EQ(exp_of_sum(x, 0.f), 0.f) << x;
}

TEST_P(Vectors, ExpKeepsANan) { EXPECT_TRUE(std::isnan(exp_of_sum(NAN, 0.f))); }

TEST_P(Vectors, ExpAddsTheLowPartOfItsArgument) {
  // -40 carries no more than 4e-6 in one float; the low part brings it back to full precision.
  const float hi = -40.f;
  for (float lo : {1.8e-6f, -1.1e-6f, 3e-8f}) {
    const double want = std::exp(double(hi) + double(lo));
    EXPECT_NEAR(exp_of_sum(hi, lo), want, want * 2.4e-7) << lo;
  }
}

TEST_P(Vectors, EachLaneIsItsOwn) {
  std::vector<float> x(64);
  for (int i = 0; i < 64; ++i)
    x[size_t(i)] = i % 5 == 0 ? NAN : i % 7 == 0 ? -kInfinity : float(i) - 32;
  const std::vector<float> got = exp(x);
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]))
      EXPECT_TRUE(std::isnan(got[i])) << i;
    else
      EXPECT_NEAR(got[i], std::exp(double(x[i])), std::exp(double(x[i])) * 2.4e-7) << i;
  }
}

TEST_P(Vectors, SixteenBitPatternsAreLoadedAsTheScalarConversionDoes) {
  std::vector<uint16_t> patterns(0x10000);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = uint16_t(i);
  std::vector<float> got(patterns.size());
  functions().load_bf16(patterns.data(), got.data(), int(got.size()));
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_EQ(float_to_bits(got[i]), float_to_bits(bf16_to_float(uint16_t(i)))) << i;
  functions().load_f16(patterns.data(), got.data(), int(got.size()));
  for (size_t i = 0; i < got.size(); ++i) {
    const float want = f16_to_float(uint16_t(i));
    if (std::isnan(want))
      ASSERT_TRUE(std::isnan(got[i])) << i;
    else
      ASSERT_EQ(float_to_bits(got[i]), float_to_bits(want)) << i;
  }
}

// Around every 16-bit number of both formats: itself, the middles to its neighbors, a float beside
// each.
std::vector<float> hard_to_round() {
  std::vector<float> x;
  for (uint32_t h = 0; h < 0x10000; h += 3)
    for (float at : {bf16_to_float(uint16_t(h)), f16_to_float(uint16_t(h))}) {
      const uint32_t u = float_to_bits(at);
      for (uint32_t v : {u, u + 0x7fff, u + 0x8000, u + 0x8001, u + 0xfff, u + 0x1000, u + 0x1001})
        x.push_back(bits_to_float(v));
    }
  x.resize(x.size() / 16 * 16);
  return x;
}

TEST_P(Vectors, Bf16IsStoredAsTheScalarConversionDoes) {
  const std::vector<float> x = hard_to_round();
  std::vector<uint16_t> got(x.size());
  functions().store_bf16(x.data(), got.data(), int(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]))
      ASSERT_TRUE(std::isnan(bf16_to_float(got[i]))) << std::hex << float_to_bits(x[i]);
    else
      ASSERT_EQ(got[i], float_to_bf16(x[i])) << std::hex << float_to_bits(x[i]);
  }
}

TEST_P(Vectors, Fp16IsStoredAsTheScalarConversionDoes) {
  const std::vector<float> x = hard_to_round();
  std::vector<uint16_t> got(x.size());
  functions().store_f16(x.data(), got.data(), int(x.size()));
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i]))
      ASSERT_TRUE(std::isnan(f16_to_float(got[i]))) << std::hex << float_to_bits(x[i]);
    else
      ASSERT_EQ(got[i], float_to_f16(x[i])) << std::hex << float_to_bits(x[i]);
  }
}

TEST_P(Vectors, PairsAreRoundedAsTheScalarConversionDoes) {
  const std::vector<float> even = hard_to_round();
  const std::vector<float> odd(even.rbegin(), even.rend());
  std::vector<float> got(even.size());
  functions().bf16_pair(even.data(), odd.data(), got.data(), int(got.size()));
  const bool flushes = GetParam() == "avx512_bf16";  // subnormal numbers become zero
  const auto same = [&](uint16_t half, float x) {
    if (std::isnan(x)) return std::isnan(bf16_to_float(half));
    if (flushes && std::fabs(x) < std::numeric_limits<float>::min()) return (half & 0x7fff) == 0;
    return half == float_to_bf16(x);
  };
  for (size_t i = 0; i < got.size(); ++i) {
    const uint32_t pair = float_to_bits(got[i]);
    ASSERT_TRUE(same(uint16_t(pair), even[i])) << std::hex << float_to_bits(even[i]);
    ASSERT_TRUE(same(uint16_t(pair >> 16), odd[i])) << std::hex << float_to_bits(odd[i]);
  }
}

TEST_P(Vectors, ProductsOfPairsAreSummedInFloat) {
  constexpr size_t kCount = 4096;
  std::vector<float> a(kCount), b(kCount), c(kCount), exact(kCount), size(kCount);
  uint32_t seed = 1;
  const auto random = [&] {  // a bf16 between 2^-8 and 2^8, of either sign
    seed = seed * 1664525u + 1013904223u;
    return uint16_t((seed >> 16 & 0x8000u) | (0x3b80u + (seed >> 20 & 0x7ffu)));
  };
  for (size_t i = 0; i < kCount; ++i) {
    const uint16_t halves[] = {random(), random(), random(), random()};
    a[i] = bits_to_float(uint32_t(halves[0]) | uint32_t(halves[1]) << 16);
    b[i] = bits_to_float(uint32_t(halves[2]) | uint32_t(halves[3]) << 16);
    c[i] = bf16_to_float(random());
    const double even = double(bf16_to_float(halves[0])) * bf16_to_float(halves[2]);
    const double odd = double(bf16_to_float(halves[1])) * bf16_to_float(halves[3]);
    exact[i] = float(c[i] + even + odd);
    size[i] = float(std::fabs(c[i]) + std::fabs(even) + std::fabs(odd));
  }
  functions().dot2(a.data(), b.data(), c.data(), int(kCount));
  for (size_t i = 0; i < kCount; ++i)
    ASSERT_NEAR(c[i], exact[i], size[i] * 1.8e-7) << i;  // two or three roundings
}

TEST_P(Vectors, SumAddsEveryLaneOnce) {
  const int lanes = functions().lanes;
  std::vector<float> x(size_t(lanes) * size_t(lanes), 0.f), got(size_t(lanes), NAN);
  for (int i = 0; i < lanes; ++i) x[size_t(i * lanes + i)] = float(1 << i);  // lane i of vector i
  functions().sum(x.data(), got.data(), lanes * lanes);
  for (int i = 0; i < lanes; ++i) EXPECT_EQ(got[size_t(i)], float(1 << i));
  for (int i = 0; i < lanes; ++i) x[size_t(i)] = float(1 << i);
  functions().sum(x.data(), got.data(), lanes);
  EXPECT_EQ(got[0], float((1 << lanes) - 1));
}

TEST_P(Vectors, SumsOfSeveralRowsEndInTheRightPlaces) {
  const int lanes = functions().lanes, rows = functions().dot_rows, ld = 7;
  std::vector<float> x(size_t(rows) * 4 * size_t(lanes)), got(size_t(rows) * ld + 16, -1.f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = float(i % 97) - 40;
  functions().store_sums(x.data(), got.data(), ld);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < ld; ++j) {
      float want = -1;  // untouched
      if (j < 4) {
        want = 0;
        for (int k = 0; k < lanes; ++k) want += x[size_t((4 * i + j) * lanes + k)];
      }
      EXPECT_EQ(got[size_t(i * ld + j)], want) << i << ", " << j;
    }
}

TEST_P(Vectors, PartialLoadsAndStoresTouchOnlyTheirPart) {
  for (int count = 0; count <= 40; ++count) {
    // The source ends where its memory ends, so that reading on is caught by a sanitizer.
    std::vector<float> from(static_cast<size_t>(count)), to(64, -1.f);
    for (int i = 0; i < count; ++i) from[size_t(i)] = float(i + 1);
    functions().copy_first(from.data(), to.data(), count);
    for (int i = 0; i < 64; ++i) ASSERT_EQ(to[size_t(i)], i < count ? float(i + 1) : -1.f) << count;
  }
}

DELTANET_FOR_EVERY_ISA(Vectors);

}  // namespace
}  // namespace deltanet::cpu
