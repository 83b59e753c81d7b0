// SPDX-License-Identifier: Apache-2.0
//
// What the backward pass makes again before it runs: docs/algorithm.md, equations (9) and (10).
//
//   S0    the state before every chunk of a segment, from the one that was saved at its start
//   R     = V - diag(e) K S0            residuals
//   N     = (I + L)^-1 diag(b) R        new values; (I + L) N = diag(b) R by substitution
//
// Work split:  one value head of one segment, kSegmentTokens long, in the order of its tokens.
// Memory:      results stay in scratch until the segment has run in reverse. Rows of K and Q, their
//              norms and products are made once per segment, for all value heads of the key head.
// Padding:     as in the forward pass, and K up to a multiple of 4, so that no loop has a tail.
//
// Included inside an ISA namespace, after chunk_forward.inl.h.

template <class X>
struct ChunkRecompute {
  using Forward = ChunkForward<X>;
  using Params = GatedDeltaRuleBackwardParams;
  using Real = typename X::Real;
  using Wider = typename Forward::Wider;
  using V = typename X::V;
  static constexpr int W = X::kLanes;
  static constexpr int C = X::kChunk;
  static constexpr int kRow = Forward::kRow;
  static constexpr int kWidest = X::kTileWidths[0];
  static constexpr int kChunks = kSegmentTokens / C;  // of a segment
  static_assert(kSegmentTokens % C == 0);

  // Everything of a chunk and value head that depends on neither V nor S. Rows of tokens that do
  // not belong to the piece at hand are zero.
  struct Gates {
    alignas(64) Real D[C * C];   // e^{G_i - G_j}              j <= i, else 0
    alignas(64) Real L[C * C];   // b_i (k_i . k_j) D_ij       j <  i, else 0   (3)
    alignas(64) Real P[C * C];   // scale (q_i . k_j) D_ij     j <= i, else 0
    alignas(64) Real decay[C];   // e_i = e^{G_i}
    alignas(64) Real value[C];   // b_i
    alignas(64) Real key[C];     // b_i e_i
    alignas(64) Real query[C];   // scale e_i
    alignas(64) Real update[C];  // f_i = e^{G_C - G_i}
    Real keep;                   // gamma = e^{G_C}
    bool inside[C];              // belongs to the piece
  };

  struct Scratch {
    Real *K, *Q;                       // [kSegmentTokens, kRow]  normalized rows
    Real *rk, *rq;                     // [kSegmentTokens]        reciprocal norms, or 1
    Real *KK, *QK;                     // [chunks][C, C]  products of rows, lower blocks only
    Real *Vin, *dO;                    // [C, kRow]  rows of the current chunk
    Real *Z, *dV;                      // [C, kRow]  (12), (13)
    Real *Nf, *dOe, *Ze;               // [C, kRow]  diag(f) N, diag(s e) dO, diag(b e) Z
    Real *A, *B, *X2;                  // [C, C]     (15), (16), X + X^T
    Real *q_past, *k_past, *k_future;  // [C, kRow]  (17)
    Real *across, *back;               // [kRow, C]  transposed rows, and products of them
    Real* future;                      // [C]        (21c)
    Gates* gates;
    Real* states;                       // [chunks][state]  before each chunk of the segment
    Real* pieces;                       // [C][state]       before each piece of one chunk
    Real *R, *N;                        // [kSegmentTokens, kRow]  (10)
    Real *dQ, *dK;                      // [kSegmentTokens, kRow]  sums over value heads
    Real *dQ_of_pieces, *dK_of_pieces;  // [C, kRow]  of one value head, where a chunk is cut
    Real* dS;                           // [heads][state]   adjoint states
    size_t state;                       // size of one, tile by tile as in the forward pass
    int heads;
    size_t bytes;

