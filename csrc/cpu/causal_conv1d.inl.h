// SPDX-License-Identifier: Apache-2.0
//
// The short causal convolution in front of the rule: docs/algorithm.md, equation (29).
//
//   z_t = bias + sum_j weight_j x_{t - (W - 1) + j},   y_t = z_t, or z_t sigmoid(z_t)
//
// Work split:  a task is up to kConvChannels channels of some neighboring tokens. An output depends
//              on W tokens alone, so every cut gives the same bits.
// Passes:      z of kConvTokens tokens, then silu of them: together they are slower, because few of
//              its long chains of operations fit into what a core looks ahead.
// Memory:      x is packed into fp32 rows, one per token and kConvTokens at a time, so that vectors
//              run along the channels; views with token stride 1 are transposed in registers on
//              the way. The tokens before a task are read once more than the others.
//
// Included inside an ISA namespace, after a vector type X.

// Tokens of a [B, D, T] tensor or a [N, D, S] state, as rows, from token t and a channel on.
inline ConstMatrix token_rows(const View<3>& x, int64_t batch, int64_t channel, int64_t t) {
  return {x.at(batch * x.stride[0] + channel * x.stride[1] + t * x.stride[2]), x.dtype, x.stride[2],
          x.stride[1]};
}
inline Matrix token_rows(const MutableView<3>& x, int64_t batch, int64_t channel, int64_t t) {
  return {x.at(batch * x.stride[0] + channel * x.stride[1] + t * x.stride[2]), x.dtype, x.stride[2],
          x.stride[1]};
}

// Weights [D, W] and states [D, S] have few and neighboring elements per channel. With their number
// a constant, compilers make shuffles of these loops; the general ones take one element at a time.
template <class Real, DType kType, int kRows>
inline void split_groups(const void* from, int columns, Real* to, int ld) {
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < kRows; ++r)
      to[r * ld + c] = load_element<Real>(from, kType, int64_t(c) * kRows + r);
}
template <class Real, DType kType, int kRows>
inline void join_groups(const Real* from, int ld, int columns, void* to) {
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < kRows; ++r)
      store_element(to, kType, int64_t(c) * kRows + r, from[r * ld + c]);
}
inline bool is_grouped(int64_t row_stride, int64_t column_stride, int rows, DType dtype) {
  return row_stride == 1 && column_stride == rows && (rows == 3 || rows == 4) &&
         (dtype == DType::kFloat32 || dtype == DType::kBFloat16);
}

template <class X>
inline void pack_few_rows(const ConstMatrix& m, int rows, int columns, typename X::Real* to, int ld,
                          int padded_columns) {
  using Real = typename X::Real;
  if (!is_grouped(m.row_stride, m.column_stride, rows, m.dtype))
    return pack_rows<X>(m, rows, columns, to, ld, rows, padded_columns);
  const bool wide = m.dtype == DType::kFloat32;
  const auto split = rows == 4 ? wide ? split_groups<Real, DType::kFloat32, 4>
                                      : split_groups<Real, DType::kBFloat16, 4>
                     : wide    ? split_groups<Real, DType::kFloat32, 3>
                               : split_groups<Real, DType::kBFloat16, 3>;
  split(m.data, columns, to, ld);
  for (int r = 0; r < rows; ++r)
    for (int c = columns; c < padded_columns; ++c) to[r * ld + c] = 0;
}

template <class X>
inline void store_few_rows(const typename X::Real* from, int ld, const Matrix& m, int rows,
                           int columns) {
  using Real = typename X::Real;
  if (!is_grouped(m.row_stride, m.column_stride, rows, m.dtype))
    return store_rows<X>(from, ld, m, rows, columns);
  const bool wide = m.dtype == DType::kFloat32;
  const auto join = rows == 4 ? wide ? join_groups<Real, DType::kFloat32, 4>
                                     : join_groups<Real, DType::kBFloat16, 4>
                    : wide    ? join_groups<Real, DType::kFloat32, 3>
                              : join_groups<Real, DType::kBFloat16, 3>;
  join(from, ld, columns, m.data);
}

template <class X>
struct CausalConv1d {
  using Real = typename X::Real;
  using V = typename X::V;
  static constexpr int kRow = kConvChannels;
  static constexpr int kTogether = 4;  // tokens that share the loads of the weights
  static_assert(kRow % X::kLanes == 0 && kConvTokens % kTogether == 0);

  struct Scratch {
    Real* taps;  // [W, kRow]
    Real* bias;  // [kRow]
    Real* rows;  // [S + kConvTokens, kRow]  the tokens before, and those at hand
    Real* out;   // [kConvTokens, kRow]
    size_t bytes;
  };
  static Scratch carve(void* base, int64_t state_tokens) {
    ScratchCarver carver{static_cast<char*>(base)};
    Scratch s;
    s.taps = carver.take<Real>(kMaxConvWidth * kRow);
    s.bias = carver.take<Real>(kRow);
    s.rows = carver.take<Real>(size_t(state_tokens + kConvTokens) * kRow);
    s.out = carver.take<Real>(kConvTokens * kRow);
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const CausalConv1dParams& p) {
    return carve(nullptr, p.state_tokens).bytes;
  }

