// SPDX-License-Identifier: Apache-2.0
//
// The gradient kernels of every instruction set against the fp64 kernels, which gradcheck judges
// from Python (tests/test_backward.py).
#include "cpu/forward.h"

#include <malloc.h>

#include <algorithm>

#include "rule_call.h"

namespace deltanet::cpu {
namespace {

using testing_support::Buffer;
using testing_support::error_ratio;
using testing_support::normal;
using testing_support::Options;
using testing_support::Random;
using testing_support::RuleCall;
using testing_support::Shape;

// A forward and a backward call on the same numbers, in one dtype.
class GradientCall {
 public:
  GradientCall(const Shape& s, Options options, double gate) : call_(s, options) {
    const bool wide = options.dtype == DType::kFloat64;
    const DType state = wide ? DType::kFloat64 : DType::kFloat32;
    const int64_t n = call_.params.sequences;
    if (gate != 0) call_.fill_gate(call_.params.g, [&] { return gate; });
    call_.params.l2norm = true;

    // What arrives: any numbers, the same in every dtype.
    Random random(7);
    grad_output_ = new_tensor(options.dtype, s.batch, s.tokens, s.value_heads, s.dim_v, random);
    grad_state_ = new_tensor(state, n, s.value_heads, s.dim_k, s.dim_v, random);
    const int64_t places = s.batch * (s.tokens / kSegmentTokens);
    saved_ = new_tensor(state, places, s.value_heads, s.dim_k, s.dim_v, random);
    call_.params.saved_states = saved_;
    chunk_forward(call_.params, SerialParallel());

    GatedDeltaRuleBackwardParams p;
    static_cast<GatedDeltaRuleParams&>(p) = call_.params;
    p.grad_output = read_only(grad_output_);
    p.grad_final_state = read_only(grad_state_);
    p.states = read_only(saved_);
    p.d_query = new_tensor(options.dtype, s.batch, s.tokens, s.key_heads, s.dim_k, random);
    p.d_key = new_tensor(options.dtype, s.batch, s.tokens, s.key_heads, s.dim_k, random);
    p.d_value = new_tensor(options.dtype, s.batch, s.tokens, s.value_heads, s.dim_v, random);
    p.d_g = per_token(new_tensor(state, s.batch, s.tokens, s.value_heads, 1, random));
    p.d_beta = per_token(new_tensor(state, s.batch, s.tokens, s.value_heads, 1, random));
    p.d_initial_state = new_tensor(state, n, s.value_heads, s.dim_k, s.dim_v, random);
    backward(p, SerialParallel());
  }

  // All gradients, each in one row.
  std::vector<std::vector<double>> gradients() const {
    std::vector<std::vector<double>> all;
    for (size_t i = 3; i < buffers_.size(); ++i) {
      const Buffer& buffer = *buffers_[i];
      std::vector<double> row(size_t(buffer.size()) - 1);
      for (size_t j = 0; j < row.size(); ++j)
        row[j] = load_element<double>(buffer.data(), buffer.dtype(), int64_t(j));
      all.push_back(row);
    }
    return all;
  }

 private:
  MutableView<4> new_tensor(DType dtype, int64_t a, int64_t b, int64_t c, int64_t d,
                            Random& random) {
    // An empty tensor still gets an element, so that its view is not taken for an absent one.
    buffers_.push_back(std::make_unique<Buffer>(dtype, a * b * c * d + 1));
    MutableView<4> x;
    x.data = buffers_.back()->data();
    x.dtype = dtype;
    x.stride[0] = b * c * d;
    x.stride[1] = c * d;
    x.stride[2] = d;
    x.stride[3] = 1;
    for (int64_t i = 0; i < a * b * c * d; ++i)
      store_element<double>(x.data, dtype, i, normal(random));
    return x;
  }
  static MutableView<3> per_token(const MutableView<4>& x) {
    MutableView<3> y;
    y.data = x.data;
    y.dtype = x.dtype;
    std::copy(x.stride, x.stride + 3, y.stride);
    return y;
  }
  static View<4> read_only(const MutableView<4>& x) {
    View<4> y;
    y.data = x.data;
    y.dtype = x.dtype;
    std::copy(x.stride, x.stride + 4, y.stride);
    return y;
  }

  RuleCall call_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  MutableView<4> grad_output_, grad_state_, saved_;
};

class Backward : public testing_support::EveryIsa {
 protected:
  void SetUp() override {
#ifdef __GLIBC__
    mallopt(M_PERTURB, 0x100);  // malloc'ed memory is full of 0xff, a NaN in every type
#endif
    EveryIsa::SetUp();
  }
  void TearDown() override {
    EveryIsa::TearDown();
#ifdef __GLIBC__
    mallopt(M_PERTURB, 0);
#endif
  }

  static void check(const Shape& s, double gate = 0, std::vector<int64_t> cu_seqlens = {}) {
    Options options;
    options.cu_seqlens = std::move(cu_seqlens);
    Options wide = options;
    wide.dtype = wide.gate_dtype = wide.state_dtype = DType::kFloat64;
    const auto got = GradientCall(s, options, gate).gradients();
    const auto want = GradientCall(s, wide, gate).gradients();
    ASSERT_EQ(got.size(), want.size());
    const char* const names[] = {"query", "key", "value", "g", "beta", "initial state"};
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_LE(error_ratio(got[i], want[i]), 1e-5)
          << "d " << names[i] << ", B" << s.batch << " T" << s.tokens << " HV" << s.value_heads
          << " K" << s.dim_k << " V" << s.dim_v << " gate " << gate;
  }
};

TEST_P(Backward, AgreesWithFp64) {
  for (const int64_t tokens : {1, 5, 16, 24, 49}) check({2, tokens, 1, 2, 32, 48});
}

TEST_P(Backward, TakesEveryHeadDim) {
  for (const auto& [k, v] : {std::pair(2, 1), std::pair(3, 5), std::pair(16, 16), std::pair(33, 17),
                             std::pair(65, 100), std::pair(128, 128)})
    check({1, 30, 1, 3, k, v});
}

TEST_P(Backward, CutsChunksWhereTheDecayRises) { check({1, 40, 1, 2, 16, 24}, 0.4); }

TEST_P(Backward, KeepsPackedSequencesApart) { check({1, 60, 1, 2, 16, 24}, 0, {0, 0, 17, 50}); }

TEST_P(Backward, StartsSegmentsFromSavedStates) { check({1, kSegmentTokens + 30, 1, 1, 8, 8}); }

DELTANET_FOR_EVERY_ISA(Backward);

}  // namespace
}  // namespace deltanet::cpu
