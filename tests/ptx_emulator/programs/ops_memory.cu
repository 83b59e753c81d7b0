// SPDX-License-Identifier: Apache-2.0
// Loads, stores, atomics, address spaces, calls, printf.
#include "testing.cuh"
using namespace testing;

// ---- widths ----

__global__ void widths(const signed char* bytes, const short* shorts, const float4* quads,
                       const double2* pairs, long long* out) {
  const int t = threadIdx.x;
  const float4 q = quads[t];
  const double2 p = pairs[t];
  out[t] = bytes[t] * 1000000ll + shorts[t] * 10ll +
           (long long)(q.x + 2 * q.y + 3 * q.z + 4 * q.w) + (long long)(p.x - p.y) +
           (unsigned char)bytes[t];
}
__global__ void narrow_stores(unsigned char* bytes, unsigned short* shorts, uchar4* quads) {
  const int t = threadIdx.x;
  bytes[t] = (unsigned char)(t * 77);
  shorts[t] = (unsigned short)(t * 7777);
  quads[t] = make_uchar4(t, t + 1, t + 2, t + 3);
}
static void test_widths() {
  const int n = 64;
  std::vector<signed char> b(n);
  std::vector<short> s(n);
  std::vector<float4> q(n);
  std::vector<double2> p(n);
  std::vector<long long> want(n);
  for (int i = 0; i < n; i++) {
    b[i] = (signed char)(i * 37), s[i] = short(i * 4099),
    q[i] = make_float4(i, i + 1, i + 2, i + 3), p[i] = make_double2(i * 1e6, i);
    want[i] = b[i] * 1000000ll + s[i] * 10ll + (i + 2 * (i + 1) + 3 * (i + 2) + 4 * (i + 3)) +
              (long long)(i * 1e6 - i) + (unsigned char)b[i];
  }
  Array<signed char> db(b);
  Array<short> ds(s);
  Array<float4> dq(q);
  Array<double2> dp(p);
  Array<long long> out(n);
  widths<<<1, n>>>(db, ds, dq, dp, out);
  report("ld of 1, 2, 16 bytes, v4.f32, v2.f64", out.host() == want);
  Array<unsigned char> wb(n);
  Array<unsigned short> ws(n);
  Array<uchar4> wq(n);
  narrow_stores<<<1, n>>>(wb, ws, wq);
  bool ok = true;
  for (int i = 0; i < n; i++) {
    const uchar4 v = wq.host()[i];
    ok &= wb.host()[i] == (unsigned char)(i * 77) && ws.host()[i] == (unsigned short)(i * 7777) &&
          v.x == i && v.w == i + 3;
  }
  report("st of 1, 2, 4x1 bytes", ok);
}

// ---- atomics ----

__global__ void many_atomics(int* i, unsigned* u, unsigned long long* l, float* f, double* d) {
  const int t = threadIdx.x + blockIdx.x * blockDim.x;
  atomicAdd(&i[0], t);
  atomicMax(&i[1], (t * 37) % 64 - 32);
  atomicMin(&i[2], (t * 37) % 64 - 32);
  atomicSub(&i[3], 1);
  atomicOr(&u[0], 1u << (t % 32));
  atomicAnd(&u[1], ~(1u << (t % 16)));
  atomicXor(&u[2], 1u << (t % 8));
  atomicInc(&u[3], 9);
  atomicDec(&u[4], 9);
  atomicMax(&u[5], 0x80000000u + t);
  atomicAdd(&l[0], 1ull << 33);
  atomicMin(&l[1], 1000ull - t);
  atomicAdd(f, 0.5f);
  atomicAdd(d, 0.25);
  if (t == 5) u[7] = atomicExch(&i[4], 55);
}
static void test_many_atomics() {
  Array<int> i(std::vector<int>{0, -100, 100, 0, 44});
  Array<unsigned> u(std::vector<unsigned>{0, ~0u, 0, 0, 0, 0, 0, 0});
  Array<unsigned long long> l(std::vector<unsigned long long>{0, ~0ull});
  Array<float> f(std::vector<float>{0});
  Array<double> d(std::vector<double>{0});
  many_atomics<<<4, 64>>>(i, u, l, f, d);
  const auto hi = i.host();
  const auto hu = u.host();
  const auto hl = l.host();
  report("atom.add/min/max/sub.s32, exch", hi[0] == 255 * 128 && hi[1] == 31 && hi[2] == -32 &&
                                               hi[3] == -256 && hi[4] == 55 && hu[7] == 44);
  report("atom.and/or/xor.b32", hu[0] == ~0u && hu[1] == 0xffff0000u && hu[2] == 0);
  report("atom.inc/dec/max.u32",
         hu[3] == 256 % 10 && hu[4] == (10 - 256 % 10) % 10 && hu[5] == 0x800000ffu);
  report("atom.add/min.u64", hl[0] == 256ull << 33 && hl[1] == 745);
  report("atom.add.f32/f64", f.host()[0] == 128 && d.host()[0] == 64);
}
__global__ void shared_atomics(int* out) {
  __shared__ int sum;
  __shared__ unsigned count;
  if (threadIdx.x == 0) sum = 0, count = 0;
  __syncthreads();
  atomicAdd(&sum, int(threadIdx.x));
  atomicInc(&count, 1000);
  __syncthreads();
  if (threadIdx.x == 0) out[0] = sum, out[1] = int(count);
}

