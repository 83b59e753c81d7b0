// SPDX-License-Identifier: Apache-2.0
//
// One call of the gated delta rule with memory of its own, and the recurrence that defines its
// result.
#pragma once
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/params.h"
#include "support.h"

namespace deltanet::testing_support {

struct Shape {
  int64_t batch, tokens, key_heads, value_heads;
  int dim_k, dim_v;
};

// How a [B, T, H, D] tensor lies in memory.
enum class Layout {
  kContiguous,
  kGaps,           // every row ends with unused elements
  kChannelsFirst,  // [B, H, D, T]: what a convolution leaves
  kHeadsFirst,     // [B, H, T, D]
};

struct Options {
  DType dtype = DType::kFloat32;        // of q, k, v and the output
  DType gate_dtype = DType::kFloat32;   // of g and beta
  DType state_dtype = DType::kFloat32;  // of the initial state
  Layout layout = Layout::kContiguous;
  Layout output_layout = Layout::kContiguous;
  bool with_g = true, with_beta = true;
  bool with_initial_state = true, with_final_state = true;
  bool state_v_first = false;
  std::vector<int64_t> cu_seqlens;  // empty: every batch row is a sequence
  uint64_t seed = 1;
};

// Owns the tensors of a call. Inputs are filled with what a model would give: g <= 0, beta in (0,
// 1), keys and queries of norm about 1. A test changes what it is about and then runs an operator
// on `params`.
class RuleCall {
 public:
  RuleCall(const Shape& s, const Options& options = {})
      : shape(s), options(options), cu_(options.cu_seqlens) {
    const int64_t B = s.batch, T = s.tokens;
    const bool wide = options.dtype == DType::kFloat64;
    params.batch = B;
    params.tokens = T;
    params.key_heads = s.key_heads;
    params.value_heads = s.value_heads;
    params.dim_k = s.dim_k;
    params.dim_v = s.dim_v;
    params.sequences = cu_.empty() ? B : int64_t(cu_.size()) - 1;
    params.cu_seqlens = cu_.empty() ? nullptr : cu_.data();
    params.scale = 1 / std::sqrt(double(s.dim_k));
    params.query = input4(T, s.key_heads, s.dim_k);
    params.key = input4(T, s.key_heads, s.dim_k);
    params.value = input4(T, s.value_heads, s.dim_v);
    if (options.with_g) params.g = input3();
    if (options.with_beta) params.beta = input3();

    const int64_t n = params.sequences, hv = s.value_heads, k = s.dim_k, v = s.dim_v;
    const DType state_dtype = wide ? DType::kFloat64 : DType::kFloat32;
    if (options.with_initial_state) {
      params.initial_state = view_of<View<4>>(new_buffer(options.state_dtype, n * hv * k * v));
      state_strides(params.initial_state.stride);
    }
    if (options.with_final_state) {
      params.final_state = view_of<MutableView<4>>(new_buffer(state_dtype, n * hv * k * v));
      state_strides(params.final_state.stride);
    }
    const auto [size, strides] = layout_of(options.output_layout, B, T, hv, v);
    output_buffer_ = new_buffer(options.dtype, size);
    params.output = view_of<MutableView<4>>(output_buffer_);
    std::copy(strides.begin(), strides.end(), params.output.stride);

    Random random(options.seed);
    const double key_size = 1 / std::sqrt(double(s.dim_k));
    fill_tokens(params.query, s.key_heads, s.dim_k, [&] { return normal(random) * key_size; });
    fill_tokens(params.key, s.key_heads, s.dim_k, [&] { return normal(random) * key_size; });
    fill_tokens(params.value, s.value_heads, s.dim_v, [&] { return normal(random); });
    fill_gate(params.g, [&] { return -std::exp(uniform(random, -6, 0.5)); });
    fill_gate(params.beta, [&] { return uniform(random, 0, 1); });
    fill_state(params.initial_state, [&] { return normal(random) * 0.5; });
  }
  RuleCall(const RuleCall&) = delete;
  RuleCall& operator=(const RuleCall&) = delete;

  // ---- changing inputs
  // ----------------------------------------------------------------------------

