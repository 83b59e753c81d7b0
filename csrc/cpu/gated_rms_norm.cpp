// SPDX-License-Identifier: Apache-2.0
#include "cpu/gated_rms_norm.h"

#include <algorithm>
#include <vector>

#include "cpu/registry.h"
#include "cpu/tasks.h"

namespace deltanet::cpu {
namespace {

// A number takes as long as this many multiply-adds: most of it is the exp in silu.
constexpr int64_t kWorkPerNumber = 16;

// Rows of a task: enough tasks for the cores of one machine, and not too small ones. Sums over rows
// are taken per task, so the cut must not depend on the threads at hand.
int64_t rows_per_task(const GatedRmsNormParams& p) {
  constexpr int64_t kTasks = 64, kSmallest = 8192;
  return std::max({(p.rows + kTasks - 1) / kTasks, kSmallest / p.columns, int64_t(1)});
}

template <class Body>
void for_rows(const GatedRmsNormParams& p, int64_t work, size_t scratch, const Parallel& parallel,
              const Body& body) {
  const int64_t rows = rows_per_task(p);
  run_tasks(
      (p.rows + rows - 1) / rows, p.rows * p.columns * work, scratch, parallel,
      [&](int64_t i, void* mine) { body(i, i * rows, std::min(p.rows, (i + 1) * rows), mine); });
}

}  // namespace

void gated_rms_norm(const GatedRmsNormParams& p, const Parallel& parallel) {
  const Kernels& kernels = p.is_double() ? kernels_f64() : kernels_f32();
  for_rows(p, kWorkPerNumber, kernels.norm_scratch_bytes(p), parallel,
           [&](int64_t, int64_t begin, int64_t end, void* mine) {
             kernels.norm_forward(p, begin, end, mine);
           });
}

void gated_rms_norm_backward(const GatedRmsNormBackwardParams& p, const Parallel& parallel) {
  const Kernels& kernels = p.is_double() ? kernels_f64() : kernels_f32();
  const int64_t rows = rows_per_task(p), tasks = (p.rows + rows - 1) / rows;
  std::vector<double> sums(size_t(p.d_weight ? tasks * p.columns : 0));
  for_rows(p, 2 * kWorkPerNumber, kernels.norm_backward_scratch_bytes(p), parallel,
           [&](int64_t i, int64_t begin, int64_t end, void* mine) {
             kernels.norm_backward(p, begin, end,
                                   p.d_weight ? sums.data() + i * p.columns : nullptr, mine);
           });
  if (!p.d_weight) return;
  for (int64_t c = 0; c < p.columns; ++c) {
    double total = 0;
    for (int64_t i = 0; i < tasks; ++i) total += sums[size_t(i * p.columns + c)];
    store_element(p.d_weight.data, p.d_weight.dtype, c * p.d_weight.stride[0], total);
  }
}

}  // namespace deltanet::cpu