// ---- address spaces, calls, branches ----

__constant__ float table[4] = {3, 4, 5, 6};
__device__ int counter = 7;
__device__ float scratch[64];
__device__ float* const scratch_pointer = scratch;  // a variable whose value is an address

__device__ __noinline__ float pick_local(const float* values, int i) {
  float local[8];
#pragma unroll 1
  for (int k = 0; k < 8; k++) local[k] = values[k] * 2;
  return local[(i * 5) & 7];
}
__device__ __noinline__ int factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }
__device__ __noinline__ int by_switch(int x) {
  switch (x) {
    case 0:
      return 11;
    case 1:
      return x * 22 + int(threadIdx.x);
    case 2:
      return 33 - x;
    case 3:
      return 44 ^ x;
    case 4:
      return 55 + counter;
    case 5:
      return 66;
    case 6:
      return 77 / (x + 1);
    case 7:
      return int(threadIdx.x) * 8;
    default:
      return -1;
  }
}
struct Big {
  int values[40];
};
__global__ void spaces(float* out, const __grid_constant__ Big big, int* counts) {
  extern __shared__ float dynamic[];
  const int t = threadIdx.x;
  dynamic[t] = table[t & 3];
  __syncthreads();
  float* generic = t & 1 ? &dynamic[t ^ 1] : &scratch[t];  // one pointer, two spaces
  if (!(t & 1)) scratch_pointer[t] = 100 + t;
  out[t] = *generic + pick_local(&dynamic[t & 24], t);
  counts[t] = factorial(t % 8) + by_switch(t % 10) + big.values[t % 40];
  if (t == 3)
    printf("thread %d of %u: %.2f %s %lld %%\n", t, blockDim.x, table[1], "text", 1ll << 40);
}
static void test_spaces() {
  Big big;
  for (int i = 0; i < 40; i++) big.values[i] = i * 1000;
  Array<float> out(64);
  Array<int> counts(64);
  const float changed = 9;
  cudaMemcpyToSymbol(table, &changed, 4, 8);
  spaces<<<1, 64, 64 * 4>>>(out, big, counts);
  const float tab[] = {3, 4, 9, 6};
  bool ok = true, calls = true;
  const int factorials[] = {1, 1, 2, 6, 24, 120, 720, 5040};
  for (int t = 0; t < 64; t++) {
    const float want =
        (t & 1 ? tab[(t ^ 1) & 3] : 100 + t) + 2 * tab[((t & 24) + ((t * 5) & 7)) & 3];
    ok &= out.host()[t] == want;
    const int s[] = {11, 22 + t, 31, 47, 62, 66, 11, t * 8, -1, -1};
    calls &= counts.host()[t] == factorials[t % 8] + s[t % 10] + t % 40 * 1000;
  }
  report("generic, shared, constant, local, dynamic shared addresses", ok);
  report("calls, recursion, switch, large parameters", calls);
  int read = 0;
  cudaMemcpyFromSymbol(&read, counter, 4);
  report("cudaMemcpyFromSymbol", read == 7);
}
__global__ void several_blocks(uint3* out) {
  const int b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[b * blockDim.x * blockDim.y * blockDim.z + t] =
      make_uint3(blockIdx.y, threadIdx.z, threadIdx.x + 10 * threadIdx.y);
}

int main() {
  test_widths();
  test_many_atomics();
  Array<int> two(2);
  shared_atomics<<<1, 96>>>(two);
  report("atomics in shared memory", two.host()[0] == 95 * 48 && two.host()[1] == 96);
  test_spaces();
  Array<uint3> grid(3 * 4 * 2 * 5 * 3 * 2);
  several_blocks<<<dim3(3, 4, 2), dim3(5, 3, 2)>>>(grid);
  const auto g = grid.host();
  bool ok = true;
  for (size_t i = 0; i < g.size(); i++)
    ok &= g[i].x == i / 30 / 3 % 4 && g[i].y == i % 30 / 15 && g[i].z == i % 5 + 10 * (i % 15 / 5);
  report("grids and blocks of three extents", ok);
  return finish();
}
