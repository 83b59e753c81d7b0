// SPDX-License-Identifier: Apache-2.0
//
// The chunked gated delta rule, forward: docs/algorithm.md, equations (2) to (7).
//
//   V' = (I + L)^-1 diag(b) (V - diag(e^G) K S)        forward substitution, T is never formed
//   O  = scale (diag(e^G) Q S + (Q K^T o D) V')
//   S <- e^{G_C} S + (diag(e^{G_C - G}) K)^T V'
//
// Work split:  a task is some value heads of one key head and some columns of V, over a whole
//              sequence. Per chunk and key head: K K^T and Q K^T. Per value head: gates. Per
//              column tile: the three lines above.
// Numerics:    everything in X::Real; G is a pair of Reals, summed in a wider type. l2norm, beta,
//              decay and scale are row factors of the products: K and Q are never rescaled.
// Memory:      q, k, v are read once and o is written once. The working state of a head is packed
//              tile by tile and stays in L2; nothing that is kept grows with T.
// Padding:     K, V and the chunk are padded with zeros (k = b = g = 0 leaves the state alone), so
//              no loop has a tail.
//
// kBf16Products: K S, Q S and the update of S multiply pairs of bf16 and add in Real (X::dot2).
//              k and q are bf16 as they come; a copy of S, and V' in the update, are rounded to it.
//              K K^T, Q K^T, gates, substitution, P V' and the state that is kept are as without.
//
// Included inside an ISA namespace, after a vector type X.

template <class X, bool kBf16Products = false>
struct ChunkForward {
  using Real = typename X::Real;
  using Wider = typename WiderThan<Real>::type;
  using V = typename X::V;
  static constexpr int W = X::kLanes;
  static constexpr int C = X::kChunk;

  // Row stride of packed K, Q and V: the same for every head dim, so that a register tile addresses
  // its rows by constants; not a power of two, so that rows do not meet in the same cache sets.
  static constexpr int kRow = kMaxHeadDim + 16;
  static constexpr int kWidest = X::kTileWidths[0];
  static_assert(C % 4 == 0 && C % X::kDotRows == 0 && C % W == 0 && kRow % W == 0);
  static_assert(kSegmentTokens % C == 0);

  // Everything of a chunk and value head that depends on neither V nor S.
  struct Gates {
    alignas(64)
        Real L[C * C];  // b_i (k_i . k_j) D_ij        j <  i   (3); above the diagonal: never read
    alignas(64) Real P[C * C];   // scale (q_i . k_j) D_ij      j <= i
    alignas(64) Real value[C];   // b_i
    alignas(64) Real key[C];     // b_i e^{G_i}
    alignas(64) Real query[C];   // scale e^{G_i}
    alignas(64) Real update[C];  // e^{G_C - G_i}
    Real keep;                   // e^{G_C}
  };

