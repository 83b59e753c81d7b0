// SPDX-License-Identifier: Apache-2.0
// Tensor cores and the matrix loads that feed them: each shape and type against a product in double
// precision.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "testing.cuh"
using namespace testing;

enum Form { kBf16K16, kBf16K8, kF16K16, kF16K8, kF16K16Half, kTf32K8, kTf32K4, kForms };
static const char* const kName[] = {
    "mma m16n8k16 bf16",          "mma m16n8k8 bf16", "mma m16n8k16 f16", "mma m16n8k8 f16",
    "mma m16n8k16 f16, f16 sums", "mma m16n8k8 tf32", "mma m16n8k4 tf32"};
static const int kK[] = {16, 8, 16, 8, 16, 8, 4};

// The fragment layout of the PTX manual, written out as (row, column) of each element.
template <class Pack>
__device__ void load_a(const float* A, int k, Pack pack, uint32_t (&a)[4]) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = 0; i < k / 4; i++) {
    const int row = g + (i % 2 ? 8 : 0), column = 2 * t + (i / 2 ? 8 : 0);
    a[i] = pack(A[row * k + column], A[row * k + column + 1]);
  }
}
template <class Pack>
__device__ void load_b(const float* B, int k, Pack pack, uint32_t (&b)[2]) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = 0; i < k / 8; i++) {
    const int row = 2 * t + 8 * i;
    b[i] = pack(B[row * 8 + g], B[(row + 1) * 8 + g]);
  }
}
__device__ uint32_t to_tf32(float x) {
  uint32_t u;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(u) : "f"(x));
  return u;
}
#define MMA_F32(SHAPE, N, ...)                                                   \
  asm volatile("mma.sync.aligned." SHAPE " {%0,%1,%2,%3}, " N ", {%0,%1,%2,%3};" \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                  \
               : __VA_ARGS__)