  void fill_tokens(const View<4>& x, int64_t heads, int64_t dim,
                   const std::function<double()>& next) {
    if (!x) return;
    for (int64_t b = 0; b < shape.batch; ++b)
      for (int64_t t = 0; t < shape.tokens; ++t)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < dim; ++i) write(x, offset(x, b, t, h, i), next());
  }
  void fill_gate(const View<3>& x, const std::function<double()>& next) {
    fill_gate_at(x, [&](int64_t) { return next(); });
  }
  void fill_gate_at(const View<3>& x, const std::function<double(int64_t)>& at_token) {
    if (!x) return;
    for (int64_t b = 0; b < shape.batch; ++b)
      for (int64_t t = 0; t < shape.tokens; ++t)
        for (int64_t h = 0; h < shape.value_heads; ++h)
          write(x, b * x.stride[0] + t * x.stride[1] + h * x.stride[2], at_token(t));
  }
  void fill_state(const View<4>& x, const std::function<double()>& next) {
    if (!x) return;
    for (int64_t n = 0; n < params.sequences; ++n)
      for (int64_t h = 0; h < shape.value_heads; ++h)
        for (int64_t i = 0; i < shape.dim_k; ++i)
          for (int64_t j = 0; j < shape.dim_v; ++j) write(x, offset(x, n, h, i, j), next());
  }
  // One element per value head (A_log, dt_bias).
  View<1> per_head(const std::function<double(int64_t)>& at_head) {
    View<1> x = view_of<View<1>>(new_buffer(DType::kFloat32, shape.value_heads));
    x.stride[0] = 1;
    for (int64_t h = 0; h < shape.value_heads; ++h) write(x, h, at_head(h));
    return x;
  }
  template <class AnyView>
  void write(const AnyView& x, int64_t at, double value) {
    store_element<double>(const_cast<void*>(x.data), x.dtype, at, value);
  }
  template <class AnyView>
  static int64_t offset(const AnyView& x, int64_t a, int64_t b, int64_t c, int64_t d) {
    return a * x.stride[0] + b * x.stride[1] + c * x.stride[2] + d * x.stride[3];
  }

  // ---- reading results
  // ----------------------------------------------------------------------------

  std::vector<double> output() const {
    return read(params.output, shape.batch, shape.tokens, shape.value_heads, shape.dim_v);
  }
  std::vector<double> final_state() const {
    return read(params.final_state, params.sequences, shape.value_heads, shape.dim_k, shape.dim_v);
  }
  // Elements of the output's memory that belong to no output element and were written all the same.
  int64_t stray_writes() const {
    std::vector<bool> ours(size_t(output_buffer_->size()), false);
    for (int64_t b = 0; b < shape.batch; ++b)
      for (int64_t t = 0; t < shape.tokens; ++t)
        for (int64_t h = 0; h < shape.value_heads; ++h)
          for (int64_t j = 0; j < shape.dim_v; ++j)
            ours[size_t(offset(params.output, b, t, h, j))] = true;
    int64_t strays = 0;
    for (int64_t i = 0; i < output_buffer_->size(); ++i)
      strays += !ours[size_t(i)] && !output_buffer_->is_untouched(i);
    return strays;
  }

  std::string describe() const {
    std::ostringstream text;
    text << "B" << shape.batch << " T" << shape.tokens << " HK" << shape.key_heads << " HV"
         << shape.value_heads << " K" << shape.dim_k << " V" << shape.dim_v << " "
         << name_of(options.dtype) << " layout " << int(options.layout) << " sequences "
         << params.sequences;
    return text.str();
  }

  const Shape shape;
  const Options options;
  GatedDeltaRuleParams params;

 private:
  Buffer* new_buffer(DType dtype, int64_t size) {
    buffers_.push_back(std::make_unique<Buffer>(dtype, size));
    return buffers_.back().get();
  }
  template <class AnyView>
  static AnyView view_of(Buffer* buffer) {
    AnyView x;
    x.data = buffer->data();
    x.dtype = buffer->dtype();
    return x;
  }
  using Strides = std::vector<int64_t>;
  static std::pair<int64_t, Strides> layout_of(Layout layout, int64_t b, int64_t t, int64_t h,
                                               int64_t d) {
    // An empty tensor still gets an element, so that its view is not taken for an absent one.
    const auto sized = [&](int64_t size, Strides s) {
      return std::make_pair(size + 1, std::move(s));
    };
    switch (layout) {
      case Layout::kGaps:
        return sized(b * t * h * (d + 3), {t * h * (d + 3), h * (d + 3), d + 3, 1});
      case Layout::kChannelsFirst:
        return sized(b * h * d * t, {h * d * t, 1, d * t, t});
      case Layout::kHeadsFirst:
        return sized(b * h * t * d, {h * t * d, d, t * d, 1});
      case Layout::kContiguous:
        break;
    }
    return sized(b * t * h * d, {t * h * d, h * d, d, 1});
  }
  View<4> input4(int64_t tokens, int64_t heads, int64_t dim) {
    const auto [size, strides] = layout_of(options.layout, shape.batch, tokens, heads, dim);
    View<4> x = view_of<View<4>>(new_buffer(options.dtype, size));
    std::copy(strides.begin(), strides.end(), x.stride);
    return x;
  }
  View<3> input3() {
    const int64_t hv = shape.value_heads, T = shape.tokens;
    View<3> x = view_of<View<3>>(new_buffer(options.gate_dtype, shape.batch * T * hv + 1));
    const bool heads_first = options.layout != Layout::kContiguous;
    x.stride[0] = T * hv;
    x.stride[1] = heads_first ? 1 : hv;
    x.stride[2] = heads_first ? T : 1;
    return x;
  }
  void state_strides(int64_t (&stride)[4]) const {
    const int64_t k = shape.dim_k, v = shape.dim_v;
    stride[0] = shape.value_heads * k * v;
    stride[1] = k * v;
    stride[2] = options.state_v_first ? 1 : v;
    stride[3] = options.state_v_first ? k : 1;
  }
  static std::vector<double> read(const MutableView<4>& x, int64_t a, int64_t b, int64_t c,
                                  int64_t d) {
    std::vector<double> all;
    for (int64_t i = 0; i < a; ++i)
      for (int64_t j = 0; j < b; ++j)
        for (int64_t k = 0; k < c; ++k)
          for (int64_t l = 0; l < d; ++l)
            all.push_back(load_element<double>(x.data, x.dtype, offset(x, i, j, k, l)));
    return all;
  }