    // The same, with what is kept per chunk beginning at this chunk.
    Scratch at(int chunk) const {
      Scratch s = *this;
      Real** const rows[] = {&s.K, &s.Q, &s.R, &s.N, &s.dQ, &s.dK};
      for (Real** x : rows) *x += chunk * C * kRow;
      s.rk += chunk * C;
      s.rq += chunk * C;
      s.KK += chunk * C * C;
      s.QK += chunk * C * C;
      s.states += state * chunk;
      return s;
    }
  };
  static Scratch carve(void* base, int dim_k, int dim_v, int heads) {
    ScratchCarver carver{static_cast<char*>(base)};
    Scratch s;
    Real** const rows[] = {&s.Vin, &s.dO,     &s.Z,      &s.dV,       &s.Nf,     &s.dOe,
                           &s.Ze,  &s.q_past, &s.k_past, &s.k_future, &s.across, &s.back};
    for (Real** x : rows) *x = carver.take<Real>(C * kRow);
    s.dQ_of_pieces = carver.take<Real>(C * kRow);
    s.dK_of_pieces = carver.take<Real>(C * kRow);
    s.rk = carver.take<Real>(kSegmentTokens);
    s.rq = carver.take<Real>(kSegmentTokens);
    s.KK = carver.take<Real>(kChunks * C * C);
    s.QK = carver.take<Real>(kChunks * C * C);
    Real** const squares[] = {&s.A, &s.B, &s.X2};
    for (Real** x : squares) *x = carver.take<Real>(C * C);
    s.future = carver.take<Real>(C);
    s.gates = carver.take<Gates>(1);
    s.state = size_t(rows_of_state(dim_k)) * round_up(dim_v, W);
    s.heads = heads;
    s.states = carver.take<Real>(s.state * kChunks);
    s.pieces = carver.take<Real>(s.state * C);
    Real** const of_segment[] = {&s.K, &s.Q, &s.R, &s.N, &s.dQ, &s.dK};
    for (Real** x : of_segment) *x = carver.take<Real>(kSegmentTokens * kRow);
    s.dS = carver.take<Real>(s.state * heads);
    s.bytes = carver.used;
    return s;
  }
  // Rows beyond dim_k are zero and stay zero.
  static constexpr int rows_of_state(int dim_k) { return round_up(dim_k, 4); }
  static constexpr int columns_of_rows(int dim) { return round_up(dim, W > 4 ? W : 4); }

  struct Segment {
    int64_t batch, begin, end;  // tokens of a batch row
    int64_t saved;  // where its start state lies among the saved ones; -1: initial state
    static Segment of(const Params& p, int64_t sequence, int64_t number) {
      const int64_t first = p.sequence_begin(sequence), last = p.sequence_end(sequence);
      Segment s;
      s.batch = p.sequence_batch(sequence);
      s.begin = first + number * kSegmentTokens;
      s.end = last - s.begin < kSegmentTokens ? last : s.begin + kSegmentTokens;
      s.saved = number ? p.saved_state(s.batch, s.begin) : -1;
      return s;
    }
    int chunks() const { return int((end - begin + C - 1) / C); }
    int64_t start(int chunk) const { return begin + int64_t(chunk) * C; }
    int count(int chunk) const {
      const int64_t left = end - start(chunk);
      return int(left < C ? left : C);
    }
  };

  // ---- once per chunk

  // x <- x rsqrt(|x|^2 + eps), row by row
  static void normalize(Real* rows, Real* reciprocal, int dim, bool l2norm) {
    for (int i = 0; i < C; ++i) {
      reciprocal[i] = 1;
      if (!l2norm) continue;
      reciprocal[i] = reciprocal_norm(dot_product<X>(rows + i * kRow, rows + i * kRow, dim));
      const V r = X::set1(reciprocal[i]);
      for (int k = 0; k < dim; k += W)
        X::store(rows + i * kRow + k, X::mul(r, X::load(rows + i * kRow + k)));
    }
  }
  // Rows of K and Q of a whole segment, and their products, which all value heads share.
  static void pack_segment(const Params& p, const RuleTask& task, const Scratch& s,
                           const Segment& segment) {
    const int dim = columns_of_rows(p.dim_k);
    for (int chunk = 0; chunk < segment.chunks(); ++chunk) {
      const int64_t t = segment.start(chunk);
      const int count = segment.count(chunk);
      const Scratch at = s.at(chunk);
      pack_rows<X>(head_rows(p.key, segment.batch, t, task.key_head), count, p.dim_k, at.K, kRow, C,
                   dim);
      pack_rows<X>(head_rows(p.query, segment.batch, t, task.key_head), count, p.dim_k, at.Q, kRow,
                   C, dim);
      normalize(at.K, at.rk, dim, p.l2norm);
      normalize(at.Q, at.rq, dim, p.l2norm);
      Forward::lower_products(at.K, at.K, dim, C, at.KK);
      Forward::lower_products(at.Q, at.K, dim, C, at.QK);
    }
  }

