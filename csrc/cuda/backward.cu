// SPDX-License-Identifier: Apache-2.0
//
// The backward pass: which stages run, and the scratch memory that they share.
#include "cuda/backward.h"

#include <algorithm>

#include "cuda/chunk_table.cuh"
#include "cuda/launch.cuh"
#include "cuda/simt_backward.h"
#include "cuda/simt_forward.h"
#include "cuda/simt_gradients.cuh"
#include "cuda/simt_reduce.cuh"
#include "cuda/supported.h"

namespace deltanet::cuda {
namespace {

using namespace simt;

// Only what is wanted is computed: dV and the initial state's gradient need no more than the
// reverse scan.
struct Wanted {
  explicit Wanted(const RuleBackwardParams& p)
      : gate_sums(p.d_A_log || p.d_dt_bias),
        query_sums(p.d_query || p.d_g || gate_sums),  // dg needs q . q_past
        key_sums(p.d_key),
        gradients(query_sums || key_sums || p.d_beta) {}

  bool gate_sums, query_sums, key_sums, gradients;
};

// Strips in a segment of the reverse scan; sequences of up to so many are not cut.
//
// Segments cost 2.7 times the work of a plain scan: their maps come first. They pay where blocks of
// whole sequences fill less than a quarter of the device: then as many segments as fill it, of two
// strips or more. The choice depends on N, HV, V, T and the device alone, never on what cu_seqlens
// holds, so that maps and ends of segments take no more than a few states per processor.
int64_t choose_segment_strips(const RuleParams& p, const BackwardOptions& options) {
  if (options.segment_strips > 0) return options.segment_strips;
  constexpr int64_t kFewestStrips = 2, kFewestSegments = 4;
  const int64_t strips = (p.tokens + kStrip - 1) / kStrip;
  const int64_t blocks = p.sequences * p.value_heads * column_tiles(p.dim_v, 16);
  const int64_t wanted = blocks > 0 ? processors() / blocks : 1;
  if (p.batch_invariant || wanted < kFewestSegments || strips < 2 * kFewestStrips)
    return std::max<int64_t>(strips, 1);
  return std::max((strips + wanted - 1) / wanted, kFewestStrips);
}

struct Workspace {
  Workspace(const RuleBackwardParams& p, const Wanted& wanted, const BackwardOptions& options,
            void* memory)
      : base_(static_cast<char*>(memory)) {
    const int64_t strips = max_chunks(p, kStrip), heads = strips * p.value_heads;
    const int64_t state = state_floats(p.dim_k, p.dim_v), map = state_floats(p.dim_k, p.dim_k);
    segment_strips = choose_segment_strips(p, options);
    segments =
        std::max<int64_t>((p.tokens + segment_strips * kStrip - 1) / (segment_strips * kStrip), 1);
    const int64_t keys = p.sequences * p.value_heads;
    table = take(chunk_table_bytes(p, kStrip));
    prepared = take<Prepared>(heads * kStripChunks);
    ends = take<float>((segments - 1) * keys * state);
    maps = take<float>(std::max<int64_t>(segments - 2, 0) * keys * map);
    if (wanted.gradients) {
      gradient = take<PreparedGradient>(heads * kStripChunks);
      strip_states = take<float>(heads * state);
      strip_adjoints = take<float>(heads * state);
      plan = plan_gradients(p, wanted.query_sums, wanted.key_sums);
      plan.slots.data = take<float>(plan.blocks * plan.slots.floats);
    }
    if (wanted.gate_sums) gate_sums = take<double>(2 * heads);
  }

  int64_t segments, segment_strips;
  void* table;
  Prepared* prepared;
  float *ends, *maps;
  PreparedGradient* gradient = nullptr;
  float *strip_states = nullptr, *strip_adjoints = nullptr;
  GradientArguments plan = {};
  double* gate_sums = nullptr;
  size_t bytes = 0;

 private:
  void* take(size_t size) {
    void* const here = base_ + bytes;
    bytes += (size + 255) / 256 * 256;
    return here;
  }
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take(sizeof(T) * size_t(count)));
  }
  char* base_;
};

}  // namespace

size_t chunk_backward_workspace(const RuleBackwardParams& p, const BackwardOptions& options) {
  check_supported("chunk_gated_delta_rule_backward", p);
  char* const anywhere = reinterpret_cast<char*>(256);
  return Workspace(p, Wanted(p), options, anywhere).bytes;
}

void chunk_backward(const RuleBackwardParams& p, void* workspace, cudaStream_t stream,
                    const BackwardOptions& options) {
  check_supported("chunk_gated_delta_rule_backward", p);
  const Wanted wanted(p);
  const Workspace w(p, wanted, options, workspace);
  const int64_t strips = max_chunks(p, kStrip);
  const ChunkTable table = build_chunk_table(p, kStrip, w.table, stream);
  prepare_strips(p, table, w.prepared, w.gradient, stream);

  AdjointArguments adjoints = {};
  adjoints.prepared = w.prepared;
  adjoints.table = table;
  adjoints.strips = strips;
  adjoints.strip_adjoints = w.strip_adjoints;
  adjoints.segments = w.segments;
  adjoints.segment_strips = w.segment_strips;
  adjoints.ends = w.ends;
  adjoints.maps = w.maps;
  adjoint(p, adjoints, stream);

  if (wanted.gradients) {
    scan_segments(p, table, w.prepared, p.states, w.strip_states, stream);
    GradientArguments x = w.plan;
    x.prepared = w.prepared;
    x.gradient = w.gradient;
    x.table = table;
    x.states = w.strip_states;
    x.adjoints = w.strip_adjoints;
    x.gate_sums = w.gate_sums;
    gradients(p, x, stream);
  }

  // What gradients() leaves: sums over heads where a block had one of them, the tail, sums of
  // gates.
  const bool split = (p.d_query || p.d_key) && w.plan.heads_of_item < p.value_heads / p.key_heads;
  ReduceArguments sums = {};
  sums.table = table;
  sums.strips = strips;
  if (split) sums.slots = w.plan.slots;
  if (split || p.packed()) sums.row_blocks = strips * p.key_heads;
  sums.gate_sums = w.gate_sums;
  launch("reduce", reduce_kernel, sums.row_blocks + (wanted.gate_sums ? p.value_heads : 0),
         kReduceThreads, /*dynamic_shared=*/0, stream, p, sums);
}

}  // namespace deltanet::cuda