  struct Scratch {
    Real *K, *Q;         // [C, kRow]   rows of the current chunk
    Real* Vin;           // [C, kRow]   v of the current chunk and value head
    Real *KK, *QK;       // [C, C]      products of the current chunk, lower blocks only
    Real *rk, *rq;       // [C]         reciprocal norms, or 1
    Real *k0, *q0;       // [C]         products of rows with zeros: 0, or NaN of a NaN or infinity
    bool state_is_zero;  // there are no other products of rows with the state
    Real *Vnew, *Vup;    // [C, widest tile]   V' and diag(update) V'
    Real* O;             // [C, kRow]   o, which leaves a whole row at a time
    Gates* gates;
    Real* S;  // [heads][tiles][K, tile]  working states
    // Pairs of bf16, with kBf16Products only. Vup holds pairs of rows then: [C / 2, widest tile].
    Real *K_pairs = nullptr, *Q_pairs = nullptr;  // [C, kRow / 2]  neighbors in a row
    Real* K_tokens = nullptr;                     // [C / 2, kRow]  neighbors in a column
    Real* S_pairs = nullptr;  // [heads][tiles][K / 2, tile]  of S, neighbors in a column
    size_t bytes;
  };
  static int state_rows(int dim_k) { return kBf16Products ? round_up(dim_k, 2) : dim_k; }
  static Scratch carve(void* base, int dim_k, int heads, int columns) {
    ScratchCarver carver{static_cast<char*>(base)};
    Scratch s;
    s.K = carver.take<Real>(C * kRow);
    s.Q = carver.take<Real>(C * kRow);
    s.Vin = carver.take<Real>(C * kRow);
    s.KK = carver.take<Real>(C * C);
    s.QK = carver.take<Real>(C * C);
    s.rk = carver.take<Real>(C);
    s.rq = carver.take<Real>(C);
    s.k0 = carver.take<Real>(C);
    s.q0 = carver.take<Real>(C);
    s.state_is_zero = false;
    s.Vnew = carver.take<Real>(C * kWidest * W);
    s.Vup = carver.take<Real>(C * kWidest * W);
    s.O = carver.take<Real>(C * kRow);
    s.gates = carver.take<Gates>(1);
    const size_t states = size_t(heads) * state_rows(dim_k) * round_up(columns, W);
    s.S = carver.take<Real>(states);
    if constexpr (kBf16Products) {
      s.K_pairs = carver.take<Real>(C * kRow / 2);
      s.Q_pairs = carver.take<Real>(C * kRow / 2);
      s.K_tokens = carver.take<Real>(C / 2 * kRow);
      s.S_pairs = carver.take<Real>(states / 2);
    }
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const GatedDeltaRuleParams& p, int heads, int columns) {
    return carve(nullptr, p.dim_k, heads, columns).bytes;
  }

  // ---- once per chunk and key head
  // ----------------------------------------------------------------

