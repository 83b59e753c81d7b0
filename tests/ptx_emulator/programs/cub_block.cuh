// SPDX-License-Identifier: Apache-2.0
// CUB's block and warp collectives, every algorithm, odd sizes included.
#pragma once
#include <cub/block/block_load.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <cub/warp/warp_scan.cuh>

#include "affine.cuh"
#include "testing.cuh"

namespace cub_block {
using namespace testing;

struct Larger {
  __device__ float operator()(float x, float y) const { return x > y ? x : y; }
};

template <cub::BlockScanAlgorithm kAlgorithm, int kThreads>
__global__ void scan(const float* in, float* out) {
  using Scan = cub::BlockScan<float, kThreads, kAlgorithm>;
  __shared__ typename Scan::TempStorage storage;
  float v = in[threadIdx.x], total;
  Scan(storage).InclusiveSum(v, v, total);
  __syncthreads();  // the storage is used again
  float before;
  Scan(storage).ExclusiveSum(in[threadIdx.x], before);
  out[threadIdx.x] = v + total;
  out[kThreads + threadIdx.x] = before;
}
template <cub::BlockScanAlgorithm kAlgorithm>
__global__ void scan_maps(const Affine* in, Affine* out) {
  using Scan = cub::BlockScan<Affine, 128, kAlgorithm>;
  __shared__ typename Scan::TempStorage storage;
  Affine v[3];
  for (int i = 0; i < 3; i++) v[i] = in[threadIdx.x * 3 + i];
  Scan(storage).InclusiveScan(v, v, Compose());
  for (int i = 0; i < 3; i++) out[threadIdx.x * 3 + i] = v[i];
}
template <cub::BlockReduceAlgorithm kAlgorithm, int kThreads>
__global__ void reduce(const float* in, float* out) {
  using Reduce = cub::BlockReduce<float, kThreads, kAlgorithm>;
  __shared__ typename Reduce::TempStorage storage;
  const float v = in[threadIdx.x], sum = Reduce(storage).Sum(v);
  __syncthreads();
  const float largest = Reduce(storage).Reduce(v, Larger());
  if (threadIdx.x == 0) out[0] = sum, out[1] = largest;
}
template <cub::BlockLoadAlgorithm kLoad, cub::BlockStoreAlgorithm kStore>
__global__ void load_store(const float* in, float* out, int n) {
  using Load = cub::BlockLoad<float, 128, 4, kLoad>;
  using Store = cub::BlockStore<float, 128, 4, kStore>;
  __shared__ union {
    typename Load::TempStorage load;
    typename Store::TempStorage store;
  } storage;
  float v[4];
  Load(storage.load).Load(in, v, n, 0.f);
  __syncthreads();
  for (int i = 0; i < 4; i++) v[i] = v[i] * 2 + float(threadIdx.x);
  Store(storage.store).Store(out, v, n);
}
__global__ void warps(const float* in, float* scanned, float* reduced) {
  using Scan = cub::WarpScan<float>;
  using Reduce = cub::WarpReduce<float>;
  __shared__ typename Scan::TempStorage scans[4];
  __shared__ typename Reduce::TempStorage reductions[4];
  const int warp = threadIdx.x / 32;
  float v = in[threadIdx.x], before;
  Scan(scans[warp]).ExclusiveSum(v, before);
  scanned[threadIdx.x] = before;
  const float sum = Reduce(reductions[warp]).Sum(v);
  if (threadIdx.x % 32 == 0) reduced[warp] = sum;
}

template <cub::BlockScanAlgorithm kAlgorithm, int kThreads>
void test_scan(const char* name) {
  const auto in = numbers(kThreads);
  Array<float> d(in), out(2 * kThreads);
  scan<kAlgorithm, kThreads><<<1, kThreads>>>(d, out);
  std::vector<double> want(2 * kThreads);
  double total = 0, sum = 0;
  for (float x : in) total += x;
  for (int i = 0; i < kThreads; i++) want[kThreads + i] = sum, sum += in[i], want[i] = sum + total;
  report_error("BlockScan " + std::string(name) + ", " + std::to_string(kThreads) + " threads",
               difference(out.host(), want), 2e-5);
}
template <cub::BlockScanAlgorithm kAlgorithm>
void test_maps(const char* name) {
  std::vector<Affine> in(384);
  const auto x = numbers(768);
  for (int i = 0; i < 384; i++) in[i] = {x[2 * i], x[2 * i + 1]};
  Array<Affine> d(in), out(384);
  scan_maps<kAlgorithm><<<1, 128>>>(d, out);
  double a = 1, b = 0, error = 0;
  for (int i = 0; i < 384; i++) {
    b = in[i].a * b + in[i].b, a *= in[i].a;
    error = std::fmax(error, std::fabs(out.host()[i].b - b) + std::fabs(out.host()[i].a - a));
  }
  report_error("BlockScan of affine maps, " + std::string(name), error, 1e-5);
}
template <cub::BlockReduceAlgorithm kAlgorithm, int kThreads>
void test_reduce(const char* name) {
  const auto in = numbers(kThreads);
  Array<float> d(in), out(2);
  reduce<kAlgorithm, kThreads><<<1, kThreads>>>(d, out);
  double sum = 0, largest = -1e9;
  for (float x : in) sum += x, largest = std::fmax(largest, x);
  report_error("BlockReduce " + std::string(name) + ", " + std::to_string(kThreads) + " threads",
               difference(out.host(), {sum, largest}), 2e-5);
}
template <cub::BlockLoadAlgorithm kLoad, cub::BlockStoreAlgorithm kStore>
void test_load_store(const char* name) {
  const auto in = numbers(512);
  Array<float> d(in), out(std::vector<float>(512, 9.f));
  load_store<kLoad, kStore><<<1, 128>>>(d, out, 501);
  std::vector<double> want(512);
  const bool striped = kLoad == cub::BLOCK_LOAD_STRIPED;
  for (int i = 0; i < 512; i++) want[i] = i < 501 ? 2 * in[i] + (striped ? i % 128 : i / 4) : 9;
  report_error("BlockLoad and BlockStore " + std::string(name), difference(out.host(), want), 1e-6);
}

inline void test() {
  test_scan<cub::BLOCK_SCAN_RAKING, 128>("raking"), test_scan<cub::BLOCK_SCAN_RAKING, 96>("raking"),
      test_scan<cub::BLOCK_SCAN_RAKING, 65>("raking");
  test_scan<cub::BLOCK_SCAN_RAKING_MEMOIZE, 128>("raking memoize"),
      test_scan<cub::BLOCK_SCAN_WARP_SCANS, 128>("warp scans"),
      test_scan<cub::BLOCK_SCAN_WARP_SCANS, 64>("warp scans");
  test_maps<cub::BLOCK_SCAN_RAKING>("raking"), test_maps<cub::BLOCK_SCAN_WARP_SCANS>("warp scans");
  test_reduce<cub::BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY, 256>("raking commutative"),
      test_reduce<cub::BLOCK_REDUCE_RAKING, 256>("raking");
  test_reduce<cub::BLOCK_REDUCE_WARP_REDUCTIONS, 256>("warp reductions"),
      test_reduce<cub::BLOCK_REDUCE_WARP_REDUCTIONS, 72>("warp reductions");
  test_load_store<cub::BLOCK_LOAD_DIRECT, cub::BLOCK_STORE_DIRECT>("direct"),
      test_load_store<cub::BLOCK_LOAD_WARP_TRANSPOSE, cub::BLOCK_STORE_WARP_TRANSPOSE>(
          "warp transpose");
  test_load_store<cub::BLOCK_LOAD_TRANSPOSE, cub::BLOCK_STORE_TRANSPOSE>("transpose"),
      test_load_store<cub::BLOCK_LOAD_STRIPED, cub::BLOCK_STORE_STRIPED>("striped");
  const auto in = numbers(128);
  Array<float> d(in), scanned(128), reduced(4);
  warps<<<1, 128>>>(d, scanned, reduced);
  std::vector<double> s(128), r(4);
  for (int i = 0; i < 128; i++) s[i] = i % 32 ? s[i - 1] + in[i - 1] : 0, r[i / 32] += in[i];
  report_error("WarpScan", difference(scanned.host(), s), 1e-5),
      report_error("WarpReduce", difference(reduced.host(), r), 1e-5);
}

}  // namespace cub_block
