// SPDX-License-Identifier: Apache-2.0
//
// The kernel table of a vector type. Included inside an ISA namespace, last.

template <class X>
constexpr Kernels make_kernels() {
  return {
      /*column_granularity=*/X::kTileWidths[0] * X::kLanes,
      &ChunkForward<X>::scratch_bytes,
      &ChunkForward<X>::run,
      &RecurrentForward<X>::scratch_bytes,
      &RecurrentForward<X>::run,
      &TriangularInverse<X>::scratch_bytes,
      &TriangularInverse<X>::run,
  };
}
