// SPDX-License-Identifier: Apache-2.0
//
// The gradients of every strip of tokens, in parallel, in fp32: docs/algorithm.md, equations (10)
// to (22), from the state before the strip and the adjoint state behind it.
//
// Work split:  one block = one (strip, key head), with a loop over the value heads of the key, or
//              one (strip, value head) where the former would leave processors idle; of those it
//              takes one after the other. What it does with one: simt_gradient_block.cuh.
// Numerics:    every sum has one fixed order, the same for both splits.
// Memory:      reads q, k, v, dO, both states of the strip, what prepare made. Writes dQ and dK, or
//              what reduce_kernel sums over the value heads.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/chunk_table.cuh"
#include "cuda/rule_params.cuh"
#include "cuda/simt_gradient_block.cuh"
#include "cuda/strips.cuh"

namespace deltanet::cuda::simt {

struct GradientArguments : GradientInputs {  // items: strips * HK, or strips * HV
  const Prepared* prepared;                  // [strips * kStripChunks, HV]
  const PreparedGradient* gradient;          // the same
  ChunkTable table;                          // of strips
  int heads_of_item;                         // HV / HK or 1
  // Before and behind each strip: [strips, HV] of state_floats.
  const float *states, *adjoints;
};

template <int kColumns>
class StripBlock : public GradientBlock<StripBlock<kColumns>, kColumns> {
 public:
  static constexpr bool kWalks = false;

  __device__ __forceinline__ StripBlock(const RuleBackwardParams& p, const GradientArguments& x,
                                        float4* memory)
      : Base(p, x, memory), arguments_(x) {}

  // The gradients of one strip, for heads_of_item value heads from `head` on.
  __device__ __forceinline__ void run(const Chunk& strip, int number, int head) {
    const int64_t prepared = int64_t(number) * kStripChunks * p_.value_heads + head;
    __syncthreads();  // the strip before has been read
    if (thread_ == 0)
      shared_.place = {strip,
                       p_.device_cu_seqlens ? 0 : strip.sequence,
                       head,
                       head,
                       int(key_head_of(p_, head)),
                       /*tile=*/0,
                       int(p_.value_heads),
                       arguments_.prepared + prepared,
                       arguments_.gradient + prepared,
                       number,
                       /*first_of_sums=*/true,
                       /*states_only=*/false};
    this->run_heads(arguments_.heads_of_item);
    if (arguments_.heads_of_item == this->heads_of_key()) this->write_rows();
  }

 private:
  using Base = GradientBlock<StripBlock<kColumns>, kColumns>;
  friend Base;
  using Base::p_, Base::place, Base::shared_, Base::thread_;

  __device__ __forceinline__ int64_t state_of_strip() const {
    return (int64_t(place().sums) * p_.value_heads + place().head) *
           state_floats(p_.dim_k, p_.dim_v);
  }
  __device__ __forceinline__ void load_before() const {
    this->tile_of(this->S_).load(arguments_.states + state_of_strip());
  }
  __device__ __forceinline__ void load_behind() const {
    this->tile_of(this->dS_).load(arguments_.adjoints + state_of_strip());
  }
  __device__ __forceinline__ bool wants_before() const { return false; }

  const GradientArguments& arguments_;
};

template <int kColumns>
__global__ void __launch_bounds__(GradientTraits<kColumns>::kThreads,
                                  GradientTraits<kColumns>::kMinBlocks)
    gradient_kernel(const __grid_constant__ RuleBackwardParams p,
                    const __grid_constant__ GradientArguments x) {
  extern __shared__ float4 memory[];
  const unsigned per_strip = unsigned(p.value_heads) / unsigned(x.heads_of_item);
  for (unsigned item = blockIdx.x; item < x.items; item += gridDim.x) {
    const int number = int(item / per_strip), head = int(item % per_strip) * x.heads_of_item;
    const Chunk strip = chunk_at(p, x.table, number);
    if (strip.count > 0) {
      StripBlock<kColumns>(p, x, memory).run(strip, number, head);
    } else if (x.gate_sums) {
      for (int i = int(threadIdx.x); i < 2 * x.heads_of_item;
           i += GradientTraits<kColumns>::kThreads)
        x.gate_sums[2 * (number * p.value_heads + head) + i] = 0;
    }
  }
}

}  // namespace deltanet::cuda::simt
