// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_core/scan_output.cuh"

namespace deltanet::cuda::tensor_core {
template void scan_output<bf16, 64, Precision::kExact>(const Params&, cudaStream_t);
template void scan_output<bf16, 64, Precision::kFast>(const Params&, cudaStream_t);
template int64_t scan_output_shared_bytes<bf16, 64, Precision::kExact>(int);
template int64_t scan_output_shared_bytes<bf16, 64, Precision::kFast>(int);
}  // namespace deltanet::cuda::tensor_core
