// SPDX-License-Identifier: Apache-2.0
//
// The second stage of sums over tokens: blocks have left a row of partial sums each, and every
// column of these is added up in double, in one order that depends on shapes alone.
//
//   store(c, sum_i partial[i, c])
//
// Work split:  one block = 32 columns; kLanes threads of a column take every kLanes-th row.
// Memory:      reads every partial sum once, coalesced.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.cuh"

namespace deltanet::cuda {

constexpr int kSumLanes = 8;

template <class Store>
__global__ void __launch_bounds__(32 * kSumLanes)
    column_sums_kernel(const float* partial /* [rows, columns] */, int64_t rows, int64_t columns,
                       const __grid_constant__ Store store) {
  __shared__ double shared[kSumLanes][32];
  const int x = int(threadIdx.x) % 32, lane = int(threadIdx.x) / 32;
  const int64_t c = int64_t(blockIdx.x) * 32 + x;
  double sum = 0;
  if (c < columns)
    for (int64_t i = lane; i < rows; i += kSumLanes) sum += partial[i * columns + c];
  shared[lane][x] = sum;
  __syncthreads();  // every lane's sum is there
  if (lane > 0 || c >= columns) return;
  for (int i = 1; i < kSumLanes; ++i) sum += shared[i][x];
  store(c, float(sum));
}

template <class Store>
void sum_columns(const char* name, const float* partial, int64_t rows, int64_t columns,
                 const Store& store, cudaStream_t stream) {
  launch(name, column_sums_kernel<Store>, (columns + 31) / 32, 32 * kSumLanes,
         /*dynamic_shared=*/0, stream, partial, rows, columns, store);
}

}  // namespace deltanet::cuda
