// SPDX-License-Identifier: Apache-2.0
// Warp collectives: shuffles, votes, matrix loads, MMA. Lanes leave their operands; the last to
// arrive works for all.
#include <algorithm>
#include <cstdio>

#include "state.h"

namespace ptx {
namespace {

enum Operation {
  kSync,
  kShuffle,
  kVote,
  kMatch,
  kReduce,
  kMma,
  kLoadMatrix,
  kStoreMatrix,
  kMoveMatrix
};
constexpr uint32_t kPoison = 0xdeadbeef;  // what a lane reads from one that does not take part

template <class F>
void for_lanes(uint32_t mask, F f) {
  for (; mask; mask &= mask - 1) f(uint32_t(__builtin_ctz(mask)));
}

void do_shuffle(Thread** w, uint32_t mask, uint32_t mode) {
  for_lanes(mask, [&](uint32_t lane) {
    const int b = w[lane]->in[1] & 31, clamp = w[lane]->in[2] & 31,
              segment = w[lane]->in[2] >> 8 & 31;
    const int last = (int(lane) & segment) | (clamp & ~segment), first = int(lane) & segment;
    int from = 0;
    bool inside = false;
    switch (mode) {
      case kUp_:
        from = int(lane) - b, inside = from >= last;
        break;
      case kDown_:
        from = int(lane) + b, inside = from <= last;
        break;
      case kButterfly:
        from = int(lane) ^ b, inside = from <= last;
        break;
      default:
        from = first | (b & ~segment), inside = from <= last;
    }
    if (!inside) from = int(lane);
    w[lane]->out[0] = mask >> from & 1 ? w[from]->in[0] : kPoison;
    w[lane]->out[1] = inside;
  });
}
void do_vote(Thread** w, uint32_t mask, uint32_t mode) {
  uint32_t ballot = 0;
  for_lanes(mask, [&](uint32_t i) { ballot |= (w[i]->in[0] & 1) << i; });
  const uint32_t result = mode == kBallot    ? ballot
                          : mode == kVoteAny ? ballot != 0
                          : mode == kVoteAll ? ballot == mask
                                             : ballot == mask || !ballot;
  for_lanes(mask, [&](uint32_t i) { w[i]->out[0] = result; });
}
void do_match(Thread** w, uint32_t mask, uint32_t all) {
  for_lanes(mask, [&](uint32_t i) {
    uint32_t same = 0;
    for_lanes(mask, [&](uint32_t j) {
      if (w[j]->in[0] == w[i]->in[0] && w[j]->in[1] == w[i]->in[1]) same |= 1u << j;
    });
    w[i]->out[0] = all ? (same == mask ? mask : 0) : same;
    w[i]->out[1] = same == mask;
  });
}
uint32_t combine(uint32_t op, uint32_t x, uint32_t y) {
  switch (op) {
    case kAdd:
      return x + y;
    case kAnd:
      return x & y;
    case kOr:
      return x | y;
    case kXor:
      return x ^ y;
    case kMin:
      return std::min(x, y);
    case kMax:
      return std::max(x, y);
    case kMinSigned:
      return uint32_t(std::min(int32_t(x), int32_t(y)));
    default:
      return uint32_t(std::max(int32_t(x), int32_t(y)));
  }
}
void do_reduce(Thread** w, uint32_t mask, uint32_t op) {
  uint32_t result = w[__builtin_ctz(mask)]->in[0];
  for_lanes(mask & (mask - 1), [&](uint32_t i) { result = combine(op, result, w[i]->in[0]); });
  for_lanes(mask, [&](uint32_t i) { w[i]->out[0] = result; });
}
void need_all_lanes(Thread** w, uint32_t mask, const char* name) {
  if (mask == ~0u) return;
  Thread* t = w[__builtin_ctz(mask)];
  fault(t, t->site, kDivergent, "%s needs all 32 lanes of the warp; here are 0x%08x", name, mask);
}

// ---- tensor cores: D (16x8) = A (16xK) B (Kx8) + C, products exact in fp32 or wider, sums in fp32
// in the order of k ----

using Row = float __attribute__((vector_size(32)));  // 8 columns of D

template <int kK>
void multiply_tile(float* d, const float* a, const float* b) {
  for (int m = 0; m < 16; m += 4) {
    Row sum[4], b_row;
    for (int i = 0; i < 4; i++) std::memcpy(&sum[i], d + (m + i) * 8, sizeof(Row));
    for (int k = 0; k < kK; k++) {
      std::memcpy(&b_row, b + k * 8, sizeof(Row));
      for (int i = 0; i < 4; i++) sum[i] += a[(m + i) * kK + k] * b_row;
    }
    for (int i = 0; i < 4; i++) std::memcpy(d + (m + i) * 8, &sum[i], sizeof(Row));
  }
}
template <MmaType kType>
float element(uint32_t word, int upper) {
  if (kType == kBf16) return as_float(upper ? word & 0xffff0000u : word << 16);
  return half_value(uint16_t(upper ? word >> 16 : word));
}
struct MmaForm {
  MmaType type;
  int k;
  bool half_accumulator;
  uint32_t code() const {
    return uint32_t(type) | uint32_t(k) << 4 | uint32_t(half_accumulator) << 12;
  }
  static MmaForm from(uint32_t code) {
    return {MmaType(code & 15), int(code >> 4 & 255), bool(code >> 12)};
  }
};
const char* const kTypeName[] = {"bf16", "f16", "tf32"};

// Fragments (g = lane / 4, t = lane % 4): element (row, column) of each word as the PTX manual lays
// them out.
template <MmaType kType, int kK>
void mma_tile(Thread** w, bool half_accumulator) {
  constexpr int kA = kType == kTf32 ? kK / 2 : kK / 4, kB = kType == kTf32 ? kK / 4 : kK / 8;
  alignas(32) float a[16 * kK], b[kK * 8], d[16 * 8];
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t* in = w[lane]->in;
    for (int i = 0; i < kA; i++) {
      const int row = g + 8 * (i & 1);
      if constexpr (kType == kTf32) {
        a[row * kK + t + 4 * (i >> 1)] = as_float(in[i] & 0xffffe000);
      } else {
        a[row * kK + 2 * t + 8 * (i >> 1)] = element<kType>(in[i], 0);
        a[row * kK + 2 * t + 8 * (i >> 1) + 1] = element<kType>(in[i], 1);
      }
    }
    for (int i = 0; i < kB; i++) {
      if constexpr (kType == kTf32) {
        b[(t + 4 * i) * 8 + g] = as_float(in[8 + i] & 0xffffe000);
      } else {
        b[(2 * t + 8 * i) * 8 + g] = element<kType>(in[8 + i], 0);
        b[(2 * t + 8 * i + 1) * 8 + g] = element<kType>(in[8 + i], 1);
      }
    }
    for (int i = 0; i < 4; i++)
      d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] =
          half_accumulator ? element<kF16>(in[12 + (i >> 1)], i & 1) : as_float(in[12 + i]);
  }
  multiply_tile<kK>(d, a, b);
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    const float* top = d + g * 8 + 2 * t;
    const float v[4] = {top[0], top[1], top[64], top[65]};
    if (half_accumulator)
      for (int i = 0; i < 2; i++)
        w[lane]->out[i] =
            round_half(v[2 * i], kNearest) | uint32_t(round_half(v[2 * i + 1], kNearest)) << 16;
    else
      std::memcpy(w[lane]->out, v, sizeof v);
  }
}
void do_mma(Thread** w, uint32_t mask, uint32_t code) {
  need_all_lanes(w, mask, "mma.sync");
  const MmaForm f = MmaForm::from(code);
  if (f.type == kBf16)
    (f.k == 16 ? mma_tile<kBf16, 16> : mma_tile<kBf16, 8>)(w, false);
  else if (f.type == kF16)
    (f.k == 16 ? mma_tile<kF16, 16> : mma_tile<kF16, 8>)(w, f.half_accumulator);
  else
    (f.k == 8 ? mma_tile<kTf32, 8> : mma_tile<kTf32, 4>)(w, false);
  if (settings().count) {
    char name[48];
    std::snprintf(name, sizeof name, "m16n8k%d_%s_%s", f.k, kTypeName[f.type],
                  f.half_accumulator ? "f16" : "f32");
    count_matrix(w[0], name);
  }
}

