// SPDX-License-Identifier: Apache-2.0
//
// Switches of the CUDA operators that are no arguments of theirs: the process sets them through
// deltanet_ext.batch_invariant and deltanet_ext.cuda_precision, an operator reads them when it
// runs. Not part of the schemas, so that they hold for compiled and exported graphs as well.
#pragma once
#include <atomic>
#include <cstdint>

namespace deltanet::ops {

struct CudaSettings {
  // The path is chosen from HV and the device alone: a sequence gets the same bits in any company.
  std::atomic<bool> batch_invariant{false};
  // The cheapest mix of split operands that holds the bound for low precision outputs, instead of
  // splitting every operand.
  std::atomic<bool> fast{false};
  // BackwardOptions::segment_strips. Only tests set it: segments pay for long sequences only.
  std::atomic<int64_t> backward_segment_strips{0};
  // BackwardOptions::mode. Only tests set it, too.
  std::atomic<int> backward_mode{0};
};

inline CudaSettings cuda_settings;  // one in each library

}  // namespace deltanet::ops
