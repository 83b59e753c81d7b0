// SPDX-License-Identifier: Apache-2.0
// CUB: its collectives, its device-wide scans, and storage that is used twice, which is a finding
// without a barrier between. One program, because nvcc reads CUB's headers for longer than it works
// on the rest.
//
//     cub                                   tests everything but the finding
//     cub NUMBER                            device-wide scans of so many elements
//     cub storage_reused_with[out]_barrier
#include "cub_block.cuh"
#include "cub_device.cuh"

template <bool kSync>
__global__ void storage_twice(float* x) {
  using Reduce = cub::BlockReduce<float, 128>;
  __shared__ typename Reduce::TempStorage storage;
  const float v = x[threadIdx.x], a = Reduce(storage).Sum(v);
  if (kSync) __syncthreads();
  const float b = Reduce(storage).Sum(2 * v);
  if (threadIdx.x == 0) x[0] = a + b;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what.rfind("storage_reused_", 0) == 0) {
    testing::Array<float> x(testing::numbers(128));
    if (what == "storage_reused_without_barrier")
      storage_twice<false><<<1, 128>>>(x);
    else
      storage_twice<true><<<1, 128>>>(x);
    cudaDeviceSynchronize();
    const cudaError_t e = cudaGetLastError();
    std::printf("%s: %s\n", argv[1], e ? cudaGetErrorString(e) : "finished");
    return e != 0;
  }
  if (what.empty()) cub_block::test();
  cub_device::test(what.empty() ? 20011 : std::stoi(what));
  return testing::finish();
}
