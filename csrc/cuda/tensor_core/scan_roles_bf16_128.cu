// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_core/scan_roles.cuh"

namespace deltanet::cuda::tensor_core {
template void scan_roles<bf16, 128, Precision::kExact>(const Params&, cudaStream_t);
template void scan_roles<bf16, 128, Precision::kFast>(const Params&, cudaStream_t);
template int64_t scan_roles_shared_bytes<bf16, 128, Precision::kExact>();
template int64_t scan_roles_shared_bytes<bf16, 128, Precision::kFast>();
}  // namespace deltanet::cuda::tensor_core