  static void pack_weights(const CausalConv1dParams& p, const ConvTask& task, Real* taps,
                           Real* bias, int padded) {
    const auto& w = p.weight;
    pack_few_rows<X>({w.at(task.channel_begin * w.stride[0]), w.dtype, w.stride[1], w.stride[0]},
                     p.width, task.channels, taps, kRow, padded);
    if (p.bias)
      pack_rows<X>(
          {p.bias.at(task.channel_begin * p.bias.stride[0]), p.bias.dtype, 0, p.bias.stride[0]}, 1,
          task.channels, bias, kRow, 1, padded);
    else
      std::memset(bias, 0, sizeof(Real) * padded);
  }

  // The S tokens before token t: those of the run, and before these the last ones of its state.
  static void pack_past(const CausalConv1dParams& p, const ConvTask& task, int64_t t, Real* rows,
                        int padded) {
    const int past = int(p.state_tokens);
    const int of_run = int(t - task.run.begin < past ? t - task.run.begin : past);
    const int of_state = past - of_run;
    if (of_state > 0) {
      if (p.initial_states)
        pack_few_rows<X>(
            token_rows(p.initial_states, task.run.sequence, task.channel_begin, of_run), of_state,
            task.channels, rows, kRow, padded);
      else
        std::memset(rows, 0, sizeof(Real) * of_state * kRow);
    }
    if (of_run > 0)
      pack_rows<X>(token_rows(p.x, task.run.batch, task.channel_begin, t - of_run), of_run,
                   task.channels, rows + of_state * kRow, kRow, of_run, padded);
  }

  // z of kCount tokens and one vector of channels
  template <int kTaps, int kCount>
  static DELTANET_INLINE void convolve_vector(const Real* taps, V bias, const Real* rows,
                                              Real* out) {
    V x[kTaps + kCount - 1], z[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kTaps + kCount - 1; ++i) x[i] = X::load(rows + i * kRow);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) z[i] = bias;
#pragma GCC unroll 8
    for (int j = 0; j < kTaps; ++j) {
      const V weight = X::load(taps + j * kRow);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) z[i] = X::fma(weight, x[i + j], z[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) X::store(out + i * kRow, z[i]);
  }
  // out_t = z from the rows t to t + kTaps - 1
  template <int kTaps>
  static DELTANET_NOINLINE void convolve(const Real* taps, const Real* bias, const Real* rows,
                                         int count, int padded, Real* out) {
    int t = 0;
    for (; t + kTogether <= count; t += kTogether)
      for (int c = 0; c < padded; c += X::kLanes)
        convolve_vector<kTaps, kTogether>(taps + c, X::load(bias + c), rows + t * kRow + c,
                                          out + t * kRow + c);
    for (; t < count; ++t)
      for (int c = 0; c < padded; c += X::kLanes)
        convolve_vector<kTaps, 1>(taps + c, X::load(bias + c), rows + t * kRow + c,
                                  out + t * kRow + c);
  }
  using Convolve = void (*)(const Real*, const Real*, const Real*, int, int, Real*);
  static Convolve convolve_for(int width) {
    static constexpr Convolve kAll[kMaxConvWidth] = {convolve<1>, convolve<2>, convolve<3>,
                                                     convolve<4>, convolve<5>, convolve<6>,
                                                     convolve<7>, convolve<8>};
    return kAll[width - 1];
  }

  static DELTANET_NOINLINE void apply_silu(Real* z, int count, int padded, RowsAhead& ahead) {
    for (int t = 0; t < count; ++t) {
      ahead.step();
      Real* const row = z + t * kRow;
      for_each_silu<X>(row, padded, [&](int c, V y) { X::store(row + c, y); });
    }
  }

  static void run(const CausalConv1dParams& p, const ConvTask& task, void* scratch) {
    const Scratch s = carve(scratch, p.state_tokens);
    const int padded = round_up(task.channels, X::kLanes);
    const int past = int(p.state_tokens);
    if (task.run.sequence < 0) {
      std::memset(s.out, 0, sizeof(Real) * kConvTokens * kRow);
      for (int64_t t = task.begin; t < task.end; t += kConvTokens)
        store_rows<X>(s.out, kRow, token_rows(p.output, task.run.batch, task.channel_begin, t),
                      min_of(kConvTokens, int(task.end - t)), task.channels);
      return;
    }
    pack_weights(p, task, s.taps, s.bias, padded);
    pack_past(p, task, task.begin, s.rows, padded);
    const Convolve convolve = convolve_for(p.width);
    for (int64_t t = task.begin; t < task.end; t += kConvTokens) {
      const int count = int(task.end - t < kConvTokens ? task.end - t : kConvTokens);
      pack_rows<X>(token_rows(p.x, task.run.batch, task.channel_begin, t), count, task.channels,
                   s.rows + past * kRow, kRow, count, padded);
      convolve(s.taps, s.bias, s.rows + (past - (p.width - 1)) * kRow, count, padded, s.out);
      RowsAhead ahead;  // of the task that most likely follows
      ahead.add(token_rows(p.x, task.run.batch, task.channel_begin + kConvChannels, t), 0, count,
                min_of(kConvChannels, int(p.channels - task.channel_begin - kConvChannels)));
      ahead.spread(count);
      if (p.silu) apply_silu(s.out, count, padded, ahead);
      write_rows<X>(s.out, kRow, token_rows(p.output, task.run.batch, task.channel_begin, t), count,
                    task.channels, p.batch * p.tokens * p.channels);
      std::memmove(s.rows, s.rows + count * kRow, sizeof(Real) * past * kRow);
    }
    X::finish_streams();
    if (task.end == task.run.end && p.final_states)
      store_few_rows<X>(s.rows, kRow,
                        token_rows(p.final_states, task.run.sequence, task.channel_begin, 0), past,
                        task.channels);
  }
};
