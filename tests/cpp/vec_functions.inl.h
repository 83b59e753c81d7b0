// SPDX-License-Identifier: Apache-2.0
//
// A vector type's functions, applied to arrays whose length is a multiple of its lanes.
// Included inside the namespace and the target region of an instruction set, after the type and its
// alias X.

void exp_of_sum(const float* hi, const float* lo, float* out, int n) {
  for (int i = 0; i < n; i += X::kLanes)
    X::store(out + i, X::exp_of_sum(X::load(hi + i), X::load(lo + i)));
}
void one_plus_exp(const float* x, float* out, int n) {
  for (int i = 0; i < n; i += X::kLanes) {
    typename X::V v[1] = {X::load(x + i)};
    X::one_plus_exp(v);
    X::store(out + i, v[0]);
  }
}
void load_bf16(const uint16_t* from, float* out, int n) {
  for (int i = 0; i < n; i += X::kLanes) X::store(out + i, X::load_bf16(from + i));
}
void load_f16(const uint16_t* from, float* out, int n) {
  for (int i = 0; i < n; i += X::kLanes) X::store(out + i, X::load_f16(from + i));
}
void store_bf16(const float* from, uint16_t* out, int n) {
  for (int i = 0; i < n; i += X::kLanes) X::store_bf16(out + i, X::load(from + i));
}
void store_f16(const float* from, uint16_t* out, int n) {
  for (int i = 0; i < n; i += X::kLanes) X::store_f16(out + i, X::load(from + i));
}
void bf16_pair(const float* even, const float* odd, float* out, int n) {
  for (int i = 0; i < n; i += X::kLanes)
    X::store(out + i, X::bf16_pair(X::load(even + i), X::load(odd + i)));
}
void dot2(const float* a, const float* b, float* c, int n) {
  for (int i = 0; i < n; i += X::kLanes)
    X::store(c + i, X::dot2(X::load(a + i), X::load(b + i), X::load(c + i)));
}
void sum(const float* from, float* out, int n) {
  for (int i = 0; i < n; i += X::kLanes) out[i / X::kLanes] = X::sum(X::load(from + i));
}
// out[k] = the first `count` values, and what was there behind them
void copy_first(const float* from, float* out, int count) {
  for (int i = 0; i < count; i += X::kLanes) {
    const int left = count - i;
    if (left >= X::kLanes)
      X::store(out + i, X::load(from + i));
    else
      X::store_partial(out + i, X::load_partial(from + i, left), left);
  }
}
void store_sums(const float* from, float* out, int ld) {
  X::V rows[X::kDotRows * 4];
  for (int i = 0; i < X::kDotRows * 4; ++i) rows[i] = X::load(from + i * X::kLanes);
  X::store_sums(out, ld, rows);
}
const VecFunctions functions{X::kLanes, X::kDotRows, exp_of_sum, one_plus_exp, load_bf16,
                             load_f16,  store_bf16,  store_f16,  bf16_pair,    dot2,
                             sum,       copy_first,  store_sums};
