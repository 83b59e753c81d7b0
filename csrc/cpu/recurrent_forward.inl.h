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
// Memory:      a token or two: the first reads the initial state where it lies and writes the final
//              state, which is then updated in place, 2 K V elements per token and head. More: the
//              state is cut into tiles of columns, and each stays in L1 for a block of tokens.
//              One token and states in memory: the new state goes past the caches. Where a vector
//              is less than a line, a head is written while the next one is read, row by row, so
//              that memory reads and writes at the same time.
// Registers:   where they hold both sums over 128 columns (X::kRowVectors), tokens go row by row
//              through them, whole rows at a time, and the state stays in L2 between the first and
//              the last; elsewhere several rows share a pass over the sums in L1.
//
// Included inside an ISA namespace, after a vector type X.

template <class X>
struct RecurrentForward {
  using Real = typename X::Real;
  using V = typename X::V;
  static constexpr int W = X::kLanes;
  static constexpr int kRow = kMaxHeadDim;
  static constexpr int kBlock = 16;        // tokens that are prepared together
  static constexpr int kInRows = 2;        // up to so many tokens are not worth cutting into tiles
  static constexpr int kTileColumns = 32;  // 16 KB of fp32 with K = 128, half of a small L1
  static_assert(kRow % W == 0 && kTileColumns % W == 0 && kSegmentTokens % kBlock == 0);

