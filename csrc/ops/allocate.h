// SPDX-License-Identifier: Apache-2.0
//
// Allocation of results.
#pragma once
#include <torch/csrc/stable/ops.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ops/tensor_view.h"

namespace deltanet::ops {

// A new tensor on `like`'s device, not initialized.
//
// malloc maps fresh pages for every block above 32 MB, and the kernel then clears them one 4 KB
// fault at a time: for the states of a decode batch that costs more than the arithmetic. Asking for
// 2 MB pages takes most of it away. Advice only: where it cannot be followed nothing changes.
inline Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       ScalarType dtype) {
  const Tensor x = torch::stable::new_empty(like, sizes, dtype);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096, kMapped = 32 << 20;
  const uintptr_t bytes = uintptr_t(x.numel()) * x.element_size();
  if (x.is_cpu() && bytes > kMapped) {
    const uintptr_t begin = (uintptr_t(x.data_ptr()) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (uintptr_t(x.data_ptr()) + bytes) / kPage * kPage;
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
  return x;
}

}  // namespace deltanet::ops