// ---- 8x8 matrices of 16-bit values: row pointers in, one word per lane and matrix out ----

template <class Pointer>
void rows_of(Thread** w, int count, Pointer* row) {
  for (int i = 0; i < 8 * count; i++) std::memcpy(&row[i], w[i]->in, sizeof row[i]);
}
void count_rows(Thread** w, int count, const uint8_t* const* row) {
  if (!settings().count) return;
  uint64_t offsets[32];
  for (int i = 0; i < 8 * count; i++) offsets[i] = uint64_t(row[i] - w[0]->shared);
  count_matrix_rows(w[0], w[0]->site, count, offsets);
}
void do_load_matrix(Thread** w, uint32_t mask, uint32_t code) {
  need_all_lanes(w, mask, "ldmatrix");
  const int count = code & 15;
  const uint8_t* row[32];
  rows_of(w, count, row);
  count_rows(w, count, row);
  for (int lane = 0; lane < 32; lane++)
    for (int j = 0; j < count; j++) {
      const int g = lane / 4, t = lane % 4;
      if (code >> 4) {
        const uint16_t low = load<uint16_t>(row[j * 8 + 2 * t] + 2 * g),
                       high = load<uint16_t>(row[j * 8 + 2 * t + 1] + 2 * g);
        w[lane]->out[j] = low | uint32_t(high) << 16;
      } else {
        w[lane]->out[j] = load<uint32_t>(row[j * 8 + g] + 4 * t);
      }
    }
}
void do_store_matrix(Thread** w, uint32_t mask, uint32_t code) {
  need_all_lanes(w, mask, "stmatrix");
  const int count = code & 15;
  uint8_t* row[32];
  rows_of(w, count, row);
  count_rows(w, count, row);
  for (int lane = 0; lane < 32; lane++)
    for (int j = 0; j < count; j++) {
      const int g = lane / 4, t = lane % 4;
      const uint32_t v = w[lane]->in[4 + j];
      if (code >> 4) {
        store(row[j * 8 + 2 * t] + 2 * g, uint16_t(v));
        store(row[j * 8 + 2 * t + 1] + 2 * g, uint16_t(v >> 16));
      } else {
        store(row[j * 8 + g] + 4 * t, v);
      }
    }
}
void do_move_matrix(Thread** w, uint32_t mask, uint32_t) {
  need_all_lanes(w, mask, "movmatrix");
  for (int lane = 0; lane < 32; lane++) {
    uint32_t r = 0;
    for (int h = 0; h < 2; h++) {
      const int row = (lane % 4) * 2 + h, column = lane / 4;
      const uint32_t source = w[row * 4 + column / 2]->in[0];
      r |= (column & 1 ? source >> 16 : source & 0xffff) << (16 * h);
    }
    w[lane]->out[0] = r;
  }
}
void do_sync(Thread** w, uint32_t mask, uint32_t) {
  if (settings().races) meet_warp(w, mask);
  if (settings().count) w[__builtin_ctz(mask)]->block->worker->counts.warp_barriers++;
}

