// SPDX-License-Identifier: Apache-2.0
//
// The forward kernels of every instruction set against the recurrence in double (in long double for
// fp64).
//
// Tolerance: twice the error that the plain recurrence in fp32 makes on the same inputs, or 1e-6
// where that is lucky; for 16-bit outputs, the error of rounding the exact output comes on top.
#include "cpu/forward.h"

#include <malloc.h>

#include <algorithm>
#include <thread>

#include "cpu/registry.h"
#include "rule_call.h"

namespace deltanet::cpu {
namespace {

using testing_support::error_ratio;
using testing_support::Layout;
using testing_support::normal;
using testing_support::Options;
using testing_support::pick;
using testing_support::Random;
using testing_support::recurrence;
using testing_support::RuleCall;
using testing_support::RuleResult;
using testing_support::Shape;
using testing_support::uniform;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Threads final : public Parallel {
 public:
  explicit Threads(int count) : count_(count) {}
  int max_workers() const override { return count_; }
  void run(int workers, void (*body)(void*), void* context) const override {
    std::vector<std::thread> threads;
    for (int i = 0; i < workers; ++i) threads.emplace_back(body, context);
    for (std::thread& t : threads) t.join();
  }

 private:
  int count_;
};

enum class Kernel { kChunk, kRecurrent };
constexpr Kernel kBoth[] = {Kernel::kChunk, Kernel::kRecurrent};

void run(Kernel kernel, const GatedDeltaRuleParams& p,
         const Parallel& parallel = SerialParallel()) {
  if (kernel == Kernel::kChunk)
    chunk_forward(p, parallel);
  else
    recurrent_forward(p, parallel);
}

class GatedDeltaRule : public testing_support::EveryIsa {
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

  static double rounding_error(const std::vector<double>& exact, DType dtype) {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat64) return 0;
    std::vector<double> rounded(exact);
    for (double& x : rounded) {
      unsigned char raw[8];
      store_element<double>(raw, dtype, 0, x);
      x = load_element<double>(raw, dtype, 0);
    }
    return error_ratio(rounded, exact);
  }

