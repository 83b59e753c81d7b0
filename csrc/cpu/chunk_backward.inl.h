// SPDX-License-Identifier: Apache-2.0
//
// The gradients of the chunked gated delta rule: docs/algorithm.md, equations (11) to (22).
//
//   Z   = (I + L)^-T (P^T dO + diag(f) K dS)                  back substitution, T is never formed
//   dV  = diag(b) Z
//   dS <- gamma dS + (diag(s e) Q)^T dO - (diag(b e) K)^T Z   the adjoint state, chunks in reverse
//   A   = s (dO N^T) o D,   B = -(Z N^T) o D,                 and from them dQ, dK, dbeta, dg
//
// Work split:  a task is value heads of one key head, over a whole sequence, with dQ and dK as sums
//              over these heads in their order. It runs segment by segment, from the last one, so
//              that tasks of the same key head may add up theirs after each.
// Memory:      what chunk_recompute.inl.h makes again of a segment and one value head; then the
//              chunks of the two run in reverse. Nothing grows with T.
// Numerics:    everything in X::Real. Rows of K and Q are normalized once, when they are packed.
//              dg adds what crosses a token boundary, (22), and never cancels.
//
// Included inside an ISA namespace, after chunk_recompute.inl.h.

template <class X>
struct ChunkBackward {
  using Forward = ChunkForward<X>;
  using Recompute = ChunkRecompute<X>;
  using Gates = typename Recompute::Gates;
  using Scratch = typename Recompute::Scratch;
  using Segment = typename Recompute::Segment;
  using Params = typename Recompute::Params;
  using Real = typename X::Real;
  using Wider = typename Forward::Wider;
  using V = typename X::V;
  static constexpr int W = X::kLanes;
  static constexpr int C = X::kChunk;
  static constexpr int kRow = Forward::kRow;
  static constexpr int kWidest = X::kTileWidths[0];

  static size_t scratch_bytes(const Params& p, int value_heads) {
    return Recompute::carve(nullptr, p.dim_k, p.dim_v, value_heads).bytes;
  }

  // What of the gradients is wanted decides which products are needed.
  struct Wanted {
    bool query, key, gate, beta;
    explicit Wanted(const Params& p)
        : query(p.d_query), key(p.d_key), gate(p.d_g || p.d_gate_sums), beta(p.d_beta) {}
    bool from_outputs() const { return query || key || gate; }  // A, (17a)
    bool from_values() const { return key || gate || beta; }    // B
  };

  // ---- products with states

