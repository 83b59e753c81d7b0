// SPDX-License-Identifier: Apache-2.0
//
// The switches of csrc/ops/cuda_settings.h in the emulated library, for tests/emulated.py: what
// module_cuda.cpp offers to Python in the real one, and two that only tests have.
#include "ops/cuda_settings.h"

extern "C" __attribute__((visibility("default"))) void ptx_emulated_operators_set(
    int batch_invariant, int fast) {
  deltanet::ops::cuda_settings.batch_invariant = batch_invariant != 0;
  deltanet::ops::cuda_settings.fast = fast != 0;
}
extern "C" __attribute__((visibility("default"))) void ptx_emulated_operators_set_segment_strips(
    long long strips) {
  deltanet::ops::cuda_settings.backward_segment_strips = strips;
}
extern "C" __attribute__((visibility("default"))) void ptx_emulated_operators_set_backward_mode(
    int mode) {
  deltanet::ops::cuda_settings.backward_mode = mode;
}
