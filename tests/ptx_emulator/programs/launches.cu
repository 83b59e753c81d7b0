// SPDX-License-Identifier: Apache-2.0
// What a launch may ask for: threads, grids, shared memory, by the limits of the architecture that
// the program was built for. And that launches come one after the other.
#include "testing.cuh"
using namespace testing;

__global__ void anything(float* x) {
  extern __shared__ float box[];
  if (x && threadIdx.x + threadIdx.y + threadIdx.z == 0) x[0] = 1, box[0] = 1;
}
__global__ void __launch_bounds__(128) bounded(float* x) {
  if (x && threadIdx.x == 0) x[0] = 1;
}
__global__ void with_static(float* x) {
  extern __shared__ float box[];
  __shared__ float fixed[4096];  // 16 KiB
  fixed[threadIdx.x] = 1;
  box[threadIdx.x] = 2;
  __syncthreads();
  if (x && threadIdx.x == 0) x[0] = fixed[0] + box[0];
}
__global__ void empty() {}
__global__ void read_by_all(const float* x, float* y) { y[blockIdx.x] = x[0]; }
__global__ void write_one(float* x) { x[0] = 5; }

static void expect(const char* name, cudaError_t want) {
  const cudaError_t got = cudaGetLastError();
  report(name, got == want, std::string(cudaGetErrorName(got)));
}

int main() {
  int opt_in = 0, arch = 0;
  cudaDeviceGetAttribute(&opt_in, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  cudaDeviceGetAttribute(&arch, cudaDevAttrComputeCapabilityMajor, 0);
  std::printf("opt-in shared memory %d on sm_%d0\n", opt_in, arch);
  Array<float> x(filled(1, 0.f));
  anything<<<1, 1024, 4>>>(x), expect("1024 threads", cudaSuccess);
  anything<<<1, 1025, 4>>>(x), expect("1025 threads", cudaErrorInvalidConfiguration);
  anything<<<1, dim3(32, 32, 2), 4>>>(x),
      expect("32 x 32 x 2 threads", cudaErrorInvalidConfiguration);
  anything<<<1, dim3(1, 1, 65), 4>>>(x), expect("65 threads in z", cudaErrorInvalidConfiguration);
  bounded<<<1, 128>>>(x), expect("as many threads as __launch_bounds__", cudaSuccess);
  bounded<<<1, 129>>>(x), expect("more threads than __launch_bounds__", cudaErrorInvalidValue);
  anything<<<0, 32, 4>>>(x), expect("an empty grid", cudaErrorInvalidConfiguration);
  empty<<<dim3(1, 65535), 1>>>(), expect("65535 blocks in y", cudaSuccess);
  anything<<<dim3(1, 65536), 1, 4>>>(x), expect("65536 blocks in y", cudaErrorInvalidConfiguration);
  empty<<<70000, 1>>>(), expect("70000 blocks in x", cudaSuccess);
  anything<<<1, 32, 48 << 10>>>(x), expect("48 KiB without asking", cudaSuccess);
  anything<<<1, 32, (48 << 10) + 4>>>(x),
      expect("more than 48 KiB without asking", cudaErrorInvalidValue);
  cudaFuncSetAttribute(anything, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in),
      expect("asking for all of it", cudaSuccess);
  anything<<<1, 32, opt_in>>>(x), expect("all of it", cudaSuccess);
  cudaFuncSetAttribute(anything, cudaFuncAttributeMaxDynamicSharedMemorySize, opt_in + 1),
      expect("asking for more than there is", cudaErrorInvalidValue);
  with_static<<<1, 32, 32 << 10>>>(x), expect("16 KiB static and 32 dynamic", cudaSuccess);
  with_static<<<1, 32, (32 << 10) + 16>>>(x),
      expect("static and dynamic above 48 KiB without asking", cudaErrorInvalidValue);
  cudaFuncSetAttribute(with_static, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10),
      expect("asking for 64 KiB besides", cudaSuccess);
  with_static<<<1, 32, 64 << 10>>>(x), expect("16 KiB static and 64 dynamic", cudaSuccess);
  with_static<<<1, 32, (64 << 10) + 16>>>(x),
      expect("more than was asked for", cudaErrorInvalidValue);
  cudaFuncSetAttribute(with_static, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       opt_in - (16 << 10) + 16),
      expect("static and dynamic above all there is", cudaErrorInvalidValue);

  // What the host asks for is held to allocations, too.
  char host[64] = {};
  char *small = nullptr, *freed = nullptr;
  cudaMalloc(&small, sizeof host), cudaMalloc(&freed, sizeof host), cudaFree(freed);
  const auto refused = [](const char* what, cudaError_t e) {
    report(what, e == cudaErrorInvalidValue);
    cudaGetLastError();
  };
  report("a set to the end", cudaMemset(small, 0, 64) == cudaSuccess);
  refused("a set past the end", cudaMemset(small, 0, 65));
  refused("a set of nothing known", cudaMemset(nullptr, 0, 1));
  refused("a set of host memory", cudaMemset(host, 0, 64));
  refused("a set of freed memory", cudaMemsetAsync(freed, 0, 64, cudaStreamPerThread));
  report("a copy to the end", !cudaMemcpy(small, host, 64, cudaMemcpyHostToDevice));
  refused("a copy past the end", cudaMemcpy(small + 1, host, 64, cudaMemcpyHostToDevice));
  refused("a copy from past the end", cudaMemcpy(host, small + 1, 64, cudaMemcpyDeviceToHost));
  refused("a copy of freed memory", cudaMemcpy(small, freed, 64, cudaMemcpyDeviceToDevice));
  refused("host memory as the device's", cudaMemcpy(host, small, 64, cudaMemcpyHostToDevice));
  refused("a pointer of unknown kind past the end", cudaMemcpy(host, small, 65, cudaMemcpyDefault));
  cudaFree(small);

  Array<float> y(6);
  read_by_all<<<6, 1>>>(x, y);
  write_one<<<1, 1>>>(x);  // no race: the readers belong to an earlier launch
  read_by_all<<<6, 1>>>(x, y);
  expect("what many blocks have read, the next launch writes", cudaSuccess);
  report("and the one after it reads", y.host() == filled(6, 5.f));
  return finish();
}
