// SPDX-License-Identifier: Apache-2.0
//
// How the kernels read their inputs and write their outputs: rows of q, k, v, o of any element type
// and any strides, gates, states. Arithmetic happens in Real alone. Included inside an ISA
// namespace.

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
template <class Int>
constexpr Int min_of(Int a, Int b) {
  return a < b ? a : b;
}

// Hands out pieces of one block of scratch memory; with a null block it only counts.
struct ScratchCarver {
  char* base;
  size_t used = 0;
  template <class T>
  T* take(size_t count) {
    T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used += (count * sizeof(T) + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    return piece;
  }
};

template <class X, DType kType>
DELTANET_INLINE typename X::V load_as(const void* row, int64_t i) {
  if constexpr (kType == DType::kBFloat16)
    return X::load_bf16(static_cast<const uint16_t*>(row) + i);
  else if constexpr (kType == DType::kFloat16)
    return X::load_f16(static_cast<const uint16_t*>(row) + i);
  else
    return X::load(static_cast<const typename X::Real*>(row) + i);
}

template <class X, DType kType>
DELTANET_INLINE void store_as(void* row, int64_t i, typename X::V x) {
  if constexpr (kType == DType::kBFloat16)
    X::store_bf16(static_cast<uint16_t*>(row) + i, x);
  else if constexpr (kType == DType::kFloat16)
    X::store_f16(static_cast<uint16_t*>(row) + i, x);
  else
    X::store(static_cast<typename X::Real*>(row) + i, x);
}

// A matrix somewhere in a tensor: element (r, c) at data[r * row_stride + c * column_stride].
struct ConstMatrix {
  const void* data;
  DType dtype;
  int64_t row_stride, column_stride;
  const void* column(int64_t c) const {
    return static_cast<const char*>(data) + c * column_stride * size_of(dtype);
  }
  const void* row(int64_t r) const {
    return static_cast<const char*>(data) + r * row_stride * size_of(dtype);
  }
};
struct Matrix {
  void* data;
  DType dtype;
  int64_t row_stride, column_stride;
  void* row(int64_t r) const { return static_cast<char*>(data) + r * row_stride * size_of(dtype); }
};

// The rows (tokens) of one head, from token t and column c on.
inline ConstMatrix head_rows(const View<4>& x, int64_t b, int64_t t, int64_t head, int64_t c = 0) {
  return {x.at(b * x.stride[0] + t * x.stride[1] + head * x.stride[2] + c * x.stride[3]), x.dtype,
          x.stride[1], x.stride[3]};
}
inline Matrix head_rows(const MutableView<4>& x, int64_t b, int64_t t, int64_t head,
                        int64_t c = 0) {
  return {x.at(b * x.stride[0] + t * x.stride[1] + head * x.stride[2] + c * x.stride[3]), x.dtype,
          x.stride[1], x.stride[3]};
}
// The [K, V] state of one sequence and head, from column c on.
inline ConstMatrix head_state(const View<4>& x, int64_t n, int64_t head, int64_t c) {
  return {x.at(n * x.stride[0] + head * x.stride[1] + c * x.stride[3]), x.dtype, x.stride[2],
          x.stride[3]};
}
inline Matrix head_state(const MutableView<4>& x, int64_t n, int64_t head, int64_t c) {
  return {x.at(n * x.stride[0] + head * x.stride[1] + c * x.stride[3]), x.dtype, x.stride[2],
          x.stride[3]};
}

// What sums over many tokens are taken in.
template <class Real>
struct WiderThan {
  using type = double;
};
template <>
struct WiderThan<double> {
  using type = long double;
};

template <class Real>
constexpr DType own_dtype() {
  return sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
}

// ---- rows in ------------------------------------------------------------------------------------

inline void prefetch(const void* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(row) + at);
}

