// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule token by token, for decode and short runs: docs/algorithm.md, equation (1).
//
//   d = b (v - a S^T k),   o = scale (a S^T q + (q . k) d),   S <- a S + k d^T
//
// Both products with the old S are taken in one sweep, so that a token reads the state once and
// writes it once; the second sweep finds it in L1 or L2.
//
// Work split:  a task is some value heads of one key head and some columns of V, over a whole
//              sequence.
// Memory:      the first token reads the initial state where it lies and writes the final state,
//              which is then updated in place: 2 K V elements per token and head.
//
// Included inside an ISA namespace, after a vector type X.

template <class X>
struct RecurrentForward {
  using Real = typename X::Real;
  using V = typename X::V;
  static constexpr int W = X::kLanes;
  static constexpr int kRow = kMaxHeadDim;
  static_assert(kRow % W == 0);

  struct Scratch {
    Real *k, *q, *v, *o;  // [kRow]  the current token, zero-padded; k and q normalized
    Real* S;              // [K, columns]  working state, where the final state cannot hold it
    size_t bytes;
  };
  static Scratch carve(void* base, int dim_k, int columns) {
    ScratchCarver carver{static_cast<char*>(base)};
    Scratch s;
    s.k = carver.take<Real>(kRow);
    s.q = carver.take<Real>(kRow);
    s.v = carver.take<Real>(kRow);
    s.o = carver.take<Real>(kRow);
    s.S = carver.take<Real>(size_t(dim_k) * columns);
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const GatedDeltaRuleParams& p, int columns) {
    return carve(nullptr, p.dim_k, columns).bytes;
  }

  static DELTANET_INLINE Real dot(const Real* a, const Real* b, int dim) {
    V sum = X::zero();
    for (int i = 0; i < dim; i += W) sum = X::fma(X::load(a + i), X::load(b + i), sum);
    return X::sum(sum);
  }
  template <bool kPartial>
  static DELTANET_INLINE V load(const Real* row, int j, int width, int lanes) {
    return kPartial && j == width - 1 ? X::load_partial(row + j * W, lanes) : X::load(row + j * W);
  }
  template <bool kPartial>
  static DELTANET_INLINE void store(Real* row, int j, int width, int lanes, bool stream, V x) {
    if (kPartial && j == width - 1)
      X::store_partial(row + j * W, x, lanes);
    else if (stream)
      X::stream(row + j * W, x);
    else
      X::store(row + j * W, x);
  }
  template <int kWidth, int kWrite>
  static DELTANET_INLINE void prefetch_row(const Real* row) {
#pragma GCC unroll 8
    for (int j = 0; j < kWidth * W; j += 64 / int(sizeof(Real)))
      __builtin_prefetch(row + j, kWrite, kWrite ? 3 : 2);
  }

  // One token, kWidth vectors of columns from column c on: both sums stay in registers over all
  // rows, and the tile stays in L1 from the first sweep to the second. With kPartial the last
  // vector has only `lanes` columns. Reads the state `from`, writes the state `to` (which may be
  // the same, or null: not wanted). `next` is asked for meanwhile: rows of a tile lie apart, so no
  // hardware prefetcher follows them. `stream` writes past the caches: a state that no
  // cache can hold is then not read only to be overwritten.
  template <int kWidth, bool kPartial>
  static DELTANET_NOINLINE void step(const Scratch& s, const Real* from, int64_t from_ld, Real* to,
                                     int64_t to_ld, int dim_k, int c, int lanes, Real a, Real b,
                                     Real kq, Real scale, const Real* next, int64_t next_ld,
                                     bool stream) {
    V x[kWidth], y[kWidth];
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; ++j) x[j] = y[j] = X::zero();
#pragma GCC unroll 2
    for (int i = 0; i < dim_k; ++i) {
      prefetch_row<kWidth, 0>(next + i * next_ld);
      if (to && !stream) prefetch_row<kWidth, 1>(to + i * to_ld);
      const V k = X::set1(s.k[i]), q = X::set1(s.q[i]);
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; ++j) {
        const V row = load<kPartial>(from + i * from_ld, j, kWidth, lanes);
        x[j] = X::fma(k, row, x[j]);
        y[j] = X::fma(q, row, y[j]);
      }
    }
    const V decay = X::set1(a);
    V d[kWidth];
#pragma GCC unroll 8
    for (int j = 0; j < kWidth; ++j) {
      d[j] = X::mul(X::set1(b), X::fnma(decay, x[j], X::load(s.v + c + j * W)));
      const V o = X::fma(X::set1(kq), d[j], X::mul(decay, y[j]));
      X::store(s.o + c + j * W, X::mul(X::set1(scale), o));
    }
    if (!to) return;