  // Runs the kernel and compares everything that it was asked for.
  static void check(Kernel kernel, RuleCall& call) {
    SCOPED_TRACE((kernel == Kernel::kChunk ? "chunk " : "recurrent ") + call.describe());
    const GatedDeltaRuleParams& p = call.params;
    const bool wide = call.options.dtype == DType::kFloat64;
    const RuleResult want = wide ? recurrence<long double>(p) : recurrence<double>(p);
    const RuleResult plain = wide ? recurrence<double>(p) : recurrence<float>(p);
    const double least = wide ? 1e-14 : 1e-6;
    run(kernel, p);
    if (p.output) {
      const double error = error_ratio(call.output(), want.output);
      const double rounding = rounding_error(want.output, call.options.dtype);
      EXPECT_LE(error,
                std::max(least, 2 * error_ratio(plain.output, want.output)) + 1.02 * rounding)
          << "output";
      EXPECT_EQ(call.stray_writes(), 0);
    }
    if (p.final_state) {
      EXPECT_LE(error_ratio(call.final_state(), want.final_state),
                std::max(least, 2 * error_ratio(plain.final_state, want.final_state)))
          << "final state";
    }
  }
  static void check(const Shape& shape, const Options& options = {}) {
    for (Kernel kernel : kBoth) {
      RuleCall call(shape, options);
      check(kernel, call);
    }
  }
};

TEST_P(GatedDeltaRule, ScratchMemoryStartsAsNan) {
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
  std::unique_ptr<float, decltype(&std::free)> memory(
      static_cast<float*>(std::aligned_alloc(64, 1 << 16)), &std::free);
  const volatile float* seen = memory.get();
  for (int i = 0; i < (1 << 14); i += 997) EXPECT_TRUE(std::isnan(seen[i])) << i;
#else
  GTEST_SKIP() << "this C library cannot fill its memory";
#endif
}

// ---- sizes
// ------------------------------------------------------------------------------------------

TEST_P(GatedDeltaRule, IsRightForEveryNumberOfTokens) {
  for (int64_t tokens = 0; tokens <= 70; ++tokens) check({1, tokens, 1, 1, 5, 9});
}

TEST_P(GatedDeltaRule, IsRightForEverySmallHeadDim) {
  for (int dim = 1; dim <= 70; ++dim) {
    check({1, 19, 1, 1, dim, 71 - dim});
    check({1, 33, 1, 2, dim, dim});
  }
}

TEST_P(GatedDeltaRule, IsRightForLargeHeadDims) {
  check({1, 70, 1, 2, 128, 128});
  check({1, 40, 1, 1, 256, 256});
  check({1, 40, 1, 1, 1, 256});
  check({1, 40, 1, 1, 256, 1});
  check({1, 40, 1, 1, 129, 255});
}

TEST_P(GatedDeltaRule, IsRightForRandomShapes) {
  Random random(20261129);
  for (uint64_t i = 0; i < 120; ++i) {
    const int64_t key_heads = pick(random, {1, 2, 3});
    Options options;
    options.seed = i + 1;
    options.layout = Layout(random() % 4);
    options.with_initial_state = random() % 4 != 0;
    options.state_v_first = random() % 2;
    check({pick(random, {1, 2, 3}),
           pick(random, {1, 2, 3, 4, 5, 15, 16, 17, 23, 24, 25, 31, 47, 49, 64, 65}), key_heads,
           key_heads * pick(random, {1, 2, 3, 5}),
           int(pick(random, {1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65})),
           int(pick(random, {1, 2, 7, 8, 9, 15, 17, 24, 31, 33, 49, 63, 65}))},
          options);
  }
}

TEST_P(GatedDeltaRule, ThreeValueHeadsReadTheirOwnKeyHead) {
  check({2, 37, 2, 6, 16, 24});
  check({1, 37, 5, 15, 7, 5});
}

TEST_P(GatedDeltaRule, NothingToDoIsFine) {
  check({0, 5, 1, 1, 4, 4});
  check({2, 0, 1, 2, 4, 4});
  Options options;
  options.with_initial_state = false;
  check({2, 0, 1, 2, 4, 4}, options);
}

// ---- memory
// -----------------------------------------------------------------------------------------

TEST_P(GatedDeltaRule, AnyStridesAreRead) {
  for (Layout layout : {Layout::kGaps, Layout::kChannelsFirst, Layout::kHeadsFirst})
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
      Options options;
      options.layout = layout;
      options.dtype = dtype;
      if (dtype == DType::kFloat64) options.gate_dtype = options.state_dtype = dtype;
      check({2, 29, 2, 4, 19, 21}, options);
    }
}

TEST_P(GatedDeltaRule, OutputsMayHaveAnyStrides) {
  for (Layout layout : {Layout::kGaps, Layout::kChannelsFirst, Layout::kHeadsFirst})
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Options options;
      options.output_layout = layout;
      options.dtype = dtype;
      options.state_v_first = layout == Layout::kGaps;
      check({2, 29, 1, 2, 19, 37}, options);
    }
}

TEST_P(GatedDeltaRule, ExpandedInputsAreRead) {
  for (Kernel kernel : kBoth) {
    RuleCall call({3, 20, 2, 4, 8, 8});
    call.params.key.stride[0] = 0;  // the same keys for the whole batch
    call.params.value.stride[2] = 0;
    call.params.g.stride[1] = 0;
    call.params.beta.stride[2] = 0;
    call.params.initial_state.stride[0] = 0;
    check(kernel, call);
  }
}

TEST_P(GatedDeltaRule, PackedSequencesAreKeptApartAndTheTailIsZero) {
  Options options;
  options.cu_seqlens = {0, 0, 5, 5, 29, 64, 64};
  for (bool v_first : {false, true}) {
    options.state_v_first = v_first;
    check({1, 70, 2, 4, 12, 20}, options);
  }
  options.with_initial_state = false;
  check({1, 70, 2, 4, 12, 20}, options);
  options.cu_seqlens = {0, 0};
  check({1, 3, 1, 1, 4, 4}, options);
}

TEST_P(GatedDeltaRule, EveryElementTypeIsComputedInFp32OrBetter) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    Options options;
    options.dtype = dtype;
    options.gate_dtype = dtype;
    options.state_dtype = dtype;
    check({2, 50, 2, 4, 32, 33}, options);
  }
}

