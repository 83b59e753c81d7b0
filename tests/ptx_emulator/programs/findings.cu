// SPDX-License-Identifier: Apache-2.0
// Small kernels that are wrong in one way each, and near misses that are right: `findings NAME`
// runs one. What the emulator must say about each stands in tests/test_ptx_emulator.py.
#include <cassert>
#include <map>

#include "testing.cuh"
using namespace testing;

#define BAR(TEXT) asm volatile(TEXT ::: "memory")

namespace {

// ---- outside memory ----

__global__ void store_at(float* x, long i) { x[i + threadIdx.x] = 1; }
__global__ void load_at(const float* x, float* out, long i) {
  out[threadIdx.x] = x[i + threadIdx.x];
}
__global__ void shared_at(float* out, int i) {
  __shared__ float box[32];
  extern __shared__ float more[];
  box[threadIdx.x] = 1;
  more[threadIdx.x + i] = 2;
  __syncthreads();
  out[threadIdx.x] = box[threadIdx.x];
}
__global__ void shared_by_pointer(float* out, int i) {
  __shared__ float box[32];
  float* p = threadIdx.x < 32 ? &box[threadIdx.x] : out;  // generic: the compiler cannot tell
  p[i] = 3;
}

__global__ void local_at(float* out, int i) {
  volatile float box[8];
  for (int k = 0; k < 8; ++k) box[k] = k;
  box[i] = 9;
  out[0] = box[3] + box[7];
}

// ---- alignment ----

__global__ void load4(const float* x, float4* out) {
  out[threadIdx.x] = *reinterpret_cast<const float4*>(x + 4 * threadIdx.x);
}
__global__ void shared8(float* out, int i) {
  __shared__ __align__(16) char box[512];
  *reinterpret_cast<double*>(box + 8 * threadIdx.x + i) = 1.5;
  __syncwarp();
  out[threadIdx.x] = float(*reinterpret_cast<double*>(box + 8 * threadIdx.x + i));
}

// ---- races in shared memory ----

template <bool kSync>
__global__ void neighbour(float* out) {
  __shared__ float box[128];
  box[threadIdx.x] = threadIdx.x;
  if (kSync) __syncthreads();
  out[threadIdx.x] = box[threadIdx.x ^ 32];
}
template <bool kSync>
__global__ void reuse(float* out) {  // write after read
  __shared__ float box[128];
  float sum = 0;
  for (int i = 0; i < 3; i++) {
    box[threadIdx.x] = i + threadIdx.x;
    __syncthreads();
    sum += box[127 - threadIdx.x];
    if (kSync) __syncthreads();
  }
  out[threadIdx.x] = sum;
}
template <bool kSame>
__global__ void two_writers(float* out) {
  __shared__ float box[64];
  box[kSame ? threadIdx.x % 32 : threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = box[threadIdx.x % 32];
}
template <bool kSync>
__global__ void in_a_warp(float* out) {
  __shared__ float box[32];
  box[threadIdx.x] = threadIdx.x;
  if (kSync) __syncwarp();
  out[threadIdx.x] = box[threadIdx.x ^ 1];
}
// Half-warps exchange among themselves under masks of their own; kReach leaves the half.
template <int kReach>
__global__ void half_warps(float* out) {
  __shared__ float box[32];
  box[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 16)
    __syncwarp(0x0000ffff);
  else
    __syncwarp(0xffff0000);
  out[threadIdx.x] = box[threadIdx.x ^ kReach];
}
// Warps 0,1 and 2,3 meet at barriers of their own. kReach 32 stays in the pair, 64 leaves it.
template <int kReach>
__global__ void pairs_of_warps(float* out) {
  __shared__ float box[128];
  box[threadIdx.x] = threadIdx.x;
  if (threadIdx.x < 64)
    BAR("bar.sync 1, 64;");
  else
    BAR("bar.sync 2, 64;");
  out[threadIdx.x] = box[threadIdx.x ^ kReach];
}
// Producer and consumer warps over one buffer: "full" and "empty" barriers. Without "empty" the
// producer may be too early.
template <bool kEmpty>
__global__ void producer_consumer(float* out) {
  __shared__ float box[32];
  float sum = 0;
  for (int i = 0; i < 4; i++) {
    if (threadIdx.x < 32) {
      if (kEmpty && i > 0) BAR("bar.sync 2, 64;");
      box[threadIdx.x] = i;
      BAR("bar.arrive 1, 64;");
    } else {
      BAR("bar.sync 1, 64;");
      sum += box[63 - threadIdx.x];
      if (kEmpty && i < 3) BAR("bar.arrive 2, 64;");
    }
  }
  if (threadIdx.x >= 32) out[threadIdx.x - 32] = sum;
}
template <int kPending>
__global__ void copied_ahead(const float4* in, float4* out) {
  __shared__ float4 box[64];
  for (int i = 0; i < 2; i++) {
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(&box[threadIdx.x + 32 * i]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to),
                 "l"(in + threadIdx.x + 32 * i)
                 : "memory");
    BAR("cp.async.commit_group;");
  }
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncthreads();
  out[threadIdx.x] = box[threadIdx.x + 32];
}
template <bool kSync>
__global__ void copied_by_others(
    const float4* in, float4* out) {  // waiting is not enough: others must have waited too
  __shared__ float4 box[64];
  const uint32_t to = (uint32_t)__cvta_generic_to_shared(&box[threadIdx.x]);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + threadIdx.x)
               : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (kSync) __syncthreads();
  out[threadIdx.x] = box[threadIdx.x ^ 32];
}
__global__ void bytes_of_a_word(unsigned* out) {  // no race: each thread has its own byte
  __shared__ unsigned char box[64];
  box[threadIdx.x] = (unsigned char)threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = box[threadIdx.x ^ 1] + reinterpret_cast<unsigned*>(box)[threadIdx.x / 4];
}
__global__ void bytes_overlap(unsigned* out) {
  __shared__ __align__(4) unsigned short box[65];
  if (threadIdx.x < 32)
    box[threadIdx.x] = 1;
  else
    reinterpret_cast<unsigned char*>(box)[2 * (threadIdx.x - 32) + 1] = 2;
  __syncthreads();
  out[threadIdx.x] = box[threadIdx.x % 32];
}
template <bool kAtomic>
__global__ void shared_counter(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (kAtomic)
    atomicAdd(&count, 1);
  else
    count = count + 1;
  __syncthreads();
  out[threadIdx.x] = count;
}

