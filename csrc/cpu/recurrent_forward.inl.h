// SPDX-License-Identifier: Apache-2.0
//
// The gated delta rule token by token: decode and short runs.                    docs/algorithm.md (1)
//
//   d = b (v - a S^T k),   o = scale (a S^T q + (q . k) d),   S <- a S + k d^T
//
// Both products with the old S are taken in one sweep, so that a token reads the state once and writes it
// once; the second sweep finds it in L1 or L2.
//
// Work split:  one task = some value heads of one key head and some columns of V, over a whole sequence.
// Memory:      the first token reads the initial state where it lies and writes to the final state, which is
//              then updated in place: per token and head 2 K V elements. Rows are visited in order, kStateRows at
//              a time, over all columns, so that the prefetchers see few long streams.
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
    Real *x, *y;          // [kRow]  S^T k, then d;  S^T q
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
    V sum = X::zero();
    for (int i = 0; i < dim; i += W) sum = X::fma(X::load(a + i), X::load(b + i), sum);
    return X::sum(sum);
  }
  static DELTANET_INLINE V load(const Real* p, int left) {
    return left >= W ? X::load(p) : X::load_partial(p, left);
  }
  static DELTANET_INLINE void store(Real* p, V x, int left) {
    if (left >= W)
      X::store(p, x);
    else
      X::store_partial(p, x, left);
  }

  // x += S[i .. i + kCount)^T k, y += the same with q
  template <int kCount>
  static DELTANET_INLINE void read_rows(const Scratch& s, const Real* S, int64_t ld, int i,
                                        int columns) {
    V k[kCount], q[kCount];
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) k[r] = X::set1(s.k[i + r]), q[r] = X::set1(s.q[i + r]);
    for (int j = 0; j < columns; j += W) {
      V x = X::load(s.x + j), y = X::load(s.y + j);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r) {
        const V row = load(S + (i + r) * ld + j, columns - j);
        x = X::fma(k[r], row, x);
        y = X::fma(q[r], row, y);
      }
      X::store(s.x + j, x);
      X::store(s.y + j, y);
    }
  }
  // to[i .. i + kCount) = a * from[i ..] + k d^T, where s.x holds d
  template <int kCount>
  static DELTANET_INLINE void write_rows(const Scratch& s, Real a, const Real* from,
                                         int64_t from_ld, Real* to, int64_t to_ld, int i,
                                         int columns) {
    const V decay = X::set1(a);
    V k[kCount];
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r) k[r] = X::set1(s.k[i + r]);
    for (int j = 0; j < columns; j += W) {
      const V d = X::load(s.x + j);
#pragma GCC unroll 8
      for (int r = 0; r < kCount; ++r)
        store(to + (i + r) * to_ld + j,
              X::fma(k[r], d, X::mul(decay, load(from + (i + r) * from_ld + j, columns - j))),
              columns - j);
    }
  }

  // One token: reads the state `from`, writes the state `to` (which may be the same, or null: not wanted).
  static DELTANET_INLINE void step(const Scratch& s, const Real* from, int64_t from_ld, Real* to,
                                   int64_t to_ld, int dim_k, int columns, Real a, Real b, Real kq,
                                   Real scale) {
    for (int j = 0; j < columns; j += W) X::store(s.x + j, X::zero()), X::store(s.y + j, X::zero());
    int i = 0;
    for (; i + X::kStateRows <= dim_k; i += X::kStateRows)
      read_rows<X::kStateRows>(s, from, from_ld, i, columns);
    for (; i < dim_k; ++i) read_rows<1>(s, from, from_ld, i, columns);

    for (int j = 0; j < columns; j += W) {
      const V decay = X::set1(a), x = X::load(s.x + j), y = X::load(s.y + j);
      const V d = X::mul(X::set1(b), X::fnma(decay, x, X::load(s.v + j)));
      X::store(s.x + j, d);
      X::store(s.o + j, X::mul(X::set1(scale), X::fma(X::set1(kq), d, X::mul(decay, y))));
    }
    if (!to) return;
    for (i = 0; i + X::kStateRows <= dim_k; i += X::kStateRows)
      write_rows<X::kStateRows>(s, a, from, from_ld, to, to_ld, i, columns);
    for (; i < dim_k; ++i) write_rows<1>(s, a, from, from_ld, to, to_ld, i, columns);
  }

  static void run_head(const GatedDeltaRuleParams& p, const RuleTask& task, const Scratch& s, int64_t head) {
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
    int64_t from_ld = state_ld;
    ConstMatrix initial{};
    if (p.initial_state) initial = head_state(p.initial_state, task.sequence, head, task.column_begin);
    if (begin < end && p.initial_state && initial.column_stride == 1 && initial.dtype == own_dtype<Real>()) {
      from = static_cast<const Real*>(initial.data);
      from_ld = initial.row_stride;
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
      step(s, from, from_ld, wanted ? state : nullptr, state_ld, p.dim_k, columns,
           Real(std::exp(g)), beta, dot(s.k, s.q, padded_k), Real(p.scale));
      from = state;
      from_ld = state_ld;
      store_rows<X>(s.o, kRow, head_rows(p.output, batch, t, head, task.column_begin), 1, columns);
    }
    if (p.final_state && !in_place) store_state<X>(state, int(state_ld), final_state, p.dim_k, columns);
  }

  static void run(const GatedDeltaRuleParams& p, const RuleTask& task, void* scratch) {
    const Scratch s = carve(scratch, p.dim_k, task.column_end - task.column_begin);
    for (int64_t head = task.value_head_begin; head < task.value_head_end; ++head)
      run_head(p, task, s, head);
  }
};
