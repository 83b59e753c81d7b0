// SPDX-License-Identifier: Apache-2.0
//
// What an ISA file offers to the rest of the CPU backend: a table of kernels per arithmetic type.
// A kernel computes one task in the scratch memory that it is given; who runs which task, and on
// which thread, is decided in forward.cpp and backward.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/layer_params.h"
#include "core/params.h"

namespace deltanet::cpu {

// A piece of a call that needs no other piece: some value heads of one key head, and some columns
// of V, over a whole sequence. (Columns are independent because the state's columns are.)
struct RuleTask {
  int64_t sequence;
  int64_t key_head;
  int64_t value_head_begin, value_head_end;  // all of them read key_head
  int column_begin, column_end;              // columns of V
};

// A piece of a backward pass: value heads of one key head over a whole sequence, run segment by
// segment in scratch that holds what one segment hands to the one before it. `p` has the columns of
// V that belong to it, all of them.
struct BackwardTask {
  GatedDeltaRuleBackwardParams p;
  RuleTask task;
  void* scratch;
};

// A piece of a convolution: some channels of some neighboring tokens of one run.
struct ConvTask {
  TokenRun run;
  int64_t begin, end;  // tokens, of the run's
  int64_t channel_begin;
  int channels;  // up to kConvChannels
};
constexpr int kConvTokens = 32;  // what a task of the convolution handles at a time
constexpr int kConvChannels = 128;

constexpr size_t kScratchAlignment = 64;

// The chunked rule with products of bf16 pairs (ChunkForward), for bf16 q, k and v.
struct Bf16Kernels {
  size_t (*scratch_bytes)(const GatedDeltaRuleParams&, int value_heads, int columns);
  void (*chunk_forward)(const GatedDeltaRuleParams&, const RuleTask&, void* scratch);
};

struct Kernels {
  // A task's column_begin is a multiple of this.
  int column_granularity;

  // The chunked rule, equations (2) to (7).
  size_t (*chunk_scratch_bytes)(const GatedDeltaRuleParams&, int value_heads, int columns);
  void (*chunk_forward)(const GatedDeltaRuleParams&, const RuleTask&, void* scratch);

  // The rule token by token, equation (1), for some tasks: neighbors overlap in time.
  size_t (*recurrent_scratch_bytes)(const GatedDeltaRuleParams&, int columns);
  void (*recurrent_forward)(const GatedDeltaRuleParams&, const RuleTask* tasks, int count,
                            void* scratch);

  // Gradients of both, equations (9) to (28): begin; for every segment from the last to the first
  // run_segment for each task of a key head, then store_segment for all of them together; end.
  size_t (*backward_scratch_bytes)(const GatedDeltaRuleBackwardParams&, int value_heads);
  void (*backward_begin)(const BackwardTask&);
  void (*backward_segment)(const BackwardTask&, int64_t segment);
  void (*backward_store_segment)(const BackwardTask* of_key_head, int count, int64_t segment);
  void (*backward_end)(const BackwardTask&);

  // One matrix of the batch, equation (4).
  size_t (*inverse_scratch_bytes)(int size);
  void (*triangular_inverse)(const TriangularInverseParams&, int64_t index, void* scratch);

  // The causal convolution, equation (29).
  size_t (*conv_scratch_bytes)(const CausalConv1dParams&);
  void (*conv_forward)(const CausalConv1dParams&, const ConvTask&, void* scratch);

  // Its gradients for some channels, up to kConvChannels, of all tokens: equations (31) to (33).
  size_t (*conv_backward_scratch_bytes)(const CausalConv1dBackwardParams&);
  void (*conv_backward)(const CausalConv1dBackwardParams&, int64_t channel_begin, int channels,
                        void* scratch);

  // Rows [begin, end) of the gated norm, equation (30).
  size_t (*norm_scratch_bytes)(const GatedRmsNormParams&);
  void (*norm_forward)(const GatedRmsNormParams&, int64_t begin, int64_t end, void* scratch);

  // Its gradients, equations (34) to (36); weight_sums [C] is the gradient of the weight by these
  // rows, or null where it is not wanted.
  size_t (*norm_backward_scratch_bytes)(const GatedRmsNormBackwardParams&);
  void (*norm_backward)(const GatedRmsNormBackwardParams&, int64_t begin, int64_t end,
                        double* weight_sums, void* scratch);
};

namespace scalar {
extern const Kernels kernels_f32;
extern const Bf16Kernels kernels_bf16;
extern const Kernels kernels_f64;
}  // namespace scalar
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels_f32;
extern const Bf16Kernels kernels_bf16;
}  // namespace avx2
namespace avx512 {
extern const Kernels kernels_f32;
extern const Bf16Kernels kernels_bf16;
}  // namespace avx512
namespace avx512_bf16 {
extern const Bf16Kernels kernels_bf16;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels kernels_f32;
extern const Bf16Kernels kernels_bf16;
}  // namespace neon
#endif

}  // namespace deltanet::cpu
