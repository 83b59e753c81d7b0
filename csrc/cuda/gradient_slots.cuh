// SPDX-License-Identifier: Apache-2.0
//
// Scratch memory of the blocks of gradient_kernel and walk_kernel. A block keeps its slot for all
// the strips that it takes, so that slots are as many as blocks run at once, however long the call
// is.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/simt_chunk.cuh"
#include "cuda/strips.cuh"

namespace deltanet::cuda::simt {

// In floats, from the start of a slot.
struct GradientSlots {
  float* data = nullptr;
  int64_t floats = 0;  // of a slot
  // S of one tile of V before each chunk of the strip but the first.
  int state_floats = 0;
  int N = 0, X = 0;  // [kStrip, columns] of that tile
  // [kStrip, K] each: sums over V for one value head, and over the value heads of the key; the
  // latter are the former where a block has one head only.
  bool query = false, key = false;  // wanted
  bool totals = false;              // two of each
  int d_query = 0, d_key = 0, query_total = 0, key_total = 0;
  // Of a block that walks over strips, for the value heads of one key head:
  // [kStripChunks, heads] of one strip; S behind each strip of a segment but the last, [., heads];
  // dS behind the strip, [heads].
  int64_t prepared = 0, gradient = 0, states = 0, adjoints = 0;

  GradientSlots() = default;
  GradientSlots(int dim_k, int columns, bool with_query, bool with_key, bool with_totals)
      : state_floats(padded_rows(dim_k) * columns),
        query(with_query),
        key(with_key),
        totals(with_totals) {
    int at = (kStripChunks - 1) * state_floats;
    const auto take = [&](bool wanted, int width) {
      const int here = at;
      if (wanted) at += kStrip * width;
      return here;
    };
    N = take(true, columns);
    X = take(true, columns);
    d_query = take(query, dim_k);
    d_key = take(key, dim_k);
    query_total = totals ? take(query, dim_k) : d_query;
    key_total = totals ? take(key, dim_k) : d_key;
    floats = at;
  }

  // `strips`: of the longest sequence that there can be.
  void add_walk(int heads, int64_t strips, int64_t floats_of_state) {
    const int64_t in_segment = strips < kSegmentStrips ? strips : kSegmentStrips;
    const auto take = [&](int64_t count) {
      const int64_t here = floats;
      floats += count * heads;
      return here;
    };
    prepared = take(kStripChunks * int64_t(sizeof(Prepared) / sizeof(float)));
    gradient = take(kStripChunks * int64_t(sizeof(PreparedGradient) / sizeof(float)));
    states = take((in_segment - 1) * floats_of_state);
    adjoints = take(strips > 1 ? floats_of_state : 0);
  }
};

}  // namespace deltanet::cuda::simt