using Work = void (*)(Thread**, uint32_t mask, uint32_t code);
const Work kWork[] = {do_sync, do_shuffle,     do_vote,         do_match,      do_reduce,
                      do_mma,  do_load_matrix, do_store_matrix, do_move_matrix};

// Exited lanes no longer count. One warp may have several meetings at once: divergent halves with
// masks of their own.
bool try_complete(Block* b, uint32_t warp, Meeting& m, Thread* self) {
  Warp& state = b->warps[warp];
  const uint32_t needed = m.mask & state.live;
  if (!m.arrived || m.arrived != needed) return false;
  Thread** w = &b->thread[warp * 32];
  const int operation = m.operation;
  m.arrived = 0;
  if (&m == &state.meetings[state.used - 1]) state.used--;
  if (settings().count && needed == state.live) fold_warp(b, warp);
  kWork[operation & 15](w, needed, uint32_t(operation) >> 4);
  uint32_t others = needed;
  if (self) {
    self->state = kReady;
    others &= ~(1u << self->lane);
  }
  enqueue_lanes(b, w, others);
  return true;
}
void meet(Thread* t, int site, Operation operation, uint32_t code, uint32_t mask) {
  if (!(mask >> t->lane & 1))
    fault(t, site, kDivergent, "the calling lane %u is not in the member mask 0x%08x", t->lane,
          mask);
  Block* b = t->block;
  Warp& w = b->warps[t->warp];
  const int key = int(operation | code << 4);
  mask &= w.present;
  t->site = site;
  int i = 0;
  while (i < w.used &&
         !(w.meetings[i].arrived && w.meetings[i].mask == mask && w.meetings[i].operation == key))
    i++;
  if (i == w.used) {
    for (i = 0; i < w.used && w.meetings[i].arrived; i++) {
    }
    if (i == w.used) w.used++;
    w.meetings[i] = {mask, 0, key};
  }
  w.meetings[i].arrived |= 1u << t->lane;
  if (try_complete(b, t->warp, w.meetings[i], t)) return;
  t->state = kAtCollective;
  switch_away(t);
}

}  // namespace

