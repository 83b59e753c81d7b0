// SPDX-License-Identifier: Apache-2.0
//
// torch's own threads for the CPU backend, so that torch.set_num_threads holds here too.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "core/parallel.h"

namespace deltanet::ops {

class TorchParallel final : public Parallel {
 public:
  int max_workers() const override { return int(torch::stable::get_num_threads()); }
  void run(int workers, void (*body)(void*), void* context) const override {
    if (workers == 1) return body(context);
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(context);
    });
  }
};

}  // namespace deltanet::ops