// ---- races in global memory ----

__global__ void same_place(float* x, bool apart) {
  x[apart ? blockIdx.x * 32 + threadIdx.x : threadIdx.x] = blockIdx.x;
}
__global__ void read_of_another_block(float* x) {
  if (blockIdx.x == 0)
    x[threadIdx.x] = 1;
  else
    x[32 + threadIdx.x] = x[threadIdx.x] + 1;
}
__global__ void halves_of_a_word(unsigned short* x) {
  x[threadIdx.x * 2 + blockIdx.x] = (unsigned short)blockIdx.x;
}
template <bool kAtomic>
__global__ void counter(int* x) {
  if (kAtomic)
    atomicAdd(x, 1);
  else
    x[0] = x[0] + 1;
}
// A plain write, after which its writer takes part in the atomics of everybody.
template <bool kSync>
__global__ void counter_set_first(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  if (kSync) __syncthreads();
  atomicAdd(&count, 1);
  __syncthreads();
  out[threadIdx.x] = count;
}
__global__ void counter_set_by_a_block(int* x) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) x[0] = 0;
  atomicAdd(x, 1);
}
// A plain write by one of those who took part in atomics.
template <bool kSync>
__global__ void counter_set_last(int* out) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  if (kSync) __syncthreads();
  if (threadIdx.x == 63) count = 5;
  __syncthreads();
  out[threadIdx.x] = count;
}
// Each block leaves a partial sum; the last one to finish adds them up.
template <bool kFence>
__global__ void last_block(float* partial, unsigned* done, float* out) {
  __shared__ bool last;
  partial[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;
  if (kFence) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(done, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  float sum = 0;
  for (int b = 0; b < int(gridDim.x); b++) sum += partial[b * 32 + threadIdx.x];
  out[threadIdx.x] = sum;
  if (threadIdx.x == 0) *done = 0;  // ready for the next launch
}
// Block 1 waits for a flag of block 0.
template <bool kFence>
__global__ void flag(float* x, volatile int* ready) {
  if (blockIdx.x == 0) {
    x[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
      if (kFence) __threadfence();
      *ready = 1;
    }
  } else {
    if (threadIdx.x == 0) {
      while (!*ready) {
      }
      __threadfence();
    }
    __syncthreads();
    x[32 + threadIdx.x] = x[threadIdx.x];
  }
}
// Block 0 writes what block 1 reads again and again, until the launch has failed.
__global__ void write_under_a_reader(float* x, volatile int* flags) {
  if (blockIdx.x == 0) {
    while (!flags[0]) {
    }
    x[0] = 1;
  } else {
    do {
      float seen;
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(seen) : "l"(x) : "memory");
      x[1] = seen;
      flags[0] = 1;  // without a fence: this orders nothing
    } while (!flags[1]);
  }
}
__global__ void waits_for_nobody(volatile int* ready) {
  while (!*ready) {
  }
}
template <bool kSync>
__global__ void through_global(float* x) {  // in one block
  x[threadIdx.x] = threadIdx.x;
  if (kSync) __syncthreads();
  x[64 + threadIdx.x] = x[63 - threadIdx.x];
}

// ---- uninitialised ----

__global__ void shared_unwritten(float* out, int written) {
  __shared__ float box[64];
  if (int(threadIdx.x) < written) box[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = box[63 - threadIdx.x];
}
__global__ void copy_of(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x]; }
__global__ void half_word(unsigned* out) {
  __shared__ __align__(4) unsigned short box[64];
  if (threadIdx.x == 0 || out == nullptr) box[0] = 1;
  __syncthreads();
  if (threadIdx.x == 1) out[0] = *reinterpret_cast<unsigned*>(box);
}

// ---- barriers ----

__global__ void lanes_apart(float* out) {
  if (threadIdx.x < 48) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    out[threadIdx.x] = 2;
    __syncthreads();
  }
}
__global__ void warps_apart(float* out) {
  if (threadIdx.x < 64) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    out[threadIdx.x] = 2;
    __syncthreads();
  }
}
__global__ void roles_apart(float* out) {  // the same with a thread count: that is how roles meet
  if (threadIdx.x < 64) {
    BAR("bar.sync 1, 128;");
    out[threadIdx.x] = 1;
  } else {
    out[threadIdx.x] = 2;
    BAR("bar.sync 1, 128;");
  }
}
__global__ void some_leave(float* out, int n) {
  __shared__ float box[128];
  if (int(threadIdx.x) >= n) return;
  box[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = box[0];
}
__global__ void leave_at_the_end(float* out) {
  __shared__ float box[128];
  box[threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  __syncwarp();
  out[threadIdx.x] = box[127 - threadIdx.x];
}
__global__ void unrolled(float* out) {
  __shared__ float box[128];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 6; i++) {
    box[threadIdx.x] = i;
    __syncthreads();
    sum += box[127 - threadIdx.x];
    __syncthreads();
  }
  out[threadIdx.x] = sum;
}
__global__ void odd_count(float* out) {
  if (threadIdx.x < 48) BAR("bar.sync 1, 48;");
  out[threadIdx.x] = 1;
}
__global__ void counts_differ(float* out) {
  if (threadIdx.x < 32)
    BAR("bar.sync 1, 64;");
  else
    BAR("bar.sync 1, 96;");
  out[threadIdx.x] = 1;
}
__global__ void nobody_comes(float* out) {
  if (threadIdx.x < 32) BAR("bar.sync 1, 64;");
  out[threadIdx.x] = 1;
}
__global__ void shuffles_apart(int* out) {
  int v = threadIdx.x;
  if (threadIdx.x < 16)
    v = __shfl_sync(~0u, v, 0) + 1;
  else
    v = __shfl_down_sync(~0u, v, 1);
  out[threadIdx.x] = v;
}
__global__ void shuffles_of_halves(int* out) {
  int v = threadIdx.x;
  if (threadIdx.x < 16)
    v = __shfl_sync(0xffff, v, 0) + 1;
  else
    v = __shfl_down_sync(0xffff0000, v, 1);
  out[threadIdx.x] = v;
}
__global__ void not_in_the_mask(int* out) {
  int v = threadIdx.x;
  if (threadIdx.x < 20) v = __shfl_sync(0xffff, v, 0);
  out[threadIdx.x] = v;
}

// ---- the rest ----

__global__ void unknown_instruction(unsigned* out) {
  unsigned r;
  asm volatile("vadd.s32.s32.s32 %0, %1, %2;" : "=r"(r) : "r"(threadIdx.x), "r"(1));
  out[threadIdx.x] = r;
}
__global__ void asserts(int* out) {
  assert(out[threadIdx.x] != 7);
  out[threadIdx.x] = 1;
}
__global__ void traps(int* out) {
  if (out[threadIdx.x] == 7) asm volatile("trap;");
}
__constant__ float fixed[32];
__device__ float variable[32];

}  // namespace