template <int kForm, int kSize>
__global__ void product(const float* A, const float* B, const float* C, float* D) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  uint32_t a[4] = {}, b[2] = {};
  float c[4] = {C[g * 8 + 2 * t], C[g * 8 + 2 * t + 1], C[(g + 8) * 8 + 2 * t],
                C[(g + 8) * 8 + 2 * t + 1]};
  auto bf16 = [](float x, float y) {
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t*>(&v);
  };
  auto f16 = [](float x, float y) {
    __half2 v = __floats2half2_rn(x, y);
    return *reinterpret_cast<uint32_t*>(&v);
  };
  if constexpr (kForm <= kBf16K8)
    load_a(A, kSize, bf16, a), load_b(B, kSize, bf16, b);
  else if constexpr (kForm <= kF16K16Half)
    load_a(A, kSize, f16, a), load_b(B, kSize, f16, b);
  else {
    for (int i = 0; i < kSize / 2; i++)
      a[i] = to_tf32(A[(g + (i % 2 ? 8 : 0)) * kSize + t + (i / 2 ? 4 : 0)]);
    for (int i = 0; i < kSize / 4; i++) b[i] = to_tf32(B[(t + 4 * i) * 8 + g]);
  }
  if constexpr (kForm == kBf16K16)
    MMA_F32("m16n8k16.row.col.f32.bf16.bf16.f32", "{%4,%5,%6,%7}, {%8,%9}", "r"(a[0]), "r"(a[1]),
            "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  if constexpr (kForm == kBf16K8)
    MMA_F32("m16n8k8.row.col.f32.bf16.bf16.f32", "{%4,%5}, {%6}", "r"(a[0]), "r"(a[1]), "r"(b[0]));
  if constexpr (kForm == kF16K16)
    MMA_F32("m16n8k16.row.col.f32.f16.f16.f32", "{%4,%5,%6,%7}, {%8,%9}", "r"(a[0]), "r"(a[1]),
            "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  if constexpr (kForm == kF16K8)
    MMA_F32("m16n8k8.row.col.f32.f16.f16.f32", "{%4,%5}, {%6}", "r"(a[0]), "r"(a[1]), "r"(b[0]));
  if constexpr (kForm == kTf32K8)
    MMA_F32("m16n8k8.row.col.f32.tf32.tf32.f32", "{%4,%5,%6,%7}, {%8,%9}", "r"(a[0]), "r"(a[1]),
            "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  if constexpr (kForm == kTf32K4)
    MMA_F32("m16n8k4.row.col.f32.tf32.tf32.f32", "{%4,%5}, {%6}", "r"(a[0]), "r"(a[1]), "r"(b[0]));
  if constexpr (kForm == kF16K16Half) {
    uint32_t d[2] = {f16(c[0], c[1]), f16(c[2], c[3])};
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, "
        "{%0,%1};"
        : "+r"(d[0]), "+r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int i = 0; i < 2; i++) {
      const float2 f = __half22float2(*reinterpret_cast<__half2*>(&d[i]));
      c[2 * i] = f.x, c[2 * i + 1] = f.y;
    }
  }
  D[g * 8 + 2 * t] = c[0], D[g * 8 + 2 * t + 1] = c[1], D[(g + 8) * 8 + 2 * t] = c[2],
                D[(g + 8) * 8 + 2 * t + 1] = c[3];
}

// Operands as the tensor core sees them.
static double rounded(double x, int form) {
  if (form <= kBf16K8) return __bfloat162float(__float2bfloat16(float(x)));
  if (form <= kF16K16Half) return __half2float(__float2half(float(x)));
  int e;
  const double m = std::frexp(x, &e);
  return std::ldexp(std::round(std::ldexp(m, 11)), e - 11);
}
template <int kForm>
void test_form() {
  constexpr int k = kForm == kBf16K16 || kForm == kF16K16 || kForm == kF16K16Half ? 16
                    : kForm == kTf32K4                                            ? 4
                                                                                  : 8;
  const auto A = numbers(16 * k, 3), B = numbers(k * 8, 5), C = numbers(128, 7);
  Array<float> a(A), b(B), c(C), d(128);
  product<kForm, k><<<1, 32>>>(a, b, c, d);
  std::vector<double> want(128);
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 8; n++) {
      double sum = kForm == kF16K16Half ? rounded(C[m * 8 + n], kForm) : C[m * 8 + n];
      for (int i = 0; i < k; i++)
        sum += rounded(A[m * k + i], kForm) * rounded(B[i * 8 + n], kForm);
      want[m * 8 + n] = sum;
    }
  report_error(kName[kForm], difference(d.host(), want), kForm == kF16K16Half ? 4e-3 : 2e-6);
}

