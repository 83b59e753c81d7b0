// SPDX-License-Identifier: Apache-2.0
//
// Allocation of results.
#pragma once
#include "ops/tensor_view.h"

namespace deltanet::ops {

// A new tensor on `like`'s device, contiguous, not initialized.
//
// malloc maps fresh pages for every block above 32 MB and gives them back when it is freed. The
// kernel then clears them, 4 KB at a time, in the next call: for the states of a decode batch that
// costs more than the arithmetic. CPU results of that size therefore lie in 2 MB pages, and a few
// freed blocks are kept for the next call (docs/decisions/0011). DELTANET_KEEP_MB says how much,
// 256 by default, 0 for nothing.
Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                ScalarType dtype);

// For tests: from now on every result on the CPU is full of NaN (bytes 0xff) before it is handed
// out, or no longer. Returns how many were since the last call.
int64_t poison_results(bool on);

}  // namespace deltanet::ops