void collectives_after_exit(Block* b, uint32_t warp) {
  Warp& w = b->warps[warp];
  for (int i = 0; i < w.used; i++) try_complete(b, warp, w.meetings[i], nullptr);
}

uint32_t shuffle(Thread* t, int site, ShuffleMode mode, uint32_t value, uint32_t lane,
                 uint32_t clamp, uint32_t mask, bool* in_range) {
  t->in[0] = value, t->in[1] = lane, t->in[2] = clamp;
  meet(t, site, kShuffle, mode, mask);
  *in_range = t->out[1];
  return t->out[0];
}
uint32_t vote(Thread* t, int site, VoteMode mode, bool predicate, uint32_t mask) {
  t->in[0] = predicate;
  meet(t, site, kVote, mode, mask);
  return t->out[0];
}
uint32_t match(Thread* t, int site, bool all, uint64_t value, uint32_t mask, bool* all_equal) {
  t->in[0] = uint32_t(value), t->in[1] = uint32_t(value >> 32);
  meet(t, site, kMatch, all, mask);
  *all_equal = t->out[1];
  return t->out[0];
}
uint32_t reduce(Thread* t, int site, ReduceOp op, uint32_t value, uint32_t mask) {
  t->in[0] = value;
  meet(t, site, kReduce, op, mask);
  return t->out[0];
}
void warp_sync(Thread* t, int site, uint32_t mask) { meet(t, site, kSync, 0, mask); }

const uint32_t* mma(Thread* t, int site, int k, MmaType type, bool half, uint32_t a0, uint32_t a1,
                    uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t c0, uint32_t c1,
                    uint32_t c2, uint32_t c3) {
  t->in[0] = a0, t->in[1] = a1, t->in[2] = a2, t->in[3] = a3;
  t->in[8] = b0, t->in[9] = b1;
  t->in[12] = c0, t->in[13] = c1, t->in[14] = c2, t->in[15] = c3;
  meet(t, site, kMma, MmaForm{type, k, half}.code(), ~0u);
  return t->out;
}
const uint32_t* load_matrix(Thread* t, int site, int count, bool transposed, const uint8_t* row) {
  std::memcpy(t->in, &row, sizeof row);
  meet(t, site, kLoadMatrix, uint32_t(count) | uint32_t(transposed) << 4, ~0u);
  return t->out;
}
void store_matrix(Thread* t, int site, int count, bool transposed, uint8_t* row, uint32_t s0,
                  uint32_t s1, uint32_t s2, uint32_t s3) {
  std::memcpy(t->in, &row, sizeof row);
  t->in[4] = s0, t->in[5] = s1, t->in[6] = s2, t->in[7] = s3;
  meet(t, site, kStoreMatrix, uint32_t(count) | uint32_t(transposed) << 4, ~0u);
}
uint32_t move_matrix(Thread* t, int site, uint32_t a) {
  t->in[0] = a;
  meet(t, site, kMoveMatrix, 0, ~0u);
  return t->out[0];
}

}  // namespace ptx
