// SPDX-License-Identifier: Apache-2.0
//
// The backward pass: which stages run, and the scratch memory that they share.
#include "cuda/backward.h"

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
        gradients(query_sums || key_sums || p.d_beta),
        reduction(p.d_query || p.d_key || p.packed()) {}

  bool gate_sums, query_sums, key_sums, gradients, reduction;
};

struct Workspace {
  Workspace(const RuleBackwardParams& p, const Wanted& wanted, void* memory)
      : base_(static_cast<char*>(memory)) {
    const int64_t strips = max_chunks(p, kStrip), heads = strips * p.value_heads;
    // Rows of states are whole quads.
    const int64_t row = (p.dim_v + 3) / 4 * 4, state = p.dim_k * row;
    const auto states = [&] {
      MutableView<4> x;
      x.data = take(sizeof(float) * size_t(heads * state));
      x.stride[0] = p.value_heads * state;
      x.stride[1] = state;
      x.stride[2] = row;
      x.stride[3] = 1;
      return x;
    };
    const size_t rows = size_t(p.batch * p.tokens * p.value_heads * p.dim_k);
    table = take(chunk_table_bytes(p, kStrip));
    prepared = static_cast<Prepared*>(take(sizeof(Prepared) * size_t(heads * kStripChunks)));
    if (wanted.gradients) {
      gradient = static_cast<PreparedGradient*>(
          take(sizeof(PreparedGradient) * size_t(heads * kStripChunks)));
      strip_states = states();
      strip_adjoints = states();
    }
    if (wanted.query_sums) d_query = static_cast<float*>(take(sizeof(float) * rows));
    if (wanted.key_sums) d_key = static_cast<float*>(take(sizeof(float) * rows));
    if (wanted.gate_sums)
      gate_sums = static_cast<double*>(take(2 * sizeof(double) * size_t(heads)));
  }

  void* table;
  Prepared* prepared;
  PreparedGradient* gradient = nullptr;
  MutableView<4> strip_states, strip_adjoints;
  float *d_query = nullptr, *d_key = nullptr;
  double* gate_sums = nullptr;
  size_t bytes = 0;

 private:
  void* take(size_t size) {
    void* const here = base_ + bytes;
    bytes += (size + 255) / 256 * 256;
    return here;
  }
  char* base_;
};

View<4> constant(const MutableView<4>& x) {
  View<4> view;
  view.data = x.data;
  view.dtype = x.dtype;
  for (int i = 0; i < 4; ++i) view.stride[i] = x.stride[i];
  return view;
}

}  // namespace

size_t chunk_backward_workspace(const RuleBackwardParams& p) {
  check_supported("chunk_gated_delta_rule_backward", p);
  char* const anywhere = reinterpret_cast<char*>(256);
  return Workspace(p, Wanted(p), anywhere).bytes;
}

void chunk_backward(const RuleBackwardParams& p, void* workspace, cudaStream_t stream) {
  check_supported("chunk_gated_delta_rule_backward", p);
  const Wanted wanted(p);
  const Workspace w(p, wanted, workspace);
  const int64_t strips = max_chunks(p, kStrip);
  const ChunkTable table = build_chunk_table(p, kStrip, w.table, stream);
  prepare_strips(p, table, w.prepared, w.gradient, stream);

  AdjointArguments adjoints = {};
  adjoints.prepared = w.prepared;
  adjoints.table = table;
  adjoints.strips = strips;
  adjoints.strip_adjoints = w.strip_adjoints;
  adjoint(p, adjoints, stream);

  if (wanted.gradients) {
    scan_segments(p, table, w.prepared, p.states, w.strip_states, stream);
    GradientArguments x = {};
    x.prepared = w.prepared;
    x.gradient = w.gradient;
    x.table = table;
    x.states = constant(w.strip_states);
    x.adjoints = constant(w.strip_adjoints);
    x.d_query = w.d_query;
    x.d_key = w.d_key;
    x.gate_sums = w.gate_sums;
    gradients(p, x, stream);
  }

  ReduceArguments sums = {};
  sums.table = table;
  sums.d_query = w.d_query;
  sums.d_key = w.d_key;
  sums.gate_sums = w.gate_sums;
  sums.strips = strips;
  if (wanted.reduction)
    launch("reduce_rows", reduce_rows_kernel, strips * p.key_heads, kReduceThreads,
           /*dynamic_shared=*/0, stream, p, sums);
  if (wanted.gate_sums)
    launch("reduce_gates", reduce_gates_kernel, p.value_heads, kReduceThreads,
           /*dynamic_shared=*/0, stream, p, sums);
}

}  // namespace deltanet::cuda
