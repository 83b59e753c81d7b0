// SPDX-License-Identifier: Apache-2.0
//
// The pass over the chunks with its warps split into two roles, for calls with so few blocks that
// each has a multiprocessor to itself. What takes the time then is the chain from state to state of
// one warp, and two of four tensor cores idle.
//
//   state's warps    X, V', S: equations (5) and (7), two thirds of the products
//   output's warps   O: equation (6), and all copies
//
// Work split:  a state's and an output's warp own the same 16 columns of V. The first hands S and
// V'
//              over as its fp32 accumulators, as they lie in its registers.
// Barriers:    two per chunk, and the state's side of each is the longer one:
//                A  the chunk's tiles are here, V' of the chunk before too
//                   state: hands S over, K S            output: P V' of the chunk before, stores o
//                B  S is here, V' has been read
//                   state: X, V', which it hands over, S  output: Q S
// Numerics:    those of scan_output.cuh, bit for bit: the same products in the same order.
// Memory:      k, q, v, T lie in two buffers. Those that a chunk frees are filled one chunk ahead.
#pragma once
#include "cuda/tensor_core/scan_output.cuh"

namespace deltanet::cuda::tensor_core {

// What a state's warp hands to the output's, in its lanes' order.
template <int kK>
struct Handover {
  float4 state[kK / 8][32];
  float unscale[2][32];  // of the rows of S
  // V'. Over it, once it has been read, o is staged.
  union alignas(128) {
    float4 values[kChunk / 8][32];
    unsigned char staging[kChunk * kWarpColumns * 2];
  };
};

template <class Traits>
struct SharedOfRoles {
  typename Traits::Shared base;
  Handover<Traits::kK> handover[kMostRolePairs];
};

template <class Traits>
struct ScanRoles : ScanOutput<Traits> {
  using Base = ScanOutput<Traits>;
  using Base::C, Base::kK, Base::p, Base::s;
  using typename Base::State;
  using typename Base::Values;
  static_assert(Traits::kRoles);

  Handover<kK>* handover;

  __device__ __forceinline__ ScanRoles(const Params& params, SharedOfRoles<Traits>& shared)
      : Base(params, shared.base), handover(shared.handover) {}

