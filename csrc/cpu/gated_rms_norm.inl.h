// SPDX-License-Identifier: Apache-2.0
//
// The gated norm behind the rule, and its gradients: docs/algorithm.md, equations (30) and (34) to
// (36), row by row.
//
//   n = x r with r = rsqrt(mean(x^2) + eps),   y = weight n silu(gate)
//
// Memory:      as many rows at a time as make kNormBlock numbers are packed into fp32. First all
//              their r, then all their outputs: a row alone would wait for its own square root.
// Numerics:    a row's sums depend on nothing but the row. The gradient of the weight is a sum in
//              Real over the rows of a block, and these sums in double.
//
// Included inside an ISA namespace, after a vector type X.

constexpr int kNormBlock = 2048;

template <class X>
struct GatedRmsNorm {
  using Real = typename X::Real;
  using V = typename X::V;
  static constexpr int W = X::kLanes;

  static int padded_columns(const GatedRmsNormParams& p) { return round_up(int(p.columns), W); }
  static int rows_together(int padded) { return padded < kNormBlock ? kNormBlock / padded : 1; }

  struct Scratch {
    Real* weight;    // [C]
    Real *x, *gate;  // [rows together, C]
    Real* r;         // [rows together]
    size_t bytes;
  };
  static Scratch carve(void* base, int padded) {
    ScratchCarver carver{static_cast<char*>(base)};
    const int rows = rows_together(padded);
    Scratch s;
    s.weight = carver.take<Real>(size_t(padded));
    s.x = carver.take<Real>(size_t(rows) * padded);
    s.gate = carver.take<Real>(size_t(rows) * padded);
    s.r = carver.take<Real>(size_t(rows));
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const GatedRmsNormParams& p) {
    return carve(nullptr, padded_columns(p)).bytes;
  }

  static ConstMatrix rows_of(const View<2>& x, int64_t row) {
    return {x.at(row * x.stride[0]), x.dtype, x.stride[0], x.stride[1]};
  }
  static Matrix rows_of(const MutableView<2>& x, int64_t row) {
    return {x.at(row * x.stride[0]), x.dtype, x.stride[0], x.stride[1]};
  }

  // Sum of a_i b_i. Two chains of additions; the single lane adds in double.
  static DELTANET_INLINE Real dot(const Real* a, const Real* b, int padded) {
    if constexpr (W == 1) {
      double sum = 0;
      for (int c = 0; c < padded; ++c) sum += double(a[c]) * b[c];
      return Real(sum);
    }
    V even = X::zero(), odd = X::zero();
    int c = 0;
    for (; c + 2 * W <= padded; c += 2 * W) {
      even = X::fma(X::load(a + c), X::load(b + c), even);
      odd = X::fma(X::load(a + c + W), X::load(b + c + W), odd);
    }
    if (c < padded) even = X::fma(X::load(a + c), X::load(b + c), even);
    return X::sum(X::add(even, odd));
  }

  static void pack_weight(const GatedRmsNormParams& p, Real* weight, int padded) {
    pack_rows<X>({p.weight.data, p.weight.dtype, 0, p.weight.stride[0]}, 1, int(p.columns), weight,
                 padded, 1, padded);
  }
  static void pack(const GatedRmsNormParams& p, int64_t row, int count, const Scratch& s,
                   int padded) {
    pack_rows<X>(rows_of(p.x, row), count, int(p.columns), s.x, padded, count, padded);
    pack_rows<X>(rows_of(p.gate, row), count, int(p.columns), s.gate, padded, count, padded);
    for (int i = 0; i < count; ++i) {
      const Real* const x = s.x + i * padded;
      s.r[i] = 1 / std::sqrt(dot(x, x, padded) / Real(p.columns) + Real(p.eps));
    }
  }

  // x <- weight x r silu(gate)
  static DELTANET_NOINLINE void outputs(const Scratch& s, int count, int padded) {
    for (int i = 0; i < count; ++i) {
      const V r = X::set1(s.r[i]);
      Real* const x = s.x + i * padded;
      const Real* const gate = s.gate + i * padded;
      for_each_silu<X>(gate, padded, [&](int c, V of_gate) {
        const V scaled = X::mul(X::mul(X::load(x + c), r), X::load(s.weight + c));
        X::store(x + c, X::mul(scaled, of_gate));
      });
    }
  }

