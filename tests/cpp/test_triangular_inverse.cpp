// SPDX-License-Identifier: Apache-2.0
//
// (I + L)^-1 of every instruction set against forward substitution in long double.
#include <malloc.h>

#include <algorithm>
#include <functional>

#include "cpu/forward.h"
#include "support.h"

namespace deltanet::cpu {
namespace {

using testing_support::Buffer;
using testing_support::error_ratio;
using testing_support::Random;
using testing_support::uniform;

// Solves (I + L) T = I row by row in Real.
template <class Real>
std::vector<double> substitution(const Buffer& lower, int64_t count, int n) {
  std::vector<double> all;
  std::vector<Real> T(size_t(n) * size_t(n));
  for (int64_t m = 0; m < count; ++m) {
    for (int i = 0; i < n; ++i)
      for (int j = 0; j < n; ++j) {
        Real sum = i == j ? Real(1) : Real(0);
        for (int k = j; k < i && j <= i; ++k)
          sum -= Real(lower.get((m * n + i) * n + k)) * T[size_t(k * n + j)];
        T[size_t(i * n + j)] = j <= i ? sum : Real(0);
      }
    for (Real x : T) all.push_back(double(x));
  }
  return all;
}

class TriangularInverse : public testing_support::EveryIsa {
 protected:
  void SetUp() override {
#ifdef __GLIBC__
    mallopt(M_PERTURB, 0x100);  // malloc'ed memory is full of 0xff, a NaN in every type
#endif
    EveryIsa::SetUp();
  }

  using Element = std::function<double(int i, int j)>;

  // Above and on the diagonal of the input stands NaN: it must not be read.
  static Buffer lower_of(DType dtype, int64_t count, int n, const Element& element) {
    Buffer lower(dtype, count * n * n + 1);
    for (int64_t m = 0; m < count; ++m)
      for (int i = 0; i < n; ++i)
        for (int j = 0; j < i; ++j) lower.set((m * n + i) * n + j, element(i, j));
    return lower;
  }
  static std::vector<double> invert(const Buffer& lower, int64_t count, int n) {
    Buffer inverse(lower.dtype(), count * n * n + 1);
    TriangularInverseParams p;
    p.count = count;
    p.size = n;
    p.dtype = lower.dtype();
    p.lower = lower.data();
    p.inverse = inverse.data();
    triangular_inverse(p, SerialParallel());
    EXPECT_TRUE(inverse.is_untouched(count * n * n)) << "wrote behind the end";
    std::vector<double> all;
    for (int64_t i = 0; i < count * n * n; ++i) all.push_back(inverse.get(i));
    return all;
  }
  static void expect_right(const Buffer& lower, int64_t count, int n, double least = 1e-6) {
    const std::vector<double> want = substitution<long double>(lower, count, n);
    const double plain = lower.dtype() == DType::kFloat64
                             ? error_ratio(substitution<double>(lower, count, n), want)
                             : error_ratio(substitution<float>(lower, count, n), want);
    EXPECT_LE(error_ratio(invert(lower, count, n), want), std::max(least, 2 * plain))
        << "size " << n << " " << testing_support::name_of(lower.dtype());
  }
};

TEST_P(TriangularInverse, IsRightForEverySize) {
  Random random(1);
  for (int n = 1; n <= kMaxInverseSize; n += n < 40 ? 1 : 11) {
    const auto element = [&](int, int) { return uniform(random, -0.5, 0.5); };
    expect_right(lower_of(DType::kFloat32, 3, n, element), 3, n);
    expect_right(lower_of(DType::kFloat64, 2, n, element), 2, n, 1e-15);
  }
  const auto element = [&](int, int) { return uniform(random, -0.1, 0.1); };
  expect_right(lower_of(DType::kFloat32, 2, kMaxInverseSize, element), 2, kMaxInverseSize);
}

TEST_P(TriangularInverse, SixteenBitMatricesAreInvertedInFp32AndRoundedOnce) {
  Random random(2);
  for (DType dtype : {DType::kBFloat16, DType::kFloat16})
    for (int n : {1, 7, 16, 33, 64}) {
      const Buffer lower =
          lower_of(dtype, 2, n, [&](int, int) { return uniform(random, -0.2, 0.2); });
      const std::vector<double> want = substitution<long double>(lower, 2, n);
      Buffer rounded(dtype, int64_t(want.size()));
      std::vector<double> nearest;
      for (size_t i = 0; i < want.size(); ++i) {
        rounded.set(int64_t(i), want[i]);
        nearest.push_back(rounded.get(int64_t(i)));
      }
      EXPECT_LE(error_ratio(invert(lower, 2, n), want), 1.02 * error_ratio(nearest, want) + 1e-6);
    }
}

TEST_P(TriangularInverse, TheDiagonalIsOneAndAboveItIsZero) {
  for (int n : {1, 5, 16, 17, 64}) {
    const std::vector<double> got =
        invert(lower_of(DType::kFloat32, 1, n, [](int, int) { return 0.3; }), 1, n);
    for (int i = 0; i < n; ++i)
      for (int j = i; j < n; ++j) EXPECT_EQ(got[size_t(i * n + j)], i == j ? 1.0 : 0.0);
  }
}

TEST_P(TriangularInverse, TheSignIsThatOfIPlusL) {
  const std::vector<double> got =
      invert(lower_of(DType::kFloat32, 1, 2, [](int, int) { return 0.25; }), 1, 2);
  EXPECT_EQ(got, (std::vector<double>{1, 0, -0.25, 1}));
}

// Where keys repeat, L is a constant below the diagonal and powers of L reach 1e18.
TEST_P(TriangularInverse, RepeatedKeysAreSolvedToRounding) {
  expect_right(lower_of(DType::kFloat32, 1, 64, [](int, int) { return 1.0; }), 1, 64, 3e-8);
  expect_right(lower_of(DType::kFloat32, 1, 64, [](int, int) { return 1.999; }), 1, 64, 3e-7);
}

TEST_P(TriangularInverse, HugeInversesKeepTheirRelativePrecision) {
  Random random(5);
  expect_right(
      lower_of(DType::kFloat32, 1, 64, [&](int, int) { return 4 * uniform(random, -1, 1); }), 1,
      64);
}

TEST_P(TriangularInverse, NoMatricesAreFine) {
  EXPECT_TRUE(invert(lower_of(DType::kFloat32, 0, 8, [](int, int) { return 0.0; }), 0, 8).empty());
}

DELTANET_FOR_EVERY_ISA(TriangularInverse);

}  // namespace
}  // namespace deltanet::cpu
