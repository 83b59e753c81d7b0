// SPDX-License-Identifier: Apache-2.0
//
// The gradients of the chunked gated delta rule: docs/algorithm.md, equations (9) to (22).
//
//   Z   = (I + L)^-T (P^T dO + diag(f) K dS)                  back substitution, T is never formed
//   dV  = diag(b) Z
//   dS <- gamma dS + (diag(s e) Q)^T dO - (diag(b e) K)^T Z   the adjoint state, chunks in reverse
//   A   = s (dO N^T) o D,   B = -(Z N^T) o D,                 and from them dQ, dK, dbeta, dg
//
// Work split:  a task is one key head with all its value heads and all columns of V, over a whole
//              sequence: dQ and dK are sums over the heads, taken here in their order.
// Memory:      the forward pass saved a state every kSegmentTokens tokens. From there a segment's
//              start states of chunks, residuals R and new values N are computed again into
//              scratch, one head at a time; then its chunks run in reverse. Nothing grows with T.
// Numerics:    everything in X::Real. Rows of K and Q are normalized once, when they are packed.
//              dg adds what crosses a token boundary, (22), and never cancels.
// Padding:     as in the forward pass, and K up to a multiple of 4, so that no loop has a tail.
//
// Included inside an ISA namespace, after chunk_forward.inl.h.

template <class X>
struct ChunkBackward {
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
    Gates* gates;
    Real* states;   // [chunks][state]  before each chunk of the segment
    Real* pieces;   // [C][state]       before each piece of one chunk
    Real *R, *N;    // [kSegmentTokens, kRow]  (10)
    Real *dQ, *dK;  // [kSegmentTokens, kRow]  sums over value heads
    Real* dS;       // [heads][state]   adjoint states
    size_t state;   // size of one, tile by tile as in the forward pass
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
    s.rk = carver.take<Real>(kSegmentTokens);
    s.rq = carver.take<Real>(kSegmentTokens);
    s.KK = carver.take<Real>(kChunks * C * C);
    s.QK = carver.take<Real>(kChunks * C * C);
    Real** const squares[] = {&s.A, &s.B, &s.X2};
    for (Real** x : squares) *x = carver.take<Real>(C * C);
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
  static size_t scratch_bytes(const Params& p) {
    return carve(nullptr, p.dim_k, p.dim_v, int(p.value_heads / p.key_heads)).bytes;
  }

  // Rows beyond dim_k are zero and stay zero.
  static constexpr int rows_of_state(int dim_k) { return round_up(dim_k, 4); }
  static constexpr int columns_of_rows(int dim) { return round_up(dim, W > 4 ? W : 4); }

  // What of the gradients is wanted decides which products are needed.
  struct Wanted {
    bool query, key, gate, beta;
    explicit Wanted(const Params& p)
        : query(p.d_query), key(p.d_key), gate(p.d_g || p.d_gate_sums), beta(p.d_beta) {}
    bool from_outputs() const { return query || key || gate; }  // A, (17a)
    bool from_values() const { return key || gate || beta; }    // B
    bool keys() const { return key || gate; }                   // (17b), (17c)
  };

  struct Segment {
    int64_t batch, begin, end;  // tokens of a batch row
    int64_t saved;  // where its start state lies among the saved ones; -1: initial state
    int chunks() const { return int((end - begin + C - 1) / C); }
    int64_t start(int chunk) const { return begin + int64_t(chunk) * C; }
    int count(int chunk) const {
      const int64_t left = end - start(chunk);
      return int(left < C ? left : C);
    }
  };

  // ---- small products
  // -----------------------------------------------------------------------------

  static DELTANET_INLINE Real dot(const Real* a, const Real* b, int dim) {
    if constexpr (W == 1) {
      double sum = 0;
      for (int i = 0; i < dim; ++i) sum += double(a[i]) * b[i];
      return Real(sum);
    }
    V sum = X::zero();
    for (int i = 0; i < dim; i += W) sum = X::fma(X::load(a + i), X::load(b + i), sum);
    return X::sum(sum);
  }

