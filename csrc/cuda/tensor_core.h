// SPDX-License-Identifier: Apache-2.0
//
// The chunked forward on tensor cores, equations (2) to (7), for bf16 and fp16 inputs on sm_80 and
// newer. `chunk_forward` (forward.h) asks supports() and takes the SIMT path for everything else.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/rule_params.cuh"

namespace deltanet::cuda::tensor_core {

// How many 16-bit terms stand for each fp32 operand of a product; q, k and v are never rounded.
// Relative error of the state: exact 1e-5, and 3e-4 for keys that repeat with beta 1.999; fast
// 2e-3, and none is promised where keys repeat with beta > 1. mma beside single operands: 2.29
// and 1.57.
enum class Precision { kExact, kFast };

// Whether the warps of the chunk pass are split into those that carry the state and those that make
// the output: where the shape and the device say so, or, for tests, never or wherever it can be.
enum class Roles { kAuto, kNever, kAlways };

struct Options {
  Precision precision = Precision::kExact;
  // Not a bit of the results depends on these two.
  Roles roles = Roles::kAuto;
  int warps = 0;  // 1, 2, 4, 8: 16 columns of V each, of a block of the chunk pass; 0: chosen from
                  // the number of sequences, HV, V and the device
  // Chunks of 64 tokens in a segment; -1: never cut; 0: chosen likewise. Results differ in
  // rounding.
  int64_t segment_chunks = 0;
};

// Whether forward() takes this call: bf16 or fp16, K <= 128, rows of q, k, v contiguous and 16-byte
// aligned, rows of o contiguous, no fp64 anywhere, a device of sm_80 or newer with enough shared
// memory.
bool supports(const RuleParams& p);

// Bytes of device memory for forward() with the same arguments, a multiple of 256.
size_t workspace_bytes(const RuleParams& p, const Options& options = {});

// workspace: 256-byte aligned, contents undefined before and after. Throws std::invalid_argument
// for what is not supported, std::runtime_error for CUDA errors.
void forward(const RuleParams& p, void* workspace, cudaStream_t stream,
             const Options& options = {});

}  // namespace deltanet::cuda::tensor_core