  static void run(const GatedRmsNormParams& p, int64_t begin, int64_t end, void* scratch) {
    const int padded = padded_columns(p), together = rows_together(padded);
    const Scratch s = carve(scratch, padded);
    pack_weight(p, s.weight, padded);
    for (int64_t row = begin; row < end; row += together) {
      const int count = int(end - row < together ? end - row : together);
      pack(p, row, count, s, padded);
      outputs(s, count, padded);
      write_rows<X>(s.x, padded, rows_of(p.output, row), count, int(p.columns), p.rows * p.columns);
    }
    X::finish_streams();
  }
};

template <class X>
struct GatedRmsNormBackward {
  using Forward = GatedRmsNorm<X>;
  using Params = GatedRmsNormBackwardParams;
  using Real = typename X::Real;
  using V = typename X::V;
  static constexpr int W = X::kLanes;

  struct Scratch {
    typename Forward::Scratch forward;
    Real* dy;    // [rows together, C], then the gradient of the gate
    Real* sums;  // [C]  gradient of the weight
    size_t bytes;
  };
  static Scratch carve(void* base, int padded) {
    Scratch s;
    s.forward = Forward::carve(base, padded);
    ScratchCarver carver{static_cast<char*>(base), s.forward.bytes};
    s.dy = carver.take<Real>(size_t(Forward::rows_together(padded)) * padded);
    s.sums = carver.take<Real>(size_t(padded));
    s.bytes = carver.used;
    return s;
  }
  static size_t scratch_bytes(const Params& p) {
    return carve(nullptr, Forward::padded_columns(p)).bytes;
  }

  // x <- dx, dy <- dgate, gate is lost; adds to sums
  static DELTANET_NOINLINE void gradients(const Scratch& s, int count, int padded, Real columns) {
    for (int i = 0; i < count; ++i) {
      Real* const x = s.forward.x + i * padded;
      Real* const gate = s.forward.gate + i * padded;
      Real* const dy = s.dy + i * padded;
      const V r = X::set1(s.forward.r[i]);
      for (int c = 0; c < padded; c += W) {
        V value, slope;
        silu_and_slope<X>(X::load(gate + c), &value, &slope);
        const V n = X::mul(X::load(x + c), r), w = X::load(s.forward.weight + c);
        const V d = X::load(dy + c), dn = X::mul(d, value);
        X::store(s.sums + c, X::fma(dn, n, X::load(s.sums + c)));
        X::store(dy + c, X::mul(X::mul(d, w), X::mul(n, slope)));
        X::store(gate + c, X::mul(dn, w));
        X::store(x + c, n);
      }
      const V mean = X::set1(Forward::dot(gate, x, padded) / columns);
      for (int c = 0; c < padded; c += W)
        X::store(x + c, X::mul(r, X::fnma(X::load(x + c), mean, X::load(gate + c))));
    }
  }

  static void run(const Params& p, int64_t begin, int64_t end, double* weight_sums, void* scratch) {
    const int padded = Forward::padded_columns(p), together = Forward::rows_together(padded);
    const int columns = int(p.columns);
    const Scratch s = carve(scratch, padded);
    Forward::pack_weight(p, s.forward.weight, padded);
    if (weight_sums)
      for (int c = 0; c < columns; ++c) weight_sums[c] = 0;
    for (int64_t row = begin; row < end; row += together) {
      const int count = int(end - row < together ? end - row : together);
      Forward::pack(p, row, count, s.forward, padded);
      pack_rows<X>(Forward::rows_of(p.grad_output, row), count, columns, s.dy, padded, count,
                   padded);
      std::memset(s.sums, 0, sizeof(Real) * padded);
      gradients(s, count, padded, Real(p.columns));
      if (p.d_x) store_rows<X>(s.forward.x, padded, Forward::rows_of(p.d_x, row), count, columns);
      if (p.d_gate) store_rows<X>(s.dy, padded, Forward::rows_of(p.d_gate, row), count, columns);
      if (weight_sums)
        for (int c = 0; c < columns; ++c) weight_sums[c] += double(s.sums[c]);
    }
  }
};
