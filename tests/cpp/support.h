// SPDX-License-Identifier: Apache-2.0
//
// What the kernel tests share: instruction sets in turn, typed buffers full of NaN, error measures.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "cpu/registry.h"

namespace deltanet::testing_support {

// Each test of a derived suite runs once for every instruction set that was built, with that one
// forced.
class EveryIsa : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    for (const std::string& name : cpu::available_isas())
      if (name == GetParam()) {
        cpu::force_isa(name);
        return;
      }
    GTEST_SKIP() << "this CPU cannot run " << GetParam();
  }
  void TearDown() override { cpu::force_isa(""); }
};

inline std::string isa_name(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

#define DELTANET_FOR_EVERY_ISA(suite)                                                     \
  INSTANTIATE_TEST_SUITE_P(On, suite, ::testing::ValuesIn(::deltanet::cpu::built_isas()), \
                           ::deltanet::testing_support::isa_name)

inline const char* name_of(DType t) {
  switch (t) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat64:
      return "fp64";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat16:
      return "fp16";
  }
  return "?";
}

// An array of any element type. Every byte starts as 0xff, which is a NaN in each of them, so that
// an element that nobody wrote shows.
class Buffer {
 public:
  Buffer(DType dtype, int64_t size) : dtype_(dtype), bytes_(size_t(size * size_of(dtype)), 0xff) {}
  DType dtype() const { return dtype_; }
  int64_t size() const { return int64_t(bytes_.size()) / size_of(dtype_); }
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  double get(int64_t i) const { return load_element<double>(bytes_.data(), dtype_, i); }
  void set(int64_t i, double x) { store_element<double>(bytes_.data(), dtype_, i, x); }
  bool operator==(const Buffer& other) const { return bytes_ == other.bytes_; }
  bool is_untouched(int64_t i) const {
    const int64_t width = size_of(dtype_);
    for (int64_t k = 0; k < width; ++k)
      if (bytes_[size_t(i * width + k)] != 0xff) return false;
    return true;
  }

 private:
  DType dtype_;
  std::vector<unsigned char> bytes_;
};

using Random = std::mt19937_64;
inline double uniform(Random& r, double low, double high) {
  return low + (high - low) * double(r() >> 11) * 0x1p-53;
}
inline int64_t pick(Random& r, std::initializer_list<int64_t> from) {
  return from.begin()[r() % from.size()];
}
inline double normal(Random& r) {
  const double radius = std::sqrt(-2 * std::log(1 - uniform(r, 0, 1)));
  return radius * std::cos(6.283185307179586 * uniform(r, 0, 1));
}

// Root of the summed squared error over the root of the summed squares; 0 for two zero vectors.
inline double error_ratio(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  if (error == 0) return 0;  // false for a NaN
  return norm > 0 ? std::sqrt(error / norm) : std::numeric_limits<double>::infinity();
}

}  // namespace deltanet::testing_support
