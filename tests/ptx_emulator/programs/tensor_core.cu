// SPDX-License-Identifier: Apache-2.0
// The tensor-core forward from plain C++, without torch: tensor_core::forward against the fp64
// recurrence, equation (1). With DELTANET_ALONE it brings the kernels that it needs with it, and
// can be built again and again with seeded bugs; else it is linked to those that the operators run.
#include <cuda_bf16.h>

#include <random>

#ifdef DELTANET_ALONE
#include "bf16_128.cuh"
#endif
#include "cuda/tensor_core.h"
#include "processors.cuh"
#include "testing.cuh"
using namespace testing;
using deltanet::DType;
namespace dn = deltanet::cuda;

constexpr int T = 200, HV = 2, K = 128, V = 32;

struct Inputs {
  std::vector<float> q, k, v, g, beta, state;
};

// kinds: 0 random keys, 1 the same key everywhere with beta 1.999, 2 a key along one axis, g that
// jumps up, and no initial state: what goes wrong is not outgrown by noise in other directions
Inputs inputs(int kind) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto draw = [&](size_t n, float size) {
    std::vector<float> x(n);
    for (auto& y : x) y = __bfloat162float(__float2bfloat16(size * normal(random)));
    return x;
  };
  Inputs x{draw(T * K, 1),  draw(T * K, 1),  draw(T * HV * V, 1),
           draw(T * HV, 1), draw(T * HV, 1), draw(HV * K * V, 0.3f)};
  for (int t = 0; t < T; ++t) {
    for (int i = 0; kind > 0 && i < K; ++i)
      x.k[t * K + i] = kind == 1 ? x.k[i] : i == 0 ? 1.f : 0.f;
    for (int h = 0; h < HV; ++h) {
      float& g = x.g[t * HV + h];
      g = kind == 1 ? 0.f : -0.5f * std::log1p(std::exp(g - 2));
      if (kind == 2 && t % 16 == 9) g = 4;
      float& beta = x.beta[t * HV + h];
      beta = kind == 1 ? 1.999f : kind == 2 ? 0.95f : 1 / (1 + std::exp(-beta));
    }
  }
  if (kind == 2) x.state.assign(x.state.size(), 0.f);
  return x;
}

// Equation (1), with l2norm and scale 1. Leaves the final state in S.
std::vector<double> recurrence(const Inputs& x, std::vector<double>& S) {
  std::vector<double> o(T * HV * V), u(V);
  S.assign(x.state.begin(), x.state.end());
  for (int t = 0; t < T; ++t)
    for (int h = 0; h < HV; ++h) {
      const float *q = &x.q[t * K], *k = &x.k[t * K];
      double qq = 1e-6, kk = 1e-6;
      for (int i = 0; i < K; ++i) qq += double(q[i]) * q[i], kk += double(k[i]) * k[i];
      const double a = std::exp(double(x.g[t * HV + h]));
      double* const s = &S[h * K * V];
      for (int j = 0; j < V; ++j) {
        double error = x.v[(t * HV + h) * V + j], out = 0;
        for (int i = 0; i < K; ++i) error -= (s[i * V + j] *= a) * k[i] / std::sqrt(kk);
        for (int i = 0; i < K; ++i) {
          s[i * V + j] += x.beta[t * HV + h] * error * k[i] / std::sqrt(kk);
          out += s[i * V + j] * q[i] / std::sqrt(qq);
        }
        o[(t * HV + h) * V + j] = out;
      }
    }
  return o;
}

template <class Got>
double ratio(const std::vector<Got>& got, const std::vector<double>& want) {
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = double(got[i]) - want[i];
    error += d * d;
    size += want[i] * want[i];
  }
  const double r = std::sqrt(error / size);
  return r == r ? r : 1e30;
}

std::vector<__nv_bfloat16> narrow(const std::vector<float>& x) {
  std::vector<__nv_bfloat16> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = __float2bfloat16(x[i]);
  return y;
}

using dn::tensor_core::Roles;

void check(int kind, Roles roles, int64_t segment_chunks) {
  const Inputs x = inputs(kind);
  const Array<__nv_bfloat16> q(narrow(x.q)), k(narrow(x.k)), v(narrow(x.v));
  const Array<float> g(x.g), beta(x.beta), initial(x.state);
  Array<__nv_bfloat16> out(size_t(T * HV * V));
  Array<float> state(size_t(HV * K * V));
  dn::RuleParams p;
  p.batch = p.sequences = p.key_heads = 1;
  p.tokens = T;
  p.value_heads = HV;
  p.dim_k = K;
  p.dim_v = V;
  p.query = {q.data, DType::kBFloat16, {T * K, K, K, 1}};
  p.key = {k.data, DType::kBFloat16, {T * K, K, K, 1}};
  p.value = {v.data, DType::kBFloat16, {T * HV * V, HV * V, V, 1}};
  p.g = {g.data, DType::kFloat32, {T * HV, HV, 1}};
  p.beta = {beta.data, DType::kFloat32, {T * HV, HV, 1}};
  p.initial_state = {initial.data, DType::kFloat32, {HV * K * V, K * V, V, 1}};
  p.output = {out.data, DType::kBFloat16, {T * HV * V, HV * V, V, 1}};
  p.final_state = {state.data, DType::kFloat32, {HV * K * V, K * V, V, 1}};
  p.l2norm = true;
  dn::tensor_core::Options options;
  options.segment_chunks = segment_chunks;
  options.roles = roles;
  const std::string name = "kind " + std::to_string(kind) + ", segments of " +
                           (segment_chunks < 0 ? "all" : std::to_string(segment_chunks)) +
                           (roles == Roles::kAlways ? ", roles" : "");
  report(name + ": supported", dn::tensor_core::supports(p));
  const Array<char> workspace(dn::tensor_core::workspace_bytes(p, options));
  dn::tensor_core::forward(p, workspace.data, 0, options);

  std::vector<double> want_state, rounded;
  const std::vector<double> want = recurrence(x, want_state);
  for (double y : want) rounded.push_back(__bfloat162float(__float2bfloat16(float(y))));
  std::vector<double> got;
  for (__nv_bfloat16 y : out.host()) got.push_back(__bfloat162float(y));
  report_error(name + ": output", ratio(got, want), 1.15 * ratio(rounded, want));
  report_error(name + ": state", ratio(state.host(), want_state),
               kind == 1   ? 3e-4
               : kind == 2 ? 3e-5
                           : 1e-5);
}

int main() {
  for (int kind : {0, 1, 2}) {
    processors = kind == 0 ? 1 : 4;  // with one, a block of prepare takes both value heads
    check(kind, Roles::kNever, -1);
    check(kind, Roles::kAlways, -1);
  }
  check(0, Roles::kNever, 1);
  check(0, Roles::kAlways, 1);
  return finish();
}