  // (9), (3) for tokens [first, end) of the chunk. Without queries P is not made.
  static DELTANET_NOINLINE void make_gates(const Scratch& s, int first, int end, const Real* g,
                                           const Real* beta, Real scale, bool with_query) {
    Gates& gates = *s.gates;
    alignas(64) Real hi[C], lo[C];
    Wider sum = 0;
    for (int i = 0; i < C; ++i) {
      gates.inside[i] = i >= first && i < end;
      if (gates.inside[i]) sum += g[i];
      gates.value[i] = gates.inside[i] ? beta[i] : Real(0);
      hi[i] = Real(sum);
      lo[i] = Real(sum - hi[i]);
    }
    const V last_hi = X::set1(hi[C - 1]), last_lo = X::set1(lo[C - 1]);
    for (int j = 0; j < C; j += W) {
      const V h = X::load(hi + j), l = X::load(lo + j);
      const V decay = X::exp_of_sum(h, l);
      X::store(gates.decay + j, decay);
      X::store(gates.key + j, X::mul(X::load(gates.value + j), decay));
      X::store(gates.query + j, X::mul(X::set1(scale), decay));
      X::store(gates.update + j, X::exp_of_sum(X::sub(last_hi, h), X::sub(last_lo, l)));
    }
    gates.keep = Real(std::exp(Wider(hi[C - 1]) + Wider(lo[C - 1])));

    for (int i = 0; i < C; ++i) {
      Real *const D = gates.D + i * C, *const L = gates.L + i * C, *const P = gates.P + i * C;
      if (!gates.inside[i]) {
        gates.decay[i] = gates.key[i] = gates.query[i] = gates.update[i] = 0;
        std::memset(D, 0, sizeof(Real) * C);
        std::memset(L, 0, sizeof(Real) * C);
        std::memset(P, 0, sizeof(Real) * C);
        continue;
      }
      const V hi_i = X::set1(hi[i]), lo_i = X::set1(lo[i]);
      const V b = X::set1(beta[i]), factor = X::set1(scale);
      for (int j = 0; j <= i; j += W)
        X::store(D + j,
                 X::exp_of_sum(X::sub(hi_i, X::load(hi + j)), X::sub(lo_i, X::load(lo + j))));
      std::memset(D, 0, sizeof(Real) * first);
      for (int j = i + 1; j < C; ++j) D[j] = 0;
      for (int j = 0; j < C; j += W) {
        const V decay = X::load(D + j);
        X::store(L + j, X::mul(b, X::mul(X::load(s.KK + i * C + j), decay)));
        if (with_query) X::store(P + j, X::mul(factor, X::mul(X::load(s.QK + i * C + j), decay)));
      }
      L[i] = 0;
    }
  }

  // ---- once per chunk, value head and column tile

  template <int kWidth>
  struct Tile {
    using Base = typename Forward::template Tile<kWidth>;
    using Registers = typename Base::Registers;
    static constexpr int kColumns = Base::kColumns;
    static constexpr int kRows = Base::kRows;

