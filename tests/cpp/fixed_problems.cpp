// SPDX-License-Identifier: Apache-2.0
//
// Small fixed problems, one kernel each, whose instructions benchmarks/instructions.py counts.
//
//   fixed_problems                 the compiler, then each instruction set and problem of this CPU
//   fixed_problems ISA PROBLEM     runs it once, inside counted()
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cpu/causal_conv1d.h"
#include "cpu/forward.h"
#include "cpu/gated_rms_norm.h"
#include "rule_call.h"

namespace {

using namespace deltanet;
using testing_support::Options;
using testing_support::RuleCall;
using testing_support::Shape;

// 192 tokens are whole chunks of 16 and of 24; two value heads share a key head.
const Shape kPrefill{1, 192, 1, 2, 128, 128};
const Shape kDecode{1, 1, 2, 4, 128, 128};

const std::function<void()>* problem;

// What is counted. Everything that a problem needs is made before.
extern "C" __attribute__((noinline)) void counted() { (*problem)(); }

void count(const std::function<void()>& run) {
  problem = &run;
  counted();
}

void prefill(DType dtype) {
  Options options;
  options.dtype = dtype;
  RuleCall call(kPrefill, options);
  call.params.l2norm = true;
  count([&] { cpu::chunk_forward(call.params, SerialParallel()); });
}

void decode() {
  RuleCall call(kDecode);
  call.params.l2norm = true;
  count([&] { cpu::recurrent_forward(call.params, SerialParallel()); });
}

void gradients() {
  RuleCall call(kPrefill);
  call.params.l2norm = true;
  GatedDeltaRuleBackwardParams p;
  static_cast<GatedDeltaRuleParams&>(p) = call.params;
  const auto like = [](const View<4>& x) {
    MutableView<4> y;
    y.dtype = x.dtype;
    std::copy(x.stride, x.stride + 4, y.stride);
    return y;
  };
  const auto like3 = [](const View<3>& x) {
    MutableView<3> y;
    y.dtype = x.dtype;
    std::copy(x.stride, x.stride + 3, y.stride);
    return y;
  };
  const int64_t T = kPrefill.tokens, HK = kPrefill.key_heads, HV = kPrefill.value_heads;
  const int64_t K = kPrefill.dim_k, V = kPrefill.dim_v;
  std::vector<float> d_query(size_t(T * HK * K)), d_key(d_query), d_value(size_t(T * HV * V)),
      d_g(size_t(T * HV)), d_beta(d_g), d_state(size_t(HV * K * V)), grad(d_value.size(), 0.5f);
  p.d_query = like(p.query), p.d_query.data = d_query.data();
  p.d_key = like(p.key), p.d_key.data = d_key.data();
  p.d_value = like(p.value), p.d_value.data = d_value.data();
  p.d_g = like3(p.g), p.d_g.data = d_g.data();
  p.d_beta = like3(p.beta), p.d_beta.data = d_beta.data();
  p.d_initial_state = like(p.initial_state), p.d_initial_state.data = d_state.data();
  p.grad_output = p.value, p.grad_output.data = grad.data();
  count([&] { cpu::backward(p, SerialParallel()); });
}

void inverse() {
  constexpr int kMatrices = 8, kSize = 64;
  std::vector<float> lower(kMatrices * kSize * kSize, 0.01f), inverse(lower.size());
  TriangularInverseParams p;
  p.count = kMatrices;
  p.size = kSize;
  p.lower = lower.data();
  p.inverse = inverse.data();
  count([&] { cpu::triangular_inverse(p, SerialParallel()); });
}

std::vector<uint16_t> bf16_numbers(size_t count) {
  std::vector<uint16_t> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = float_to_bf16(float(int(i * 37 % 101) - 50) / 25);
  return x;
}

template <class AnyView>
AnyView bf16_rows(void* data, int64_t columns) {
  AnyView x;
  x.data = data, x.dtype = DType::kBFloat16;
  x.stride[0] = columns, x.stride[1] = 1;
  return x;
}

// As a layer calls it: 96 tokens of 256 channels, channels-last, four taps and silu.
void convolution() {
  constexpr int64_t kTokens = 96, kChannels = 256, kWidth = 4;
  std::vector<uint16_t> x = bf16_numbers(kTokens * kChannels), y(x.size()),
                        weight = bf16_numbers(kChannels * kWidth);
  const TokenRun run{0, 0, kTokens, 0};
  CausalConv1dParams p;
  p.batch = 1, p.channels = kChannels, p.tokens = kTokens;
  p.width = kWidth, p.state_tokens = kWidth - 1, p.silu = true;
  p.runs = &run, p.run_count = 1;
  p.x.data = x.data(), p.output.data = y.data();
  p.x.dtype = p.output.dtype = DType::kBFloat16;
  for (int64_t* stride : {p.x.stride, p.output.stride})
    stride[0] = kTokens * kChannels, stride[1] = 1, stride[2] = kChannels;
  p.weight = bf16_rows<View<2>>(weight.data(), kWidth);
  count([&] { cpu::causal_conv1d(p, SerialParallel()); });
}

void norm() {
  constexpr int64_t kRows = 256, kColumns = 128;
  std::vector<uint16_t> x = bf16_numbers(kRows * kColumns), gate = x, y(x.size()),
                        weight = bf16_numbers(kColumns);
  GatedRmsNormParams p;
  p.rows = kRows, p.columns = kColumns, p.eps = 1e-6;
  p.x = bf16_rows<View<2>>(x.data(), kColumns);
  p.gate = bf16_rows<View<2>>(gate.data(), kColumns);
  p.output = bf16_rows<MutableView<2>>(y.data(), kColumns);
  p.weight.data = weight.data(), p.weight.dtype = DType::kBFloat16, p.weight.stride[0] = 1;
  count([&] { cpu::gated_rms_norm(p, SerialParallel()); });
}

const std::map<std::string, std::function<void()>> kProblems = {
    {"chunk forward, fp32", [] { prefill(DType::kFloat32); }},
    {"chunk forward, bf16", [] { prefill(DType::kBFloat16); }},
    {"recurrent forward, fp32", decode},
    {"backward, fp32", gradients},
    {"convolution, bf16", convolution},
    {"gated norm, bf16", norm},
    {"triangular inverse, fp32", inverse},
};

#if defined(__clang__)
const char kCompiler[] = "clang " __VERSION__;
#else
const char kCompiler[] = "gcc " __VERSION__;
#endif

}  // namespace

int main(int count, char** arguments) {
  if (count == 3) {
    cpu::force_isa(arguments[1]);
    kProblems.at(arguments[2])();
    return 0;
  }
  std::puts(kCompiler);
  for (const std::string& isa : cpu::available_isas())
    for (const auto& [name, run] : kProblems) std::printf("%s\t%s\n", isa.c_str(), name.c_str());
}
