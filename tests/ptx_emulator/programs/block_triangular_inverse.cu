// SPDX-License-Identifier: Apache-2.0
// BlockTriangularInverse: every size, all algorithms, systems that break other ways of inverting.
#include "cuda/block_triangular_inverse.cuh"

#include <algorithm>
#include <limits>

#include "testing.cuh"
using namespace testing;
using namespace deltanet::cuda;

// example-begin: what the documentation of BlockTriangularInverse shows
__global__ void __launch_bounds__(128) example(const float* L, float* T) {
  using Inverse = BlockTriangularInverse<64, 128>;
  __shared__ alignas(16) float matrix[Inverse::kMatrixSize];
  __shared__ typename Inverse::TempStorage temp_storage;
  for (int e = threadIdx.x; e < 64 * 64; e += 128) matrix[Inverse::Offset(e / 64, e % 64)] = L[e];
  __syncthreads();  // L is complete
  Inverse(temp_storage).Invert(matrix);
  for (int e = threadIdx.x; e < 64 * 64; e += 128)
    T[e] = e % 64 <= e / 64 ? matrix[Inverse::Offset(e / 64, e % 64)] : 0.f;
}
// example-end

template <int kSize, int kThreads, BlockTriangularInverseAlgorithm kAlgorithm>
__global__ void __launch_bounds__(kThreads) invert(const float* L, float* T) {
  using Inverse = BlockTriangularInverse<kSize, kThreads, kAlgorithm>;
  struct Shared {
    alignas(16) float matrix[Inverse::kMatrixSize];
    typename Inverse::TempStorage inverse;
  };
  extern __shared__ float4 memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  float* matrix = shared.matrix;
  // On and above the diagonal NaN, which must not count; blocks above the diagonal stay unwritten:
  // reading them would be a finding.
  for (int e = threadIdx.x; e < kSize * kSize; e += kThreads) {
    const int i = e / kSize, j = e % kSize;
    if (j / 16 <= i / 16) matrix[Inverse::Offset(i, j)] = j < i ? L[e] : NAN;
  }
  __syncthreads();
  Inverse(shared.inverse).Invert(matrix);
  for (int e = threadIdx.x; e < kSize * kSize; e += kThreads)
    T[e] = e % kSize / 16 <= e / kSize / 16 ? matrix[Inverse::Offset(e / kSize, e % kSize)] : 0.f;
}

struct System {
  const char* name;
  float cosine, beta, norm;  // of the keys with each other; of all rows; of the keys
  bool alternating;
  double raking, tf32x3;  // bounds of the relative error, C <= 64
};
// Three times the error of fp32 substitution (design table, C = 64), and 2e-6 for tensor cores.
const System kSystems[] = {
    {"random keys, beta 0.5", 0, 0.5f, 1, false, 6e-8, 2e-6},
    {"identical keys, beta 1", 1, 1, 1, false, 6e-8, 2e-6},
    {"identical keys, beta 1.999", 1, 1.999f, 1, false, 9e-7, 2e-6},
    {"alternating keys, beta 1.999", 1, 1.999f, 1, true, 9e-7, 2e-6},
    {"keys with cosine 0.8, beta 0.95", 0.8f, 0.95f, 1, false, 3e-7, 2e-6},
    {"identical keys of norm 2, beta 1", 1, 1, 2, false, 6e-6, 6e-6},
};
// Keys that differ in the last bits: T is as large, and errors do not cancel by luck. Merges have
// no bound of their own here.
const System kNearlyIdentical = {
    "nearly identical keys, beta 1.999", 0.999999f, 1.999f, 1, false, 0, 0};

std::vector<float> lower(const System& s, int size) {
  const int K = 64;
  const std::vector<float> base = numbers(K, 1), own = numbers(size_t(size) * K, 2);
  std::vector<double> keys(size_t(size) * K);
  for (int i = 0; i < size; ++i) {
    double square = 0;
    for (int c = 0; c < K; ++c) {
      const double x = std::sqrt(s.cosine) * base[c] + std::sqrt(1 - s.cosine) * own[i * K + c];
      keys[i * K + c] = x;
      square += x * x;
    }
    for (int c = 0; c < K; ++c)
      keys[i * K + c] *= s.norm / std::sqrt(square) * (s.alternating && i % 2 ? -1 : 1);
  }
  std::vector<float> L(size_t(size) * size);
  for (int i = 0; i < size; ++i)
    for (int j = 0; j < i; ++j) {
      double sum = 0;
      for (int c = 0; c < K; ++c) sum += keys[i * K + c] * keys[j * K + c];
      L[i * size + j] = float(s.beta * sum);
    }
  return L;
}

std::vector<double> inverse(const std::vector<float>& L, int size) {
  std::vector<double> T(L.size(), 0.0);
  for (int j = 0; j < size; ++j)
    for (int i = j; i < size; ++i) {
      double sum = i == j;
      for (int m = j; m < i; ++m) sum -= double(L[i * size + m]) * T[m * size + j];
      T[i * size + j] = sum;
    }
  return T;
}