// Rounding what is multiplied costs what the bf16 output's own rounding does. What is at stake is
// padding and tails, which show as errors of order one, or as NaN from scratch memory.
TEST_P(GatedDeltaRule, PairsOfBf16GiveTheSameUpToTheirRounding) {
  set_bf16_products(Bf16Products::kAlways);
  for (const auto& [tokens, dim_k, dim_v] : {std::tuple{41, 128, 128},
                                             {16, 1, 1},
                                             {7, 33, 47},
                                             {100, 6, 256},
                                             {65, 256, 5},
                                             {5, 101, 75}})
    for (const bool with_state : {true, false}) {
      Options options;
      options.dtype = DType::kBFloat16;
      options.with_initial_state = with_state;
      RuleCall call({1, tokens, 2, 6, dim_k, dim_v}, options);
      const RuleResult want = recurrence<double>(call.params);
      run(Kernel::kChunk, call.params);
      EXPECT_LE(error_ratio(call.output(), want.output), 3.5e-3) << call.describe();
      EXPECT_LE(error_ratio(call.final_state(), want.final_state), 3.5e-3) << call.describe();
      EXPECT_EQ(call.stray_writes(), 0);
    }
  set_bf16_products(Bf16Products::kNever);
}

TEST_P(GatedDeltaRule, GatesAndStatesMayHaveAnotherTypeThanTheInputs) {
  for (DType gate : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (DType state : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64})
      for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        Options options;
        options.dtype = dtype;
        options.gate_dtype = gate;
        options.state_dtype = state;
        check({1, 21, 1, 2, 9, 17}, options);
      }
}

TEST_P(GatedDeltaRule, WhatIsAbsentIsNotNeeded) {
  for (int missing = 0; missing < 8; ++missing) {
    Options options;
    options.with_g = !(missing & 1);
    options.with_beta = !(missing & 2);
    options.with_final_state = !(missing & 4);
    options.with_initial_state = missing % 3 != 0;
    check({2, 35, 1, 2, 10, 11}, options);
  }
}

// ---- options
// ----------------------------------------------------------------------------------------

TEST_P(GatedDeltaRule, KeysAndQueriesAreNormalizedOnRequest) {
  for (Kernel kernel : kBoth)
    for (double size : {0.0, 1e-4, 1.0, 30.0}) {
      SCOPED_TRACE(size);
      RuleCall call({1, 41, 2, 4, 24, 24});
      Random random(3);
      call.fill_tokens(call.params.key, 2, 24, [&] { return normal(random) * size; });
      call.fill_tokens(call.params.query, 2, 24, [&] { return normal(random) * size; });
      call.params.l2norm = true;
      check(kernel, call);
    }
}

TEST_P(GatedDeltaRule, TheGateMayBeComputedInTheKernel) {
  for (Kernel kernel : kBoth)
    for (bool with_bias : {false, true}) {
      RuleCall call({1, 33, 1, 3, 8, 8});
      Random random(4);
      call.fill_gate(call.params.g, [&] { return uniform(random, -5, 5); });
      call.params.gate_in_kernel = true;
      call.params.A_log = call.per_head([](int64_t h) { return 0.3 * double(h) - 0.5; });
      if (with_bias) call.params.dt_bias = call.per_head([](int64_t h) { return 0.7 - double(h); });
      check(kernel, call);
    }
}

TEST_P(GatedDeltaRule, BetaMayBeASigmoidOrTwice) {
  for (Kernel kernel : kBoth)
    for (bool doubled : {false, true}) {
      RuleCall call({1, 33, 1, 2, 8, 8});
      Random random(5);
      call.fill_gate(call.params.beta, [&] { return uniform(random, -4, 4); });
      call.params.beta_sigmoid = true;
      call.params.beta_doubled = doubled;
      check(kernel, call);
    }
}

TEST_P(GatedDeltaRule, TheScaleMultipliesTheOutput) {
  for (Kernel kernel : kBoth)
    for (double scale : {0.0, -1.0, 3.5}) {
      RuleCall call({1, 20, 1, 1, 8, 8});
      call.params.scale = scale;
      check(kernel, call);
    }
}

// ---- hard inputs
// ------------------------------------------------------------------------------------

