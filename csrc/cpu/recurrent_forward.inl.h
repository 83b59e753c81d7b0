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
  static constexpr int kRowsAhead = 16;
  static_assert(kRow % W == 0);

  struct Scratch {
    Real *k, *q, *v, *o;  // [kRow]  the current token, zero-padded; k and q normalized
    Real *x, *y;          // [kRow]  S^T k, then d; S^T q
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
    s.x = carver.take<Real>(kRow);
    s.y = carver.take<Real>(kRow);
    s.S = carver.take<Real>(size_t(dim_k) * columns);
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const GatedDeltaRuleParams& p, int columns) {
    return carve(nullptr, p.dim_k, columns).bytes;
  }

  static DELTANET_INLINE Real dot(const Real* a, const Real* b, int dim) {
    if constexpr (W == 1) {  // one chain of Reals would lose what lanes keep apart
      double sum = 0;
      for (int i = 0; i < dim; ++i) sum += double(a[i]) * b[i];
      return Real(sum);
    }
    V sum = X::zero();
    for (int i = 0; i < dim; i += W) sum = X::fma(X::load(a + i), X::load(b + i), sum);
    return X::sum(sum);
  }
  template <bool kPartial>
  static DELTANET_INLINE V load(const Real* p, int lanes) {
    return kPartial ? X::load_partial(p, lanes) : X::load(p);
  }
  // The loops below keep every address in a local: vector stores may alias anything, and what they
  // may alias is loaded again after each of them.

  // x += S^T k and y += S^T q over kRows rows of S, for one vector of columns
  template <int kRows, bool kPartial>
  static DELTANET_INLINE void read_entry(const Real* S, int64_t ld, const V (&k)[kRows],
                                         const V (&q)[kRows], Real* x, Real* y, int lanes) {
    const V first = load<kPartial>(S, lanes);
    V kS = X::mul(k[0], first), qS = X::mul(q[0], first);
#pragma GCC unroll 8
    for (int i = 1; i < kRows; ++i) {
      const V entry = load<kPartial>(S + i * ld, lanes);
      kS = X::fma(k[i], entry, kS);
      qS = X::fma(q[i], entry, qS);
    }
    X::store(x, X::add(X::load(x), kS));
    X::store(y, X::add(X::load(y), qS));
  }
  template <int kRows>
  static DELTANET_INLINE void read_rows(const Scratch& s, const Real* S, int64_t ld, int row,
                                        int columns) {
    V k[kRows], q[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) k[i] = X::set1(s.k[row + i]), q[i] = X::set1(s.q[row + i]);
    Real *const x = s.x, *const y = s.y;
    S += row * ld;
    const int whole = columns / W * W, lanes = columns - whole;
#pragma GCC unroll 4
    for (int c = 0; c < whole; c += W) read_entry<kRows, false>(S + c, ld, k, q, x + c, y + c, W);
    if (lanes) read_entry<kRows, true>(S + whole, ld, k, q, x + whole, y + whole, lanes);
  }

  // to = a from + k d^T for kRows rows
  template <int kRows, bool kStream>
  static DELTANET_INLINE void write_rows(const Scratch& s, const Real* from, int64_t from_ld,
                                         Real* to, int64_t to_ld, int row, V a, int columns) {
    V k[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) k[i] = X::set1(s.k[row + i]);
    const Real* const d = s.x;
    from += row * from_ld;
    to += row * to_ld;
    const int whole = columns / W * W, lanes = columns - whole;
#pragma GCC unroll 4
    for (int c = 0; c < whole; c += W) {
      const V dc = X::load(d + c);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const V entry = X::fma(k[i], dc, X::mul(a, X::load(from + i * from_ld + c)));
        if constexpr (kStream)
          X::stream(to + i * to_ld + c, entry);
        else
          X::store(to + i * to_ld + c, entry);
      }
    }
    if (!lanes) return;
    const V dc = X::load(d + whole);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
      X::store_partial(
          to + i * to_ld + whole,
          X::fma(k[i], dc, X::mul(a, X::load_partial(from + i * from_ld + whole, lanes))), lanes);
  }

  // One token. Reads the state `from` and writes the state `to`, which may be the same, or null:
  // not wanted. Both sweeps run through memory row by row, the second one backwards, so that it
  // finds the rows that were read last in L1. `next` is the state of the next head. `far` says that
  // the states lie in memory; with kStream they are written past the caches, which saves reading
  // lines only to overwrite them.
  template <bool kStream>
  static DELTANET_NOINLINE void step(const Scratch& s, const Real* from, int64_t from_ld, Real* to,
                                     int64_t to_ld, int dim_k, int dim_v, Real a, Real b, Real kq,
                                     Real scale, const Real* next, bool far) {
    constexpr int R = X::kStateRows;
    std::memset(s.x, 0, sizeof(Real) * kRow);
    std::memset(s.y, 0, sizeof(Real) * kRow);
    // A state in some cache is asked for two pages ahead, since hardware prefetching stops at the
    // end of each; a state in memory a head ahead, one half of it in each sweep.
    const int64_t row_bytes = dim_v * int64_t(sizeof(Real));
    int row = 0;
    for (; row + R <= dim_k; row += R) {
      if (far) {
        for (int i = row / 2; i < (row + R) / 2; ++i) prefetch(next + i * from_ld, row_bytes);
      } else {
        for (int i = row + kRowsAhead; i < row + kRowsAhead + R; ++i)
          prefetch(i < dim_k ? from + i * from_ld : next + (i - dim_k) * from_ld, row_bytes);
      }
      read_rows<R>(s, from, from_ld, row, dim_v);
    }
    for (; row < dim_k; ++row) read_rows<1>(s, from, from_ld, row, dim_v);

    for (int c = 0; c < dim_v; c += W) {
      const V decay = X::set1(a);
      const V d = X::mul(X::set1(b), X::fnma(decay, X::load(s.x + c), X::load(s.v + c)));
      const V o = X::fma(X::set1(kq), d, X::mul(decay, X::load(s.y + c)));
      X::store(s.x + c, d);
      X::store(s.o + c, X::mul(X::set1(scale), o));
    }
    if (!to) return;
    const V decay = X::set1(a);
    while (row % R != 0) write_rows<1, kStream>(s, from, from_ld, to, to_ld, --row, decay, dim_v);
    while (row > 0) {
      row -= R;
      if (far)
        for (int i = row / 2; i < (row + R) / 2; ++i)
          prefetch(next + (dim_k - 1 - i) * from_ld, row_bytes);
      write_rows<R, kStream>(s, from, from_ld, to, to_ld, row, decay, dim_v);
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
    const bool far = states_exceed_caches(p);
    bool stream = false;
    ConstMatrix initial{};
    if (p.initial_state)
      initial = head_state(p.initial_state, task.sequence, head, task.column_begin);
    if (begin < end && p.initial_state && initial.column_stride == 1 &&
        initial.dtype == own_dtype<Real>()) {
      from = static_cast<const Real*>(initial.data);
      from_ld = initial.row_stride;
      next_head = p.initial_state.stride[1];
      stream = in_place && end - begin == 1 && far && uintptr_t(state) % kScratchAlignment == 0 &&
               state_ld * sizeof(Real) % kScratchAlignment == 0;
    } else {
      load_state<X>(p.initial_state ? &initial : nullptr, p.initial_state_is_identity,
                    task.column_begin, p.dim_k, columns, state, int(state_ld), columns);
    }

    for (int64_t t = begin; t < end; ++t) {
      if (p.saved_states && t > begin && (t - begin) % kSegmentTokens == 0)
        store_state<X>(state, int(state_ld),
                       head_state(p.saved_states, p.saved_state(batch, t), head, task.column_begin),
                       p.dim_k, columns);
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
      const auto token = from != state && stream ? step<true> : step<false>;
      token(s, from, from_ld, wanted ? state : nullptr, state_ld, p.dim_k, columns,
            Real(std::exp(g)), beta, dot(s.k, s.q, padded_k), Real(p.scale), from + next_head, far);
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
