// SPDX-License-Identifier: Apache-2.0
// Kernels whose counts are known by hand; tests/test_ptx_emulator.py reads them back from count
// mode.
#include "testing.cuh"
using namespace testing;

__global__ void coalesced(const float* in, float* out) {
  out[blockIdx.x * 128 + threadIdx.x] = in[blockIdx.x * 128 + threadIdx.x];
}
__global__ void strided(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x * 8];
}  // each lane in a sector of its own
__global__ void misplaced(const float* in, float* out) {
  out[threadIdx.x] = in[threadIdx.x + 1];
}  // one sector more than needed
__global__ void broadcast(const float* in, float* out) { out[threadIdx.x] = in[0]; }
__global__ void vectors(const float4* in, float4* out) { out[threadIdx.x] = in[threadIdx.x]; }
template <int kStride>
__global__ void banks(float* out) {
  __shared__ float box[32 * kStride];
  box[threadIdx.x * kStride] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = box[threadIdx.x * kStride];
}
__global__ void quads(float4* out) {
  __shared__ float4 box[32];
  box[threadIdx.x] = make_float4(1, 2, 3, threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = box[threadIdx.x];
}
template <int kPitch>
__global__ void matrices(unsigned* out) {
  __shared__ __align__(16) unsigned short box[8 * kPitch];
  for (int i = threadIdx.x; i < 8 * kPitch; i += 32) box[i] = (unsigned short)i;
  __syncthreads();
  unsigned d, address = (unsigned)__cvta_generic_to_shared(&box[threadIdx.x % 8 * kPitch]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(d)
               : "r"(address)
               : "memory");
  out[threadIdx.x] = d;
}
__global__ void products(float* out) {
  float c[4] = {};
  for (int i = 0; i < 5; i++)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, "
        "{%4,%4}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(0x3f803f80));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(0x3f800000));
  out[blockIdx.x * 64 + threadIdx.x] = c[0];
}
__global__ void loops(const float* in, float* out) {  // the same site many times; barriers between
  __shared__ float box[64];
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < 7; i++) {
    box[threadIdx.x] = in[i * 64 + threadIdx.x];
    __syncthreads();
    sum += box[63 - threadIdx.x];
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}

int main() {
  Array<float> in(filled(1024, 1.f)), out(filled(1024, 0.f));
  Array<unsigned> words(32);
  coalesced<<<8, 128>>>(in, out);
  strided<<<1, 32>>>(in, out);
  misplaced<<<1, 32>>>(in, out);
  broadcast<<<1, 32>>>(in, out);
  vectors<<<1, 32>>>(reinterpret_cast<float4*>(in.data), reinterpret_cast<float4*>(out.data));
  banks<1><<<1, 32>>>(out);
  banks<2><<<1, 32>>>(out);
  banks<32><<<1, 32>>>(out);
  banks<33><<<1, 32>>>(out);
  quads<<<1, 32>>>(reinterpret_cast<float4*>(out.data));
  matrices<64><<<1, 32>>>(words);
  matrices<72><<<1, 32>>>(words);
  products<<<3, 64>>>(out);
  loops<<<1, 64>>>(in, out);
  const cudaError_t e = cudaGetLastError();
  std::printf("%s\n", cudaGetErrorString(e));
  return e != 0;
}