// Rows that are needed soon, asked for a few at a time between other work. In one burst half of the
// requests are dropped, since a core keeps track of about twenty misses at once.
class RowsAhead {
 public:
  // Rows [begin, end) of m, this many columns.
  void add(const ConstMatrix& m, int begin, int end, int columns) {
    const int64_t size = size_of(m.dtype);
    if (columns <= 0) return;
    if (begin < end && m.column_stride == 1)
      blocks_[used_++] = {static_cast<const char*>(m.row(begin)), m.row_stride * size,
                          columns * size, end - begin};
    else if (begin < end && m.row_stride == 1)
      blocks_[used_++] = {static_cast<const char*>(m.row(begin)), m.column_stride * size,
                          (end - begin) * size, columns};
    else
      return;
    runs_ += blocks_[used_ - 1].count;
  }
  // Spreads them over so many calls of step().
  void spread(int steps) { runs_per_step_ = (runs_ + steps - 1) / steps; }
  DELTANET_INLINE void step() {
    for (int i = 0; i < runs_per_step_ && current_ < used_; ++i) {
      Block& block = blocks_[current_];
      // Into L2: rows a power of two apart meet in a few sets of L1.
      for (int64_t at = 0; at < block.bytes; at += 64) __builtin_prefetch(block.next + at, 0, 2);
      block.next += block.stride;
      if (--block.count == 0) ++current_;
    }
  }

 private:
  struct Block {  // runs of neighboring bytes
    const char* next;
    int64_t stride, bytes;
    int count;
  } blocks_[3];
  int used_ = 0, current_ = 0, runs_ = 0, runs_per_step_ = 0;
};

// rows and columns are multiples of the vector length; row_stride is 1.
template <class X, DType kType>
inline void transpose_blocks(const ConstMatrix& m, int rows, int columns, typename X::Real* to,
                             int ld) {
  constexpr int W = X::kLanes;
  for (int c = 0; c < columns; c += W) {
    if (c + W < columns)
      for (int i = 0; i < W; ++i) prefetch(m.column(c + W + i), rows * size_of(kType));
    for (int r = 0; r < rows; r += W) {
      typename X::V block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) block[i] = load_as<X, kType>(m.column(c + i), r);
      X::transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) X::store(to + (r + i) * ld + c, block[i]);
    }
  }
}

template <class X, DType kType>
inline void pack_rows_as(const ConstMatrix& m, int rows, int columns, typename X::Real* to,
                         int ld) {
  using Real = typename X::Real;
  if (m.column_stride == 1) {
    const int whole = columns / X::kLanes * X::kLanes;
    constexpr int kAhead = 8;
    const int64_t bytes = columns * size_of(kType);
    for (int r = 0; r < min_of(rows, kAhead); ++r) prefetch(m.row(r), bytes);
    for (int r = 0; r < rows; ++r) {
      if (r + kAhead < rows) prefetch(m.row(r + kAhead), bytes);
      const void* row = m.row(r);
      for (int c = 0; c < whole; c += X::kLanes)
        X::store(to + r * ld + c, load_as<X, kType>(row, c));
      for (int c = whole; c < columns; ++c) to[r * ld + c] = load_element<Real>(row, kType, c);
    }
    return;
  }
  int done_rows = 0, done_columns = 0;
  if constexpr (X::kLanes > 1) {
    // Token stride 1: the views that models make of a channels-first convolution. Square blocks of
    // it are transposed in registers.
    if (m.row_stride == 1 && kType != DType::kFloat64) {
      done_rows = rows / X::kLanes * X::kLanes;
      done_columns = columns / X::kLanes * X::kLanes;
      transpose_blocks<X, kType>(m, done_rows, done_columns, to, ld);
    }
  }
  for (int c = 0; c < columns; ++c) {
    const int first = c < done_columns ? done_rows : 0;
    int64_t at = c * m.column_stride + first * m.row_stride;
    for (int r = first; r < rows; ++r, at += m.row_stride)
      to[r * ld + c] = load_element<Real>(m.data, kType, at);
  }
}

// Copies rows x columns of m to packed Real scratch with row stride ld, and fills up with zeros to
// padded_rows x padded_columns. Zeros are exact no-ops in every product that follows.
template <class X>
inline void pack_rows(const ConstMatrix& m, int rows, int columns, typename X::Real* to, int ld,
                      int padded_rows, int padded_columns) {
  using Real = typename X::Real;
  if constexpr (sizeof(Real) == 8) {
    pack_rows_as<X, DType::kFloat64>(m, rows, columns, to, ld);
  } else {
    if (m.dtype == DType::kFloat32)
      pack_rows_as<X, DType::kFloat32>(m, rows, columns, to, ld);
    else if (m.dtype == DType::kBFloat16)
      pack_rows_as<X, DType::kBFloat16>(m, rows, columns, to, ld);
    else
      pack_rows_as<X, DType::kFloat16>(m, rows, columns, to, ld);
  }
  if (columns < padded_columns)
    for (int r = 0; r < rows; ++r)
      std::memset(to + r * ld + columns, 0, sizeof(Real) * (padded_columns - columns));
  for (int r = rows; r < padded_rows; ++r)
    std::memset(to + r * ld, 0, sizeof(Real) * padded_columns);
}

