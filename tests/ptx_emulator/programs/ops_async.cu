// SPDX-License-Identifier: Apache-2.0
// cp.async: sizes, zero fill, groups, and a double-buffered pipeline that must hold however late or
// early the copies land.
#include "testing.cuh"
using namespace testing;

template <int kBytes>
__device__ void copy(void* to, const void* from, int valid) {
  const uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(valid)
                 : "memory");
  if constexpr (kBytes == 8)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address), "l"(from),
                 "r"(valid)
                 : "memory");
  if constexpr (kBytes == 4)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from),
                 "r"(valid)
                 : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <int kBytes>
__global__ void sizes(const unsigned char* in, unsigned char* out, int valid) {
  __shared__ __align__(16) unsigned char box[32 * 16];
  copy<kBytes>(&box[threadIdx.x * kBytes], &in[threadIdx.x * kBytes], valid);
  asm volatile("cp.async.wait_all;" ::: "memory");
  for (int i = 0; i < kBytes; i++) out[threadIdx.x * kBytes + i] = box[threadIdx.x * kBytes + i];
}
template <int kBytes>
void test_size() {
  std::vector<unsigned char> in(32 * kBytes);
  for (size_t i = 0; i < in.size(); i++) in[i] = (unsigned char)(i * 7 + 1);
  Array<unsigned char> d(in);
  bool ok = true;
  for (int valid : {kBytes, kBytes / 2, 0}) {
    Array<unsigned char> out(in.size());
    sizes<kBytes><<<1, 32>>>(d, out, valid);
    for (size_t i = 0; i < in.size(); i++)
      ok &= out.host()[i] == (int(i % kBytes) < valid ? in[i] : 0);
  }
  report("cp.async of " + std::to_string(kBytes) + " bytes, with zero fill",
         ok && cudaGetLastError() == cudaSuccess);
}

// Sums rows of `in`, each copied a step ahead into one of two buffers.
__global__ void pipeline(const float* in, float* out, int steps) {
  __shared__ __align__(16) float box[2][128];
  const int t = threadIdx.x;
  auto fetch = [&](int step) {
    if (t < 32) copy<16>(&box[step & 1][t * 4], &in[step * 128 + t * 4], 16);
    commit();
  };
  float sum = 0;
  fetch(0);
  for (int step = 0; step < steps; step++) {
    if (step + 1 < steps) {
      fetch(step + 1);
      wait<1>();
    } else {
      wait<0>();
    }
    __syncthreads();
    sum += box[step & 1][127 - t];
    __syncthreads();  // the next fetch overwrites what was read
  }
  out[t] = sum;
}

int main() {
  test_size<4>(), test_size<8>(), test_size<16>();
  const int steps = 7;
  const auto in = numbers(steps * 128);
  Array<float> d(in), out(128);
  pipeline<<<1, 128>>>(d, out, steps);
  std::vector<double> want(128);
  for (int t = 0; t < 128; t++)
    for (int s = 0; s < steps; s++) want[t] += in[s * 128 + 127 - t];
  report_error("double buffering", difference(out.host(), want), 1e-6);
  return finish();
}