TEST_P(GatedDeltaRule, StrongWeakAndPositiveGatesAreComputedAsTheFormulaSays) {
  Random random(6);
  const std::vector<std::function<double(int64_t)>> gates = {
      [](int64_t) { return 0.0; },
      [](int64_t) { return -1e-3; },
      [](int64_t) { return -20.0; },
      [](int64_t t) { return t == 0 ? -90.0 : 0.0; },
      [](int64_t t) { return t == 17 ? -90.0 : 0.0; },
      [](int64_t t) { return t % 13 == 5 ? -kInfinity : -0.1; },
      [](int64_t) { return -kInfinity; },
      [](int64_t) { return 0.05; },
      [&](int64_t) { return normal(random) * 0.1; },
      [](int64_t t) { return t % 2 ? -80.0 : 0.0; },
  };
  for (size_t i = 0; i < gates.size(); ++i)
    for (Kernel kernel : kBoth) {
      SCOPED_TRACE("gate " + std::to_string(i));
      RuleCall call({1, 64, 1, 2, 16, 16});
      call.params.l2norm = true;
      call.fill_gate_at(call.params.g, gates[i]);
      check(kernel, call);
    }
}

TEST_P(GatedDeltaRule, AStrongGateAloneScalesTheStateByItsExponential) {
  for (Kernel kernel : kBoth)
    for (double g : {-5.0, -40.0, -70.0, -87.0}) {
      SCOPED_TRACE(g);
      RuleCall call({1, 1, 1, 2, 9, 17});
      call.fill_gate_at(call.params.g, [&](int64_t) { return g; });
      call.fill_gate_at(call.params.beta, [](int64_t) { return 0.0; });
      check(kernel, call);
    }
}

// With beta near 2 each token reflects the state along the key, and the error of a head is one
// random number: how far its rounded key is from norm 1. So there are many heads, each with a key
// of its own.
TEST_P(GatedDeltaRule, RepeatedKeysDoNotBlowUp) {
  for (double beta : {0.0, 1.0, 1.999})
    for (Kernel kernel : kBoth) {
      SCOPED_TRACE(beta);
      RuleCall call({1, 70, 16, 16, 16, 16});
      call.params.l2norm = true;
      call.fill_gate_at(call.params.g, [](int64_t) { return 0.0; });
      call.fill_gate_at(call.params.beta, [&](int64_t) { return beta; });
      int i = 0;
      call.fill_tokens(call.params.key, 16, 16,
                       [&] { return std::sin(double(1 + i++ % (16 * 16))); });
      check(kernel, call);
    }
}

TEST_P(GatedDeltaRule, LongKeysWithoutNormGrowAsTheRecurrenceDoes) {
  for (Kernel kernel : kBoth) {
    RuleCall call({1, 64, 1, 1, 16, 16});
    Random random(7);
    call.fill_tokens(call.params.key, 1, 16, [&] { return normal(random) * 0.5; });  // norm 2
    call.fill_gate_at(call.params.g, [](int64_t) { return 0.0; });
    call.fill_gate_at(call.params.beta, [](int64_t) { return 1.0; });
    check(kernel, call);
  }
}

TEST_P(GatedDeltaRule, ZeroKeysLeaveTheStateAlone) {
  for (Kernel kernel : kBoth) {
    RuleCall call({1, 40, 1, 1, 8, 8});
    call.params.l2norm = true;
    call.fill_tokens(call.params.key, 1, 8, [] { return 0.0; });
    call.fill_gate_at(call.params.g, [](int64_t) { return 0.0; });
    check(kernel, call);
    std::vector<double> initial;
    const View<4>& s = call.params.initial_state;
    for (int64_t i = 0; i < 64; ++i) initial.push_back(load_element<double>(s.data, s.dtype, i));
    EXPECT_EQ(call.final_state(), initial);
  }
}

// ---- equation (8)
// -----------------------------------------------------------------------------------