  // kDotRows x 4 dot products of rows of A and of B. Vectors run along K: nothing is transposed,
  // nothing is broadcast, and blocks above the diagonal are left out.
  static DELTANET_INLINE void dot_products(const Real* A, const Real* B, int dim, Real* out) {
    if constexpr (W == 1) {  // one chain of Reals over all of K would lose what lanes keep apart
      for (int i = 0; i < X::kDotRows; ++i)
        for (int j = 0; j < 4; ++j) {
          double sum = 0;
          for (int k = 0; k < dim; ++k) sum += double(A[i * kRow + k]) * B[j * kRow + k];
          out[i * C + j] = Real(sum);
        }
      return;
    }
    V c[X::kDotRows * 4];
#pragma GCC unroll 16
    for (int i = 0; i < X::kDotRows * 4; ++i) c[i] = X::zero();
    for (int k = 0; k < dim; k += W) {
      V b[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) b[j] = X::load(B + j * kRow + k);
#pragma GCC unroll 4
      for (int i = 0; i < X::kDotRows; ++i) {
        const V a = X::load(A + i * kRow + k);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) c[i * 4 + j] = X::fma(a, b[j], c[i * 4 + j]);
      }
    }
    X::store_sums(out, C, c);
  }

  // out_ij = a_i . b_j for j <= i < rows, in whole blocks
  static DELTANET_NOINLINE void lower_products(const Real* a, const Real* b, int dim, int rows,
                                               Real* out) {
    for (int i = 0; i < rows; i += X::kDotRows)
      for (int j = 0; j < i + X::kDotRows; j += 4)
        dot_products(a + i * kRow, b + j * kRow, dim, out + i * C + j);
  }

  // A row whose norm overflows has the reciprocal norm 0: it is a row of zeros (or NaN, where it
  // has an infinity). Later its infinite products could not be told from 0 times infinity. Whether
  // there was one.
  static bool clear_overflowing(Real* rows, const Real* reciprocal, int count, int dim) {
    bool any = false;
    for (int i = 0; i < count; ++i) {
      if (reciprocal[i] != 0) continue;
      any = true;
      for (int k = 0; k < dim; ++k) rows[i * kRow + k] *= 0;
    }
    return any;
  }

  static void multiply_keys(const Scratch& s, int dim_k, int rows, bool with_query, bool l2norm) {
    const int dim = round_up(dim_k, W);
    lower_products(s.K, s.K, dim, rows, s.KK);
    if (with_query) lower_products(s.Q, s.K, dim, rows, s.QK);
    for (int i = 0; i < C; ++i) s.rk[i] = s.rq[i] = 1;
    if (!l2norm) return;
    for (int i = 0; i < rows; ++i) {
      s.rk[i] = reciprocal_norm(s.KK[i * C + i]);  // |k|^2 is the diagonal of K K^T
      if (!with_query) continue;
      V sum = X::zero();
      for (int k = 0; k < dim; k += W) {
        const V x = X::load(s.Q + i * kRow + k);
        sum = X::fma(x, x, sum);
      }
      s.rq[i] = reciprocal_norm(X::sum(sum));
    }
    bool overflowed = clear_overflowing(s.K, s.rk, rows, dim);
    if (with_query) overflowed |= clear_overflowing(s.Q, s.rq, rows, dim);
    if (!overflowed) return;
    lower_products(s.K, s.K, dim, rows, s.KK);
    if (with_query) lower_products(s.Q, s.K, dim, rows, s.QK);
  }

  // The first chunk of a sequence that has no initial state: two products of three are with zeros.
  static DELTANET_NOINLINE void multiply_by_zero(const Real* rows, int dim, Real* out) {
    for (int i = 0; i < C; ++i) {
      V sum = X::zero();
      for (int k = 0; k < dim; k += W) sum = X::fma(X::load(rows + i * kRow + k), X::zero(), sum);
      out[i] = X::sum(sum);
    }
  }

  static DELTANET_INLINE Real exact_pair(Real even, Real odd) {
    return bits_to_float(float_to_bits(even) >> 16 | (float_to_bits(odd) & 0xffff0000u));
  }
  // The same rows as pairs of bf16, which they are as they come.
  static DELTANET_NOINLINE void pair_rows(const Scratch& s, int dim_k) {
    for (int i = 0; i < C; ++i)
      for (int k = 0; k < dim_k; k += 2) {
        const int from = i * kRow + k, to = (i * kRow + k) / 2;
        s.K_pairs[to] = exact_pair(s.K[from], s.K[from + 1]);
        s.Q_pairs[to] = exact_pair(s.Q[from], s.Q[from + 1]);
      }
    for (int t = 0; t < C; t += 2)
      for (int k = 0; k < dim_k; k += W)
        X::store(s.K_tokens + t / 2 * kRow + k,
                 X::bf16_pair(X::load(s.K + t * kRow + k), X::load(s.K + (t + 1) * kRow + k)));
  }

  // ---- once per chunk and value head
  // --------------------------------------------------------------

  // Where a chunk that starts with token `first` has to end. Normally at `count`; earlier where the
  // decay rises by more than e^kMostRise inside it, which takes positive g. Then terms that grow
  // like e^{G_i - G_j} would cancel in the substitution, while token by token nothing does. A new
  // chunk starts there; what was before does not change.
  static constexpr Real kMostRise = 1;
  static int end_of_chunk(const Real* g, int first, int count) {
    Wider sum = 0, lowest = 0;
    for (int i = first + 1; i < count; ++i) {
      sum += g[i];
      if (sum - lowest > kMostRise) return i;
      if (sum < lowest) lowest = sum;
    }
    return count;
  }

  // Tokens outside [first, end) count as padding.
  static DELTANET_NOINLINE void make_gates(const Scratch& s, int first, int end, const Real* g,
                                           const Real* beta, Real scale) {
    Gates& gates = *s.gates;
    // G as hi + lo, summed in a wider type: after one strong gate a single Real would carry its
    // rounding error into every later difference.
    alignas(64) Real hi[C], lo[C], b[C];
    Wider sum = 0;
    for (int i = 0; i < C; ++i) {
      const bool inside = i >= first && i < end;
      if (inside) sum += g[i];
      b[i] = inside ? beta[i] : Real(0);
      hi[i] = Real(sum);
      lo[i] = Real(sum - hi[i]);
    }
    const V last_hi = X::set1(hi[C - 1]), last_lo = X::set1(lo[C - 1]);
    for (int j = 0; j < C; j += W) {
      const V h = X::load(hi + j), l = X::load(lo + j), rk = X::load(s.rk + j);
      const V decay = X::exp_of_sum(h, l), bj = X::load(b + j);
      X::store(gates.value + j, bj);
      X::store(gates.key + j, X::mul(bj, X::mul(decay, rk)));
      X::store(gates.query + j, X::mul(X::set1(scale), X::mul(decay, X::load(s.rq + j))));
      X::store(gates.update + j, X::mul(X::exp_of_sum(X::sub(last_hi, h), X::sub(last_lo, l)), rk));
    }
    gates.keep = Real(std::exp(Wider(hi[C - 1]) + Wider(lo[C - 1])));

    for (int i = first; i < end; ++i) {
      const V hi_i = X::set1(hi[i]), lo_i = X::set1(lo[i]);
      const V key_factor = X::set1(b[i] * s.rk[i]), query_factor = X::set1(scale * s.rq[i]);
      for (int j = 0; j <= i; j += W) {
        // Lanes above the diagonal may overflow here; nothing reads them.
        const V difference = X::sub(hi_i, X::load(hi + j)), rest = X::sub(lo_i, X::load(lo + j));
        const V D = X::mul(X::exp_of_sum(difference, rest), X::load(s.rk + j));
        X::store(gates.L + i * C + j, X::mul(key_factor, X::mul(X::load(s.KK + i * C + j), D)));
        X::store(gates.P + i * C + j, X::mul(query_factor, X::mul(X::load(s.QK + i * C + j), D)));
      }
      std::memset(gates.L + i * C, 0, sizeof(Real) * first);
      std::memset(gates.P + i * C, 0, sizeof(Real) * first);
    }
    for (int i = 0; i < C; ++i) {
      if (i >= first && i < end) continue;
      gates.key[i] = gates.query[i] = gates.update[i] = 0;
      std::memset(gates.L + i * C, 0, sizeof(Real) * C);
      std::memset(gates.P + i * C, 0, sizeof(Real) * C);
    }
  }

  // Where the bf16 copy of a tile of S lies.
  static DELTANET_INLINE Real* pairs_of(const Scratch& s, const Real* S) {
    return s.S_pairs + (S - s.S) / 2;
  }

  // ---- once per chunk, value head and column tile
  // ------------------------------------------------- A tile is kWidth vectors of columns. Register
  // tiles are kRows x kWidth accumulators.

  template <int kWidth>
  struct Tile {
    static constexpr int kColumns = kWidth * W;
    static constexpr int kRows = X::rows_for(kWidth);
    static constexpr int kUpdateRows = X::update_rows_for(kWidth);
    // The last eight rows of a state as 4 + 4, not as 6 + 2: tiles of two wait for their own sums.
    static constexpr int kInHalves = kUpdateRows == 6 ? 8 : 0;
    static constexpr int kPerRow = kBf16Products ? 2 : 1;  // tokens
    static_assert(C % kRows == 0);
    static_assert(!kBf16Products || (C % 2 == 0 && kRows % 2 == 0 && kUpdateRows % 2 == 0));
    using Registers = V[kRows][kWidth];

    static DELTANET_INLINE V multiply_add(V a, V b, V c) {
      if constexpr (kBf16Products)
        return X::dot2(a, b, c);
      else
        return X::fma(a, b, c);
    }

    static DELTANET_INLINE void load_row(V (&b)[kWidth], const Real* row) {
#pragma GCC unroll 8
      for (int j = 0; j < kWidth; ++j) b[j] = X::load(row + j * W);
    }

    // c = A S for kRows rows of A. With kBf16Products A and S are pairs, half as many as dim_k.
    static DELTANET_INLINE void rows_times_state(Registers& c, const Real* A, const Real* S,
                                                 int dim_k) {
      constexpr int kStride = kBf16Products ? kRow / 2 : kRow;
      const int count = kBf16Products ? (dim_k + 1) / 2 : dim_k;
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) c[i][j] = X::zero();
#pragma GCC unroll 4
      for (int k = 0; k < count; ++k) {
        V b[kWidth];
        load_row(b, S + k * kColumns);
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
          const V a = X::set1(A[i * kStride + k]);
#pragma GCC unroll 8
          for (int j = 0; j < kWidth; ++j) c[i][j] = multiply_add(a, b[j], c[i][j]);
        }
      }
    }

    static DELTANET_INLINE void rows_times_zero(Registers& c, const Real* products) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) c[i][j] = X::set1(products[i]);
    }

    // c += sign * M[:, first .. first + count) V'[first .. first + count) for kRows rows of M
    template <bool kSubtract>
    static DELTANET_INLINE void add_row(Registers& c, const Real* M, const Real* Vnew, int k,
                                        int from_row) {
      V b[kWidth];
      load_row(b, Vnew + k * kColumns);
#pragma GCC unroll 32
      for (int i = from_row; i < kRows; ++i) {
        const V a = X::set1(M[i * C + k]);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          c[i][j] = kSubtract ? X::fnma(a, b[j], c[i][j]) : X::fma(a, b[j], c[i][j]);
      }
    }

    // new_values, output and the loop of update_rows are kept small: what a tile runs through then
    // stays in the cache of decoded instructions, of which a core with two threads has half (5 to
    // 12% faster than with all of it unrolled and inlined).

    // (5) for rows r0 to r0 + kRows: substitution in the registers that hold K S
    static DELTANET_NOINLINE void new_values(const Scratch& s, const Real* S, const Real* v,
                                             int dim_k, int r0) {
      const Gates& gates = *s.gates;
      Registers c;
      if (s.state_is_zero)
        rows_times_zero(c, s.k0 + r0);
      else
        rows_times_state(c, kBf16Products ? s.K_pairs + r0 * kRow / 2 : s.K + r0 * kRow, S, dim_k);
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const V b = X::set1(gates.value[r0 + i]), decayed = X::set1(gates.key[r0 + i]);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          c[i][j] = X::fnma(decayed, c[i][j], X::mul(b, X::load(v + (r0 + i) * kRow + j * W)));
      }
      const Real* L = gates.L + r0 * C;
      for (int k = 0; k < r0; ++k) add_row<true>(c, L, s.Vnew, k, 0);
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
        const V u = X::set1(gates.update[r0 + i]);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) {
          X::store(s.Vnew + (r0 + i) * kColumns + j * W, c[i][j]);
          c[i][j] = X::mul(u, c[i][j]);
          if constexpr (!kBf16Products) X::store(s.Vup + (r0 + i) * kColumns + j * W, c[i][j]);
        }
      }
      if constexpr (kBf16Products) store_pairs<kRows>(s.Vup + r0 / 2 * kColumns, c);
    }

    // Two neighboring rows of c each, as pairs of bf16.
    template <int kCount>
    static DELTANET_INLINE void store_pairs(Real* to, const V (&c)[kCount][kWidth]) {
#pragma GCC unroll 32
      for (int i = 0; i < kCount; i += 2)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          X::store(to + i / 2 * kColumns + j * W, X::bf16_pair(c[i][j], c[i + 1][j]));
    }

    // (6) for rows r0 to r0 + kRows
    static DELTANET_NOINLINE void output(const Scratch& s, const Real* S, int dim_k, int r0,
                                         Real* o) {
      const Gates& gates = *s.gates;
      Registers c;
      if (s.state_is_zero)
        rows_times_zero(c, s.q0 + r0);
      else
        rows_times_state(c, kBf16Products ? s.Q_pairs + r0 * kRow / 2 : s.Q + r0 * kRow, S, dim_k);
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const V factor = X::set1(gates.query[r0 + i]);
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) c[i][j] = X::mul(factor, c[i][j]);
      }
      const Real* P = gates.P + r0 * C;
      for (int k = 0; k < r0; ++k) add_row<false>(c, P, s.Vnew, k, 0);
