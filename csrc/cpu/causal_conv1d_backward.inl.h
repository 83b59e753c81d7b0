// SPDX-License-Identifier: Apache-2.0
//
// The gradients of the causal convolution: docs/algorithm.md, equations (31) to (33).
//
//   dz_t = dy_t silu'(z_t),   dx_t = sum_i weight_{W-1-i} dz_{t+i},   dweight_j = sum_t dz_t
//   x_{t-(W-1)+j}
//
// dx is a convolution itself, with the taps in reverse, and so is the gradient of the state before
// a run: its tokens are those before the first one, and dz is zero there.
//
// Work split:  a task is up to kConvChannels channels of all tokens, so that the sums over tokens
//              are taken in one place, in one order.
// Memory:      nothing is kept by the forward pass; z is computed again, kConvTokens at a time, the
//              last tokens of a run first.
// Numerics:    sums over kConvTokens tokens in Real, and these sums in Wider.
//
// Included inside an ISA namespace, after causal_conv1d.inl.h.

template <class X>
struct CausalConv1dBackward {
  using Forward = CausalConv1d<X>;
  using Params = CausalConv1dBackwardParams;
  using Real = typename X::Real;
  using Wider = typename WiderThan<Real>::type;
  using V = typename X::V;
  static constexpr int kRow = Forward::kRow;
  static constexpr int kPast = kMaxConvWidth - 1;

  struct Scratch {
    Real *taps, *reversed;  // [W, kRow]
    Real *bias, *zero;      // [kRow]
    Real* rows;             // [kPast + kConvTokens, kRow]  x, and the tokens before
    Real* dz;       // [kConvTokens + kPast, kRow]  and those of the tokens behind; before it
                    //                              W - 1 rows of zeros
    Real* z;        // [kConvTokens, kRow]  z or dx
    Real* more;     // [kPast, kRow]  gradients of the final states
    Real* sums;     // [kMaxConvWidth + 1, kRow]  of dweight, dbias over the tokens at hand
    Wider* totals;  // the same over all tokens
    size_t bytes;
  };
  static Scratch carve(void* base) {
    ScratchCarver carver{static_cast<char*>(base)};
    Scratch s;
    s.taps = carver.take<Real>(kMaxConvWidth * kRow);
    s.reversed = carver.take<Real>(kMaxConvWidth * kRow);
    s.bias = carver.take<Real>(kRow);
    s.zero = carver.take<Real>(kRow);
    s.rows = carver.take<Real>((kPast + kConvTokens) * kRow);
    s.dz = carver.take<Real>((kPast + kConvTokens + kPast) * kRow);
    if (base) s.dz += kPast * kRow;
    s.z = carver.take<Real>(kConvTokens * kRow);
    s.more = carver.take<Real>(kPast * kRow);
    s.sums = carver.take<Real>((kMaxConvWidth + 1) * kRow);
    s.totals = carver.take<Wider>((kMaxConvWidth + 1) * kRow);
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const Params&) { return carve(nullptr).bytes; }

  // dz <- dz silu'(z)
  static DELTANET_NOINLINE void times_slope(Real* dz, const Real* z, int count, int padded) {
    for (int t = 0; t < count; ++t)
      for (int c = 0; c < padded; c += X::kLanes) {
        V value, slope;
        silu_and_slope<X>(X::load(z + t * kRow + c), &value, &slope);
        X::store(dz + t * kRow + c, X::mul(X::load(dz + t * kRow + c), slope));
      }
  }

  // Tap j, and after the last one the bias: [kTaps + 1, kRow].
  template <int kTaps>
  static DELTANET_NOINLINE void sum_over_tokens(const Real* dz, const Real* rows, int count,
                                                int padded, Real* sums) {
    for (int c = 0; c < padded; c += X::kLanes) {
      V sum[kTaps + 1];
#pragma GCC unroll 16
      for (int j = 0; j <= kTaps; ++j) sum[j] = X::zero();
      for (int t = 0; t < count; ++t) {
        const V d = X::load(dz + t * kRow + c);
#pragma GCC unroll 8
        for (int j = 0; j < kTaps; ++j)
          sum[j] = X::fma(d, X::load(rows + (t + j) * kRow + c), sum[j]);
        sum[kTaps] = X::add(sum[kTaps], d);
      }
#pragma GCC unroll 16
      for (int j = 0; j <= kTaps; ++j) X::store(sums + j * kRow + c, sum[j]);
    }
  }
  using Sum = void (*)(const Real*, const Real*, int, int, Real*);
  static Sum sum_for(int width) {
    static constexpr Sum kAll[kMaxConvWidth] = {
        sum_over_tokens<1>, sum_over_tokens<2>, sum_over_tokens<3>, sum_over_tokens<4>,
        sum_over_tokens<5>, sum_over_tokens<6>, sum_over_tokens<7>, sum_over_tokens<8>};
    return kAll[width - 1];
  }