  // <S, dS>, for as many vectors as a multiple of four, in four sums that do not wait for each
  // other
  static DELTANET_NOINLINE Real dot_of_states(const Real* S, const Real* dS, size_t size) {
    if constexpr (W == 1) return dot(S, dS, int(size));
    V sums[4] = {X::zero(), X::zero(), X::zero(), X::zero()};
    for (size_t i = 0; i < size; i += 4 * W)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        sums[j] = X::fma(X::load(S + i + j * W), X::load(dS + i + j * W), sums[j]);
    return X::sum(X::add(X::add(sums[0], sums[1]), X::add(sums[2], sums[3])));
  }

  // out_ij = a_i . b_j for j <= i, in whole blocks
  static DELTANET_NOINLINE void lower_products(const Real* a, const Real* b, int dim, Real* out) {
    for (int i = 0; i < C; i += X::kDotRows)
      for (int j = 0; j < i + X::kDotRows; j += 4)
        Forward::dot_products(a + i * kRow, b + j * kRow, dim, out + i * C + j);
  }

  // [C, columns] rows to [columns, C], and back. Whole vectors.
  static DELTANET_INLINE void transpose_block(const Real* from, int from_ld, Real* to, int to_ld) {
    V block[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) block[i] = X::load(from + i * from_ld);
    X::transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) X::store(to + i * to_ld, block[i]);
  }
  static DELTANET_NOINLINE void transpose_rows(const Real* rows, int columns, Real* to) {
    for (int c = 0; c < columns; c += W)
      for (int i = 0; i < C; i += W) transpose_block(rows + i * kRow + c, kRow, to + c * C + i, C);
  }
  static DELTANET_NOINLINE void transpose_back(const Real* from, int columns, Real* rows) {
    for (int c = 0; c < columns; c += W)
      for (int i = 0; i < C; i += W)
        transpose_block(from + c * C + i, C, rows + i * kRow + c, kRow);
  }

  // Register tiles of the products with a transposed state: kCount rows of the state by all tokens
  // of the chunk. Vectors run along the tokens, so that nothing is summed across lanes.
  static constexpr int kTokens = C / W;
  static constexpr int kStateRows = kTokens < 4 ? 12 / kTokens / 4 * 4 : 2;

  // sums += S_r . a over the columns of one tile; kTileColumns 0: as given
  template <int kCount, int kTileColumns>
  static DELTANET_INLINE void add_tile(V (&sums)[kCount][kTokens], const Real* S, const Real* a,
                                       int tile_columns) {
    const int ld = kTileColumns ? kTileColumns : tile_columns;
    // The rows that come next: hardware does not see that far from tile to tile.
#pragma GCC unroll 16
    for (int r = 0; r < kCount; ++r) __builtin_prefetch(S + (kCount + r) * ld);
#pragma GCC unroll 4
    for (int v = 0; v < ld; ++v) {
      V x[kTokens];
#pragma GCC unroll 16
      for (int w = 0; w < kTokens; ++w) x[w] = X::load(a + v * C + w * W);
#pragma GCC unroll 16
      for (int r = 0; r < kCount; ++r) {
        const V entry = X::set1(S[r * ld + v]);
#pragma GCC unroll 16
        for (int w = 0; w < kTokens; ++w) sums[r][w] = X::fma(entry, x[w], sums[r][w]);
      }
    }
  }
  template <int kCount>
  static DELTANET_INLINE void state_rows_times(const Real* S, int row, int dim_k, const Real* a,
                                               int columns, const Real* factors, Real* out) {
    V sums[kCount][kTokens];
#pragma GCC unroll 16
    for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 16
      for (int w = 0; w < kTokens; ++w) sums[r][w] = X::zero();
    int c = 0;
    for (; c + kWidest * W <= columns; c += kWidest * W)
      add_tile<kCount, kWidest * W>(sums, S + c * dim_k + row * kWidest * W, a + c * C, 0);
    while (c < columns) {
      const int tile_columns = Forward::tile_width(columns - c) * W;
      add_tile<kCount, 0>(sums, S + c * dim_k + row * tile_columns, a + c * C, tile_columns);
      c += tile_columns;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 16
      for (int w = 0; w < kTokens; ++w)
        X::store(out + (row + r) * C + w * W, X::mul(X::load(factors + w * W), sums[r][w]));
  }

  // out_ik = factor_i a_i . S_k: rows of a and of the state, both along V
  static DELTANET_NOINLINE void rows_times_transposed_state(const Scratch& s, const Real* a,
                                                            const Real* S, int dim_k, int columns,
                                                            const Real* factors, Real* out) {
    if constexpr (W == 1) {
      for (int i = 0; i < C; ++i)
        for (int k = 0; k < dim_k; ++k) {
          double sum = 0;
          for (int c = 0; c < columns;) {
            const int width = Forward::tile_width(columns - c);
            for (int j = 0; j < width; ++j)
              sum += double(a[i * kRow + c + j]) * S[c * dim_k + k * width + j];
            c += width;
          }
          out[i * kRow + k] = Real(factors[i] * sum);
        }
    } else {
      transpose_rows(a, columns, s.across);
      int k = 0;
      for (; k + kStateRows <= dim_k; k += kStateRows)
        state_rows_times<kStateRows>(S, k, dim_k, s.across, columns, factors, s.back);
      for (; k < dim_k; k += 4)
        state_rows_times<4>(S, k, dim_k, s.across, columns, factors, s.back);
      transpose_back(s.back, round_up(dim_k, W), out);
    }
  }

  // ---- once per chunk
  // -----------------------------------------------------------------------------

  // x <- x rsqrt(|x|^2 + eps), row by row
  static void normalize(Real* rows, Real* reciprocal, int dim, bool l2norm) {
    for (int i = 0; i < C; ++i) {
      reciprocal[i] = 1;
      if (!l2norm) continue;
      reciprocal[i] = reciprocal_norm(dot(rows + i * kRow, rows + i * kRow, dim));
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
      lower_products(at.K, at.K, dim, at.KK);
      lower_products(at.Q, at.K, dim, at.QK);
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
  // -------------------------------------------------

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
    static DELTANET_INLINE void multiply_rows(Registers& c, const Real* factors) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const V f = X::set1(factors[i]);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) c[i][j] = X::mul(f, c[i][j]);
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

    // (11), (12), (13): rows of Z from the last to the first, in the registers that hold K dS
    static DELTANET_NOINLINE void reverse(const Scratch& s, const Real* dS, int column, int dim_k,
                                          bool with_output) {
      const Gates& gates = *s.gates;
      Real *const Z = s.Z + column, *const Ze = s.Ze + column, *const dV = s.dV + column;
      for (int r0 = C - kRows; r0 >= 0; r0 -= kRows) {
        Registers c;
        Base::rows_times_state(c, s.K + r0 * kRow, dS, dim_k);
        multiply_rows(c, gates.update + r0);
        if (with_output) add_product<false, 1, C>(c, gates.P + r0, s.dO + column, r0, C);
        const Real* L = gates.L + r0;
        add_product<true, 1, C>(c, L, Z, r0 + kRows, C);
#pragma GCC unroll 32
        for (int k = kRows - 1; k > 0; --k)
#pragma GCC unroll 32
          for (int i = 0; i < k; ++i) {
            const V a = X::set1(L[(r0 + k) * C + i]);
#pragma GCC unroll 8
            for (int j = 0; j < kWidth; ++j) c[i][j] = X::fnma(a, c[k][j], c[i][j]);
          }
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
          store(c, Z + (r0 + i) * kRow, i);
          store_times(c, gates.key[r0 + i], Ze + (r0 + i) * kRow, i);
          store_times(c, gates.value[r0 + i], dV + (r0 + i) * kRow, i);
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
#pragma GCC unroll 32
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
      for (; m + kMost <= dim_k; m += kMost) update_rows<kMost>(s, from, Nf, to, m);
      for (; m < dim_k; m += 2) update_rows<2>(s, from, Nf, to, m);
    }

    // (14) for state rows m to m + kCount, in place
    template <int kCount>
    static DELTANET_INLINE void adjoint_rows(const Scratch& s, Real* dS, int column, int m,
                                             bool with_output) {
      V c[kCount][kWidth];
      const V keep = X::set1(s.gates->keep);
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          c[i][j] = X::mul(keep, X::load(dS + (m + i) * kColumns + j * W));
      const Real *Q = s.Q + m, *dOe = s.dOe + column, *K = s.K + m, *Ze = s.Ze + column;
      if (with_output) {
#pragma GCC unroll 4
        for (int t = 0; t < C; ++t, Q += kRow, dOe += kRow) {
          V b[kWidth];
          Base::load_row(b, dOe);
#pragma GCC unroll 32
          for (int i = 0; i < kCount; ++i) {
            const V q = X::set1(Q[i]);
#pragma GCC unroll 8
            for (int j = 0; j < kWidth; ++j) c[i][j] = X::fma(q, b[j], c[i][j]);
          }
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < C; ++t, K += kRow, Ze += kRow) {
        V b[kWidth];
        Base::load_row(b, Ze);
#pragma GCC unroll 32
        for (int i = 0; i < kCount; ++i) {
          const V k = X::set1(K[i]);
#pragma GCC unroll 8
          for (int j = 0; j < kWidth; ++j) c[i][j] = X::fnma(k, b[j], c[i][j]);
        }
      }
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) X::store(dS + (m + i) * kColumns + j * W, c[i][j]);
    }
    static DELTANET_NOINLINE void update_adjoint(const Scratch& s, Real* dS, int column, int dim_k,
                                                 bool with_output) {
      constexpr int kMost = Base::kUpdateRows;
      int m = 0;
      for (; m + kMost <= dim_k; m += kMost) adjoint_rows<kMost>(s, dS, column, m, with_output);
      for (; m < dim_k; m += 2) adjoint_rows<2>(s, dS, column, m, with_output);
    }

    // (18), (19) for columns of K: added to what other value heads and pieces left there, but for
    // the first of them
    static DELTANET_INLINE void add_rows(Registers& c, const Real* from) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          c[i][j] = X::add(c[i][j], X::load(from + i * kRow + j * W));
    }
    static DELTANET_NOINLINE void gradients(const Scratch& s, int column, bool query, bool key,
                                            bool first) {
      for (int r0 = 0; r0 < C; r0 += kRows) {
        const int at = r0 * kRow + column;
        Registers c;
        if (query) {
          load(c, s.q_past + at);
          add_product<false, C, 1>(c, s.A + r0 * C, s.K + column, 0, r0 + kRows);
          if (!first) add_rows(c, s.dQ + at);
          store_rows(c, s.dQ + at);
        }
        if (key) {
          load(c, s.k_past + at);
          add_rows(c, s.k_future + at);
          add_product<false, 1, C>(c, s.A + r0, s.Q + column, r0, C);
          add_product<false, C, 1>(c, s.X2 + r0 * C, s.K + column, 0, C);
          if (!first) add_rows(c, s.dK + at);
          store_rows(c, s.dK + at);
        }
      }
    }
    static DELTANET_INLINE void store_rows(const Registers& c, Real* to) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) store(c, to + i * kRow, i);
    }
    static DELTANET_INLINE void load(Registers& c, const Real* from) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) c[i][j] = X::load(from + i * kRow + j * W);
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
  struct Reverse {
    const Scratch& s;
    const Real* dS;
    int dim_k;
    bool with_output;
    template <int kWidth>
    void run(int c) const {
      Tile<kWidth>::reverse(s, dS + c * dim_k, c, dim_k, with_output);
    }
  };
  struct UpdateAdjoint {
    const Scratch& s;
    Real* dS;
    int dim_k;
    bool with_output;
    template <int kWidth>
    void run(int c) const {
      Tile<kWidth>::update_adjoint(s, dS + c * dim_k, c, dim_k, with_output);
    }
  };
  struct Gradients {
    const Scratch& s;
    bool query, key, first;
    template <int kWidth>
    void run(int c) const {
      Tile<kWidth>::gradients(s, c, query, key, first);
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

  // ---- states
  // -------------------------------------------------------------------------------------

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
  static void write_state(const Real* S, const MutableView<4>& to, int64_t n, int64_t head,
                          int dim_k, int dim_v) {
    const int rows = rows_of_state(dim_k), columns = round_up(dim_v, W);
    for (int c = 0; c < columns;) {
      const int tile_columns = Forward::tile_width(columns - c) * W;
      store_state<X>(S, tile_columns, head_state(to, n, head, c), dim_k,
                     min_of(tile_columns, dim_v - c));
      S += rows * tile_columns;
      c += tile_columns;
    }
  }

  // ---- a whole task
  // -------------------------------------------------------------------------------

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

  // (15), (16), (19)'s X + X^T
  static DELTANET_NOINLINE void make_squares(const Scratch& s, Real scale) {
    const Gates& gates = *s.gates;
    const V factor = X::set1(scale);
    for (int i = 0; i < C; ++i) {
      for (int j = 0; j < C; j += W) {
        const V D = X::load(gates.D + i * C + j);
        X::store(s.A + i * C + j, X::mul(factor, X::mul(X::load(s.A + i * C + j), D)));
        X::store(s.B + i * C + j, X::sub(X::zero(), X::mul(X::load(s.B + i * C + j), D)));
      }
      s.B[i * C + i] = 0;
    }
    for (int i = 0; i < C; ++i) {
      s.X2[i * C + i] = 0;
      for (int j = 0; j < i; ++j)
        s.X2[i * C + j] = s.X2[j * C + i] = gates.value[i] * s.B[i * C + j];
    }
  }

  // (20)
  static void beta_gradients(const Scratch& s, int columns, Real* d_beta) {
    for (int i = 0; i < C; ++i)
      if (s.gates->inside[i])
        d_beta[i] =
            dot(s.Z + i * kRow, s.R + i * kRow, columns) + dot(s.B + i * C, s.KK + i * C, C);
  }

  // (21), (22). `through` is <S0, dS>, still without its factor gamma.
  static DELTANET_NOINLINE void gate_gradients(const Scratch& s, int dim, Real through, Real* d_g) {
    const Gates& gates = *s.gates;
    alignas(64) Real column[C] = {};  // sums of the columns of W, from row i down
    Wider past = 0;                   // of tokens i and later
    for (int i = C - 1; i >= 0; --i) {
      if (!gates.inside[i]) continue;
      const Real *q = s.Q + i * kRow, *k = s.K + i * kRow;
      past += Wider(dot(q, s.q_past + i * kRow, dim)) + Wider(dot(k, s.k_past + i * kRow, dim));
      const V b = X::set1(gates.value[i]);
      for (int j = 0; j < C; j += W) {
        const V a = X::mul(X::load(s.A + i * C + j), X::load(s.QK + i * C + j));
        const V x = X::mul(X::load(s.B + i * C + j), X::load(s.KK + i * C + j));
        X::store(column + j, X::add(X::load(column + j), X::fma(b, x, a)));
      }
      column[i] = 0;  // token i itself: decays nothing on its way
      Wider inside = 0;
      for (int j = 0; j < i; ++j) inside += column[j];
      d_g[i] = Real(past + inside + Wider(gates.keep * through));
    }
    Wider future = 0;
    for (int i = 0; i < C; ++i) {
      if (!gates.inside[i]) continue;
      d_g[i] += Real(future);
      future += dot(s.K + i * kRow, s.k_future + i * kRow, dim);
    }
  }

  // One piece of a chunk, from the adjoint state at its end to that at its start. `first`: nothing
  // has been added to this chunk's dQ and dK yet.
  static void run_piece(const Params& p, const Wanted& wanted, const Scratch& s, const Real* S,
                        Real* dS, Real* d_g, Real* d_beta, bool first) {
    const int dim_k = rows_of_state(p.dim_k), columns = round_up(p.dim_v, W);
    const int dim = columns_of_rows(p.dim_k);
    const Gates& gates = *s.gates;
    const bool with_output = bool(p.grad_output);
    for_each_tile(columns, Reverse{s, dS, dim_k, with_output});
    multiply_rows(gates.query, s.dO, columns, s.dOe);
    // The sums over value heads lie in an outer cache, and are asked for well before they are used.
    const int64_t row_bytes = p.dim_k * int64_t(sizeof(Real));
    for (int i = 0; i < C && !first; ++i) {
      if (wanted.query) prefetch(s.dQ + i * kRow, row_bytes);
      if (wanted.key) prefetch(s.dK + i * kRow, row_bytes);
    }
    Real through = 0;
    if (wanted.keys()) {  // (17b), (17c)
      rows_times_transposed_state(s, s.N, dS, dim_k, columns, gates.update, s.k_future);
      alignas(64) Real factors[C];
      for (int i = 0; i < C; ++i) factors[i] = -gates.key[i];
      rows_times_transposed_state(s, s.Z, S, dim_k, columns, factors, s.k_past);
    }
    if (wanted.gate) through = dot_of_states(S, dS, s.state);
    if (wanted.query || wanted.gate)  // (17a)
      rows_times_transposed_state(s, s.dO, S, dim_k, columns, gates.query, s.q_past);
    if (wanted.from_outputs()) lower_products(s.dO, s.N, columns, s.A);
    if (wanted.from_values()) lower_products(s.Z, s.N, columns, s.B);
    if (wanted.from_outputs() || wanted.from_values()) make_squares(s, Real(p.scale));
    for_each_tile(columns, UpdateAdjoint{s, dS, dim_k, with_output});
    if (wanted.query || wanted.key)
      for_each_tile(round_up(p.dim_k, W), Gradients{s, wanted.query, wanted.key, first});
    if (wanted.beta) beta_gradients(s, columns, d_beta);
    if (wanted.gate) gate_gradients(s, dim, through, d_g);
  }

  // The chunks of a segment in reverse, for one head.
  static void reverse(const Params& p, const RuleTask& task, const Wanted& wanted,
                      const Scratch& whole, const Segment& segment, int64_t head, Real* dS) {
    const int dim_k = rows_of_state(p.dim_k), columns = round_up(p.dim_v, W);
    for (int chunk = segment.chunks() - 1; chunk >= 0; --chunk) {
      const int64_t t = segment.start(chunk);
      const int count = segment.count(chunk);
      const Scratch s = whole.at(chunk);
      if (p.grad_output)
        pack_rows<X>(head_rows(p.grad_output, segment.batch, t, head), count, p.dim_v, s.dO, kRow,
                     C, columns);
      Real g[C], beta[C], d_g[C], d_beta[C];
      load_gates<Real>(p, segment.batch, t, head, count, g, beta);

      int starts[C], pieces = 0;
      for (int first = 0; first < count; first = Forward::end_of_chunk(g, first, count))
        starts[pieces++] = first;
      if (pieces > 1) recompute_pieces(s, count, g, beta, dim_k, columns);
      for (int piece = pieces - 1; piece >= 0; --piece) {
        const int first = starts[piece], last = piece + 1 < pieces ? starts[piece + 1] : count;
        make_gates(s, first, last, g, beta, Real(p.scale), true);
        run_piece(p, wanted, s, piece ? s.pieces + s.state * piece : s.states, dS, d_g, d_beta,
                  head == task.value_head_begin && piece == pieces - 1);
        if (p.d_value)
          store_rows<X>(s.dV + first * kRow, kRow,
                        head_rows(p.d_value, segment.batch, t + first, head), last - first,
                        p.dim_v);
      }
      if (wanted.gate)
        store_gate_gradients(p, task.sequence, segment.batch, t, head, count, g, d_g);
      if (wanted.beta) store_beta_gradients(p, segment.batch, t, head, count, d_beta);
    }
  }

  // (27): through the raw gate. The sums for A_log and dt_bias add up over the whole sequence.
  static void store_gate_gradients(const Params& p, int64_t n, int64_t batch, int64_t t,
                                   int64_t head, int count, const Real* g, const Real* d_g) {
    double rate = 0, bias = 0, sum = 0, product = 0;
    if (p.gate_in_kernel) {
      rate = -std::exp(load_element<double>(p.A_log.data, p.A_log.dtype, head * p.A_log.stride[0]));
      if (p.dt_bias)
        bias = load_element<double>(p.dt_bias.data, p.dt_bias.dtype, head * p.dt_bias.stride[0]);
    }
    for (int i = 0; i < count; ++i) {
      double d = d_g[i];
      if (p.gate_in_kernel) {
        const int64_t at = batch * p.g.stride[0] + (t + i) * p.g.stride[1] + head * p.g.stride[2];
        const double x = load_element<double>(p.g.data, p.g.dtype, at) + bias;
        product += d * double(g[i]);
        // A rate of -inf has gates that nothing passes.
        d = d == 0 ? 0 : d * rate * sigmoid(x);
        sum += d;
      }
      if (p.d_g)
        store_element(p.d_g.data, p.d_g.dtype,
                      batch * p.d_g.stride[0] + (t + i) * p.d_g.stride[1] + head * p.d_g.stride[2],
                      d);
    }
    if (!p.d_gate_sums) return;
    double* const sums = p.d_gate_sums + 2 * (n * p.value_heads + head);
    sums[0] += product;
    sums[1] += sum;
  }

  // (28): through the raw beta
  static void store_beta_gradients(const Params& p, int64_t batch, int64_t t, int64_t head,
                                   int count, const Real* d_beta) {
    for (int i = 0; i < count; ++i) {
      double d = d_beta[i];
      if (p.beta_sigmoid) {
        const int64_t at =
            batch * p.beta.stride[0] + (t + i) * p.beta.stride[1] + head * p.beta.stride[2];
        const double x = load_element<double>(p.beta.data, p.beta.dtype, at);
        d *= (p.beta_doubled ? 2 : 1) * sigmoid(x) * sigmoid(-x);
      }
      store_element(
          p.d_beta.data, p.d_beta.dtype,
          batch * p.d_beta.stride[0] + (t + i) * p.d_beta.stride[1] + head * p.d_beta.stride[2], d);
    }
  }
  static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

  // (25), after the sum over value heads: d <- r (d - y (y . d))
  static void through_norm(const Real* y, const Real* r, int count, int dim, Real* d) {
    for (int i = 0; i < count; ++i, y += kRow, d += kRow) {
      const V along = X::set1(dot(y, d, dim)), factor = X::set1(r[i]);
      for (int k = 0; k < dim; k += W)
        X::store(d + k, X::mul(factor, X::fnma(along, X::load(y + k), X::load(d + k))));
    }
  }
  static void store_query_and_key(const Params& p, const RuleTask& task, const Scratch& whole,
                                  const Segment& segment) {
    const int dim = round_up(p.dim_k, W);
    for (int chunk = 0; chunk < segment.chunks(); ++chunk) {
      const int64_t t = segment.start(chunk);
      const int count = segment.count(chunk);
      const Scratch s = whole.at(chunk);
      if (p.d_query) {
        if (p.l2norm) through_norm(s.Q, s.rq, count, dim, s.dQ);
        store_rows<X>(s.dQ, kRow, head_rows(p.d_query, segment.batch, t, task.key_head), count,
                      p.dim_k);
      }
      if (p.d_key) {
        if (p.l2norm) through_norm(s.K, s.rk, count, dim, s.dK);
        store_rows<X>(s.dK, kRow, head_rows(p.d_key, segment.batch, t, task.key_head), count,
                      p.dim_k);
      }
    }
  }

  static void run(const Params& p, const RuleTask& task, void* scratch) {
    const int heads = int(task.value_head_end - task.value_head_begin);
    const Scratch s = carve(scratch, p.dim_k, p.dim_v, heads);
    const Wanted wanted(p);
    // Vectors also pass over what is above the diagonal, and over columns that no product fills.
    std::memset(s.KK, 0, sizeof(Real) * kChunks * C * C);
    std::memset(s.QK, 0, sizeof(Real) * kChunks * C * C);
    Real* const squares[] = {s.A, s.B, s.X2};
    for (Real* x : squares) std::memset(x, 0, sizeof(Real) * C * C);
    Real* const rows_of_chunk[] = {s.dO, s.q_past, s.k_past, s.k_future, s.back};
    for (Real* x : rows_of_chunk) std::memset(x, 0, sizeof(Real) * C * kRow);

    for (int r = 0; r < heads; ++r)
      read_state(p.grad_final_state, task.sequence, task.value_head_begin + r, p.dim_k, p.dim_v,
                 s.dS + s.state * r);
    const int64_t begin = p.sequence_begin(task.sequence), end = p.sequence_end(task.sequence);
    for (int64_t i = (end - begin + kSegmentTokens - 1) / kSegmentTokens - 1; i >= 0; --i) {
      Segment segment;
      segment.batch = p.sequence_batch(task.sequence);
      segment.begin = begin + i * kSegmentTokens;
      segment.end = end - segment.begin < kSegmentTokens ? end : segment.begin + kSegmentTokens;
      segment.saved = i ? p.saved_state(segment.batch, segment.begin) : -1;
      pack_segment(p, task, s, segment);
      for (int r = 0; r < heads; ++r) {
        const int64_t head = task.value_head_begin + r;
        recompute(p, task, s, segment, head);
        reverse(p, task, wanted, s, segment, head, s.dS + s.state * r);
      }
      store_query_and_key(p, task, s, segment);
    }
    if (p.d_initial_state)
      for (int r = 0; r < heads; ++r)
        write_state(s.dS + s.state * r, p.d_initial_state, task.sequence, task.value_head_begin + r,
                    p.dim_k, p.dim_v);
  }
};