// Row by row in fp32: what substitution is measured by.
std::vector<float> substitution(const std::vector<float>& L, int size) {
  std::vector<float> T(L.size(), 0.f);
  for (int j = 0; j < size; ++j)
    for (int i = j; i < size; ++i) {
      float sum = i == j;
      for (int m = j; m < i; ++m) sum = std::fma(-L[i * size + m], T[m * size + j], sum);
      T[i * size + j] = sum;
    }
  return T;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

template <int kSize, int kThreads, BlockTriangularInverseAlgorithm kAlgorithm>
std::vector<float> run(const std::vector<float>& L) {
  using Inverse = BlockTriangularInverse<kSize, kThreads, kAlgorithm>;
  const Array<float> in(L), out(L.size());
  const size_t shared =
      Inverse::kMatrixSize * sizeof(float) + sizeof(typename Inverse::TempStorage);
  const auto kernel = invert<kSize, kThreads, kAlgorithm>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
  kernel<<<1, kThreads, shared>>>(in, out);
  cudaDeviceSynchronize();
  return out.host();
}

template <int kSize, int kThreads, BlockTriangularInverseAlgorithm kAlgorithm>
void test_systems() {
  const bool substitutes = kAlgorithm == BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION;
  const bool tensor_cores = kAlgorithm == BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3;
  std::vector<System> systems(std::begin(kSystems), std::end(kSystems));
  if (substitutes) systems.push_back(kNearlyIdentical);
  for (const System& s : systems) {
    const std::vector<float> L = lower(s, kSize);
    const std::vector<double> want = inverse(L, kSize);
    // The entries of T grow with the rows where keys of norm 2 repeat, up to infinity at 128.
    if (!(*std::max_element(want.begin(), want.end()) < 1e37)) continue;
    const std::vector<float> got = run<kSize, kThreads, kAlgorithm>(L);
    const std::string name = std::string(substitutes    ? "substitution "
                                         : tensor_cores ? "tf32x3 "
                                                        : "fp32 ") +
                             std::to_string(kSize) + " rows, " + std::to_string(kThreads) +
                             " threads, " + s.name;
    // Another order of the same sums: at most three times, or three roundings where it is exact.
    const double own = 3 * std::max(relative_error(substitution(L, kSize), want), 6e-8);
    // One merge more than the table has. It costs more than substitution at 128 rows allows.
    const double slack = kSize > 64 ? 4 : 1;
    report_error(name, relative_error(got, want),
                 substitutes ? own : slack * (tensor_cores ? s.tf32x3 : s.raking));
  }
}

void test_example() {
  const std::vector<float> ones = filled(64 * 64, 1.f);
  const Array<float> L(ones), T(64 * 64);
  example<<<1, 128>>>(L, T);
  std::vector<double> want(64 * 64, 0.0);
  for (int i = 0; i < 64; ++i) {
    want[i * 65] = 1;
    if (i) want[i * 65 - 1] = -1;
  }
  report_error("the example of the documentation", difference(T.host(), want), 0);
}

// NaN in a row of L never reaches the rows of T above it.
void test_rows_above() {
  System s = kSystems[0];
  std::vector<float> L = lower(s, 64);
  const std::vector<float> want = run<64, 128, BLOCK_TRIANGULAR_INVERSE_RAKING>(L);
  for (const int row : {1, 17, 34, 63}) {
    std::vector<float> spoiled = L;
    for (int j = 0; j < row; ++j) spoiled[row * 64 + j] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> got = run<64, 128, BLOCK_TRIANGULAR_INVERSE_RAKING>(spoiled);
    report("NaN in row " + std::to_string(row),
           std::equal(got.begin(), got.begin() + row * 64, want.begin()));
  }
}

int main() {
  test_example();
  test_rows_above();
  test_systems<16, 64, BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION>();
  test_systems<32, 64, BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION>();
  test_systems<64, 128, BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION>();
  test_systems<128, 256, BLOCK_TRIANGULAR_INVERSE_SUBSTITUTION>();
  test_systems<16, 64, BLOCK_TRIANGULAR_INVERSE_RAKING>();
  test_systems<32, 96, BLOCK_TRIANGULAR_INVERSE_RAKING>();
  test_systems<64, 128, BLOCK_TRIANGULAR_INVERSE_RAKING>();
  test_systems<64, 256, BLOCK_TRIANGULAR_INVERSE_RAKING>();
  test_systems<128, 256, BLOCK_TRIANGULAR_INVERSE_RAKING>();
  test_systems<16, 128, BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3>();
  test_systems<32, 64, BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3>();
  test_systems<64, 128, BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3>();
  test_systems<64, 256, BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3>();
  test_systems<128, 256, BLOCK_TRIANGULAR_INVERSE_RAKING_TF32X3>();
  return finish();
}
