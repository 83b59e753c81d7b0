// SPDX-License-Identifier: Apache-2.0
// Warp collectives and cooperative groups, against the definition of each.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include "testing.cuh"
using namespace testing;
namespace cg = cooperative_groups;

__global__ void shuffles(const int* in, int* out, int width, int delta) {
  const int t = threadIdx.x, v = in[t];
  out[t] = __shfl_sync(~0u, v, delta, width);
  out[32 + t] = __shfl_up_sync(~0u, v, delta, width);
  out[64 + t] = __shfl_down_sync(~0u, v, delta, width);
  out[96 + t] = __shfl_xor_sync(~0u, v, delta, width);
}
static void test_shuffles() {
  std::vector<int> in(32);
  for (int i = 0; i < 32; i++) in[i] = i * i + 3;
  Array<int> d(in), out(128);
  bool ok[4] = {true, true, true, true};
  for (int width : {32, 16, 8, 2})
    for (int delta : {0, 1, 3, 7, 16, 31}) {
      shuffles<<<1, 32>>>(d, out, width, delta);
      const auto r = out.host();
      for (int t = 0; t < 32; t++) {
        const int first = t / width * width;
        ok[0] &= r[t] == in[first + delta % width];
        if (delta < 32) ok[1] &= r[32 + t] == (t - delta >= first ? in[t - delta] : in[t]);
        ok[2] &= r[64 + t] == (t + delta < first + width ? in[t + delta] : in[t]);
        // The source may lie in an earlier segment, not in a later one.
        const int other = t ^ delta;
        ok[3] &= r[96 + t] == (other < first + width ? in[other] : in[t]);
      }
    }
  const char* names[] = {"shfl.idx", "shfl.up", "shfl.down", "shfl.bfly"};
  for (int i = 0; i < 4; i++) report(names[i], ok[i]);
}

__global__ void votes(const int* in, unsigned* out) {
  const int t = threadIdx.x, v = in[t];
  out[t] = __ballot_sync(~0u, v > 3);
  out[32 + t] = __any_sync(~0u, v > 6) | __all_sync(~0u, v >= 0) << 1 |
                __any_sync(~0u, v > 99) << 2 | __all_sync(~0u, v > 3) << 3 |
                __uni_sync(~0u, v > 3) << 4 | __uni_sync(~0u, v < 99) << 5;
  out[64 + t] = __match_any_sync(~0u, v);
  int same = 0;
  out[96 + t] = __match_all_sync(~0u, v / 100, &same) + same;
  out[128 + t] = __match_any_sync(~0u, (unsigned long long)v << 40);
  if (t < 11)
    out[160 + t] = __ballot_sync(0x7ff, v & 1);
  else
    out[160 + t] = __ballot_sync(~0x7ffu, v & 1);
}
static void test_votes() {
  std::vector<int> in(32);
  for (int i = 0; i < 32; i++) in[i] = i * 5 % 8;
  Array<int> d(in);
  Array<unsigned> out(192);
  votes<<<1, 32>>>(d, out);
  const auto r = out.host();
  unsigned ballot = 0, odd = 0;
  for (int i = 0; i < 32; i++) ballot |= unsigned(in[i] > 3) << i, odd |= unsigned(in[i] & 1) << i;
  bool b = true, v = true, m = true, all = true, wide = true, part = true;
  for (int t = 0; t < 32; t++) {
    unsigned same = 0;
    for (int i = 0; i < 32; i++) same |= unsigned(in[i] == in[t]) << i;
    b &= r[t] == ballot, v &= r[32 + t] == (1 | 2 | 32), m &= r[64 + t] == same,
        all &= r[96 + t] == 0xffffffffu + 1, wide &= r[128 + t] == same;
    part &= r[160 + t] == (t < 11 ? odd & 0x7ff : odd & ~0x7ffu);
  }
  report("vote.ballot", b), report("vote.any/all/uni", v), report("match.any.b32", m),
      report("match.all", all), report("match.any.b64", wide);
  report("collectives of two parts of a warp", part);
}

