// SPDX-License-Identifier: Apache-2.0
//
// The backward pass: which stages run, and the scratch memory that they share.
#include "cuda/backward.h"

#include <algorithm>

#include "cuda/chunk_table.cuh"
#include "cuda/launch.cuh"
#include "cuda/simt_adjoint.cuh"
#include "cuda/simt_backward.h"
#include "cuda/simt_forward.h"
#include "cuda/simt_gradients.cuh"
#include "cuda/simt_reduce.cuh"
#include "cuda/simt_walk.cuh"
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

// Whether one block walks over all strips of a sequence and key head, or strips run side by side.
//
// The walk makes 9.7 products with a state per chunk, the parallel stages 13, so it is faster from
// three quarters of the blocks on that the device holds, if blocks shared its time evenly; two on a
// multiprocessor get more than two thirds of what three get. And it takes no memory that grows with
// T. From half of the blocks on it is at most 1.5 times as slow. The choice depends on N, HK and
// the device alone, so that a sequence of any length costs the same scratch memory; what it loses
// is that a long sequence among short ones is one block's.
bool chooses_walk(const RuleParams& p, const Wanted& wanted, const BackwardOptions& options) {
  if (!wanted.gradients) return false;
  if (options.mode != BackwardMode::kChosen) return options.mode == BackwardMode::kWalk;
  return 2 * p.sequences * p.key_heads >= gradient_blocks_at_once();
}

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

// Memory from `base` on, piece by piece.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  void* take(size_t size) {
    void* const here = base_ + bytes_;
    bytes_ += (size + 255) / 256 * 256;
    return here;
  }
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take(sizeof(T) * size_t(count)));
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

struct WalkWorkspace {
  WalkWorkspace(const RuleBackwardParams& p, const Wanted& wanted, Arena& arena)
      : plan(plan_walk(p, wanted.query_sums, wanted.key_sums)) {
    plan.slots.data = arena.take<float>(plan.blocks * plan.slots.floats);
    if (wanted.gate_sums) plan.gate_sums = arena.take<double>(2 * p.sequences * p.value_heads);
  }

  WalkArguments plan;
};

struct ParallelWorkspace {
  ParallelWorkspace(const RuleBackwardParams& p, const Wanted& wanted,
                    const BackwardOptions& options, Arena& arena) {
    const int64_t strips = max_chunks(p, kStrip), heads = strips * p.value_heads;
    const int64_t state = state_floats(p.dim_k, p.dim_v), map = state_floats(p.dim_k, p.dim_k);
    segment_strips = choose_segment_strips(p, options);
    segments =
        std::max<int64_t>((p.tokens + segment_strips * kStrip - 1) / (segment_strips * kStrip), 1);
    const int64_t keys = p.sequences * p.value_heads;
    table = arena.take(chunk_table_bytes(p, kStrip));
    prepared = arena.take<Prepared>(heads * kStripChunks);
    ends = arena.take<float>((segments - 1) * keys * state);
    maps = arena.take<float>(std::max<int64_t>(segments - 2, 0) * keys * map);
    if (wanted.gradients) {
      gradient = arena.take<PreparedGradient>(heads * kStripChunks);
      strip_states = arena.take<float>(heads * state);
      strip_adjoints = arena.take<float>(heads * state);
      plan = plan_gradients(p, wanted.query_sums, wanted.key_sums);
      plan.slots.data = arena.take<float>(plan.blocks * plan.slots.floats);
    }
    if (wanted.gate_sums) plan.gate_sums = arena.take<double>(2 * heads);
  }

  int64_t segments, segment_strips;
  void* table;
  Prepared* prepared;
  float *ends, *maps;
  PreparedGradient* gradient = nullptr;
  float *strip_states = nullptr, *strip_adjoints = nullptr;
  GradientArguments plan = {};
};

// Without tokens there are no sums, and none of their memory, but gradients of zero to write.
void reduce(const RuleBackwardParams& p, const Wanted& wanted, const ReduceArguments& x,
            cudaStream_t stream) {
  launch("reduce", reduce_kernel, x.row_blocks + (wanted.gate_sums ? p.value_heads : 0),
         kReduceThreads, /*dynamic_shared=*/0, stream, p, x);
}

void backward_by_walk(const RuleBackwardParams& p, const Wanted& wanted, Arena arena,
                      cudaStream_t stream) {
  const WalkArguments plan = WalkWorkspace(p, wanted, arena).plan;
  walk(p, plan, stream);
  ReduceArguments sums = {};
  sums.gate_rows = p.sequences;
  sums.gate_sums = plan.gate_sums;
  reduce(p, wanted, sums, stream);
}

void backward_in_parallel(const RuleBackwardParams& p, const Wanted& wanted,
                          const BackwardOptions& options, Arena arena, cudaStream_t stream) {
  const ParallelWorkspace w(p, wanted, options, arena);
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
    gradients(p, x, stream);
  }

  // What gradients() leaves: sums over heads where a block had one of them, the tail, sums of
  // gates.
  const bool split = (p.d_query || p.d_key) && w.plan.heads_of_item < p.value_heads / p.key_heads;
  ReduceArguments sums = {};
  sums.table = table;
  if (split) sums.slots = w.plan.slots;
  if (split || p.packed()) sums.row_blocks = strips * p.key_heads;
  sums.gate_rows = strips;
  sums.gate_sums = w.plan.gate_sums;
  reduce(p, wanted, sums, stream);
}

}  // namespace

size_t chunk_backward_workspace(const RuleBackwardParams& p, const BackwardOptions& options) {
  check_supported("chunk_gated_delta_rule_backward", p);
  Arena anywhere(reinterpret_cast<char*>(256));
  const Wanted wanted(p);
  if (chooses_walk(p, wanted, options))
    WalkWorkspace(p, wanted, anywhere);
  else
    ParallelWorkspace(p, wanted, options, anywhere);
  return anywhere.bytes();
}

void chunk_backward(const RuleBackwardParams& p, void* workspace, cudaStream_t stream,
                    const BackwardOptions& options) {
  check_supported("chunk_gated_delta_rule_backward", p);
  const Wanted wanted(p);
  if (chooses_walk(p, wanted, options))
    backward_by_walk(p, wanted, Arena(workspace), stream);
  else
    backward_in_parallel(p, wanted, options, Arena(workspace), stream);
}

}  // namespace deltanet::cuda
