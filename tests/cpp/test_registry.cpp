// SPDX-License-Identifier: Apache-2.0
//
// Which instruction set runs: order, forcing, errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/registry.h"

namespace deltanet::cpu {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

std::string error_of(const std::string& name) {
  try {
    force_isa(name);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  force_isa("");
  return "";
}

TEST(Registry, ScalarIsAlwaysThereAndLast) {
  EXPECT_EQ(built_isas().back(), "scalar");
  EXPECT_EQ(available_isas().back(), "scalar");
}

TEST(Registry, WhatIsAvailableWasBuiltAndKeepsTheOrder) {
  const auto built = built_isas(), available = available_isas();
  size_t at = 0;
  for (const std::string& name : built)
    if (at < available.size() && available[at] == name) ++at;
  EXPECT_EQ(at, available.size());
}

#if defined(__x86_64__)
TEST(Registry, X86HasAvx512WithBf16ThenWithoutThenAvx2ThenScalar) {
  EXPECT_EQ(built_isas(), (std::vector<std::string>{"avx512_bf16", "avx512", "avx2", "scalar"}));
}
#elif defined(__aarch64__)
TEST(Registry, Arm64HasNeonThenScalar) {
  EXPECT_EQ(built_isas(), (std::vector<std::string>{"neon", "scalar"}));
}
#endif

TEST(Registry, TheBestAvailableIsaIsTheDefault) {
  if (const char* wanted = std::getenv("DELTANET_CPU_ISA"); wanted && *wanted)
    GTEST_SKIP() << "DELTANET_CPU_ISA=" << wanted << " is set";
  EXPECT_EQ(active_isa(), available_isas().front());
}

TEST(Registry, AForcedIsaIsUsedUntilItIsTakenBack) {
  const std::string automatic = active_isa();
  for (const std::string& name : available_isas()) {
    force_isa(name);
    EXPECT_EQ(active_isa(), name);
  }
  force_isa("");
  EXPECT_EQ(active_isa(), automatic);
}

TEST(Registry, EveryAvailableIsaHasKernelsOfItsOwn) {
  std::vector<const Bf16Kernels*> seen;
  set_bf16_products(Bf16Products::kAlways);
  for (const std::string& name : available_isas()) {
    force_isa(name);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), kernels_bf16()), 0) << name;
    EXPECT_GT(kernels_f32().column_granularity, 0);
    seen.push_back(kernels_bf16());
  }
  force_isa("");
  set_bf16_products(Bf16Products::kNever);
}

TEST(Registry, PairsOfBf16AreMultipliedWhereAskedFor) {
  for (const std::string& name : available_isas()) {
    force_isa(name);
    EXPECT_EQ(kernels_bf16(), nullptr) << name;
    set_bf16_products(Bf16Products::kWhereFaster);
    EXPECT_EQ(kernels_bf16() != nullptr, name == "avx512_bf16");
    set_bf16_products(Bf16Products::kAlways);
    EXPECT_NE(kernels_bf16(), nullptr) << name;
    set_bf16_products(Bf16Products::kNever);
  }
  force_isa("");
}

TEST(Registry, AnUnknownIsaIsAnErrorThatNamesItAndWhatCanBeHad) {
  const std::string error = error_of("avx1024");
  EXPECT_NE(error.find("avx1024"), std::string::npos) << error;
  for (const std::string& name : available_isas())
    EXPECT_NE(error.find(name), std::string::npos) << error;
}

TEST(Registry, NamesAreExact) {
  for (const char* name : {"AVX2", "avx", "avx512 ", " scalar", "auto"})
    EXPECT_NE(error_of(name), "") << name;
}

TEST(Registry, AnIsaThatThisCpuLacksIsAnError) {
  bool found = false;
  for (const std::string& name : built_isas()) {
    if (contains(available_isas(), name)) continue;
    found = true;
    const std::string error = error_of(name);
    EXPECT_NE(error.find(name), std::string::npos) << error;
    EXPECT_NE(error.find("scalar"), std::string::npos) << error;
  }
  if (!found) GTEST_SKIP() << "this CPU runs every instruction set";
}

TEST(Registry, AFailedForceChangesNothing) {
  force_isa("scalar");
  EXPECT_NE(error_of("nonsense"), "");
  EXPECT_EQ(active_isa(), "scalar");
  force_isa("");
}

}  // namespace
}  // namespace deltanet::cpu