  // <S, dS>, for as many vectors as a multiple of four, in four sums that do not wait for each
  // other
  static DELTANET_NOINLINE Real dot_of_states(const Real* S, const Real* dS, size_t size) {
    if constexpr (W == 1) return dot_product<X>(S, dS, int(size));
    V sums[4] = {X::zero(), X::zero(), X::zero(), X::zero()};
    for (size_t i = 0; i < size; i += 4 * W)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        sums[j] = X::fma(X::load(S + i + j * W), X::load(dS + i + j * W), sums[j]);
    return X::sum(X::add(X::add(sums[0], sums[1]), X::add(sums[2], sums[3])));
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

  // ---- once per chunk, value head and column tile

  template <int kWidth>
  struct Tile : Recompute::template Tile<kWidth> {
    using Shared = typename Recompute::template Tile<kWidth>;
    using Base = typename Forward::template Tile<kWidth>;
    using Registers = typename Base::Registers;
    using Shared::kColumns, Shared::kRows, Shared::store, Shared::store_times;

    static DELTANET_INLINE void multiply_rows(Registers& c, const Real* factors) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const V f = X::set1(factors[i]);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) c[i][j] = X::mul(f, c[i][j]);
      }
    }
    // (11), (12), (13): rows of Z from the last to the first, in the registers that hold K dS.
    // (21c) takes the same K dS: where terms of dg cancel, they do so with what Z makes of it, and
    // a product of its own, K . (N dS^T), would bring rounding of its own (docs/numerics.md).
    static DELTANET_NOINLINE void reverse(const Scratch& s, const Real* dS, int column, int dim_k,
                                          bool with_output, bool with_gate) {
      const Gates& gates = *s.gates;
      Real *const Z = s.Z + column, *const Ze = s.Ze + column, *const dV = s.dV + column;
      for (int r0 = C - kRows; r0 >= 0; r0 -= kRows) {
        Registers c;
        Base::rows_times_state(c, s.K + r0 * kRow, dS, dim_k);
        multiply_rows(c, gates.update + r0);
        if (with_gate) add_row_products(c, s.N + r0 * kRow + column, s.future + r0);
        if (with_output)
          Shared::template add_product<false, 1, C>(c, gates.P + r0, s.dO + column, r0, C);
        const Real* L = gates.L + r0;
        Shared::template add_product<true, 1, C>(c, L, Z, r0 + kRows, C);
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

    // sums_i += c_i . a_i
    static DELTANET_INLINE void add_row_products(const Registers& c, const Real* a, Real* sums) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        V sum = X::mul(c[i][0], X::load(a + i * kRow));
#pragma GCC unroll 8
        for (int j = 1; j < kWidth; ++j) sum = X::fma(c[i][j], X::load(a + i * kRow + j * W), sum);
        sums[i] += X::sum(sum);
      }
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
      for (; m + kMost <= dim_k && dim_k - m != Base::kInHalves; m += kMost)
        adjoint_rows<kMost>(s, dS, column, m, with_output);
      for (; m < dim_k; m += 4) adjoint_rows<4>(s, dS, column, m, with_output);
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
          Shared::template add_product<false, C, 1>(c, s.A + r0 * C, s.K + column, 0, r0 + kRows);
          if (!first) add_rows(c, s.dQ + at);
          store_rows(c, s.dQ + at);
        }
        if (key) {
          load(c, s.k_past + at);
          add_rows(c, s.k_future + at);
          Shared::template add_product<false, 1, C>(c, s.A + r0, s.Q + column, r0, C);
          Shared::template add_product<false, C, 1>(c, s.X2 + r0 * C, s.K + column, 0, C);
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

  struct Reverse {
    const Scratch& s;
    const Real* dS;
    int dim_k;
    bool with_output, with_gate;
    template <int kWidth>
    void run(int c) const {
      Tile<kWidth>::reverse(s, dS + c * dim_k, c, dim_k, with_output, with_gate);
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
  // ---- once per chunk and value head

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
        d_beta[i] = dot_product<X>(s.Z + i * kRow, s.R + i * kRow, columns) +
                    dot_product<X>(s.B + i * C, s.KK + i * C, C);
  }

  // (21), (22). `through` is <S0, dS>, still without its factor gamma.
  static DELTANET_NOINLINE void gate_gradients(const Scratch& s, int dim, Real through, Real* d_g) {
    const Gates& gates = *s.gates;
    alignas(64) Real column[C] = {};  // sums of the columns of W, from row i down
    Wider past = 0;                   // of tokens i and later
    for (int i = C - 1; i >= 0; --i) {
      if (!gates.inside[i]) continue;
      const Real *q = s.Q + i * kRow, *k = s.K + i * kRow;
      past += Wider(dot_product<X>(q, s.q_past + i * kRow, dim)) +
              Wider(dot_product<X>(k, s.k_past + i * kRow, dim));
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
      future += s.future[i];
    }
  }

  // One piece of a chunk, from the adjoint state at its end to that at its start. `first`: nothing
  // has been added to this chunk's dQ and dK yet.
  static void run_piece(const Params& p, const Wanted& wanted, const Scratch& s, const Real* S,
                        Real* dS, Real* d_g, Real* d_beta, bool first) {
    const int dim_k = Recompute::rows_of_state(p.dim_k), columns = round_up(p.dim_v, W);
    const int dim = Recompute::columns_of_rows(p.dim_k);
    const Gates& gates = *s.gates;
    const bool with_output = bool(p.grad_output);
    std::memset(s.future, 0, sizeof(Real) * C);
    Recompute::for_each_tile(columns, Reverse{s, dS, dim_k, with_output, wanted.gate});
    Recompute::multiply_rows(gates.query, s.dO, columns, s.dOe);
    // The sums over value heads lie in an outer cache, and are asked for well before they are used.
    const int64_t row_bytes = p.dim_k * int64_t(sizeof(Real));
    for (int i = 0; i < C && !first; ++i) {
      if (wanted.query) prefetch(s.dQ + i * kRow, row_bytes);
      if (wanted.key) prefetch(s.dK + i * kRow, row_bytes);
    }
    Real through = 0;
    if (wanted.key)  // (17c)
      rows_times_transposed_state(s, s.N, dS, dim_k, columns, gates.update, s.k_future);
    if (wanted.key || wanted.gate) {  // (17b)
      alignas(64) Real factors[C];
      for (int i = 0; i < C; ++i) factors[i] = -gates.key[i];
      rows_times_transposed_state(s, s.Z, S, dim_k, columns, factors, s.k_past);
    }
    if (wanted.gate) through = dot_of_states(S, dS, s.state);
    if (wanted.query || wanted.gate)  // (17a)
      rows_times_transposed_state(s, s.dO, S, dim_k, columns, gates.query, s.q_past);
    if (wanted.from_outputs()) Forward::lower_products(s.dO, s.N, columns, C, s.A);
    if (wanted.from_values()) Forward::lower_products(s.Z, s.N, columns, C, s.B);
    if (wanted.from_outputs() || wanted.from_values()) make_squares(s, Real(p.scale));
    Recompute::for_each_tile(columns, UpdateAdjoint{s, dS, dim_k, with_output});
    if (wanted.query || wanted.key)
      Recompute::for_each_tile(round_up(p.dim_k, W), Gradients{s, wanted.query, wanted.key, first});
    if (wanted.beta) beta_gradients(s, columns, d_beta);
    if (wanted.gate) gate_gradients(s, dim, through, d_g);
  }

  // The chunks of a segment in reverse, for one head.
  static void reverse(const Params& p, const RuleTask& task, const Wanted& wanted,
                      const Scratch& whole, const Segment& segment, int64_t head, Real* dS) {
    const int dim_k = Recompute::rows_of_state(p.dim_k), columns = round_up(p.dim_v, W);
    for (int chunk = segment.chunks() - 1; chunk >= 0; --chunk) {
      const int64_t t = segment.start(chunk);
      const int count = segment.count(chunk);
      Scratch s = whole.at(chunk);
      if (p.grad_output)
        pack_rows<X>(head_rows(p.grad_output, segment.batch, t, head), count, p.dim_v, s.dO, kRow,
                     C, columns);
      Real g[C], beta[C], d_g[C], d_beta[C];
      load_gates<Real>(p, segment.batch, t, head, count, g, beta);

      int starts[C], pieces = 0;
      for (int first = 0; first < count; first = Forward::end_of_chunk(g, first, count))
        starts[pieces++] = first;
      if (pieces > 1) Recompute::recompute_pieces(s, count, g, beta, dim_k, columns);
      // Pieces are summed before they are added to other heads: as where those have their own sums.
      const bool first_head = head == task.value_head_begin, apart = pieces > 1 && !first_head;
      Real *const dQ = s.dQ, *const dK = s.dK;
      if (apart) {
        s.dQ = s.dQ_of_pieces;
        s.dK = s.dK_of_pieces;
      }
      for (int piece = pieces - 1; piece >= 0; --piece) {
        const int first = starts[piece], last = piece + 1 < pieces ? starts[piece + 1] : count;
        Recompute::make_gates(s, first, last, g, beta, Real(p.scale), true);
        run_piece(p, wanted, s, piece ? s.pieces + s.state * piece : s.states, dS, d_g, d_beta,
                  (first_head || apart) && piece == pieces - 1);
        if (p.d_value)
          store_rows<X>(s.dV + first * kRow, kRow,
                        head_rows(p.d_value, segment.batch, t + first, head), last - first,
                        p.dim_v);
      }
      if (apart && wanted.query) add_rows(s.dQ, columns_of_keys(p), C, dQ);
      if (apart && wanted.key) add_rows(s.dK, columns_of_keys(p), C, dK);
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
      const V along = X::set1(dot_product<X>(y, d, dim)), factor = X::set1(r[i]);
      for (int k = 0; k < dim; k += W)
        X::store(d + k, X::mul(factor, X::fnma(along, X::load(y + k), X::load(d + k))));
    }
  }
  // Sums over the value heads of the key head, in their order: to += from
  static void add_rows(const Real* from, int columns, int count, Real* to) {
    for (int i = 0; i < count; ++i, from += kRow, to += kRow)
      for (int c = 0; c < columns; c += W)
        X::store(to + c, X::add(X::load(from + c), X::load(to + c)));
  }
  static int columns_of_keys(const Params& p) { return round_up(p.dim_k, W); }

  static void write_state(const Real* S, const MutableView<4>& to, int64_t n, int64_t head,
                          int dim_k, int dim_v) {
    const int rows = Recompute::rows_of_state(dim_k), columns = round_up(dim_v, W);
    for (int c = 0; c < columns;) {
      const int tile_columns = Forward::tile_width(columns - c) * W;
      store_state<X>(S, tile_columns, head_state(to, n, head, c), dim_k,
                     min_of(tile_columns, dim_v - c));
      S += rows * tile_columns;
      c += tile_columns;
    }
  }

  // ---- a task, step by step
  // -------------------------------------------------------------------------------

  static Scratch scratch_of(const BackwardTask& x) {
    const int heads = int(x.task.value_head_end - x.task.value_head_begin);
    return Recompute::carve(x.scratch, x.p.dim_k, x.p.dim_v, heads);
  }

  // The adjoint states behind the last segment.
  static void begin(const BackwardTask& x) {
    const Scratch s = scratch_of(x);
    // Vectors also pass over what is above the diagonal, and over columns that no product fills.
    std::memset(s.KK, 0, sizeof(Real) * Recompute::kChunks * C * C);
    std::memset(s.QK, 0, sizeof(Real) * Recompute::kChunks * C * C);
    Real* const squares[] = {s.A, s.B, s.X2};
    for (Real* square : squares) std::memset(square, 0, sizeof(Real) * C * C);
    Real* const rows_of_chunk[] = {s.dO, s.q_past, s.k_past, s.k_future, s.back};
    for (Real* rows : rows_of_chunk) std::memset(rows, 0, sizeof(Real) * C * kRow);
    for (int r = 0; r < s.heads; ++r)
      Recompute::read_state(x.p.grad_final_state, x.task.sequence, x.task.value_head_begin + r,
                            x.p.dim_k, x.p.dim_v, s.dS + s.state * r);
  }

  // All gradients of a segment's tokens but those of q and k, whose sums over the task's value
  // heads stay in scratch.
  static void run_segment(const BackwardTask& x, int64_t number) {
    const Scratch s = scratch_of(x);
    const Segment segment = Segment::of(x.p, x.task.sequence, number);
    const Wanted wanted(x.p);
    Recompute::pack_segment(x.p, x.task, s, segment);
    for (int r = 0; r < s.heads; ++r) {
      const int64_t head = x.task.value_head_begin + r;
      Recompute::recompute(x.p, x.task, s, segment, head);
      reverse(x.p, x.task, wanted, s, segment, head, s.dS + s.state * r);
    }
  }

  // Those of q and k: the sums of all tasks of the key head, added up in their order.
  static void store_segment(const BackwardTask* tasks, int count, int64_t number) {
    const BackwardTask& x = tasks[0];
    const Params& p = x.p;
    const Segment segment = Segment::of(p, x.task.sequence, number);
    const int dim = columns_of_keys(p);
    for (int chunk = 0; chunk < segment.chunks(); ++chunk) {
      const Scratch s = scratch_of(x).at(chunk);
      const int rows = segment.count(chunk);
      for (int i = 1; i < count; ++i) {
        const Scratch other = scratch_of(tasks[i]).at(chunk);
        if (p.d_query) add_rows(other.dQ, dim, rows, s.dQ);
        if (p.d_key) add_rows(other.dK, dim, rows, s.dK);
      }
      const int64_t t = segment.start(chunk);
      if (p.d_query) {
        if (p.l2norm) through_norm(s.Q, s.rq, rows, dim, s.dQ);
        store_rows<X>(s.dQ, kRow, head_rows(p.d_query, segment.batch, t, x.task.key_head), rows,
                      p.dim_k);
      }
      if (p.d_key) {
        if (p.l2norm) through_norm(s.K, s.rk, rows, dim, s.dK);
        store_rows<X>(s.dK, kRow, head_rows(p.d_key, segment.batch, t, x.task.key_head), rows,
                      p.dim_k);
      }
    }
  }

  // What is in front of the first segment.
  static void end(const BackwardTask& x) {
    const Scratch s = scratch_of(x);
    if (!x.p.d_initial_state) return;
    for (int r = 0; r < s.heads; ++r)
      write_state(s.dS + s.state * r, x.p.d_initial_state, x.task.sequence,
                  x.task.value_head_begin + r, x.p.dim_k, x.p.dim_v);
  }
};