int main(int argc, char** argv) {
  // An odd size: the end of the array is not the end of a sector or page.
  Array<float> x(filled(1001, 1.f)), y(filled(1001, 0.f));
  Array<int> n(filled(256, 0));
  unsigned* u = reinterpret_cast<unsigned*>(n.data);
  const float4* x4 = reinterpret_cast<const float4*>(x.data);
  float4* y4 = reinterpret_cast<float4*>(y.data);
  std::map<std::string, void (*)(float*, float*, int*, unsigned*, const float4*, float4*)> all;
#define RUN(NAME, ...)                                                                     \
  all[#NAME] = [](float* x, float* y, int* n, unsigned* u, const float4* x4, float4* y4) { \
    (void)x, (void)y, (void)n, (void)u, (void)x4, (void)y4;                                \
    __VA_ARGS__;                                                                           \
  }
  RUN(store_past_the_end, store_at<<<1, 32>>>(x, 970));
  RUN(store_to_the_end, store_at<<<1, 32>>>(x, 969));
  RUN(store_before_the_start, store_at<<<1, 32>>>(x, -1));
  RUN(load_far_away, load_at<<<1, 32>>>(x, y, 1l << 30));
  RUN(load_of_the_end, load_at<<<1, 32>>>(x, y, 969));
  RUN(load_of_host_memory, std::vector<float> h(32); load_at<<<1, 32>>>(h.data(), y, 0));
  RUN(load_after_free, float* p; cudaMalloc(&p, 128); cudaMemset(p, 0, 128); cudaFree(p);
      load_at<<<1, 32>>>(p, y, 0));
  RUN(shared_past_the_end, shared_at<<<1, 32, 128>>>(x, 1));
  RUN(shared_to_the_end, shared_at<<<1, 32, 128>>>(x, 0));
  RUN(shared_pointer_past_the_end, shared_by_pointer<<<1, 32>>>(x, 1));
  RUN(constant_written, float* p; cudaGetSymbolAddress((void**)&p, fixed);
      store_at<<<1, 32>>>(p, 0));
  RUN(variable_written, float* p; cudaGetSymbolAddress((void**)&p, variable);
      store_at<<<1, 32>>>(p, 0));
  RUN(load4_misaligned, load4<<<1, 32>>>(x + 1, y4));
  RUN(load4_aligned, load4<<<1, 32>>>(x + 4, y4));
  RUN(shared8_misaligned, shared8<<<1, 32>>>(x, 4));
  RUN(shared8_aligned, shared8<<<1, 32>>>(x, 8));
  RUN(neighbour_without_barrier, neighbour<false><<<1, 128>>>(x));
  RUN(neighbour_with_barrier, neighbour<true><<<1, 128>>>(x));
  RUN(reuse_without_barrier, reuse<false><<<1, 128>>>(x));
  RUN(reuse_with_barrier, reuse<true><<<1, 128>>>(x));
  RUN(two_writers_of_one_word, two_writers<true><<<1, 64>>>(x));
  RUN(two_writers_apart, two_writers<false><<<1, 64>>>(x));
  RUN(warp_without_syncwarp, in_a_warp<false><<<1, 32>>>(x));
  RUN(warp_with_syncwarp, in_a_warp<true><<<1, 32>>>(x));
  RUN(half_warps_across, half_warps<16><<<1, 32>>>(x));
  RUN(half_warps_inside, half_warps<8><<<1, 32>>>(x));
  RUN(named_barrier_across, pairs_of_warps<64><<<1, 128>>>(x));
  RUN(named_barrier_inside, pairs_of_warps<32><<<1, 128>>>(x));
  RUN(producer_too_early, producer_consumer<false><<<1, 64>>>(x));
  RUN(producer_in_time, producer_consumer<true><<<1, 64>>>(x));
  RUN(copy_waits_too_little, copied_ahead<1><<<1, 32>>>(x4, y4));
  RUN(copy_waits_enough, copied_ahead<0><<<1, 32>>>(x4, y4));
  RUN(copy_of_others_without_barrier, copied_by_others<false><<<1, 64>>>(x4, y4));
  RUN(copy_of_others_with_barrier, copied_by_others<true><<<1, 64>>>(x4, y4));
  RUN(bytes_of_a_word, bytes_of_a_word<<<1, 64>>>(u));
  RUN(bytes_that_overlap, bytes_overlap<<<1, 64>>>(u));
  RUN(shared_counter_plain, shared_counter<false><<<1, 64>>>(n));
  RUN(shared_counter_atomic, shared_counter<true><<<1, 64>>>(n));
  RUN(blocks_write_one_place, same_place<<<2, 32>>>(x, false));
  RUN(blocks_write_apart, same_place<<<2, 32>>>(x, true));
  RUN(blocks_in_two_launches, same_place<<<1, 32>>>(x, false); same_place<<<1, 32>>>(x, false));
  RUN(block_reads_another, read_of_another_block<<<2, 32>>>(x));
  RUN(halves_of_a_word, halves_of_a_word<<<2, 32>>>(reinterpret_cast<unsigned short*>(n)));
  RUN(local_past_the_end, local_at<<<1, 1>>>(x, 8));
  RUN(local_before_the_start, local_at<<<1, 1>>>(x, -1));
  RUN(local_far_away, local_at<<<1, 1>>>(x, 1000000));
  RUN(local_to_the_end, local_at<<<1, 1>>>(x, 7));
  RUN(counter_set_without_barrier, counter_set_first<false><<<1, 64>>>(n));
  RUN(counter_set_with_barrier, counter_set_first<true><<<1, 64>>>(n));
  RUN(counter_set_by_a_block, counter_set_by_a_block<<<4, 32>>>(n));
  RUN(counter_set_too_early, counter_set_last<false><<<1, 64>>>(n));
  RUN(counter_set_in_time, counter_set_last<true><<<1, 64>>>(n));
  RUN(counter_plain, counter<false><<<4, 1>>>(n));
  RUN(counter_atomic, counter<true><<<4, 32>>>(n));
  RUN(last_block_without_fence, last_block<false><<<4, 32>>>(x, u, y));
  RUN(last_block_with_fence, last_block<true><<<4, 32>>>(x, u, y);
      last_block<true><<<4, 32>>>(x, u, y));
  RUN(flag_without_fence, flag<false><<<2, 32>>>(x, n));
  RUN(flag_with_fence, flag<true><<<2, 32>>>(x, n));
  RUN(write_under_a_reader, write_under_a_reader<<<2, 1>>>(x, n));
  RUN(flag_that_nobody_sets, waits_for_nobody<<<1, 32>>>(n));
  RUN(global_in_a_block_without_barrier, through_global<false><<<1, 64>>>(x));
  RUN(global_in_a_block_with_barrier, through_global<true><<<1, 64>>>(x));
  RUN(shared_never_written, shared_unwritten<<<1, 64>>>(x, 0));
  RUN(shared_partly_written, shared_unwritten<<<1, 64>>>(x, 63));
  RUN(shared_all_written, shared_unwritten<<<1, 64>>>(x, 64));
  RUN(half_a_word_written, half_word<<<1, 64>>>(u));
  RUN(global_never_written, Array<float> fresh(64); copy_of<<<1, 64>>>(fresh, y));
  RUN(global_copied_unwritten, Array<float> fresh(64), to(64);
      cudaMemcpy(to, fresh, 256, cudaMemcpyDeviceToDevice); copy_of<<<1, 64>>>(to, y));
  RUN(global_partly_set, Array<float> fresh(64); cudaMemset(fresh, 0, 252);
      copy_of<<<1, 64>>>(fresh, y));
  RUN(global_set, Array<float> fresh(64); cudaMemset(fresh, 0, 256); copy_of<<<1, 64>>>(fresh, y));
  RUN(global_written_by_a_kernel, Array<float> fresh(64); copy_of<<<1, 64>>>(x, fresh);
      copy_of<<<1, 64>>>(fresh, y));
  RUN(lanes_at_different_barriers, lanes_apart<<<1, 128>>>(x));
  RUN(warps_at_different_barriers, warps_apart<<<1, 128>>>(x));
  RUN(roles_at_one_named_barrier, roles_apart<<<1, 128>>>(x));
  RUN(threads_leave_before_a_barrier, some_leave<<<1, 128>>>(x, 100));
  RUN(warps_leave_before_a_barrier, some_leave<<<1, 128>>>(x, 64));
  RUN(nobody_leaves, some_leave<<<1, 128>>>(x, 128));
  RUN(threads_leave_at_the_end, leave_at_the_end<<<1, 128>>>(x));
  RUN(barriers_in_an_unrolled_loop, unrolled<<<1, 128>>>(x));
  RUN(barrier_of_48_threads, odd_count<<<1, 64>>>(x));
  RUN(barrier_counts_differ, counts_differ<<<1, 96>>>(x));
  RUN(barrier_that_never_fills, nobody_comes<<<1, 64>>>(x));
  RUN(shuffles_of_a_split_warp, shuffles_apart<<<1, 32>>>(n));
  RUN(shuffles_of_two_halves, shuffles_of_halves<<<1, 32>>>(n));
  RUN(lane_not_in_the_mask, not_in_the_mask<<<1, 32>>>(n));
  RUN(unknown_instruction, unknown_instruction<<<1, 32>>>(u));
  RUN(assertion, n[5] = 7; asserts<<<1, 32>>>(n));
  RUN(assertion_that_holds, asserts<<<1, 32>>>(n));
  RUN(trapped, n[5] = 7; traps<<<1, 32>>>(n));
  if (argc < 2) {
    for (auto& [name, f] : all) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (!all.count(argv[1])) return 3;
  all[argv[1]](x, y, n, u, x4, y4);
  const cudaError_t e = cudaGetLastError();
  std::printf("%s: %s\n", argv[1], e ? cudaGetErrorString(e) : "finished");
  return e != 0;
}
