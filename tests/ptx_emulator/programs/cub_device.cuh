// SPDX-License-Identifier: Apache-2.0
// CUB's device-wide scans: blocks that hand over partial results to later blocks (decoupled
// look-back).
#pragma once
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>

#include "affine.cuh"
#include "testing.cuh"

namespace cub_device {
using namespace testing;

template <class Call>
cudaError_t with_storage(Call call) {
  size_t bytes = 0;
  if (cudaError_t e = call(nullptr, bytes)) return e;
  Array<char> storage(bytes);
  return call(storage.data, bytes);
}

inline void test(int n) {
  const int run = 777;
  const auto x = numbers(2 * size_t(n));
  std::vector<Affine> in(n);
  std::vector<int> keys(n);
  for (int i = 0; i < n; i++) in[i] = {0.5f + 0.4f * x[2 * i], x[2 * i + 1]}, keys[i] = i / run;
  Array<Affine> d(in), out(n);
  Array<int> k(keys);
  std::vector<double> want(n);
  std::vector<float> got(n);
  auto compare = [&](const char* name, cudaError_t e) {
    const auto r = out.host();
    for (int i = 0; i < n; i++) got[i] = r[i].b;
    report_error(name, e ? 1e30 : difference(got, want), 1e-4);
  };
  double b = 0;
  for (int i = 0; i < n; i++) want[i] = b = in[i].a * b + in[i].b;
  compare("DeviceScan of affine maps", with_storage([&](void* s, size_t& bytes) {
            return cub::DeviceScan::InclusiveScan(s, bytes, d.data, out.data, Compose(), n);
          }));
  for (int i = 0; i < n; i++) want[i] = b = i % run ? in[i].a * b + in[i].b : in[i].b;
  compare("DeviceScan by key", with_storage([&](void* s, size_t& bytes) {
            return cub::DeviceScan::InclusiveScanByKey(s, bytes, k.data, d.data, out.data,
                                                       Compose(), n);
          }));
  const auto f = numbers(size_t(n), 9);
  Array<float> df(f), sum(1);
  double total = 0;
  for (float v : f) total += v;
  const cudaError_t e = with_storage([&](void* s, size_t& bytes) {
    return cub::DeviceReduce::Sum(s, bytes, df.data, sum.data, n);
  });
  report_error("DeviceReduce", e ? 1e30 : std::fabs(sum.host()[0] - total), 1e-2);
}

}  // namespace cub_device
