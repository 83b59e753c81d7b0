// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_core/prepare.cuh"

namespace deltanet::cuda::tensor_core {
template void prepare<fp16, 64>(const Params&, cudaStream_t);
template void prepare<fp16, 128>(const Params&, cudaStream_t);
}  // namespace deltanet::cuda::tensor_core