__global__ void reductions(const unsigned* in, unsigned* out) {
  const unsigned v = in[threadIdx.x];
  unsigned r[] = {__reduce_add_sync(~0u, v),
                  __reduce_min_sync(~0u, v),
                  __reduce_max_sync(~0u, v),
                  __reduce_and_sync(~0u, v),
                  __reduce_or_sync(~0u, v),
                  __reduce_xor_sync(~0u, v),
                  (unsigned)__reduce_min_sync(~0u, (int)v),
                  (unsigned)__reduce_max_sync(~0u, (int)v)};
  for (int i = 0; i < 8; i++) out[i * 32 + threadIdx.x] = r[i];
}
static void test_reductions() {
  std::vector<unsigned> in(32);
  for (unsigned i = 0; i < 32; i++) in[i] = i * 0x9e3779b9u + 5;
  Array<unsigned> d(in), out(256);
  reductions<<<1, 32>>>(d, out);
  unsigned w[8] = {0, ~0u, 0, ~0u, 0, 0, 0x7fffffff, 0x80000000};
  for (unsigned x : in) {
    w[0] += x, w[1] = std::min(w[1], x), w[2] = std::max(w[2], x), w[3] &= x, w[4] |= x, w[5] ^= x;
    w[6] = unsigned(std::min(int(w[6]), int(x))), w[7] = unsigned(std::max(int(w[7]), int(x)));
  }
  bool ok = true;
  for (int i = 0; i < 256; i++) ok &= out.host()[i] == w[i / 32];
  report("redux.add/min/max/and/or/xor", ok);
}

__global__ void block_votes(const int* in, int* out) {
  const int v = in[threadIdx.x];
  const int count = __syncthreads_count(v > 3), all = __syncthreads_and(v >= 0),
            any = __syncthreads_or(v > 6), none = __syncthreads_or(v > 99);
  out[threadIdx.x] = count + 1000 * all + 10000 * any + 100000 * none;
}
__global__ void named_barriers(int* out) {
  __shared__ int box[64];
  const int t = threadIdx.x;
  // Warps 0 and 1 produce for warps 2 and 3: the one side arrives, the other waits.
  if (t < 64) {
    box[t] = t * 3;
    asm volatile("bar.arrive 1, 128;" ::: "memory");
    asm volatile("bar.sync 2, 64;" ::: "memory");
    out[t] = box[63 - t];
  } else {
    asm volatile("bar.sync 1, 128;" ::: "memory");
    out[t] = box[t - 64] + 1;
  }
}

__global__ void groups(const int* in, int* out) {
  cg::thread_block block = cg::this_thread_block();
  __shared__ int box[128];
  box[block.thread_rank()] = in[block.thread_rank()];
  block.sync();
  auto tile = cg::tiled_partition<8>(block);
  int sum = box[127 - block.thread_rank()];
  for (int d = 4; d > 0; d /= 2) sum += tile.shfl_xor(sum, d);
  tile.sync();
  auto warp = cg::tiled_partition<32>(block);
  const int largest = cg::reduce(warp, in[block.thread_rank()], cg::greater<int>());
  const unsigned ballot = tile.ballot(in[block.thread_rank()] & 1);
  out[block.thread_rank()] =
      sum * 1000 + largest + int(ballot) * 1000000 + tile.meta_group_rank() * 0;
}
static void test_groups() {
  std::vector<int> in(128);
  for (int i = 0; i < 128; i++) in[i] = i * 7 % 50;
  Array<int> d(in), out(128);
  groups<<<1, 128>>>(d, out);
  bool ok = true;
  for (int t = 0; t < 128; t++) {
    int sum = 0, largest = 0, ballot = 0;
    for (int i = 0; i < 8; i++)
      sum += in[127 - (t / 8 * 8 + i)], ballot |= (in[t / 8 * 8 + i] & 1) << i;
    for (int i = 0; i < 32; i++) largest = std::max(largest, in[t / 32 * 32 + i]);
    ok &= out.host()[t] == sum * 1000 + largest + ballot * 1000000;
  }
  report("cooperative groups: block, tiles, reduce", ok);
  Array<int> votes(128);
  block_votes<<<1, 128>>>(d, votes);
  int count = 0;
  for (int x : in) count += x > 3;
  ok = true;
  for (int x : votes.host()) ok &= x == count + 1000 + 10000;
  report("bar.red popc/and/or", ok);
  named_barriers<<<1, 128>>>(out);
  ok = true;
  for (int t = 0; t < 128; t++) ok &= out.host()[t] == (t < 64 ? (63 - t) * 3 : (t - 64) * 3 + 1);
  report("bar.arrive and bar.sync with a count", ok);
}

__global__ void partial_warp(int* out) {  // 20 lanes only; the mask names all 32
  const int t = threadIdx.x;
  int v = t + 1;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, v, d);
    if (t >= d) v += other;
  }
  out[t] = v;
  if (t < 7) return;  // the others go on without these lanes
  out[t] += __popc(__ballot_sync(~0u, 1));
}

int main() {
  test_shuffles();
  test_votes();
  test_reductions();
  test_groups();
  Array<int> out(20);
  partial_warp<<<1, 20>>>(out);
  bool ok = true;
  for (int t = 0; t < 20; t++) ok &= out.host()[t] == (t + 1) * (t + 2) / 2 + (t < 7 ? 0 : 13);
  report("a short warp, and lanes that ended", ok);
  return finish();
}
