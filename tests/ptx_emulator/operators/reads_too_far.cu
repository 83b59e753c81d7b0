// SPDX-License-Identifier: Apache-2.0
// A kernel with a mistake, for the test that a finding reaches Python.
#include <cstdint>

namespace deltanet::cuda {

__global__ void reads_too_far_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i + 1];  // one too far at the end
}

void reads_too_far(const float* x, float* y, int64_t n, cudaStream_t stream) {
  reads_too_far_kernel<<<unsigned((n + 127) / 128), 128, 0, stream>>>(x, y, n);
}

}  // namespace deltanet::cuda
