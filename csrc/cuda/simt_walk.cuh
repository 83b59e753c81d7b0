// SPDX-License-Identifier: Apache-2.0
//
// The whole backward pass of a sequence in one block, in fp32: docs/algorithm.md, equations (9) to
// (22). For calls with so many sequences and key heads that one block for each fills the device:
// then nothing need lie in memory that would let strips run side by side.
//
// Work split:  one block = one (sequence, key head). It walks over the saved segments, and over the
//              strips of each, the last one first. Before that it runs the segment forward, for the
//              states between its strips; then each strip makes its gradients
//              (simt_gradient_block.cuh), from the state before it and the adjoint state that the
//              strip behind it left.
// Numerics:    the bits of the parallel stages without segments (simt_adjoint.cuh, simt_scan.cuh,
//              simt_gradients.cuh), but for the sums of A_log and dt_bias.
// Memory:      all scratch memory is the block's slot, whose size does not depend on T. Reads k, v,
//              g and beta twice, q and dO once per strip; writes every gradient once.
// Edges:       in packed calls, blocks of one sequence more clear the tail. A sequence without
//              tokens passes the gradient of its final state on.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/rule_params.cuh"
#include "cuda/simt_gradient_block.cuh"
#include "cuda/simt_prepare.cuh"
#include "cuda/simt_tail.cuh"
#include "cuda/strips.cuh"

namespace deltanet::cuda::simt {

struct WalkArguments : GradientInputs {  // items: N * HK, in packed calls (N + 1) * HK
  bool initial_quads, saved_quads, final_quads, d_value_quads, d_initial_quads;
};

template <int kColumns>
class WalkBlock : public GradientBlock<WalkBlock<kColumns>, kColumns> {
 public:
  static constexpr bool kWalks = true;

  __device__ __forceinline__ WalkBlock(const RuleBackwardParams& p, const WalkArguments& x,
                                       float4* memory)
      : Base(p, x, memory), arguments_(x) {}

  __device__ __forceinline__ void run(int n, int key_head) {
    const Sequence s = sequence_at(p_, n);
    const int strips = int((s.end - s.begin + kStrip - 1) / kStrip);
    if (strips == 0) return pass_on(n, key_head);
    __syncthreads();  // the sequence before has been read
    if (thread_ == 0) go_to(n, key_head, (strips - 1) / kSegmentStrips * kSegmentStrips, true);
    for (;;) {
      __syncthreads();  // the place is there
      run_strip();
      if (place().strip.index == 0 && !place().states_only) break;
      __syncthreads();  // the strip has been read
      if (thread_ == 0) go_on();
    }
  }

 private:
  using Base = GradientBlock<WalkBlock<kColumns>, kColumns>;
  friend Base;
  using Base::kThreads, Base::p_, Base::place, Base::shared_, Base::slot, Base::thread_;

  __device__ __forceinline__ void run_strip() {
    for (int c = 0; c < this->chunks(); ++c) {
      prepare_chunk(c);
      __syncthreads();  // the chunk has been read
    }
    this->run_heads(this->heads_of_key());
    if (!place().states_only) this->write_rows();
  }

  // Strip `index` of sequence n. `forward`: on the way to the last one of its segment, which makes
  // gradients at once.
  __device__ __forceinline__ void go_to(int n, int key_head, int index, bool forward) const {
    const Sequence s = sequence_at(p_, n);
    const int64_t first = s.begin + int64_t(index) * kStrip, left = s.end - first;
    const bool ends_segment =
        left <= kStrip || unsigned(index) % kSegmentStrips == kSegmentStrips - 1;
    const int heads = this->heads_of_key(), head = key_head * heads;
    const auto& slots = this->x_.slots;
    shared_.place = {{n, int32_t(first), int32_t(left < kStrip ? left : kStrip), index},
                     int(s.batch),
                     head,
                     head,
                     key_head,
                     /*tile=*/0,
                     heads,
                     reinterpret_cast<const Prepared*>(slot() + slots.prepared),
                     reinterpret_cast<const PreparedGradient*>(slot() + slots.gradient),
                     n,
                     /*first_of_sums=*/left <= kStrip,
                     forward && !ends_segment};
  }
  // Forward to the segment's end, then in reverse, then to the start of the segment before.
  __device__ __forceinline__ void go_on() const {
    const int index = place().strip.index;
    const bool starts_segment = unsigned(index) % kSegmentStrips == 0;
    const int next = place().states_only ? index + 1
                     : starts_segment    ? index - kSegmentStrips
                                         : index - 1;
    go_to(place().strip.sequence, place().key_head, next, place().states_only || starts_segment);
  }