  std::vector<int64_t> cu_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  Buffer* output_buffer_ = nullptr;
};

struct RuleResult {
  std::vector<double> output;       // [B, T, HV, V]
  std::vector<double> final_state;  // [N, HV, K, V]
};

// Equation (1), token by token, all of it in Real: the definition in double, the yardstick in
// float.
template <class Real>
RuleResult recurrence(const GatedDeltaRuleParams& p) {
  const int64_t K = p.dim_k, V = p.dim_v, HV = p.value_heads;
  RuleResult result;
  result.output.assign(size_t(p.batch * p.tokens * HV * V), 0.0);
  result.final_state.assign(size_t(p.sequences * HV * K * V), 0.0);
  const auto at4 = [](const View<4>& x, int64_t a, int64_t b, int64_t c, int64_t d) {
    return load_element<double>(x.data, x.dtype, RuleCall::offset(x, a, b, c, d));
  };
  const auto at3 = [](const View<3>& x, int64_t a, int64_t b, int64_t c) {
    return load_element<double>(x.data, x.dtype,
                                a * x.stride[0] + b * x.stride[1] + c * x.stride[2]);
  };
  std::vector<Real> S(size_t(K * V)), k(size_t(K), 0), q(size_t(K), 0), d(size_t(V), 0);
  for (int64_t n = 0; n < p.sequences; ++n)
    for (int64_t h = 0; h < HV; ++h) {
      const int64_t b = p.sequence_batch(n), hk = h / (HV / p.key_heads);
      for (int64_t i = 0; i < K; ++i)
        for (int64_t j = 0; j < V; ++j)
          S[size_t(i * V + j)] = p.initial_state ? Real(at4(p.initial_state, n, h, i, j))
                                 : p.initial_state_is_identity ? Real(i == j)
                                                               : Real(0);
      for (int64_t t = p.sequence_begin(n); t < p.sequence_end(n); ++t) {
        Real kk = 0, qq = 0;
        for (int64_t i = 0; i < K; ++i) {
          k[size_t(i)] = Real(at4(p.key, b, t, hk, i));
          q[size_t(i)] = p.query ? Real(at4(p.query, b, t, hk, i)) : Real(0);
          kk += k[size_t(i)] * k[size_t(i)];
          qq += q[size_t(i)] * q[size_t(i)];
        }
        if (p.l2norm)
          for (int64_t i = 0; i < K; ++i) {
            k[size_t(i)] *= 1 / std::sqrt(kk + Real(1e-6));
            q[size_t(i)] *= 1 / std::sqrt(qq + Real(1e-6));
          }
        double g = p.g ? at3(p.g, b, t, h) : 0;
        if (p.gate_in_kernel) {
          const double x =
              g + (p.dt_bias ? load_element<double>(p.dt_bias.data, p.dt_bias.dtype, h) : 0);
          g = -std::exp(load_element<double>(p.A_log.data, p.A_log.dtype, h)) *
              std::log1p(std::exp(x));
        }
        double beta = p.beta ? at3(p.beta, b, t, h) : 1;
        if (p.beta_sigmoid) beta = (p.beta_doubled ? 2 : 1) / (1 + std::exp(-beta));
        const Real a = std::exp(Real(g));
        for (int64_t j = 0; j < V; ++j) {
          Real sum = 0;
          for (int64_t i = 0; i < K; ++i) {
            S[size_t(i * V + j)] *= a;
            sum += S[size_t(i * V + j)] * k[size_t(i)];
          }
          d[size_t(j)] = Real(beta) * ((p.value ? Real(at4(p.value, b, t, h, j)) : Real(0)) - sum);
        }
        for (int64_t j = 0; j < V; ++j) {
          Real sum = 0;
          for (int64_t i = 0; i < K; ++i) {
            S[size_t(i * V + j)] += k[size_t(i)] * d[size_t(j)];
            sum += S[size_t(i * V + j)] * q[size_t(i)];
          }
          if (p.query)
            result.output[size_t(((b * p.tokens + t) * HV + h) * V + j)] =
                double(Real(p.scale) * sum);
        }
      }
      for (int64_t i = 0; i < K * V; ++i)
        result.final_state[size_t((n * HV + h) * K * V + i)] = double(S[size_t(i)]);
    }
  return result;
}

}  // namespace deltanet::testing_support