TEST_P(GatedDeltaRule, ARunOfTokensActsOnTheStateAsAnAffineMap) {
  for (int dim_v : {13, 24}) {
    const Shape shape{1, 53, 1, 2, 13, dim_v};
    const auto fresh = [&](int columns) {
      auto call = std::make_unique<RuleCall>(Shape{1, 53, 1, 2, 13, columns});
      call->params.query = {};
      call->params.output = {};
      return call;
    };
    RuleCall whole(shape);
    run(Kernel::kChunk, whole.params);

    // M: from the identity without values. U: from zero.
    auto m = fresh(13), u = fresh(dim_v);
    m->params.key = u->params.key = whole.params.key;
    m->params.g = u->params.g = whole.params.g;
    m->params.beta = u->params.beta = whole.params.beta;
    u->params.value = whole.params.value;
    m->params.value = {};
    m->params.initial_state = u->params.initial_state = {};
    m->params.initial_state_is_identity = true;
    check(Kernel::kChunk, *m);
    check(Kernel::kChunk, *u);

    const std::vector<double> M = m->final_state(), U = u->final_state();
    std::vector<double> composed;
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 13; ++i)
        for (int64_t j = 0; j < dim_v; ++j) {
          const View<4>& s = whole.params.initial_state;
          double x = U[size_t((h * 13 + i) * dim_v + j)];
          for (int64_t k = 0; k < 13; ++k)
            x += M[size_t((h * 13 + i) * 13 + k)] *
                 load_element<double>(s.data, s.dtype, RuleCall::offset(s, 0, h, k, j));
          composed.push_back(x);
        }
    EXPECT_LE(error_ratio(composed, whole.final_state()), 2e-6);
  }
}

// ---- guarantees, bit for bit
// ------------------------------------------------------------------------

TEST_P(GatedDeltaRule, TheNumberOfThreadsChangesNoBit) {
  for (Kernel kernel : kBoth)
    for (const Shape& shape : {Shape{2, 45, 2, 4, 40, 72}, Shape{1, 45, 1, 1, 128, 128},
                               Shape{1, 45, 1, 3, 32, 200}, Shape{1, 45, 1, 8, 128, 100}}) {
      RuleCall one(shape), again(shape);
      run(kernel, one.params);
      run(kernel, again.params);
      EXPECT_EQ(one.output(), again.output());
      EXPECT_EQ(one.final_state(), again.final_state());
      for (int threads : {2, 3, 16}) {  // each cuts heads and columns in another way
        RuleCall many(shape);
        run(kernel, many.params, Threads(threads));
        EXPECT_EQ(one.output(), many.output()) << threads;
        EXPECT_EQ(one.final_state(), many.final_state()) << threads;
      }
    }
}

TEST_P(GatedDeltaRule, ASequenceGetsTheSameBitsAloneInABatchAndPacked) {
  const int64_t T = 41, heads = 2, size = T * heads * 16;
  for (Kernel kernel : kBoth) {
    Options packed_options;
    packed_options.cu_seqlens = {0, T, 2 * T, 3 * T};
    RuleCall batch({3, T, heads, heads, 16, 16});
    RuleCall packed({1, 3 * T, heads, heads, 16, 16},
                    packed_options);  // the same memory, read otherwise
    RuleCall alone({1, T, heads, heads, 16, 16});
    const auto borrow = [](RuleCall& to, const RuleCall& from) {
      to.params.query.data = from.params.query.data;
      to.params.key.data = from.params.key.data;
      to.params.value.data = from.params.value.data;
      to.params.g.data = from.params.g.data;
      to.params.beta.data = from.params.beta.data;
      to.params.initial_state.data = from.params.initial_state.data;
    };
    borrow(packed, batch);
    borrow(alone, batch);
    run(kernel, batch.params);
    run(kernel, packed.params);
    run(kernel, alone.params);
    EXPECT_EQ(batch.output(), packed.output());
    EXPECT_EQ(batch.final_state(), packed.final_state());
    std::vector<double> first = batch.output();
    first.resize(size_t(size));
    EXPECT_EQ(first, alone.output());
  }
}

TEST_P(GatedDeltaRule, NoInitialStateIsTheZeroState) {
  for (Kernel kernel : kBoth)
    for (int64_t tokens : {0, 1, 3, 40}) {
      RuleCall zeros({2, tokens, 1, 2, 17, 23}), none({2, tokens, 1, 2, 17, 23});
      zeros.fill_state(zeros.params.initial_state, [] { return 0.0; });
      none.params.initial_state = {};
      run(kernel, zeros.params);
      run(kernel, none.params);
      EXPECT_EQ(zeros.output(), none.output());
      EXPECT_EQ(zeros.final_state(), none.final_state());
    }
}