// ---- rows out -----------------------------------------------------------------------------------

template <class X, DType kType>
inline void store_row(const typename X::Real* from, void* row, int64_t column_stride, int columns) {
  const int whole = column_stride == 1 ? columns / X::kLanes * X::kLanes : 0;
  for (int c = 0; c < whole; c += X::kLanes) store_as<X, kType>(row, c, X::load(from + c));
  for (int c = whole; c < columns; ++c) store_element(row, kType, c * column_stride, from[c]);
}

// kStream: past the caches, since a plain store would first read every line. Rows are aligned and
// have no gaps then, and `from` is used up.
template <class X, DType kType, bool kStream, class From>
inline void store_rows_as(From* from, int ld, const Matrix& m, int rows, int columns) {
  using Real = typename X::Real;
  for (int r = 0; r < rows; ++r, from += ld) {
    if constexpr (kStream) {
      if constexpr (kType != own_dtype<Real>()) store_row<X, kType>(from, from, 1, columns);
      constexpr int kPerVector = X::kLanes * int(sizeof(Real)) / int(size_of(kType));
      Real* const row = static_cast<Real*>(m.row(r));
      const int whole = columns / kPerVector * X::kLanes;
      for (int i = 0; i < whole; i += X::kLanes) X::stream(row + i, X::load(from + i));
      std::memcpy(row + whole, from + whole, size_t(columns % kPerVector) * size_t(size_of(kType)));
    } else {
      store_row<X, kType>(from, m.row(r), m.column_stride, columns);
    }
  }
}

template <class X, bool kStream = false, class From>
inline void store_rows(From* from, int ld, const Matrix& m, int rows, int columns) {
  if constexpr (sizeof(typename X::Real) == 8) {
    store_rows_as<X, DType::kFloat64, kStream>(from, ld, m, rows, columns);
  } else {
    if (m.dtype == DType::kFloat32)
      store_rows_as<X, DType::kFloat32, kStream>(from, ld, m, rows, columns);
    else if (m.dtype == DType::kBFloat16)
      store_rows_as<X, DType::kBFloat16, kStream>(from, ld, m, rows, columns);
    else
      store_rows_as<X, DType::kFloat16, kStream>(from, ld, m, rows, columns);
  }
}

// The same for a piece of an output of so many elements. One that no cache holds is written past
// the caches, whole rows at a time: a plain store would first read every line, and lines apart make
// memory open a page for each. `from` is used up; finish_streams has to follow.
template <class X>
inline void write_rows(typename X::Real* from, int ld, const Matrix& m, int rows, int columns,
                       int64_t elements) {
  constexpr int64_t kLargeOutput = 8 << 20;
  constexpr int64_t kAlignment = int64_t(kScratchAlignment);
  const int64_t size = size_of(m.dtype);
  if (elements * size > kLargeOutput && m.column_stride == 1 &&
      m.row_stride * size % kAlignment == 0 && uintptr_t(m.data) % kAlignment == 0)
    store_rows<X, true>(from, ld, m, rows, columns);
  else
    store_rows<X>(from, ld, m, rows, columns);
}

// ---- states -------------------------------------------------------------------------------------

