// SPDX-License-Identifier: Apache-2.0
//
// What calls of the operators around the rule hand to a backend: the short causal convolution in
// front of it and the gated norm behind it. As params.h: no torch, no CUDA.
#pragma once
#include <cstdint>

#include "core/params.h"

namespace deltanet {

constexpr int kMaxConvWidth = 8;

// Neighboring tokens of one batch row that belong to one sequence, or to none.
struct TokenRun {
  int64_t batch;
  int64_t begin, end;  // tokens
  int64_t sequence;    // which state is theirs; -1: they belong to nobody, their outputs are zero
};

// One call of the causal convolution, equation (29). Sizes: B batch, D channels, T tokens, W taps,
// N states, S tokens in a state (W - 1, or more).
struct CausalConv1dParams {
  int64_t batch = 0;         // B
  int64_t channels = 0;      // D
  int64_t tokens = 0;        // T
  int width = 0;             // W: 1 to kMaxConvWidth
  int64_t state_tokens = 0;  // S

  // Together they cover every token once, in order. A sequence without tokens has a run too.
  const TokenRun* runs = nullptr;
  int64_t run_count = 0;

  View<3> x;               // [B, D, T]
  View<2> weight;          // [D, W]
  View<1> bias;            // [D]        absent: zero
  View<3> initial_states;  // [N, D, S]  the tokens before the first; absent: zeros
  bool silu = false;       // the output is z sigmoid(z)

  MutableView<3> output;        // [B, D, T]
  MutableView<3> final_states;  // [N, D, S]  the last tokens, those before the first included.
                                // May be the memory of initial_states.

  bool is_double() const { return x.dtype == DType::kFloat64; }
  bool updates_in_place() const {
    return initial_states && final_states.data == initial_states.data;
  }
};

// The gradients of one call, equations (31) to (33). Every gradient that is wanted is written in
// full. S is W - 1; output and final_states of the base are not used.
struct CausalConv1dBackwardParams : CausalConv1dParams {
  View<3> grad_output;        // [B, D, T]      absent: zero
  View<3> grad_final_states;  // [N, D, W - 1]  absent: zero

  MutableView<3> d_x;               // [B, D, T]
  MutableView<2> d_weight;          // [D, W]
  MutableView<1> d_bias;            // [D]
  MutableView<3> d_initial_states;  // [N, D, W - 1]
};

// One call of the gated norm, equation (30), over the rows of matrices.
struct GatedRmsNormParams {
  int64_t rows = 0;     // R
  int64_t columns = 0;  // C, at least 1
  double eps = 0;

  View<2> x, gate;  // [R, C]
  View<1> weight;   // [C]

  MutableView<2> output;  // [R, C]

  bool is_double() const { return x.dtype == DType::kFloat64; }
};

// The gradients of one call, equations (34) to (36); output of the base is not used.
struct GatedRmsNormBackwardParams : GatedRmsNormParams {
  View<2> grad_output;  // [R, C]

  MutableView<2> d_x, d_gate;  // [R, C]
  MutableView<1> d_weight;     // [C]
};

}  // namespace deltanet