  __device__ __forceinline__ void prepare_chunk(int c) {
    const auto& slots = this->x_.slots;
    const int at = c * place().prepared_stride;
    PrepareBlock<kThreads>(p_, shared_.prepare, this->k_, this->S_)
        .run({place().batch, this->first_of(c), this->count_of(c), place().key_head,
              /*with_query=*/!place().states_only,
              reinterpret_cast<Prepared*>(slot() + slots.prepared) + at,
              place().states_only
                  ? nullptr
                  : reinterpret_cast<PreparedGradient*>(slot() + slots.gradient) + at},
             this->x_.key_quads, this->x_.query_quads);
  }

  // ---- states between strips

  __device__ __forceinline__ int index_in_segment() const {
    return unsigned(place().strip.index) % kSegmentStrips;
  }
  __device__ __forceinline__ bool ends_sequence() const { return place().first_of_sums; }

  // S behind strip i of the segment
  __device__ __forceinline__ float* state_behind(int i) const {
    return slot() + this->x_.slots.states +
           (int64_t(i) * place().prepared_stride + place().head - place().first_head) *
               state_floats(p_.dim_k, p_.dim_v);
  }
  // dS between this strip and the one behind it, then between this one and the one before
  __device__ __forceinline__ float* adjoint() const {
    return slot() + this->x_.slots.adjoints +
           (place().head - place().first_head) * state_floats(p_.dim_k, p_.dim_v);
  }

  __device__ __forceinline__ void load_before() const {
    const auto S = this->tile_of(this->S_);
    const auto& strip = place().strip;
    if (index_in_segment() > 0)
      S.load(state_behind(index_in_segment() - 1));
    else if (strip.index > 0)
      S.load(p_.states, p_.saved_state(place().batch, strip.first), place().head,
             arguments_.saved_quads, false);
    else
      S.load(p_.initial_state, strip.sequence, place().head, arguments_.initial_quads, false);
  }
  __device__ __forceinline__ void leave_behind() const {
    this->tile_of(this->S_).store(state_behind(index_in_segment()));
  }
  __device__ __forceinline__ void load_behind() const {
    const auto dS = this->tile_of(this->dS_);
    if (ends_sequence())
      dS.load(p_.grad_final_state, place().strip.sequence, place().head, arguments_.final_quads,
              false);
    else
      dS.load(adjoint());
  }
  __device__ __forceinline__ bool wants_before() const {
    return place().strip.index > 0 || p_.d_initial_state.data;
  }
  __device__ __forceinline__ void leave_before() const {
    const auto dS = this->tile_of(this->dS_);
    if (place().strip.index > 0)
      dS.store(adjoint());
    else
      dS.store(p_.d_initial_state, place().strip.sequence, place().head,
               arguments_.d_initial_quads);
  }
  __device__ __forceinline__ bool value_gradient_quads() const { return arguments_.d_value_quads; }

  // A sequence without tokens.
  __device__ __forceinline__ void pass_on(int n, int key_head) {
    const int first = key_head * this->heads_of_key();
    if (this->x_.gate_sums)
      for (int i = thread_; i < 2 * this->heads_of_key(); i += kThreads)
        this->x_.gate_sums[2 * (n * p_.value_heads + first) + i] = 0;
    if (!p_.d_initial_state.data) return;
    for (int head = first; head < first + this->heads_of_key(); ++head)
      for (int tile = 0; tile < p_.dim_v; tile += kColumns) {
        const StateTile<kColumns, Base::kPitch, kThreads> dS{this->dS_, p_.dim_k, p_.dim_v, tile};
        __syncthreads();  // the tile before has been read
        dS.load(p_.grad_final_state, n, head, arguments_.final_quads, false);
        __syncthreads();  // dS is complete
        dS.store(p_.d_initial_state, n, head, arguments_.d_initial_quads);
      }
  }

  const WalkArguments& arguments_;
};

template <int kColumns>
__global__ void __launch_bounds__(GradientTraits<kColumns>::kThreads,
                                  GradientTraits<kColumns>::kMinBlocks)
    walk_kernel(const __grid_constant__ RuleBackwardParams p,
                const __grid_constant__ WalkArguments x) {
  extern __shared__ float4 memory[];
  for (unsigned item = blockIdx.x; item < x.items; item += gridDim.x) {
    const int n = int(item / unsigned(p.key_heads)), key_head = int(item % unsigned(p.key_heads));
    if (n < p.sequences) {
      WalkBlock<kColumns>(p, x, memory).run(n, key_head);
    } else {
      const Sequence tail = tail_of(p);
      clear_tokens<GradientTraits<kColumns>::kWarps>(p, tail.begin, tail.end, key_head);
    }
  }
}

}  // namespace deltanet::cuda::simt
