// SPDX-License-Identifier: Apache-2.0
// The rule's kernels from plain C++: raw pointers, a params struct, a stream. Both forms against
// the recurrence in double, states and maps, packed sequences that share key heads; then the shapes
// that are counted.
#include <cstring>
#include <stdexcept>

#include "cuda/forward.h"
#include "cuda/simt_forward.h"
#include "testing.cuh"
using namespace testing;
using namespace deltanet::cuda;
using namespace deltanet;

struct Sizes {
  int64_t batch, tokens, key_heads, value_heads;
  int K, V;
  std::vector<int64_t> starts;  // of packed sequences; empty: each batch row is one sequence
  bool l2norm;

  int64_t sequences() const { return starts.empty() ? batch : int64_t(starts.size()) - 1; }
};

template <int kRank>
View<kRank> view(const float* data, const int64_t (&sizes)[kRank]) {
  View<kRank> v;
  v.data = data;
  int64_t stride = 1;
  for (int i = kRank - 1; i >= 0; --i) v.stride[i] = stride, stride *= sizes[i];
  return v;
}
template <int kRank>
MutableView<kRank> mutable_view(float* data, const int64_t (&sizes)[kRank]) {
  const View<kRank> like = view<kRank>(data, sizes);
  MutableView<kRank> v;
  v.data = data;
  std::copy(like.stride, like.stride + kRank, v.stride);
  return v;
}

// Inputs on the host and on the device.
struct Inputs {
  explicit Inputs(const Sizes& s)
      : q(numbers(s.batch * s.tokens * s.key_heads * s.K, 1)),
        k(numbers(s.batch * s.tokens * s.key_heads * s.K, 2)),
        v(numbers(s.batch * s.tokens * s.value_heads * s.V, 3)),
        g(numbers(s.batch * s.tokens * s.value_heads, 4)),
        beta(numbers(s.batch * s.tokens * s.value_heads, 5)),
        state(numbers(s.sequences() * s.value_heads * s.K * s.V, 6)) {
    for (float& x : g) x = -std::fabs(x);
    for (float& x : beta) x = std::fabs(x);
    if (!s.l2norm)
      for (float& x : k) x /= std::sqrt(float(s.K));
  }
  std::vector<float> q, k, v, g, beta, state;
};

// Equation (1).
void recurrence(const Sizes& s, const Inputs& x, std::vector<double>& o, std::vector<double>& S) {
  const int64_t HV = s.value_heads, HK = s.key_heads;
  o.assign(size_t(s.batch * s.tokens * HV * s.V), 0.0);
  S.assign(x.state.begin(), x.state.end());
  const double scale = 1 / std::sqrt(double(s.K));
  for (int64_t n = 0; n < s.sequences(); ++n)
    for (int64_t h = 0; h < HV; ++h) {
      double* state = S.data() + (n * HV + h) * s.K * s.V;
      const int64_t row = s.starts.empty() ? n * s.tokens : 0;
      const int64_t begin = s.starts.empty() ? 0 : s.starts[n];
      const int64_t end = s.starts.empty() ? s.tokens : s.starts[n + 1];
      for (int64_t t = row + begin; t < row + end; ++t) {
        const int64_t key = (t * HK + h / (HV / HK)) * s.K;
        double kk = 1e-6, qq = 1e-6;
        for (int i = 0; i < s.K; ++i) {
          kk += double(x.k[key + i]) * x.k[key + i];
          qq += double(x.q[key + i]) * x.q[key + i];
        }
        const double rk = s.l2norm ? 1 / std::sqrt(kk) : 1, rq = s.l2norm ? 1 / std::sqrt(qq) : 1;
        const double a = std::exp(double(x.g[t * HV + h])), b = x.beta[t * HV + h];
        for (int j = 0; j < s.V; ++j) {
          double read = 0, out = 0;
          for (int i = 0; i < s.K; ++i) read += a * state[i * s.V + j] * rk * x.k[key + i];
          const double d = b * (x.v[(t * HV + h) * s.V + j] - read);
          for (int i = 0; i < s.K; ++i) {
            state[i * s.V + j] = a * state[i * s.V + j] + rk * x.k[key + i] * d;
            out += state[i * s.V + j] * rq * x.q[key + i];
          }
          o[(t * HV + h) * s.V + j] = scale * out;
        }
      }
    }
}

double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double error = 0, size = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

void test(const std::string& name, const Sizes& s) {
  const Inputs x(s);
  const Array<float> q(x.q), k(x.k), v(x.v), g(x.g), beta(x.beta), state(x.state);
  const Array<int64_t> starts(s.starts.empty() ? std::vector<int64_t>(1, 0) : s.starts);
  const size_t outputs = size_t(s.batch * s.tokens * s.value_heads * s.V);

  RuleParams p;
  p.batch = s.batch, p.tokens = s.tokens;
  p.key_heads = s.key_heads, p.value_heads = s.value_heads;
  p.dim_k = s.K, p.dim_v = s.V;
  p.sequences = s.sequences();
  if (!s.starts.empty()) p.device_cu_seqlens = starts.data, p.cu_seqlens_is_int64 = true;
  p.query = view<4>(q, {s.batch, s.tokens, s.key_heads, s.K});
  p.key = view<4>(k, {s.batch, s.tokens, s.key_heads, s.K});
  p.value = view<4>(v, {s.batch, s.tokens, s.value_heads, s.V});
  p.g = view<3>(g, {s.batch, s.tokens, s.value_heads});
  p.beta = view<3>(beta, {s.batch, s.tokens, s.value_heads});
  p.initial_state = view<4>(state, {s.sequences(), s.value_heads, s.K, s.V});
  p.scale = 1 / std::sqrt(double(s.K));
  p.l2norm = s.l2norm;

  std::vector<double> want_o, want_S;
  recurrence(s, x, want_o, want_S);
  for (const bool chunked : {false, true}) {
    const Array<float> o(outputs), S(x.state.size());
    const Array<char> workspace(simt::workspace_bytes(p) + 1);
    p.output = mutable_view<4>(o.data, {s.batch, s.tokens, s.value_heads, s.V});
    p.final_state = mutable_view<4>(S.data, {s.sequences(), s.value_heads, s.K, s.V});
    if (chunked)
      simt::forward(p, workspace.data, nullptr);
    else
      recurrent_forward(p, nullptr);
    cudaDeviceSynchronize();
    const std::string form = name + (chunked ? ", chunks" : ", tokens");
    report_error(form + ", output", relative_error(o.host(), want_o), 2e-6);
    report_error(form + ", state", relative_error(S.host(), want_S), 2e-6);
  }
}

void test_float64() {
  RuleParams p;
  p.key.dtype = DType::kFloat64;
  p.dim_k = p.dim_v = 8;
  try {
    recurrent_forward(p, nullptr);
    report("float64 is declined", false);
  } catch (const std::invalid_argument& error) {
    report("float64 is declined", std::strstr(error.what(), "float64 runs on the CPU"));
  }
}

int main() {
  test("two batch rows", {2, 37, 1, 3, 20, 24, {}, true});
  test("packed", {1, 60, 2, 4, 16, 40, {0, 0, 17, 17, 50}, true});
  test("no l2norm, odd head dims", {1, 21, 1, 1, 33, 7, {}, false});
  test("decode", {4, 1, 1, 2, 128, 128, {}, true});
  test("one chunk of wide heads", {1, 16, 1, 2, 128, 128, {}, true});
  test_float64();
  return finish();
}