template <int kCount, bool kTransposed>
__global__ void load_matrices(const uint16_t* in, uint32_t* out) {
  __shared__ __align__(16) uint16_t tile[32 * 8];
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = in[i];
  __syncthreads();
  // Rows in a scrambled order: row r of matrix m lies at 8 * ((5 r + 8 m) % 32).
  const int lane = threadIdx.x;
  const uint32_t address =
      (uint32_t)__cvta_generic_to_shared(&tile[(5 * (lane % 8) + 8 * (lane / 8)) % 32 * 8]);
  uint32_t d[4] = {};
#define LOAD(X, LIST, T)                                                         \
  asm volatile("ldmatrix.sync.aligned.m8n8." X T ".shared.b16 {" LIST "}, [%4];" \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                  \
               : "r"(address))
  if constexpr (kCount == 1 && !kTransposed) LOAD("x1", "%0", "");
  if constexpr (kCount == 1 && kTransposed) LOAD("x1", "%0", ".trans");
  if constexpr (kCount == 2 && !kTransposed) LOAD("x2", "%0,%1", "");
  if constexpr (kCount == 2 && kTransposed) LOAD("x2", "%0,%1", ".trans");
  if constexpr (kCount == 4 && !kTransposed) LOAD("x4", "%0,%1,%2,%3", "");
  if constexpr (kCount == 4 && kTransposed) LOAD("x4", "%0,%1,%2,%3", ".trans");
  for (int i = 0; i < kCount; i++) out[i * 32 + lane] = d[i];
}
template <int kCount, bool kTransposed>
void test_load() {
  std::vector<uint16_t> in(256);
  for (int i = 0; i < 256; i++) in[i] = uint16_t(i * 259 + 7);
  Array<uint16_t> d(in);
  Array<uint32_t> out(32 * kCount);
  load_matrices<kCount, kTransposed><<<1, 32>>>(d, out);
  bool ok = cudaGetLastError() == cudaSuccess;
  const auto r = out.host();
  for (int m = 0; m < kCount; m++)
    for (int lane = 0; lane < 32; lane++)
      for (int h = 0; h < 2; h++) {
        int row = lane / 4, column = lane % 4 * 2 + h;
        if (kTransposed) std::swap(row, column);
        ok &= uint16_t(r[m * 32 + lane] >> (16 * h)) == in[(5 * row + 8 * m) % 32 * 8 + column];
      }
  report("ldmatrix x" + std::to_string(kCount) + (kTransposed ? ".trans" : ""), ok);
}
__global__ void transpose(const uint32_t* in, uint32_t* out) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(out[threadIdx.x])
               : "r"(in[threadIdx.x]));
}
#if __CUDA_ARCH__ >= 900 || defined(TEST_STMATRIX)
template <bool kTransposed>
__global__ void store_matrices(const uint32_t* in, uint16_t* out) {
  __shared__ __align__(16) uint16_t tile[32 * 8];
  const int lane = threadIdx.x;
  const uint32_t address =
      (uint32_t)__cvta_generic_to_shared(&tile[(5 * (lane % 8) + 8 * (lane / 8)) % 32 * 8]);
  if constexpr (kTransposed)
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(in[lane]), "r"(in[32 + lane]), "r"(in[64 + lane]), "r"(in[96 + lane])
        : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(in[lane]), "r"(in[32 + lane]), "r"(in[64 + lane]), "r"(in[96 + lane])
                 : "memory");
  __syncthreads();
  for (int i = lane; i < 256; i += 32) out[i] = tile[i];
}
template <bool kTransposed>
void test_store() {
  std::vector<uint32_t> in(128);
  for (uint32_t i = 0; i < 128; i++) in[i] = i * 0x01030507u + 99;
  Array<uint32_t> d(in);
  Array<uint16_t> out(256);
  store_matrices<kTransposed><<<1, 32>>>(d, out);
  bool ok = cudaGetLastError() == cudaSuccess;
  const auto r = out.host();
  for (int m = 0; m < 4; m++)
    for (int lane = 0; lane < 32; lane++)
      for (int h = 0; h < 2; h++) {
        int row = lane / 4, column = lane % 4 * 2 + h;
        if (kTransposed) std::swap(row, column);
        ok &= r[(5 * row + 8 * m) % 32 * 8 + column] == uint16_t(in[m * 32 + lane] >> (16 * h));
      }
  report(kTransposed ? "stmatrix x4.trans" : "stmatrix x4", ok);
}
#endif

int main() {
  test_form<kBf16K16>(), test_form<kBf16K8>(), test_form<kF16K16>(), test_form<kF16K8>(),
      test_form<kF16K16Half>(), test_form<kTf32K8>(), test_form<kTf32K4>();
  test_load<1, false>(), test_load<1, true>(), test_load<2, false>(), test_load<2, true>(),
      test_load<4, false>(), test_load<4, true>();
  std::vector<uint32_t> in(32);
  for (uint32_t i = 0; i < 32; i++) in[i] = i * 0x00050003u + 1;
  Array<uint32_t> d(in), out(32);
  transpose<<<1, 32>>>(d, out);
  bool ok = true;
  for (int i = 0; i < 8; i++)
    for (int j = 0; j < 8; j++)
      ok &= uint16_t(out.host()[i * 4 + j / 2] >> (16 * (j % 2))) ==
            uint16_t(in[j * 4 + i / 2] >> (16 * (i % 2)));
  report("movmatrix", ok);
#ifdef TEST_STMATRIX
  test_store<false>(), test_store<true>();
#endif
  return finish();
}
