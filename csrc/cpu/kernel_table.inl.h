// SPDX-License-Identifier: Apache-2.0
//
// The kernel table of a vector type. Included inside an ISA namespace, last.

// Columns of a task: a multiple of every widest tile, and wide enough that K K^T, Q K^T and the
// packing of q and k, which every task of a head repeats, stay below a tenth of its work.
constexpr int kTaskColumns = 64;

template <class X>
constexpr Kernels make_kernels() {
  static_assert(kTaskColumns % (X::kTileWidths[0] * X::kLanes) == 0);
  return {
      kTaskColumns,
      &ChunkForward<X>::scratch_bytes,
      &ChunkForward<X>::run,
      &RecurrentForward<X>::scratch_bytes,
      &RecurrentForward<X>::run,
      &ChunkBackward<X>::scratch_bytes,
      &ChunkBackward<X>::begin,
      &ChunkBackward<X>::run_segment,
      &ChunkBackward<X>::store_segment,
      &ChunkBackward<X>::end,
      &TriangularInverse<X>::scratch_bytes,
      &TriangularInverse<X>::run,
      &CausalConv1d<X>::scratch_bytes,
      &CausalConv1d<X>::run,
      &CausalConv1dBackward<X>::scratch_bytes,
      &CausalConv1dBackward<X>::run,
      &GatedRmsNorm<X>::scratch_bytes,
      &GatedRmsNorm<X>::run,
      &GatedRmsNormBackward<X>::scratch_bytes,
      &GatedRmsNormBackward<X>::run,
  };
}

template <class X>
constexpr Bf16Kernels make_bf16_kernels() {
  return {&ChunkForward<X, true>::scratch_bytes, &ChunkForward<X, true>::run};
}
