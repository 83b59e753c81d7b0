// SPDX-License-Identifier: Apache-2.0
//
// What a call of an operator hands to a backend: raw pointers with strides, sizes, options.
// No torch and no CUDA, so that C++ programs, C++ tests and both backends share it.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace deltanet {

// Strides count elements, not bytes; any stride is allowed, 0 (expanded) included.
template <int kRank>
struct View {
  const void* data = nullptr;  // null: the tensor is absent
  DType dtype = DType::kFloat32;
  int64_t stride[kRank] = {};

  explicit operator bool() const { return data != nullptr; }
  const void* at(int64_t offset) const {
    return static_cast<const char*>(data) + offset * size_of(dtype);
  }
};

template <int kRank>
struct MutableView {
  void* data = nullptr;  // null: not wanted
  DType dtype = DType::kFloat32;
  int64_t stride[kRank] = {};

  explicit operator bool() const { return data != nullptr; }
  void* at(int64_t offset) const { return static_cast<char*>(data) + offset * size_of(dtype); }
};

constexpr int kMaxHeadDim = 256;

// For the backward pass the forward pass saves the state after every kSegmentTokens tokens of a
// sequence. A multiple of every kernel's chunk, so that each of them can start there.
constexpr int64_t kSegmentTokens = 1056;

// One call of the gated delta rule, forward. Sizes: B batch, T tokens, HK key heads, HV value heads
// (a multiple of HK; value head h reads key head h / (HV/HK)), K and V head dims, N sequences.
struct GatedDeltaRuleParams {
  int64_t batch = 0;         // B
  int64_t tokens = 0;        // T
  int64_t key_heads = 0;     // HK
  int64_t value_heads = 0;   // HV
  int dim_k = 0, dim_v = 0;  // K, V: 1 to kMaxHeadDim
  int64_t sequences = 0;     // N: B, or the number of packed sequences

  // [N+1], in host memory, rising from 0 to at most T: sequence n is the tokens from cu_seqlens[n]
  // up to cu_seqlens[n+1] of batch row 0. Null: each batch row is one sequence.
  const int64_t* cu_seqlens = nullptr;

  View<4> query;          // [B, T, HK, K]    absent: no output is computed (only the state)
  View<4> key;            // [B, T, HK, K]
  View<4> value;          // [B, T, HV, V]    absent: zeros
  View<3> g;              // [B, T, HV]       log decay, or the raw gate; absent: no decay
  View<3> beta;           // [B, T, HV]       absent: 1
  View<1> A_log;          // [HV]             only with gate_in_kernel
  View<1> dt_bias;        // [HV]             only with gate_in_kernel, may be absent
  View<4> initial_state;  // [N, HV, K, V]    any strides (a V-first state is only other strides)
  bool initial_state_is_identity = false;  // start from I (K = V) instead: equation (8)'s M
  // [N], in host memory, or null. Both states are pools then: sequence n has slot state_slots[n],
  // or none where that is negative, and its outputs are zero. Only token by token, on the CPU.
  const int64_t* state_slots = nullptr;

  MutableView<4> output;       // [B, T, HV, V]  absent exactly when query is
  MutableView<4> final_state;  // [N, HV, K, V]  fp32 (fp64 for fp64 inputs), any strides
  // [B * (T / kSegmentTokens), HV, K, V], see saved_state; dtype as final_state
  MutableView<4> saved_states;

  double scale = 1.0;
  bool l2norm = false;          // q and k are normalized: x * rsqrt(sum(x^2) + 1e-6)
  bool gate_in_kernel = false;  // g <- -exp(A_log) * softplus(g + dt_bias)
  bool beta_sigmoid = false;    // beta <- sigmoid(beta)
  bool beta_doubled = false;    // beta <- 2 * sigmoid(beta): negative eigenvalues allowed

  bool is_double() const { return key.dtype == DType::kFloat64; }
  int64_t sequence_begin(int64_t n) const { return cu_seqlens ? cu_seqlens[n] : 0; }
  int64_t sequence_end(int64_t n) const { return cu_seqlens ? cu_seqlens[n + 1] : tokens; }
  int64_t sequence_batch(int64_t n) const { return cu_seqlens ? 0 : n; }
  int64_t state_slot(int64_t n) const { return state_slots ? state_slots[n] : n; }

  // Where the state before a token is saved that starts the second or a later segment of its
  // sequence. No two such tokens of a batch row lie in the same kSegmentTokens tokens, also when
  // sequences are packed; the places of those that have none stay unused.
  constexpr int64_t saved_state(int64_t batch_row, int64_t token) const {
    return batch_row * (tokens / kSegmentTokens) + token / kSegmentTokens - 1;
  }
};

// What the backward pass of one call is given besides the inputs of the forward call, and what it
// makes. Every gradient that is wanted is written in full.
struct RuleGradients {
  View<4> grad_output;       // [B, T, HV, V]   dtype of the inputs; absent: zero
  View<4> grad_final_state;  // [N, HV, K, V]   absent: zero
  View<4> states;            // what the forward call saved; absent where no sequence needs one

  MutableView<4> d_query, d_key;   // [B, T, HK, K]  dtype of the inputs
  MutableView<4> d_value;          // [B, T, HV, V]  dtype of the inputs
  MutableView<3> d_g, d_beta;      // [B, T, HV]     any dtype; only where g, beta are given
  MutableView<4> d_initial_state;  // [N, HV, K, V]  fp32 (fp64 for fp64 inputs), any strides
};

// On the CPU. output, final_state and their kin of the base are not used.
struct GatedDeltaRuleBackwardParams : GatedDeltaRuleParams, RuleGradients {
  double* d_gate_sums = nullptr;  // [N, HV, 2]     of A_log, dt_bias per sequence; zeroed before
};

// A batch of (I + L)^-1, equation (4): only what lies strictly below the diagonal of L is read.
struct TriangularInverseParams {
  int64_t count = 0;  // matrices
  int size = 0;       // C: 1 to kMaxInverseSize
  DType dtype = DType::kFloat32;
  const void* lower = nullptr;  // [count, C, C], contiguous
  void* inverse = nullptr;      // [count, C, C], contiguous
};

constexpr int kMaxInverseSize = 128;

}  // namespace deltanet