#pragma GCC unroll 32
      for (int k = 0; k < kRows; ++k) add_row<false>(c, P, s.Vnew, r0 + k, k);
      o += r0 * kRow;
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) X::store(o + i * kRow + j * W, c[i][j]);
    }

    // (7) for state rows m to m + kCount, and the first `tokens` of the chunk, a multiple of kRows
    template <int kCount>
    static DELTANET_INLINE void update_rows(const Scratch& s, Real* S, int m, int tokens) {
      V c[kCount][kWidth];
      const V keep = X::set1(s.gates->keep);
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j)
          c[i][j] = X::mul(keep, X::load(S + (m + i) * kColumns + j * W));
      const Real* K = kBf16Products ? s.K_tokens : s.K;
      const int steps = tokens / kPerRow;
#pragma GCC unroll 4
      for (int t = 0; t < steps; ++t) {
        V b[kWidth];
        load_row(b, s.Vup + t * kColumns);
#pragma GCC unroll 32
        for (int i = 0; i < kCount; ++i) {
          const V k = X::set1(K[t * kRow + m + i]);
#pragma GCC unroll 8
          for (int j = 0; j < kWidth; ++j) c[i][j] = multiply_add(k, b[j], c[i][j]);
        }
      }
#pragma GCC unroll 32
      for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kWidth; ++j) X::store(S + (m + i) * kColumns + j * W, c[i][j]);
      if constexpr (kBf16Products) store_pairs<kCount>(pairs_of(s, S) + m / 2 * kColumns, c);
    }
    static DELTANET_INLINE void update_state(const Scratch& s, Real* S, int dim_k, int tokens) {
      const int rows = state_rows(dim_k);
      int m = 0;
      for (; m + kUpdateRows <= rows && rows - m != kInHalves; m += kUpdateRows)
        update_rows<kUpdateRows>(s, S, m, tokens);
      for (; m + 4 <= rows; m += 4) update_rows<4>(s, S, m, tokens);
      for (; m + 2 <= rows; m += 2) update_rows<2>(s, S, m, tokens);
      if constexpr (!kBf16Products)
        for (; m < rows; ++m) update_rows<1>(s, S, m, tokens);
    }

    // o: rows of Scratch::O from the tile's first column on, or null: no output is wanted.
    static DELTANET_NOINLINE void run(const Scratch& s, Real* S, const Real* v, int dim_k,
                                      int count, Real* o, RowsAhead& ahead) {
      const int rows = round_up(count, kRows);
      const Real* factor = kBf16Products ? pairs_of(s, S) : S;
      for (int r = 0; r < rows; r += kRows) {
        ahead.step();
        new_values(s, factor, v, dim_k, r);
      }
      if (o)
        for (int r = 0; r < rows; r += kRows) {
          ahead.step();
          output(s, factor, dim_k, r, o);
        }
      update_state(s, S, dim_k, rows);
    }
  };

  static constexpr int tile_width(int columns_left) {
    for (int width : X::kTileWidths)
      if (width * W <= columns_left) return width;
    return 1;
  }
  template <int kIndex = 0>
  static DELTANET_INLINE void run_tile(int width, const Scratch& s, Real* S, const Real* v,
                                       int dim_k, int count, Real* o, RowsAhead& ahead) {
    constexpr int kWidth = X::kTileWidths[kIndex];
    if (width == kWidth)
      Tile<kWidth>::run(s, S, v, dim_k, count, o, ahead);
    else if constexpr (kWidth > 1)
      run_tile<kIndex + 1>(width, s, S, v, dim_k, count, o, ahead);
  }

  // ---- a whole task
  // -------------------------------------------------------------------------------

  // What is read after value head `r` of the chunk at t: v of the next one, and its share of the
  // next chunk's k and q.
  static RowsAhead rows_ahead(const GatedDeltaRuleParams& p, const RuleTask& task, int64_t batch,
                              int64_t t, int64_t end, int r) {
    const int heads = int(task.value_head_end - task.value_head_begin);
    const int columns = task.column_end - task.column_begin;
    const bool last = r + 1 == heads;
    const int here = int(min_of<int64_t>(end - t, C)),
              next = int(min_of<int64_t>(end - t - here, C));
    const int share_begin = next * r / heads, share_end = next * (r + 1) / heads;
    RowsAhead ahead;
    if (p.value)
      ahead.add(head_rows(p.value, batch, last ? t + C : t, task.value_head_begin + (r + 1) % heads,
                          task.column_begin),
                0, last ? next : here, columns);
    ahead.add(head_rows(p.key, batch, t + C, task.key_head), share_begin, share_end, p.dim_k);
    if (p.query)
      ahead.add(head_rows(p.query, batch, t + C, task.key_head), share_begin, share_end, p.dim_k);
    ahead.spread(row_tiles(columns) * (p.output ? 2 : 1));
    return ahead;
  }
  // Register tiles of C rows.
  static int row_tiles(int columns) {
    return round_up(columns, kWidest * W) / (kWidest * W) * (C / X::rows_for(kWidest));
  }

  // All column tiles of one value head, tokens t + first to t + end of the chunk that starts at t.
  static void run_head(const GatedDeltaRuleParams& p, const RuleTask& task, const Scratch& s,
                       int64_t batch, int64_t t, int first, int end, int64_t head, Real* S,
                       RowsAhead& ahead) {
    const int columns = task.column_end - task.column_begin;
    const int padded = round_up(columns, W);
    if (p.value)
      pack_rows<X>(head_rows(p.value, batch, t, head, task.column_begin), end, columns, s.Vin, kRow,
                   C, padded);
    for (int c = 0; c < padded;) {
      const int width = tile_width(padded - c), tile_columns = width * W;
      run_tile(width, s, S, s.Vin + c, p.dim_k, end, p.output ? s.O + c : nullptr, ahead);
      S += state_rows(p.dim_k) * tile_columns;
      c += tile_columns;
    }
    if (p.output) {
      const Matrix to = head_rows(p.output, batch, t + first, head, task.column_begin);
      write_rows<X>(s.O + first * kRow, kRow, to, end - first, columns,
                    p.batch * p.tokens * p.value_heads * p.dim_v);
    }
  }

  template <class Visit>
  static void for_each_state(const GatedDeltaRuleParams& p, const RuleTask& task, Real* S,
                             const Visit& visit) {
    const int columns = task.column_end - task.column_begin;
    const int padded = round_up(columns, W);
    for (int64_t h = task.value_head_begin; h < task.value_head_end; ++h)
      for (int c = 0; c < padded;) {
        const int tile_columns = tile_width(padded - c) * W;
        visit(p, task.sequence, h, task.column_begin + c, min_of(tile_columns, columns - c),
              tile_columns, S);
        S += state_rows(p.dim_k) * tile_columns;
        c += tile_columns;
      }
  }
  struct LoadState {
    const Scratch& s;
    void operator()(const GatedDeltaRuleParams& p, int64_t n, int64_t h, int column, int valid,
                    int tile_columns, Real* S) const {
      ConstMatrix from{};
      if (p.initial_state) from = head_state(p.initial_state, n, h, column);
      load_state<X>(p.initial_state ? &from : nullptr, p.initial_state_is_identity, column, p.dim_k,
                    valid, S, tile_columns, tile_columns);
      if constexpr (kBf16Products) {
        const int rows = state_rows(p.dim_k);
        if (rows > p.dim_k) std::memset(S + p.dim_k * tile_columns, 0, sizeof(Real) * tile_columns);
        for (int k = 0; k < rows; k += 2)
          for (int j = 0; j < tile_columns; j += W)
            X::store(pairs_of(s, S) + k / 2 * tile_columns + j,
                     X::bf16_pair(X::load(S + k * tile_columns + j),
                                  X::load(S + (k + 1) * tile_columns + j)));
      }
    }
  };
  struct StoreState {
    void operator()(const GatedDeltaRuleParams& p, int64_t n, int64_t h, int column, int valid,
                    int tile_columns, Real* S) const {
      store_state<X>(S, tile_columns, head_state(p.final_state, n, h, column), p.dim_k, valid);
    }
  };

  struct SaveState {
    int64_t at;
    void operator()(const GatedDeltaRuleParams& p, int64_t, int64_t h, int column, int valid,
                    int tile_columns, Real* S) const {
      store_state<X>(S, tile_columns, head_state(p.saved_states, at, h, column), p.dim_k, valid);
    }
  };

  static void run(const GatedDeltaRuleParams& p, const RuleTask& task, void* scratch) {
    const int heads = int(task.value_head_end - task.value_head_begin);
    const int columns = task.column_end - task.column_begin;
    Scratch s = carve(scratch, p.dim_k, heads, columns);
    const size_t head_state_size = size_t(state_rows(p.dim_k)) * round_up(columns, W);
    const int64_t batch = p.sequence_batch(task.sequence);
    const int64_t begin = p.sequence_begin(task.sequence), end = p.sequence_end(task.sequence);
    // Lanes above the diagonal take part in vector arithmetic, though nothing reads the result.
    std::memset(s.KK, 0, sizeof(Real) * C * C);
    std::memset(s.QK, 0, sizeof(Real) * C * C);
    if (!p.value) std::memset(s.Vin, 0, sizeof(Real) * C * kRow);

    for_each_state(p, task, s.S, LoadState{s});
    for (int64_t t = begin; t < end; t += C) {
      const int count = int(end - t < C ? end - t : C);
      const int padded_k = round_up(state_rows(p.dim_k), W);
      if (p.saved_states && t > begin && (t - begin) % kSegmentTokens == 0)
        for_each_state(p, task, s.S, SaveState{p.saved_state(batch, t)});
      pack_rows<X>(head_rows(p.key, batch, t, task.key_head), count, p.dim_k, s.K, kRow, C,
                   padded_k);
      if (p.query)
        pack_rows<X>(head_rows(p.query, batch, t, task.key_head), count, p.dim_k, s.Q, kRow, C,
                     padded_k);
      multiply_keys(s, p.dim_k, round_up(count, X::kDotRows), bool(p.query), p.l2norm);
      if constexpr (kBf16Products) pair_rows(s, padded_k);
      const bool from_zero = t == begin && !p.initial_state && !p.initial_state_is_identity;
      if (from_zero) {
        multiply_by_zero(s.K, padded_k, s.k0);
        if (p.query) multiply_by_zero(s.Q, padded_k, s.q0);
      }
      for (int r = 0; r < heads; ++r) {
        const int64_t head = task.value_head_begin + r;
        Real g[C], beta[C];
        load_gates<Real>(p, batch, t, head, count, g, beta);
        for (int first = 0, last; first < count; first = last) {
          last = end_of_chunk(g, first, count);
          s.state_is_zero = from_zero && first == 0;
          make_gates(s, first, last, g, beta, Real(p.scale));
          RowsAhead ahead = rows_ahead(p, task, batch, t, end, r);
          run_head(p, task, s, batch, t, first, last, head, s.S + r * head_state_size, ahead);
        }
      }
    }
    if (p.final_state) for_each_state(p, task, s.S, StoreState{});
    X::finish_streams();
  }
};