    // c (+ or -)= M Y over rows [begin, end) of Y; entry (i, k) of M is M[i * kRowStep + k * kStep]
    template <bool kSubtract, int kRowStep, int kStep>
    static DELTANET_INLINE void add_product(Registers& c, const Real* M, const Real* Y, int begin,
                                            int end) {
      const Real *m = M + begin * kStep, *y = Y + begin * kRow;
      for (int k = begin; k < end; ++k, m += kStep, y += kRow) {
        V b[kWidth];
        Base::load_row(b, y);
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
          const V a = X::set1(m[i * kRowStep]);
#pragma GCC unroll 8
          for (int j = 0; j < kWidth; ++j)
            c[i][j] = kSubtract ? X::fnma(a, b[j], c[i][j]) : X::fma(a, b[j], c[i][j]);
        }
      }
    }
    static DELTANET_INLINE void store(const Registers& c, Real* to, int row) {
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; ++j) X::store(to + j * W, c[row][j]);
    }
    static DELTANET_INLINE void store_times(const Registers& c, Real factor, Real* to, int row) {
      const V f = X::set1(factor);
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; ++j) X::store(to + j * W, X::mul(f, c[row][j]));
    }

    // (10) of the piece: rows of R and N. Rows up to `end` are stored, the padding behind the last
    // token included; rows before `first` belong to earlier pieces.
    static DELTANET_NOINLINE void new_values(const Scratch& s, const Real* S, int column, int dim_k,
                                             int first, int end) {
      const Gates& gates = *s.gates;
      const Real* const v = s.Vin + column;
      Real *const R = s.R + column, *const N = s.N + column, *const Nf = s.Nf + column;
      for (int r0 = 0; r0 < C; r0 += kRows) {
        Registers c;
        Base::rows_times_state(c, s.K + r0 * kRow, S, dim_k);
        const Real* L = gates.L + r0 * C;
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
          const V e = X::set1(gates.decay[r0 + i]), b = X::set1(gates.value[r0 + i]);
#pragma GCC unroll 8
          for (int j = 0; j < kWidth; ++j)
            c[i][j] = X::fnma(e, c[i][j], X::load(v + (r0 + i) * kRow + j * W));
          if (r0 + i >= first && r0 + i < end) store(c, R + (r0 + i) * kRow, i);
#pragma GCC unroll 8
          for (int j = 0; j < kWidth; ++j) c[i][j] = X::mul(b, c[i][j]);
        }
        add_product<true, C, 1>(c, L, N, 0, r0);
#pragma GCC unroll 32
        for (int k = 0; k < kRows; ++k)
#pragma GCC unroll 32
          for (int i = k + 1; i < kRows; ++i) {
            const V a = X::set1(L[i * C + r0 + k]);
#pragma GCC unroll 8
            for (int j = 0; j < kWidth; ++j) c[i][j] = X::fnma(a, c[k][j], c[i][j]);
          }
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
          if (r0 + i >= first && r0 + i < end) store(c, N + (r0 + i) * kRow, i);
          store_times(c, gates.update[r0 + i], Nf + (r0 + i) * kRow, i);
        }
      }
    }

    // (7): to = keep from + K^T (diag(f) N), for state rows m to m + kCount
    template <int kCount>
    static DELTANET_INLINE void update_rows(const Scratch& s, const Real* from, const Real* Nf,
                                            Real* to, int m) {
      V c[kCount][kWidth];
      const V keep = X::set1(s.gates->keep);
      const Real* const K = s.K + m;
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          c[i][j] = X::mul(keep, X::load(from + (m + i) * kColumns + j * W));
#pragma GCC unroll 4
      for (int t = 0; t < C; ++t) {
        V b[kWidth];
        Base::load_row(b, Nf + t * kRow);
#pragma GCC unroll 32
        for (int i = 0; i < kCount; ++i) {
          const V k = X::set1(K[t * kRow + i]);
#pragma GCC unroll 8
          for (int j = 0; j < kWidth; ++j) c[i][j] = X::fma(k, b[j], c[i][j]);
        }
      }
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) X::store(to + (m + i) * kColumns + j * W, c[i][j]);
    }
    static DELTANET_NOINLINE void update_state(const Scratch& s, const Real* from, const Real* Nf,
                                               Real* to, int dim_k) {
      constexpr int kMost = Base::kUpdateRows;
      int m = 0;
      for (; m + kMost <= dim_k && dim_k - m != Base::kInHalves; m += kMost)
        update_rows<kMost>(s, from, Nf, to, m);
      for (; m < dim_k; m += 4) update_rows<4>(s, from, Nf, to, m);
    }
  };

  // One call per tile of `width` vectors. A struct per stage, because a lambda would not be
  // compiled for this instruction set.
  struct NewValues {
    const Scratch& s;
    const Real* S;
    int dim_k, first, end;
    template <int kWidth>
    void run(int c) const {
      Tile<kWidth>::new_values(s, S + c * dim_k, c, dim_k, first, end);
    }
  };
  struct UpdateState {
    const Scratch& s;
    const Real* from;
    Real* to;
    int dim_k;
    template <int kWidth>
    void run(int c) const {
      Tile<kWidth>::update_state(s, from + c * dim_k, s.Nf + c, to + c * dim_k, dim_k);
    }
  };
  template <int kIndex, class Stage>
  static void run_tile(int width, int column, const Stage& stage) {
    constexpr int kWidth = X::kTileWidths[kIndex];
    if (width == kWidth)
      stage.template run<kWidth>(column);
    else if constexpr (kWidth > 1)
      run_tile<kIndex + 1>(width, column, stage);
  }
  template <class Stage>
  static void for_each_tile(int columns, const Stage& stage) {
    for (int c = 0; c < columns;) {
      const int width = Forward::tile_width(columns - c);
      run_tile<0>(width, c, stage);
      c += width * W;
    }
  }

  // ---- a whole segment

  static void read_state(const View<4>& from, int64_t n, int64_t head, int dim_k, int dim_v,
                         Real* S) {
    const int rows = rows_of_state(dim_k), columns = round_up(dim_v, W);
    for (int c = 0; c < columns;) {
      const int tile_columns = Forward::tile_width(columns - c) * W;
      ConstMatrix matrix{};
      if (from) matrix = head_state(from, n, head, c);
      load_state<X>(from ? &matrix : nullptr, false, 0, dim_k, min_of(tile_columns, dim_v - c), S,
                    tile_columns, tile_columns);
      std::memset(S + dim_k * tile_columns, 0, sizeof(Real) * (rows - dim_k) * tile_columns);
      S += rows * tile_columns;
      c += tile_columns;
    }
  }
  // The segment's forward pass for one head: the state before each chunk, and R and N.
  static void recompute(const Params& p, const RuleTask& task, const Scratch& whole,
                        const Segment& segment, int64_t head) {
    const int dim_k = rows_of_state(p.dim_k), columns = round_up(p.dim_v, W);
    if (segment.saved < 0)
      read_state(p.initial_state, task.sequence, head, p.dim_k, p.dim_v, whole.states);
    else
      read_state(p.states, segment.saved, head, p.dim_k, p.dim_v, whole.states);
    const int chunks = segment.chunks();
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int64_t t = segment.start(chunk);
      const int count = segment.count(chunk);
      const Scratch s = whole.at(chunk);
      pack_rows<X>(head_rows(p.value, segment.batch, t, head), count, p.dim_v, s.Vin, kRow, C,
                   columns);
      Real g[C], beta[C];
      load_gates<Real>(p, segment.batch, t, head, count, g, beta);
      // A piece passes over the rows of later ones, times zero: they must be numbers.
      if (Forward::end_of_chunk(g, 0, count) < count) std::memset(s.N, 0, sizeof(Real) * C * kRow);
      const Real* S = s.states;
      Real* const next = chunk + 1 < chunks ? s.states + s.state : nullptr;
      int piece = 0;
      for (int first = 0, last; first < count; first = last, ++piece) {
        last = Forward::end_of_chunk(g, first, count);
        make_gates(s, first, last, g, beta, Real(p.scale), false);
        for_each_tile(columns, NewValues{s, S, dim_k, first, last < count ? last : C});
        Real* const to = last < count ? s.pieces + s.state * (piece + 1) : next;
        if (to) for_each_tile(columns, UpdateState{s, S, to, dim_k});
        S = to;
      }
    }
  }

  // Before each piece of a chunk that positive gates cut: N is known, only the states are not.
  static void recompute_pieces(const Scratch& s, int count, const Real* g, const Real* beta,
                               int dim_k, int columns) {
    const Real* S = s.states;
    int piece = 0;
    for (int first = 0, last; first < count; first = last, ++piece) {
      last = Forward::end_of_chunk(g, first, count);
      if (last == count) return;
      make_gates(s, first, last, g, beta, 0, false);
      multiply_rows(s.gates->update, s.N, columns, s.Nf);
      for_each_tile(columns, UpdateState{s, S, s.pieces + s.state * (piece + 1), dim_k});
      S = s.pieces + s.state * (piece + 1);
    }
  }

  static void multiply_rows(const Real* factors, const Real* rows, int columns, Real* to) {
    for (int i = 0; i < C; ++i) {
      const V f = X::set1(factors[i]);
      for (int c = 0; c < columns; c += W)
        X::store(to + i * kRow + c, X::mul(f, X::load(rows + i * kRow + c)));
    }
  }
};
