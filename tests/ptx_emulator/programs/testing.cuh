// SPDX-License-Identifier: Apache-2.0
// What the test programs share: arrays on the device, and one line per check.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace testing {

inline int failures = 0;

inline void report(const std::string& name, bool ok, const std::string& detail = "") {
  std::printf("%s %s%s%s\n", ok ? "ok" : "FAIL", name.c_str(), detail.empty() ? "" : ": ",
              detail.c_str());
  failures += !ok;
}
inline void report_error(const std::string& name, double error, double tolerance) {
  char text[64];
  std::snprintf(text, sizeof text, "error %.3g, tolerance %.3g", error, tolerance);
  const cudaError_t e = cudaGetLastError();
  report(name, error <= tolerance && e == cudaSuccess, e ? cudaGetErrorString(e) : text);
}
inline int finish() {
  std::printf("%d failures\n", failures);
  return failures != 0;
}

// An array in device memory. Without initial values its bytes count as unwritten.
template <class T>
struct Array {
  T* data = nullptr;
  size_t size;
  explicit Array(size_t n) : size(n) { cudaMalloc(&data, n * sizeof(T)); }
  explicit Array(const std::vector<T>& v) : Array(v.size()) {
    cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  operator T*() const { return data; }
  std::vector<T> host() const {
    std::vector<T> v(size);
    cudaMemcpy(v.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost);
    return v;
  }
};
template <class T>
std::vector<T> filled(size_t n, T value) {
  return std::vector<T>(n, value);
}
// Small numbers without a pattern that a wrong index would keep.
inline std::vector<float> numbers(size_t n, unsigned seed = 1) {
  std::vector<float> v(n);
  for (size_t i = 0; i < n; i++) {
    seed = seed * 1664525u + 1013904223u;
    v[i] = float(int(seed >> 8) % 2001 - 1000) / 1000;
  }
  return v;
}
inline double difference(const std::vector<float>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); i++) {
    const double d = std::fabs(double(got[i]) - want[i]);
    worst = d <= worst ? worst : d;  // NaN counts as worst
  }
  return worst;
}

}  // namespace testing