  // Adds the gradients of the final state to those of tokens [t, t + count): its rows are the last
  // W - 1 tokens of the run, of which some may lie before the first one.
  static void add_final(const Params& p, const ConvTask& task, const Scratch& s, int64_t t,
                        int count, int padded) {
    const int past = p.width - 1;
    if (!p.grad_final_states || past == 0) return;
    const int64_t first = task.run.end - past;  // the token of row 0
    const int begin = int(t > first ? t - first : 0);
    const int64_t behind = t + count - first;
    const int end = int(behind < past ? behind : past);
    if (begin >= end) return;
    pack_few_rows<X>(token_rows(p.grad_final_states, task.run.sequence, task.channel_begin, begin),
                     end - begin, task.channels, s.more, kRow, padded);
    Real* const dx = s.z + (first + begin - t) * kRow;
    for (int i = 0; i < (end - begin) * kRow; i += kRow)
      for (int c = 0; c < padded; c += X::kLanes)
        X::store(dx + i + c, X::add(X::load(dx + i + c), X::load(s.more + i + c)));
  }

  static void run_tile(const Params& p, const ConvTask& task, const Scratch& s, int64_t t,
                       int count, int padded) {
    const int past = p.width - 1;
    const auto tokens = [&](const auto& x) {
      return token_rows(x, task.run.batch, task.channel_begin, t);
    };
    Forward::pack_past(p, task, t, s.rows, padded);
    pack_rows<X>(tokens(p.x), count, task.channels, s.rows + past * kRow, kRow, count, padded);
    if (p.grad_output)
      pack_rows<X>(tokens(p.grad_output), count, task.channels, s.dz, kRow, count, padded);
    else
      std::memset(s.dz, 0, sizeof(Real) * count * kRow);
    if (p.silu && p.grad_output) {
      Forward::convolve_for(p.width)(s.taps, s.bias, s.rows, count, padded, s.z);
      times_slope(s.dz, s.z, count, padded);
    }
    if (p.d_x) {
      Forward::convolve_for(p.width)(s.reversed, s.zero, s.dz, count, padded, s.z);
      add_final(p, task, s, t, count, padded);
      store_rows<X>(s.z, kRow, tokens(p.d_x), count, task.channels);
    }
    if (p.d_weight || p.d_bias) {
      sum_for(p.width)(s.dz, s.rows, count, padded, s.sums);
      for (int j = 0; j <= p.width; ++j)
        for (int c = 0; c < padded; ++c) s.totals[j * kRow + c] += s.sums[j * kRow + c];
    }
  }

  static void run_sequence(const Params& p, const ConvTask& task, const Scratch& s, int padded) {
    const int past = p.width - 1;
    const int64_t tokens = task.run.end - task.run.begin;
    // Behind the last token nothing depends on it.
    std::memset(s.dz, 0, sizeof(Real) * (kConvTokens + kPast) * kRow);
    for (int64_t tile = (tokens + kConvTokens - 1) / kConvTokens; tile-- > 0;) {
      const int64_t t = task.run.begin + tile * kConvTokens;
      const int count = int(task.run.end - t < kConvTokens ? task.run.end - t : kConvTokens);
      if (count == kConvTokens)  // the first rows are those of the tile behind
        std::memmove(s.dz + kConvTokens * kRow, s.dz, sizeof(Real) * past * kRow);
      run_tile(p, task, s, t, count, padded);
    }
    if (p.d_initial_states && past > 0) {
      Forward::convolve_for(p.width)(s.reversed, s.zero, s.dz - past * kRow, past, padded, s.z);
      add_final(p, task, s, task.run.begin - past, past, padded);
      store_few_rows<X>(s.z, kRow,
                        token_rows(p.d_initial_states, task.run.sequence, task.channel_begin, 0),
                        past, task.channels);
    }
  }

  static void run(const Params& p, int64_t channel_begin, int channels, void* scratch) {
    const Scratch s = carve(scratch);
    const int padded = round_up(channels, X::kLanes);
    ConvTask task{{}, 0, 0, channel_begin, channels};
    Forward::pack_weights(p, task, s.taps, s.bias, padded);
    for (int j = 0; j < p.width; ++j)
      std::memcpy(s.reversed + j * kRow, s.taps + (p.width - 1 - j) * kRow, sizeof(Real) * kRow);
    std::memset(s.zero, 0, sizeof(Real) * kRow);
    std::memset(s.dz - kPast * kRow, 0, sizeof(Real) * kPast * kRow);
    std::memset(s.totals, 0, sizeof(Wider) * (kMaxConvWidth + 1) * kRow);

    for (int64_t i = 0; i < p.run_count; ++i) {
      task.run = p.runs[i];
      if (task.run.sequence >= 0) {
        run_sequence(p, task, s, padded);
      } else if (p.d_x) {
        std::memset(s.z, 0, sizeof(Real) * kConvTokens * kRow);
        for (int64_t t = task.run.begin; t < task.run.end; t += kConvTokens)
          store_rows<X>(s.z, kRow, token_rows(p.d_x, task.run.batch, channel_begin, t),
                        int(task.run.end - t < kConvTokens ? task.run.end - t : kConvTokens),
                        channels);
      }
    }

    for (int i = 0; i < (p.width + 1) * kRow; ++i) s.sums[i] = Real(s.totals[i]);
    if (p.d_weight)
      store_few_rows<X>(s.sums, kRow,
                        {p.d_weight.at(channel_begin * p.d_weight.stride[0]), p.d_weight.dtype,
                         p.d_weight.stride[1], p.d_weight.stride[0]},
                        p.width, channels);
    if (p.d_bias)
      store_rows<X>(
          s.sums + p.width * kRow, kRow,
          {p.d_bias.at(channel_begin * p.d_bias.stride[0]), p.d_bias.dtype, 0, p.d_bias.stride[0]},
          1, channels);
  }
};