TEST_P(GatedDeltaRule, ATokenChangesNothingBeforeIt) {
  for (Kernel kernel : kBoth)
    for (int64_t changed : {0, 1, 15, 16, 23, 24, 40, 59}) {
      RuleCall before({1, 60, 1, 2, 16, 16}), after({1, 60, 1, 2, 16, 16});
      GatedDeltaRuleParams& p = after.params;
      for (int64_t i = 0; i < 16; ++i) {
        after.write(p.query, RuleCall::offset(p.query, 0, changed, 0, i), 1e3);
        after.write(p.key, RuleCall::offset(p.key, 0, changed, 0, i), -7.0);
        after.write(p.value, RuleCall::offset(p.value, 0, changed, 1, i), 1e6);
      }
      after.write(p.g, changed * p.g.stride[1], -55.0);
      run(kernel, before.params);
      run(kernel, after.params);
      std::vector<double> a = before.output(), b = after.output();
      EXPECT_NE(a, b);
      a.resize(size_t(changed * 2 * 16));
      b.resize(a.size());
      EXPECT_EQ(a, b) << "token " << changed;
    }
}

TEST_P(GatedDeltaRule, SplittingARunAndCarryingTheStateChangesOnlyRounding) {
  for (Kernel kernel : kBoth)
    for (int64_t at : {1, 16, 24, 31}) {
      RuleCall whole({1, 60, 1, 2, 16, 24});
      run(kernel, whole.params);
      RuleCall head({1, at, 1, 2, 16, 24}), tail({1, 60 - at, 1, 2, 16, 24});
      const auto borrow = [&](RuleCall& part, int64_t from) {
        GatedDeltaRuleParams& p = part.params;
        const GatedDeltaRuleParams& w = whole.params;
        p.query.data = w.query.at(from * w.query.stride[1]);
        p.key.data = w.key.at(from * w.key.stride[1]);
        p.value.data = w.value.at(from * w.value.stride[1]);
        p.g.data = w.g.at(from * w.g.stride[1]);
        p.beta.data = w.beta.at(from * w.beta.stride[1]);
      };
      borrow(head, 0);
      borrow(tail, at);
      head.params.initial_state.data = whole.params.initial_state.data;
      run(kernel, head.params);
      tail.params.initial_state.data = head.params.final_state.data;
      run(kernel, tail.params);
      EXPECT_LE(error_ratio(tail.final_state(), whole.final_state()), 1e-6);
      std::vector<double> joined = head.output();
      const std::vector<double> rest = tail.output();
      joined.insert(joined.end(), rest.begin(), rest.end());
      EXPECT_LE(error_ratio(joined, whole.output()), 1e-6);
    }
}

TEST_P(GatedDeltaRule, TheInitialStateIsNeverWritten) {
  for (Kernel kernel : kBoth)
    for (bool v_first : {false, true}) {
      Options options;
      options.state_v_first = v_first;
      RuleCall call({2, 40, 1, 2, 12, 20}, options);
      const View<4>& s = call.params.initial_state;
      const std::vector<unsigned char> before(
          static_cast<const unsigned char*>(s.data),
          static_cast<const unsigned char*>(s.at(2 * 2 * 12 * 20)));
      run(kernel, call.params);
      EXPECT_EQ(std::memcmp(before.data(), s.data, before.size()), 0);
    }
}

TEST_P(GatedDeltaRule, ANanInOneSequenceStaysThere) {
  for (Kernel kernel : kBoth) {
    RuleCall clean({3, 40, 1, 1, 8, 8}), dirty({3, 40, 1, 1, 8, 8});
    dirty.write(dirty.params.value, RuleCall::offset(dirty.params.value, 1, 7, 0, 3), NAN);
    run(kernel, clean.params);
    run(kernel, dirty.params);
    const std::vector<double> a = clean.output(), b = dirty.output();
    for (size_t i = 0; i < a.size(); ++i) {
      if (i / (40 * 8) == 1) continue;
      ASSERT_EQ(a[i], b[i]) << i;
    }
    EXPECT_TRUE(std::isnan(b[40 * 8 + 7 * 8 + 3]));
  }
}

DELTANET_FOR_EVERY_ISA(GatedDeltaRule);

}  // namespace
}  // namespace deltanet::cpu