  template <int kTiles>
  static __device__ __forceinline__ void hand_over(float4 (&to)[kTiles][32], int lane,
                                                   const Accumulator (&x)[kTiles]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) to[n][lane] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
  }
  template <int kTiles>
  static __device__ __forceinline__ void take(Accumulator (&x)[kTiles], int lane,
                                              const float4 (&from)[kTiles][32]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 y = from[n][lane];
      x[n][0] = y.x, x[n][1] = y.y, x[n][2] = y.z, x[n][3] = y.w;
    }
  }

  // Both roles meet, each in code of its own, which __syncthreads does not allow.
  __device__ __forceinline__ void meet() const {
    asm volatile("bar.sync 1, %0;" ::"r"(p.warps * 64) : "memory");
  }

  __device__ __forceinline__ void run_state() const {
    State S = {};
    this->start_scales();
    this->load_state(S);
    int first = 0;  // of the window
#pragma unroll 1
    for (int chunk = this->first_of_segment(); chunk < s.work.behind;) {
      const auto& gates = s.gates[chunk & 1];
      const int stage = Base::stage_of(chunk);
      meet();  // A
      this->scale_state(S);
      {
        const auto [columns, lane, row, pair] = this->fresh_place();
        auto& to = handover[columns];
        hand_over(to.state, lane, S);
        for (int h = 0; h < 2; ++h) to.unscale[h][lane] = this->row_unscale(columns, lane, h);
      }
      Values x = {};
      this->template multiply_state<false>(x, S, s.k[chunk & 1]);
      if (gates.tokens.keys) this->clear_tokens(x, gates.tokens.keys);

      meet();  // B
      this->subtract_from_values(x, gates.factor[kDecayIn], s.columns[0].v[stage]);
      const int last = Base::end_of_window(gates.tokens.windows, first);
      if (gates.tokens.windows) this->mask_tokens(x, first, last);
      Values v_new = {};
      this->template multiply_lower<Traits::kTTerms, Traits::kTTerms>(v_new, x, s.T[stage]);
      {
        const auto [columns, lane, row, pair] = this->fresh_place();
        hand_over(handover[columns].values, lane, v_new);
      }
      this->update_state(S, v_new, gates.factor[kDecayOut], gates.factor[kDecayQ][last - 1],
                         s.k[chunk & 1]);
      first = last == C ? 0 : last;
      chunk += last == C;
    }
    meet();  // A: V' of the last chunk is here
    if (this->stores_state()) this->store_state(S);
  }

  // o += P V', stored as tokens [first, end) of a chunk
  __device__ __forceinline__ void finish_output(Values& o, int chunk, int first) const {
    const auto& gates = s.gates[chunk & 1];
    const auto [columns, lane, row, pair] = this->fresh_place();
    Values v_new;
    take(v_new, lane, handover[columns].values);
    this->add_scores(o, v_new);
    this->store_output(chunk, o, gates.factor[kOutScale], first,
                       Base::end_of_window(gates.tokens.windows, first), handover[columns].staging);
  }

  __device__ __forceinline__ void run_output() const {
    const int begin = this->first_of_segment();
    const auto load_tiles = [&](int chunk) {
      if (chunk >= s.work.behind) return;
      this->load_k(chunk);
      this->load_q(chunk);
      this->load_v(chunk);
      this->load_T(chunk);
    };
    const auto load_gates = [&](int chunk) {
      if (chunk < s.work.behind) this->load_gates(chunk);
    };
    load_tiles(begin);
    load_gates(begin);
    cp_async_commit();
    Values o;
    int first = 0, before = begin, first_before = 0;  // of the window, and the one before
#pragma unroll 1
    for (int chunk = begin; chunk < s.work.behind;) {
      const bool new_chunk = first == 0;
      cp_async_wait<0>();
      meet();  // A
      if (new_chunk) load_tiles(chunk + 1);
      cp_async_commit();
      if (chunk > begin || first > 0) finish_output(o, before, first_before);

      meet();           // B
      if (new_chunk) {  // what finish_output has read
        this->load_P(chunk);
        load_gates(chunk + 1);
      }
      cp_async_commit();
      const auto& gates = s.gates[chunk & 1];
      {
        const auto [columns, lane, row, pair] = this->fresh_place();
        const auto& from = handover[columns];
        State S;
        take(S, lane, from.state);
        Values fresh = {};
        this->query_state(fresh, S, s.q[Base::stage_of(chunk)], gates.tokens.queries,
                          gates.factor[kDecayQ], {from.unscale[0][lane], from.unscale[1][lane]});
#pragma unroll
        for (int n = 0; n < C / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n][e] = fresh[n][e];
      }
      before = chunk;
      first_before = first;
      const int last = Base::end_of_window(gates.tokens.windows, first);
      first = last == C ? 0 : last;
      chunk += last == C;
    }
    cp_async_wait<0>();
    meet();  // A
    if (begin < s.work.behind) finish_output(o, before, first_before);
  }

  __device__ __forceinline__ void run() const {
    if (!this->start()) return;
    if (int(threadIdx.x) < p.warps * 32)
      run_state();
    else
      run_output();
  }
};

template <class Traits>
__global__ void __maxnreg__(Traits::kMaxRegisters)
    scan_roles_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 800
  extern __shared__ __align__(1024) unsigned char storage[];
  ScanRoles<Traits>(p, *reinterpret_cast<SharedOfRoles<Traits>*>(storage)).run();
#else
  __trap();  // supports() declines where this would run
#endif
}

template <class Element, int kK, Precision kPrecision>
int64_t scan_roles_shared_bytes() {
  return sizeof(SharedOfRoles<ScanTraits<Element, kK, kPrecision, true>>);
}

template <class Element, int kK, Precision kPrecision>
void scan_roles(const Params& p, cudaStream_t stream) {
  using Traits = ScanTraits<Element, kK, kPrecision, true>;
  const int64_t columns = p.warps * kWarpColumns;
  launch(
      "scan_roles", scan_roles_kernel<Traits>,
      (p.rule.dim_v + columns - 1) / columns * p.rule.value_heads * p.rule.sequences * p.segments,
      p.warps * 64, sizeof(SharedOfRoles<Traits>), stream, p);
}

}  // namespace deltanet::cuda::tensor_core
