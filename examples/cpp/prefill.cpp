// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule from plain C++: raw device pointers, a params struct, a stream, no torch.
// One prompt goes through the chunked kernels, one more token through the recurrent one from the
// state that the prompt left; both are compared with the recurrence in double on the host.
//
//   cmake -S examples/cpp -B build/example -DCMAKE_CUDA_ARCHITECTURES=90
//   cmake --build build/example && build/example/prefill
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <stdexcept>
#include <vector>

#include "cuda/forward.h"

namespace {

using deltanet::DType;
using deltanet::MutableView;
using deltanet::View;
using deltanet::cuda::RuleParams;

constexpr int kTokens = 150;           // T; one sequence, so B = 1
constexpr int kKeyHeads = 2;           // HK
constexpr int kValueHeads = 4;         // HV: each key head serves two
constexpr int kDimK = 64, kDimV = 48;  // K, V

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory with the lifetime of a C++ object.
class Floats {
 public:
  explicit Floats(size_t count) : count_(count) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(float)));
  }
  explicit Floats(const std::vector<float>& host) : Floats(host.size()) {
    check(cudaMemcpy(data_, host.data(), count_ * sizeof(float), cudaMemcpyHostToDevice));
  }
  ~Floats() { cudaFree(data_); }
  Floats(const Floats&) = delete;

  float* data() const { return data_; }
  std::vector<float> to_host() const {
    std::vector<float> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(float), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  float* data_ = nullptr;
  size_t count_;
};

// Views say where a tensor lies: any strides will do, these are contiguous.
View<4> per_token(const float* data, int64_t heads, int64_t dim) {
  return {data, DType::kFloat32, {kTokens * heads * dim, heads * dim, dim, 1}};
}
View<3> gates(const float* data) {
  return {data, DType::kFloat32, {kTokens * kValueHeads, kValueHeads, 1}};
}
MutableView<4> output(float* data) {
  constexpr int64_t row = kValueHeads * kDimV;
  return {data, DType::kFloat32, {kTokens * row, row, kDimV, 1}};
}
template <class AnyView, class Pointer>
AnyView state(Pointer data) {  // [N, HV, K, V]
  return {data, DType::kFloat32, {kValueHeads * kDimK * kDimV, kDimK * kDimV, kDimV, 1}};
}

std::vector<float> normal(size_t count, unsigned seed, float scale) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw(0.f, scale);
  std::vector<float> x(count);
  for (float& value : x) value = draw(engine);
  return x;
}

struct Host {
  std::vector<float> q = normal(kTokens * kKeyHeads * kDimK, 1, 1.f),
                     k = normal(kTokens * kKeyHeads * kDimK, 2, 1.f),
                     v = normal(kTokens * kValueHeads * kDimV, 3, 1.f),
                     g = normal(kTokens * kValueHeads, 4, 0.1f),
                     beta = normal(kTokens * kValueHeads, 5, 1.f);
  Host() {
    for (float& x : g) x = -std::fabs(x);              // log of a decay
    for (float& x : beta) x = 1 / (1 + std::exp(-x));  // write strength
  }
};

// Equation (1), in double: o_t = scale S_t^T q_t after S_t = a S + b k (v - a S^T k)^T.
std::vector<float> recurrence(const Host& x) {
  std::vector<float> out(x.v.size());
  for (int h = 0; h < kValueHeads; ++h) {
    const int key_head = h / (kValueHeads / kKeyHeads);
    std::vector<double> S(kDimK * kDimV), k(kDimK), q(kDimK);
    for (int t = 0; t < kTokens; ++t) {
      const float* raw_k = &x.k[(t * kKeyHeads + key_head) * kDimK];
      const float* raw_q = &x.q[(t * kKeyHeads + key_head) * kDimK];
      double k2 = 1e-6, q2 = 1e-6;
      for (int i = 0; i < kDimK; ++i) {
        k2 += double(raw_k[i]) * raw_k[i];
        q2 += double(raw_q[i]) * raw_q[i];
      }
      for (int i = 0; i < kDimK; ++i) {
        k[i] = raw_k[i] / std::sqrt(k2);
        q[i] = raw_q[i] / std::sqrt(q2);
      }
      const int at = t * kValueHeads + h;
      const double a = std::exp(double(x.g[at])), b = x.beta[at];
      for (int j = 0; j < kDimV; ++j) {
        double seen = 0, read = 0;
        for (int i = 0; i < kDimK; ++i) seen += a * S[i * kDimV + j] * k[i];
        for (int i = 0; i < kDimK; ++i) {
          double& s = S[i * kDimV + j];
          s = a * s + b * k[i] * (x.v[at * kDimV + j] - seen);
          read += s * q[i];
        }
        out[at * kDimV + j] = float(read / std::sqrt(double(kDimK)));
      }
    }
  }
  return out;
}

void run() {
  const Host host;
  const Floats q(host.q), k(host.k), v(host.v), g(host.g), beta(host.beta);
  const Floats out(host.v.size()), S(kValueHeads * kDimK * kDimV),
      S_next(kValueHeads * kDimK * kDimV);
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));

  RuleParams p;
  p.batch = p.sequences = 1;
  p.tokens = kTokens - 1;  // the prompt; the strides above are those of all tokens
  p.key_heads = kKeyHeads;
  p.value_heads = kValueHeads;
  p.dim_k = kDimK;
  p.dim_v = kDimV;
  p.query = per_token(q.data(), kKeyHeads, kDimK);
  p.key = per_token(k.data(), kKeyHeads, kDimK);
  p.value = per_token(v.data(), kValueHeads, kDimV);
  p.g = gates(g.data());
  p.beta = gates(beta.data());
  p.output = output(out.data());
  p.final_state = state<MutableView<4>>(S.data());
  p.scale = 1 / std::sqrt(double(kDimK));
  p.l2norm = true;

  void* workspace = nullptr;
  check(cudaMalloc(&workspace, std::max<size_t>(1, deltanet::cuda::chunk_forward_workspace(p))));
  deltanet::cuda::chunk_forward(p, workspace, stream);

  // One token more. Both calls are only queued; the stream keeps them in order.
  constexpr int64_t last = kTokens - 1;
  RuleParams next = p;
  next.tokens = 1;
  next.query.data = q.data() + last * p.query.stride[1];
  next.key.data = k.data() + last * p.key.stride[1];
  next.value.data = v.data() + last * p.value.stride[1];
  next.g.data = g.data() + last * p.g.stride[1];
  next.beta.data = beta.data() + last * p.beta.stride[1];
  next.output.data = out.data() + last * p.output.stride[1];
  next.initial_state = state<View<4>>(S.data());
  next.final_state = state<MutableView<4>>(S_next.data());
  deltanet::cuda::recurrent_forward(next, stream);
  check(cudaStreamSynchronize(stream));

  const std::vector<float> got = out.to_host(), want = recurrence(host);
  double error = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  const double relative = std::sqrt(error / size);
  std::printf("%d tokens, %d value heads: relative error %.1e against the recurrence in double\n",
              kTokens, kValueHeads, relative);
  check(cudaFree(workspace));
  check(cudaStreamDestroy(stream));
  if (!(relative < 1e-5)) throw std::runtime_error("the error is too large");
}

}  // namespace

int main() {
  try {
    run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "prefill: %s\n", error.what());
    return 1;
  }
}