  struct Scratch {
    Real *k, *q, *v, *o;  // [kBlock, kRow]  tokens, zero-padded; k and q normalized
    Real *a, *b, *kq;     // [kBlock]  their decay, beta, k . q
    Real *x, *y;          // [kRow]  S^T k, then d; S^T q
    Real *xs, *ys;        // [kRow]  the same over kStateRows rows
    Real* S;  // [K, columns] where the final state cannot hold it; or [tiles, K, kTileColumns]
    size_t bytes;
  };
  static Scratch carve(void* base, int dim_k, int columns) {
    ScratchCarver carver{static_cast<char*>(base)};
    Scratch s;
    s.k = carver.take<Real>(kBlock * kRow);
    s.q = carver.take<Real>(kBlock * kRow);
    s.v = carver.take<Real>(kBlock * kRow);
    s.o = carver.take<Real>(kBlock * kRow);
    s.a = carver.take<Real>(kBlock);
    s.b = carver.take<Real>(kBlock);
    s.kq = carver.take<Real>(kBlock);
    s.x = carver.take<Real>(kRow);
    s.y = carver.take<Real>(kRow);
    s.xs = carver.take<Real>(kRow);
    s.ys = carver.take<Real>(kRow);
    s.S = carver.take<Real>(size_t(dim_k) * round_up(columns, kTileColumns));
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const GatedDeltaRuleParams& p, int columns) {
    return carve(nullptr, p.dim_k, columns).bytes + carve(nullptr, 0, columns).bytes;
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
  static DELTANET_INLINE void read_rows(const Scratch& s, int token, const Real* S, int64_t ld,
                                        int row, int columns) {
    const Real *const ks = s.k + token * kRow + row, *const qs = s.q + token * kRow + row;
    V k[kRows], q[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) k[i] = X::set1(ks[i]), q[i] = X::set1(qs[i]);
    Real *const x = s.x, *const y = s.y;
    S += row * ld;
    const int whole = columns / W * W, lanes = columns - whole;
#pragma GCC unroll 4
    for (int c = 0; c < whole; c += W) read_entry<kRows, false>(S + c, ld, k, q, x + c, y + c, W);
    if (lanes) read_entry<kRows, true>(S + whole, ld, k, q, x + whole, y + whole, lanes);
  }

  // One row of S at a time, in the sums' order of read_rows<R>: row i of R neighbors.
  enum class Part { kFirst, kMiddle, kLast };
  template <Part kPart>
  static DELTANET_INLINE void read_row(const Scratch& s, const Real* S, int row, int columns) {
    const V k = X::set1(s.k[row]), q = X::set1(s.q[row]);
    Real *const x = s.x, *const y = s.y, *const xs = s.xs, *const ys = s.ys;
    const auto entry = [&](V e, int c) {
      const V kS = kPart == Part::kFirst ? X::mul(k, e) : X::fma(k, e, X::load(xs + c));
      const V qS = kPart == Part::kFirst ? X::mul(q, e) : X::fma(q, e, X::load(ys + c));
      if (kPart == Part::kLast) {
        X::store(x + c, X::add(X::load(x + c), kS));
        X::store(y + c, X::add(X::load(y + c), qS));
      } else {
        X::store(xs + c, kS);
        X::store(ys + c, qS);
      }
    };
    const int whole = columns / W * W, lanes = columns - whole;
#pragma GCC unroll 4
    for (int c = 0; c < whole; c += W) entry(X::load(S + c), c);
    if (lanes) entry(X::load_partial(S + whole, lanes), whole);
  }

  // to = a from + k d^T for kRows rows
  template <int kRows, bool kStream>
  static DELTANET_INLINE void write_rows(const Scratch& s, int token, const Real* from,
                                         int64_t from_ld, Real* to, int64_t to_ld, int row, V a,
                                         int columns) {
    const Real* const ks = s.k + token * kRow + row;
    V k[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) k[i] = X::set1(ks[i]);
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

  // What a token asks for ahead of time, while it reads and while it writes the state.
  //
  // A state in some cache: two pages ahead, since hardware prefetching stops at the end of each.
  struct PagesAhead {
    static constexpr int kRows = 16;
    const Real *from, *next;  // this state, and that of the next head
    int64_t ld, row_bytes;
    int dim_k;
    DELTANET_INLINE void reading(int row, int count) const {
      for (int i = row + kRows; i < row + kRows + count; ++i)
        prefetch(i < dim_k ? from + i * ld : next + (i - dim_k) * ld, row_bytes);
    }
    DELTANET_INLINE void writing(int, int) const {}
  };
  // A state in memory, and more tokens than one: a head ahead, one half of it in each sweep.
  struct HeadAhead {
    const Real* next;
    int64_t ld, row_bytes;
    int dim_k;
    DELTANET_INLINE void reading(int row, int count) const {
      for (int i = row / 2; i < (row + count) / 2; ++i) prefetch(next + i * ld, row_bytes);
    }
    DELTANET_INLINE void writing(int row, int count) const {
      for (int i = row / 2; i < (row + count) / 2; ++i)
        prefetch(next + (dim_k - 1 - i) * ld, row_bytes);
    }
  };
  // Tiles: the state of the next head, a share of it in each token of each tile.
  struct ShareAhead {
    const Real* next;  // null: none
    int64_t ld, row_bytes;
    int first, last, dim_k;
    DELTANET_INLINE void reading(int row, int count) const {
      if (!next) return;
      const int rows = last - first;
      for (int i = first + row * rows / dim_k; i < first + (row + count) * rows / dim_k; ++i)
        for (int64_t at = 0; at < row_bytes; at += 64)  // into L2: L1 holds the tile
          __builtin_prefetch(reinterpret_cast<const char*>(next + i * ld) + at, 0, 2);
    }
    DELTANET_INLINE void writing(int, int) const {}
  };

  // From both products with the old state: d, in place of the first, and the output.
  static DELTANET_INLINE void finish_sums(const Scratch& s, int token, int column, int columns,
                                          Real scale) {
    const Real* const v = s.v + token * kRow + column;
    Real* const o = s.o + token * kRow + column;
    const V decay = X::set1(s.a[token]), beta = X::set1(s.b[token]), kq = X::set1(s.kq[token]);
    for (int c = 0; c < columns; c += W) {
      const V d = X::mul(beta, X::fnma(decay, X::load(s.x + c), X::load(v + c)));
      X::store(o + c, X::mul(X::set1(scale), X::fma(kq, d, X::mul(decay, X::load(s.y + c)))));
      X::store(s.x + c, d);
    }
  }

  // One token, for some columns. Reads the state `from` and writes the state `to`, which may be the
  // same, or null: not wanted. Both sweeps run through memory row by row, the second one backwards,
  // so that it finds the rows that were read last in L1.
  template <class Ahead>
  static DELTANET_NOINLINE void step(const Scratch& s, int token, int column, int columns,
                                     const Real* from, int64_t from_ld, Real* to, int64_t to_ld,
                                     int dim_k, Real scale, const Ahead& ahead) {
    constexpr int R = X::kStateRows;
    std::memset(s.x, 0, sizeof(Real) * round_up(columns, W));
    std::memset(s.y, 0, sizeof(Real) * round_up(columns, W));
    int row = 0;
    for (; row + R <= dim_k; row += R) {
      ahead.reading(row, R);
      read_rows<R>(s, token, from, from_ld, row, columns);
    }
    for (; row < dim_k; ++row) read_rows<1>(s, token, from, from_ld, row, columns);

    finish_sums(s, token, column, columns, scale);
    if (!to) return;
    const V decay = X::set1(s.a[token]);
    while (row % R != 0)
      write_rows<1, false>(s, token, from, from_ld, to, to_ld, --row, decay, columns);
    while (row > 0) {
      row -= R;
      ahead.writing(row, R);
      write_rows<R, false>(s, token, from, from_ld, to, to_ld, row, decay, columns);
    }
  }

  // The same token where registers hold the sums of kRowVectors vectors of columns.
  struct InRegisters {
    const Scratch& s;
    int token;
    const ShareAhead& ahead;
    const Real* from;
    int64_t from_ld;
    Real* to;  // null: not wanted
    int64_t to_ld;
    int dim_k;
    bool far;     // the old state is in memory
    bool stream;  // the new one goes past the caches

    static constexpr int kRowsAhead = 32;  // four pages of 4 KB with V = 128

    // Sums of kRowsTogether rows are added up in L1: one sum over all rows would be half as exact
    // where terms cancel.
    static constexpr int kRowsTogether = 16;
    template <int kCount, bool kPartial = false>
    DELTANET_INLINE void read(int column, int lanes = W) const {
      const Real *const ks = s.k + token * kRow, *const qs = s.q + token * kRow;
      Real *const kS = s.x + column, *const qS = s.y + column;
      const Real* S = from + column;
      for (int first = 0; first < dim_k; first += kRowsTogether) {
        V x[kCount], y[kCount];
#pragma GCC unroll 8
        for (int j = 0; j < kCount; ++j) x[j] = y[j] = X::zero();
        const int end = min_of(first + kRowsTogether, dim_k);
        ahead.reading(first, end - first);
        for (int row = first; row < end; ++row, S += from_ld) {
          if (far)  // into L2, and on into the next head
#pragma GCC unroll 8
            for (int j = 0; j < kCount; ++j)
              __builtin_prefetch(S + kRowsAhead * from_ld + j * W, 0, 2);
          const V k = X::set1(ks[row]), q = X::set1(qs[row]);
#pragma GCC unroll 8
          for (int j = 0; j < kCount; ++j) {
            const V entry = load<kPartial>(S + j * W, lanes);
            x[j] = X::fma(k, entry, x[j]);
            y[j] = X::fma(q, entry, y[j]);
          }
        }
#pragma GCC unroll 8
        for (int j = 0; j < kCount; ++j) {
          X::store(kS + j * W, first ? X::add(X::load(kS + j * W), x[j]) : x[j]);
          X::store(qS + j * W, first ? X::add(X::load(qS + j * W), y[j]) : y[j]);
        }
      }
    }
    // Backwards: the rows that were read last are the nearest.
    template <int kCount, bool kStream, bool kPartial = false>
    DELTANET_INLINE void write(int column, int lanes = W) const {
      const Real* const ks = s.k + token * kRow;
      const V decay = X::set1(s.a[token]);
      const Real* S = from + column + (dim_k - 1) * from_ld;
      Real* out = to + column + (dim_k - 1) * to_ld;
      V d[kCount];
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) d[j] = X::load(s.x + column + j * W);
      for (int row = dim_k - 1; row >= 0; --row, S -= from_ld, out -= to_ld) {
        const V k = X::set1(ks[row]);
#pragma GCC unroll 8
        for (int j = 0; j < kCount; ++j) {
          const V entry = X::fma(k, d[j], X::mul(decay, load<kPartial>(S + j * W, lanes)));
          if constexpr (kPartial)
            X::store_partial(out + j * W, entry, lanes);
          else if constexpr (kStream)
            X::stream(out + j * W, entry);
          else
            X::store(out + j * W, entry);
        }
      }
    }
    template <int kCount>
    DELTANET_INLINE void write_whole(int column) const {
      stream ? write<kCount, true>(column) : write<kCount, false>(column);
    }

    // Calls panel(count, column) with as many vectors as registers hold, last(column, lanes) with
    // what remains of a vector.
    template <class Panel, class Last>
    static DELTANET_INLINE void for_panels(int columns, const Panel& panel, const Last& last) {
      constexpr int kMost = X::kRowVectors;
      static_assert(kMost == 8);
      int c = 0;
      for (; c + kMost * W <= columns; c += kMost * W)
        panel(std::integral_constant<int, kMost>(), c);
      if (c + 4 * W <= columns) panel(std::integral_constant<int, 4>(), c), c += 4 * W;
      if (c + 2 * W <= columns) panel(std::integral_constant<int, 2>(), c), c += 2 * W;
      if (c + W <= columns) panel(std::integral_constant<int, 1>(), c), c += W;
      if (c < columns) last(c, columns - c);
    }
    DELTANET_NOINLINE void run(int column, int columns, Real scale) const {
      for_panels(
          columns, [&](auto count, int c) { read<count()>(c); },
          [&](int c, int lanes) { read<1, true>(c, lanes); });
      finish_sums(s, token, column, columns, scale);
      if (!to) return;
      for_panels(
          columns, [&](auto count, int c) { write_whole<count()>(c); },
          [&](int c, int lanes) { write<1, false, true>(c, lanes); });
    }
  };

  // A head whose new state has not been written yet.
  struct Unwritten {
    Scratch s;         // its k, d and decay
    const Real* from;  // null: there is none
    int64_t from_ld;
    Real* to;
    int64_t to_ld;
  };
  // One token: reads the state `from`, and meanwhile writes that of the head before, past the
  // caches, row by row. Two streams of neighboring lines are what hardware prefetching knows best:
  // R rows at a time take nearly twice as long.
  static DELTANET_NOINLINE void read_and_write(const Scratch& s, const Real* from, int64_t from_ld,
                                               const PagesAhead& ahead, const Unwritten& before,
                                               int dim_k, int columns) {
    constexpr int R = X::kStateRows;
    const V decay = X::set1(before.from ? before.s.a[0] : Real(0));
    std::memset(s.x, 0, sizeof(Real) * round_up(columns, W));
    std::memset(s.y, 0, sizeof(Real) * round_up(columns, W));
    const int whole = dim_k / R * R;
    for (int row = 0; row < dim_k; ++row) {
      ahead.reading(row, 1);
      const Real* const S = from + row * from_ld;
      if (R == 1 || row >= whole)
        read_rows<1>(s, 0, from, from_ld, row, columns);
      else if (row % R == 0)
        read_row<Part::kFirst>(s, S, row, columns);
      else if (row % R == R - 1)
        read_row<Part::kLast>(s, S, row, columns);
      else
        read_row<Part::kMiddle>(s, S, row, columns);
      if (before.from) write_row(before, row, decay, columns);
    }
  }
  static DELTANET_INLINE void write_row(const Unwritten& head, int row, V decay, int columns) {
    write_rows<1, true>(head.s, 0, head.from, head.from_ld, head.to, head.to_ld, row, decay,
                        columns);
  }
  static DELTANET_NOINLINE void write(const Unwritten& head, int dim_k, int columns) {
    const V decay = X::set1(head.s.a[0]);
    for (int row = 0; row < dim_k; ++row) write_row(head, row, decay, columns);
  }

  // Twice: both the old and the new states. Half of a large L3, which others use as well: with 32
  // MB of it, states of 12 to 31 MB took 12.2 us each where those beyond, asked for early and
  // written past the caches, took 9.5.
  static bool states_exceed_caches(const GatedDeltaRuleParams& p) {
    constexpr int64_t kLargestCache = 12 << 20;
    return 2 * int64_t(sizeof(Real)) * p.sequences * p.value_heads * p.dim_k * p.dim_v >
           kLargestCache;
  }

  // Whether rows of a state can be read or written in place, each at an address so aligned.
  template <class AnyView>
  static bool rows_aligned(const AnyView& x, uintptr_t alignment) {
    bool aligned = uintptr_t(x.data) % alignment == 0;
    for (int i = 0; i < 3; ++i) aligned &= uintptr_t(x.stride[i]) * sizeof(Real) % alignment == 0;
    return aligned && x.stride[3] == 1 && x.dtype == own_dtype<Real>();
  }
  static bool whole_lines(const MutableView<4>& states) {
    return rows_aligned(states, kScratchAlignment);
  }

  // One value head of a task, over its sequence.
  struct Head {
    const GatedDeltaRuleParams& p;
    const RuleTask& task;
    const Scratch& s;
    int64_t head, batch, begin, end;
    int64_t slot;  // negative: there is no state, and nothing to compute
    int columns;

    Head(const GatedDeltaRuleParams& p, const RuleTask& task, const Scratch& s, int64_t head)
        : p(p),
          task(task),
          s(s),
          head(head),
          batch(p.sequence_batch(task.sequence)),
          begin(p.sequence_begin(task.sequence)),
          end(p.sequence_end(task.sequence)),
          slot(p.state_slot(task.sequence)),
          columns(task.column_end - task.column_begin) {}

    template <class States>
    auto state_of(const States& states, int64_t at, int column) const {
      return head_state(states, at, head, task.column_begin + column);
    }

    // Tokens t to t + count, into scratch: what all value heads of the key head share, and the
    // rest.
    void prepare_keys(int64_t t, int count) const {
      const int padded_k = round_up(p.dim_k, W);
      pack_rows<X>(head_rows(p.key, batch, t, task.key_head), count, p.dim_k, s.k, kRow, count,
                   padded_k);
      pack_rows<X>(head_rows(p.query, batch, t, task.key_head), count, p.dim_k, s.q, kRow, count,
                   padded_k);
      for (int i = 0; i < count; ++i) {
        Real *const k = s.k + i * kRow, *const q = s.q + i * kRow;
        if (p.l2norm) {
          const V rk = X::set1(reciprocal_norm(dot_product<X>(k, k, padded_k)));
          const V rq = X::set1(reciprocal_norm(dot_product<X>(q, q, padded_k)));
          for (int j = 0; j < padded_k; j += W) {
            X::store(k + j, X::mul(rk, X::load(k + j)));
            X::store(q + j, X::mul(rq, X::load(q + j)));
          }
        }
        s.kq[i] = dot_product<X>(k, q, padded_k);
      }
    }
    void prepare_values(int64_t t, int count) const {
      pack_rows<X>(head_rows(p.value, batch, t, head, task.column_begin), count, columns, s.v, kRow,
                   count, round_up(columns, W));
      load_gates<Real>(p, batch, t, head, count, s.a, s.b);
      for (int i = 0; i < count; ++i) s.a[i] = Real(std::exp(s.a[i]));
    }
    void store_outputs(int64_t t, int count) const {
      store_rows<X>(s.o, kRow, head_rows(p.output, batch, t, head, task.column_begin), count,
                    columns);
    }

    void run() const {
      if (slot < 0)
        clear_outputs();
      else if constexpr (X::kRowVectors > 0)
        run_in_registers();
      else
        end - begin > kInRows ? run_tiles() : run_rows();
    }
    void clear_outputs() const {
      std::memset(s.o, 0, sizeof(Real) * kBlock * kRow);
      for (int64_t t = begin; t < end; t += kBlock)
        store_outputs(t, end - t < kBlock ? int(end - t) : kBlock);
    }

    // The state as the tokens of this head would read it, where it can be read in its place.
    ConstMatrix initial() const {
      return p.initial_state ? state_of(p.initial_state, slot, 0) : ConstMatrix{};
    }
    bool readable(const ConstMatrix& m) const {
      return p.initial_state && m.column_stride == 1 && m.dtype == own_dtype<Real>();
    }
    void load(int column, int count, Real* to, int64_t ld) const {
      ConstMatrix from{};
      if (p.initial_state) from = state_of(p.initial_state, slot, column);
      load_state<X>(p.initial_state ? &from : nullptr, p.initial_state_is_identity,
                    task.column_begin + column, p.dim_k, count, to, int(ld), count);
    }

    // Registers hold the sums over whole rows. The first token reads the initial state where it
    // lies, the last one writes the final state, and in between the state stays in L2.
    void run_in_registers() const {
      const ConstMatrix first = initial();
      Matrix last{};
      if (p.final_state) last = state_of(p.final_state, slot, 0);
      const bool writable = p.final_state && last.column_stride == 1;
      const bool far = states_exceed_caches(p);
      const bool streamable = far && writable && whole_lines(p.final_state) &&
                              task.column_begin * sizeof(Real) % kScratchAlignment == 0;

      Real* const S = s.S;
      const int64_t ld = round_up(columns, W);
      const Real* from = S;
      int64_t from_ld = ld;
      ShareAhead ahead{nullptr, 0, columns * int64_t(sizeof(Real)), 0, 0, p.dim_k};
      if (begin < end && readable(first)) {
        from = static_cast<const Real*>(first.data);
        from_ld = first.row_stride;
        if (end - begin > 1) ahead.next = from + p.initial_state.stride[1];
        ahead.ld = from_ld;
      } else {
        load(0, columns, S, ld);
      }
      for (int64_t t = begin; t < end; t += kBlock) {
        const int count = end - t < kBlock ? int(end - t) : kBlock;
        if (head == task.value_head_begin || end - begin > kBlock) prepare_keys(t, count);
        prepare_values(t, count);
        if (p.saved_states && t > begin && (t - begin) % kSegmentTokens == 0)
          store_state<X>(S, int(ld), state_of(p.saved_states, p.saved_state(batch, t), 0), p.dim_k,
                         columns);
        for (int i = 0; i < count; ++i) {
          const bool is_last = t + i + 1 == end;
          Real* to = is_last && !p.final_state ? nullptr : S;
          int64_t to_ld = ld;
          if (is_last && writable) to = static_cast<Real*>(last.data), to_ld = last.row_stride;
          ahead.first = p.dim_k * i / count;
          ahead.last = p.dim_k * (i + 1) / count;
          const bool stream = is_last && streamable && from != to;
          InRegisters{s, i, ahead, from, from_ld, to, to_ld, p.dim_k, far && from != S, stream}.run(
              0, columns, Real(p.scale));
          from = S;
          from_ld = ld;
        }
        ahead.next = nullptr;
        store_outputs(t, count);
      }
      if (p.final_state && (!writable || begin == end))
        store_state<X>(S, int(ld), last, p.dim_k, columns);
    }

    // A token or two: whole rows. The first head of a task prepares the keys.
    void run_rows() const {
      // Where the state lies between tokens: in the final state if its rows are contiguous.
      Real* state = s.S;
      int64_t state_ld = columns;
      Matrix final_state{};
      bool in_place = false;
      if (p.final_state) {
        final_state = state_of(p.final_state, slot, 0);
        in_place = final_state.column_stride == 1;
        if (in_place)
          state = static_cast<Real*>(final_state.data), state_ld = final_state.row_stride;
      }
      // The first token may read the initial state in its place.
      const Real* from = state;
      int64_t from_ld = state_ld, next_head = 0;
      const bool far = states_exceed_caches(p);
      const ConstMatrix first = initial();
      if (begin < end && readable(first)) {
        from = static_cast<const Real*>(first.data);
        from_ld = first.row_stride;
        next_head = p.initial_state.stride[1];
      } else {
        load(0, columns, state, state_ld);
      }
      const int count = int(end - begin);
      if (head == task.value_head_begin) prepare_keys(begin, count);
      prepare_values(begin, count);
      for (int i = 0; i < count; ++i) {
        Real* const to = i + 1 < count || p.final_state ? state : nullptr;
        const int64_t row_bytes = columns * int64_t(sizeof(Real));
        const Real* const next = from + next_head;
        const auto token = [&](const auto& ahead) {
          step(s, i, 0, columns, from, from_ld, to, state_ld, p.dim_k, Real(p.scale), ahead);
        };
        if (far)
          token(HeadAhead{next, from_ld, row_bytes, p.dim_k});
        else
          token(PagesAhead{from, next, from_ld, row_bytes, p.dim_k});
        from = state;
        from_ld = state_ld;
        next_head = 0;
      }
      if (count) store_outputs(begin, count);
      if (p.final_state && !in_place)
        store_state<X>(state, int(state_ld), final_state, p.dim_k, columns);
    }

    // More tokens: block by block, and in each of them tile by tile.
    void run_tiles() const {
      load_tiles();
      for (int64_t t = begin; t < end; t += kBlock) {
        const int count = end - t < kBlock ? int(end - t) : kBlock;
        // Keys of one block are still there from the task's first head.
        if (head == task.value_head_begin || end - begin > kBlock) prepare_keys(t, count);
        prepare_values(t, count);
        for (int c = 0; c < columns; c += kTileColumns) run_tile(t, count, c);
        store_outputs(t, count);
      }
      if (p.final_state) store_tiles();
    }
    Real* tile(int c) const { return s.S + size_t(c) * p.dim_k; }
    int tile_width(int c) const { return min_of(kTileColumns, columns - c); }

    // Between states and tiles rows go in the order of memory, not tile by tile.
    void load_tiles() const {
      const ConstMatrix first = initial();
      if (!readable(first)) {
        for (int c = 0; c < columns; c += kTileColumns)
          load(c, tile_width(c), tile(c), kTileColumns);
        return;
      }
      const auto* from = static_cast<const Real*>(first.data);
      for (int row = 0; row < p.dim_k; ++row, from += first.row_stride)
        for (int c = 0; c < columns; c += kTileColumns)
          copy<false>(from + c, tile(c) + row * kTileColumns, tile_width(c));
    }
    void store_tiles() const {
      const Matrix last = state_of(p.final_state, slot, 0);
      if (last.column_stride != 1) {
        for (int c = 0; c < columns; c += kTileColumns)
          store_state<X>(tile(c), kTileColumns, state_of(p.final_state, slot, c), p.dim_k,
                         tile_width(c));
        return;
      }
      auto* to = static_cast<Real*>(last.data);
      const bool stream = states_exceed_caches(p) && uintptr_t(to) % kScratchAlignment == 0 &&
                          uintptr_t(last.row_stride) * sizeof(Real) % kScratchAlignment == 0;
      for (int row = 0; row < p.dim_k; ++row, to += last.row_stride)
        for (int c = 0; c < columns; c += kTileColumns) {
          const Real* const from = tile(c) + row * kTileColumns;
          stream ? copy<true>(from, to + c, tile_width(c))
                 : copy<false>(from, to + c, tile_width(c));
        }
    }
    template <bool kStream>
    static DELTANET_INLINE void copy(const Real* from, Real* to, int width) {
      if (width < kTileColumns) {
        std::memcpy(to, from, sizeof(Real) * size_t(width));
        return;
      }
#pragma GCC unroll 8
      for (int i = 0; i < kTileColumns; i += W)
        kStream ? X::stream(to + i, X::load(from + i)) : X::store(to + i, X::load(from + i));
    }
    void run_tile(int64_t t, int count, int c) const {
      const int width = tile_width(c);
      Real* const S = tile(c);
      ShareAhead ahead{nullptr, 0, columns * int64_t(sizeof(Real)), 0, 0, p.dim_k};
      if (t == begin) {
        const ConstMatrix first = initial();
        if (readable(first)) {
          ahead.next = static_cast<const Real*>(first.data) + p.initial_state.stride[1];
          ahead.ld = first.row_stride;
        }
      } else if (p.saved_states && (t - begin) % kSegmentTokens == 0) {
        store_state<X>(S, kTileColumns, state_of(p.saved_states, p.saved_state(batch, t), c),
                       p.dim_k, width);
      }
      const int tiles = (columns + kTileColumns - 1) / kTileColumns;
      for (int i = 0; i < count; ++i) {
        const bool wanted = t + i + 1 < end || p.final_state;
        const int share = c / kTileColumns * count + i;
        ahead.first = p.dim_k * share / (tiles * count);
        ahead.last = p.dim_k * (share + 1) / (tiles * count);
        step(s, i, c, width, S, kTileColumns, wanted ? S : nullptr, kTileColumns, p.dim_k,
             Real(p.scale), ahead);
      }
    }
  };

  // Whether every task has one token, reads its state in place, and can write it past the caches.
  static bool can_overlap(const GatedDeltaRuleParams& p, const RuleTask* tasks, int count) {
    // A state that is updated in place needs no second stream.
    if (!p.initial_state || !p.final_state || p.initial_state.data == p.final_state.data ||
        p.state_slots || !states_exceed_caches(p) || !rows_aligned(p.initial_state, sizeof(Real)) ||
        !whole_lines(p.final_state))
      return false;
    for (int i = 0; i < count; ++i) {
      const RuleTask& t = tasks[i];
      if (p.sequence_end(t.sequence) - p.sequence_begin(t.sequence) != 1 ||
          t.column_begin * sizeof(Real) % kScratchAlignment != 0)
        return false;
    }
    return true;
  }
  static void run_overlapped(const GatedDeltaRuleParams& p, const RuleTask* tasks, int count,
                             const Scratch (&scratch)[2]) {
    Unwritten before{};
    int columns = 0;
    for (int i = 0, n = 0; i < count; ++i) {
      const RuleTask& task = tasks[i];
      for (int64_t h = task.value_head_begin; h < task.value_head_end; ++h, ++n) {
        Scratch s = scratch[n % 2];
        s.k = scratch[i % 2].k;
        s.q = scratch[i % 2].q;
        s.kq = scratch[i % 2].kq;
        const Head head(p, task, s, h);
        if (before.from && head.columns != columns) {
          write(before, p.dim_k, columns);
          before.from = nullptr;
        }
        columns = head.columns;
        if (h == task.value_head_begin) head.prepare_keys(head.begin, 1);
        head.prepare_values(head.begin, 1);
        const ConstMatrix first = head.initial();
        const Matrix last = head.state_of(p.final_state, head.slot, 0);
        const auto* const from = static_cast<const Real*>(first.data);
        const PagesAhead ahead{from, from + p.initial_state.stride[1], first.row_stride,
                               columns * int64_t(sizeof(Real)), p.dim_k};
        read_and_write(s, from, first.row_stride, ahead, before, p.dim_k, columns);
        finish_sums(s, 0, 0, columns, Real(p.scale));
        head.store_outputs(head.begin, 1);
        before = {s, from, first.row_stride, static_cast<Real*>(last.data), last.row_stride};
      }
    }
    if (before.from) write(before, p.dim_k, columns);
  }

  static void run(const GatedDeltaRuleParams& p, const RuleTask* tasks, int count, void* scratch) {
    int columns = 0;  // at most
    for (int i = 0; i < count; ++i)
      columns = std::max(columns, tasks[i].column_end - tasks[i].column_begin);
    const Scratch s = carve(scratch, p.dim_k, columns);
    bool overlapped = false;
    if constexpr (X::kRowVectors == 0) {
      overlapped = can_overlap(p, tasks, count);
      if (overlapped)
        run_overlapped(p, tasks, count,
                       {s, carve(static_cast<char*>(scratch) + s.bytes, 0, columns)});
    }
    if (!overlapped)
      for (int i = 0; i < count; ++i)
        for (int64_t h = tasks[i].value_head_begin; h < tasks[i].value_head_end; ++h)
          Head(p, tasks[i], s, h).run();
    X::finish_streams();
  }
};