// Columns [begin, begin + columns) of a [K, V] state of any dtype and strides, zero-padded to
// padded_columns. A null matrix is the zero state; identity makes it I.
template <class X>
inline void load_state(const ConstMatrix* m, bool identity, int begin, int rows, int columns,
                       typename X::Real* to, int ld, int padded_columns) {
  using Real = typename X::Real;
  if (m && m->column_stride == 1 && m->dtype == own_dtype<Real>()) {
    pack_rows_as<X, own_dtype<Real>()>(*m, rows, columns, to, ld);
  } else if (m) {
    for (int c = 0; c < columns; ++c)
      for (int r = 0; r < rows; ++r)
        to[r * ld + c] =
            load_element<Real>(m->data, m->dtype, r * m->row_stride + c * m->column_stride);
  }
  const int filled = m ? columns : 0;
  for (int r = 0; r < rows; ++r) {
    if (filled < padded_columns)
      std::memset(to + r * ld + filled, 0, sizeof(Real) * (padded_columns - filled));
    if (identity && r >= begin && r < begin + columns) to[r * ld + r - begin] = 1;
  }
}

template <class X>
inline void store_state(const typename X::Real* from, int ld, const Matrix& m, int rows,
                        int columns) {
  using Real = typename X::Real;
  store_rows_as<X, own_dtype<Real>(), false>(from, ld, m, rows, columns);
}

// ---- gates --------------------------------------------------------------------------------------

// Below this log decay exp is 0 in Real anyway, and -inf would turn differences of prefix sums into
// NaN.
template <class Real>
constexpr Real smallest_log_decay() {
  return sizeof(Real) == 8 ? Real(-800) : Real(-120);
}

inline double softplus(double x) { return (x > 0 ? x : 0) + std::log1p(std::exp(x > 0 ? -x : x)); }

// Log decay and beta of tokens t to t + count of one value head, options applied. The scalar
// functions are in double: a large A_log and a tiny softplus must not meet as inf * 0.
template <class Real>
inline void load_gates(const GatedDeltaRuleParams& p, int64_t b, int64_t t, int64_t head, int count,
                       Real* g, Real* beta) {
  int64_t at = b * p.g.stride[0] + t * p.g.stride[1] + head * p.g.stride[2];
  if (!p.g) {
    for (int i = 0; i < count; ++i) g[i] = 0;
  } else if (p.gate_in_kernel) {
    const double rate =
        -std::exp(load_element<double>(p.A_log.data, p.A_log.dtype, head * p.A_log.stride[0]));
    const double bias = p.dt_bias ? load_element<double>(p.dt_bias.data, p.dt_bias.dtype,
                                                         head * p.dt_bias.stride[0])
                                  : 0;
    for (int i = 0; i < count; ++i, at += p.g.stride[1])
      g[i] = Real(rate * softplus(load_element<double>(p.g.data, p.g.dtype, at) + bias));
  } else {
    for (int i = 0; i < count; ++i, at += p.g.stride[1])
      g[i] = load_element<Real>(p.g.data, p.g.dtype, at);
  }
  for (int i = 0; i < count; ++i)
    if (g[i] < smallest_log_decay<Real>()) g[i] = smallest_log_decay<Real>();  // keeps a NaN

  at = b * p.beta.stride[0] + t * p.beta.stride[1] + head * p.beta.stride[2];
  for (int i = 0; i < count; ++i, at += p.beta.stride[1]) {
    if (!p.beta) {
      beta[i] = 1;
    } else if (p.beta_sigmoid) {
      const double x = load_element<double>(p.beta.data, p.beta.dtype, at);
      beta[i] = Real((p.beta_doubled ? 2 : 1) / (1 + std::exp(-x)));
    } else {
      beta[i] = load_element<Real>(p.beta.data, p.beta.dtype, at);
    }
  }
}

// Sum that a token's l2norm divides by the root of: eps stands inside.
template <class Real>
inline Real reciprocal_norm(Real sum_of_squares) {
  return 1 / std::sqrt(sum_of_squares + Real(1e-6));
}

// a . b over `dim` elements, a multiple of the lanes.
template <class X>
DELTANET_INLINE typename X::Real dot_product(const typename X::Real* a, const typename X::Real* b,
                                             int dim) {
  using Real = typename X::Real;
  if constexpr (X::kLanes == 1) {  // one chain of Reals would lose what lanes keep apart
    double sum = 0;
    for (int i = 0; i < dim; ++i) sum += double(a[i]) * b[i];
    return Real(sum);
  }
  typename X::V sum = X::zero();
  for (int i = 0; i < dim; i += X::kLanes) sum = X::fma(X::load(a + i), X::load(b + i), sum);
  return X::sum(sum);
}