#pragma GCC unroll 2
    for (int i = 0; i < dim_k; ++i) {
      const V k = X::set1(s.k[i]);
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; ++j) {
        const V row = load<kPartial>(from + i * from_ld, j, kWidth, lanes);
        store<kPartial>(to + i * to_ld, j, kWidth, lanes, stream,
                        X::fma(k, d[j], X::mul(decay, row)));
      }
    }
  }

  template <int kIndex = 0>
  static DELTANET_INLINE void step_tile(int width, bool partial, const Scratch& s, const Real* from,
                                        int64_t from_ld, Real* to, int64_t to_ld, int dim_k, int c,
                                        int lanes, Real a, Real b, Real kq, Real scale,
                                        const Real* next, int64_t next_ld, bool stream) {
    constexpr int kWidth = X::kStateWidths[kIndex];
    if (width == kWidth) {
      if (partial)
        step<kWidth, true>(s, from, from_ld, to, to_ld, dim_k, c, lanes, a, b, kq, scale, next,
                           next_ld, stream);
      else
        step<kWidth, false>(s, from, from_ld, to, to_ld, dim_k, c, lanes, a, b, kq, scale, next,
                            next_ld, stream);
    } else if constexpr (kWidth > 1) {
      step_tile<kIndex + 1>(width, partial, s, from, from_ld, to, to_ld, dim_k, c, lanes, a, b, kq,
                            scale, next, next_ld, stream);
    }
  }
  // One token, all columns of the task.
  static DELTANET_INLINE void step_all(const Scratch& s, const Real* from, int64_t from_ld,
                                       Real* to, int64_t to_ld, int dim_k, int columns, Real a,
                                       Real b, Real kq, Real scale, const Real* next_head,
                                       bool stream) {
    for (int c = 0; c < columns;) {
      const int vectors = (columns - c + W - 1) / W;
      int width = 1;
      for (int candidate : X::kStateWidths)
        if (candidate <= vectors) {
          width = candidate;
          break;
        }
      const int end = c + width * W;
      // A dense state is asked for in the order of memory, a whole head ahead; the rows of another
      // one a tile ahead.
      const bool dense = from_ld == columns;
      const Real* next = dense           ? next_head + int64_t(c) * dim_k
                         : end < columns ? from + end
                                         : next_head;
      step_tile(width, end > columns, s, from + c, from_ld, to ? to + c : nullptr, to_ld, dim_k, c,
                columns - end + W, a, b, kq, scale, next, dense ? width * W : from_ld, stream);
      c = end;
    }
  }

  // Twice: both the old and the new states.
  static bool states_exceed_caches(const GatedDeltaRuleParams& p) {
    constexpr int64_t kLargestCache = 32 << 20;
    return 2 * int64_t(sizeof(Real)) * p.sequences * p.value_heads * p.dim_k * p.dim_v >
           kLargestCache;
  }

  static void run_head(const GatedDeltaRuleParams& p, const RuleTask& task, const Scratch& s,
                       int64_t head) {
    const int columns = task.column_end - task.column_begin;
    const int padded = round_up(columns, W), padded_k = round_up(p.dim_k, W);
    const int64_t batch = p.sequence_batch(task.sequence);
    const int64_t begin = p.sequence_begin(task.sequence), end = p.sequence_end(task.sequence);

    // Where the state lies between tokens: in the final state if its rows are contiguous.
    Real* state = s.S;
    int64_t state_ld = columns;
    Matrix final_state{};
    bool in_place = false;
    if (p.final_state) {
      final_state = head_state(p.final_state, task.sequence, head, task.column_begin);
      in_place = final_state.column_stride == 1;
      if (in_place) state = static_cast<Real*>(final_state.data), state_ld = final_state.row_stride;
    }
    // The first token may read the initial state in its place.
    const Real* from = state;
    int64_t from_ld = state_ld, next_head = 0;
    bool stream = false;
    ConstMatrix initial{};
    if (p.initial_state)
      initial = head_state(p.initial_state, task.sequence, head, task.column_begin);
    if (begin < end && p.initial_state && initial.column_stride == 1 &&
        initial.dtype == own_dtype<Real>()) {
      from = static_cast<const Real*>(initial.data);
      from_ld = initial.row_stride;
      next_head = p.initial_state.stride[1];
      stream = in_place && end - begin == 1 && states_exceed_caches(p) &&
               uintptr_t(state) % kScratchAlignment == 0 &&
               state_ld * sizeof(Real) % kScratchAlignment == 0;
    } else {
      load_state<X>(p.initial_state ? &initial : nullptr, p.initial_state_is_identity,
                    task.column_begin, p.dim_k, columns, state, int(state_ld), columns);
    }

    for (int64_t t = begin; t < end; ++t) {
      pack_rows<X>(head_rows(p.key, batch, t, task.key_head), 1, p.dim_k, s.k, kRow, 1, padded_k);
      pack_rows<X>(head_rows(p.query, batch, t, task.key_head), 1, p.dim_k, s.q, kRow, 1, padded_k);
      pack_rows<X>(head_rows(p.value, batch, t, head, task.column_begin), 1, columns, s.v, kRow, 1,
                   padded);
      if (p.l2norm) {
        const V rk = X::set1(reciprocal_norm(dot(s.k, s.k, padded_k)));
        const V rq = X::set1(reciprocal_norm(dot(s.q, s.q, padded_k)));
        for (int i = 0; i < padded_k; i += W) {
          X::store(s.k + i, X::mul(rk, X::load(s.k + i)));
          X::store(s.q + i, X::mul(rq, X::load(s.q + i)));
        }
      }
      Real g, beta;
      load_gates<Real>(p, batch, t, head, 1, &g, &beta);
      const bool wanted = t + 1 < end || p.final_state;
      step_all(s, from, from_ld, wanted ? state : nullptr, state_ld, p.dim_k, columns,
               Real(std::exp(g)), beta, dot(s.k, s.q, padded_k), Real(p.scale), from + next_head,
               from != state && stream);
      from = state;
      from_ld = state_ld;
      next_head = 0;
      store_rows<X>(s.o, kRow, head_rows(p.output, batch, t, head, task.column_begin), 1, columns);
    }
    if (p.final_state && !in_place)
      store_state<X>(state, int(state_ld), final_state, p.dim_k, columns);
  }

  static void run(const GatedDeltaRuleParams& p, const RuleTask& task, void* scratch) {
    const Scratch s = carve(scratch, p.dim_k, task.column_end - task.column_begin);
    for (int64_t head = task.value_head_begin; head < task.value_head_end; ++head)
      run_head(p, task, s, head);
    X::finish_streams();
  }
};
