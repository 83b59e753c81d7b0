// SPDX-License-Identifier: Apache-2.0
// One case per PTX instruction: a device side that is the instruction alone, a host side that is a
// plain C++ formula, and inputs that are edge values crossed with each other. A program of cases
// prints "ok" or "FAIL" per case.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#define TYPE_s16 int16_t
#define TYPE_u16 uint16_t
#define TYPE_s32 int32_t
#define TYPE_u32 uint32_t
#define TYPE_s64 int64_t
#define TYPE_u64 uint64_t
#define TYPE_f32 float
#define TYPE_f64 double
#define REGISTER_s16 "h"
#define REGISTER_u16 "h"
#define REGISTER_s32 "r"
#define REGISTER_u32 "r"
#define REGISTER_s64 "l"
#define REGISTER_u64 "l"
#define REGISTER_f32 "f"
#define REGISTER_f64 "d"

namespace cases {

inline int failures = 0;

inline void report(const std::string& name, bool ok, const std::string& detail = "") {
  std::printf("%s %s%s%s\n", ok ? "ok" : "FAIL", name.c_str(), detail.empty() ? "" : ": ",
              detail.c_str());
  failures += !ok;
}

// A value of any type, in its low bytes. The harness is not a template, so that a hundred cases
// compile quickly.
enum Type { kS16, kU16, kS32, kU32, kS64, kU64, kF32, kF64 };
constexpr size_t kSize[] = {2, 2, 4, 4, 8, 8, 4, 8};
using Value = uint64_t;

template <class T>
constexpr Type type_of() {
  if (std::is_same_v<T, float>) return kF32;
  if (std::is_same_v<T, double>) return kF64;
  const int width = sizeof(T) == 2 ? 0 : sizeof(T) == 4 ? 2 : 4;
  return Type(width + (std::is_signed_v<T> ? 0 : 1));
}
template <class T>
T bits_as(Value x) {
  T r;
  std::memcpy(&r, &x, sizeof r);
  return r;
}
template <class T>
Value bits_of(T x) {
  Value r = 0;
  std::memcpy(&r, &x, sizeof x);
  return r;
}

struct Case {
  const char* name;
  int operands;
  double ulps;
  Type result, a, b, c;
  void (*launch)(const void*, const void*, const void*, void*, int);
  bool (*defined)(Value, Value, Value);
  Value (*host)(Value, Value, Value);
};
inline std::vector<Case>& all() {
  static std::vector<Case> list;
  return list;
}

// ---- inputs ----

template <class T>
std::vector<Value> real_values() {
  using L = std::numeric_limits<T>;
  std::mt19937_64 random(1);
  std::vector<Value> v;
  for (T x : {T(0),
              T(1),
              T(0.5),
              T(1.5),
              T(2.5),
              T(3),
              T(1) / 3,
              T(1e-3),
              T(12345.678),
              T(2147483648.),
              T(4294967296.),
              T(9.3e18),
              L::max(),
              L::min(),
              L::denorm_min(),
              T(L::min() / 3),
              L::infinity(),
              T(1) + L::epsilon(),
              T(0.49999997),
              T(8388609)})
    v.push_back(bits_of(x)), v.push_back(bits_of(-x));
  v.push_back(bits_of(L::quiet_NaN()));
  for (int i = 0; i < 12; i++)
    v.push_back(
        bits_of(std::ldexp(T(random() >> 11) / T(1ull << 53) - T(0.5), int(random() % 60) - 30)));
  return v;
}
inline std::vector<Value> values(Type type, size_t most) {
  std::vector<Value> v;
  if (type == kF32)
    v = real_values<float>();
  else if (type == kF64)
    v = real_values<double>();
  else {
    const Value mask = kSize[type] == 8 ? ~0ull : (1ull << 8 * kSize[type]) - 1,
                sign = mask ^ mask >> 1;
    for (Value x : {0ull, 1ull, 2ull, 3ull, 7ull, 31ull, 32ull, 33ull, 100ull, 0x12345678ull,
                    0x8040201008040201ull})
      v.push_back(x & mask), v.push_back((0 - x) & mask);
    for (Value x : {sign, sign - 1, sign - 2, mask}) v.push_back(x & mask);
    std::mt19937_64 random(1);
    for (int i = 0; i < 8; i++) v.push_back(random() & mask);
  }
  std::vector<Value> thinned;  // three operands crossed would be many
  const size_t step = (v.size() + most - 1) / most;
  for (size_t i = 0; i < v.size(); i += step) thinned.push_back(v[i]);
  return thinned;
}

// ---- comparison ----

template <class T>
bool same_real(T got, T want, double ulps) {
  if (got != got || want != want) return got != got && want != want;
  if (ulps == 0 || std::isinf(got) || std::isinf(want) || got == want)
    return bits_of(got) == bits_of(want) || (ulps > 0 && got == want);
  const double unit = double(std::nextafter(std::fabs(want), std::numeric_limits<T>::infinity())) -
                      std::fabs(double(want));
  return std::fabs(double(got) - double(want)) <= ulps * unit;
}
inline bool same(Type type, Value got, Value want, double ulps) {
  if (type == kF32) return same_real(bits_as<float>(got), bits_as<float>(want), ulps);
  if (type == kF64) return same_real(bits_as<double>(got), bits_as<double>(want), ulps);
  return got == want;
}
inline std::string show(Type type, Value x) {
  char text[64];
  if (type == kF32 || type == kF64) {
    const double v = type == kF32 ? bits_as<float>(x) : bits_as<double>(x);
    std::snprintf(text, sizeof text, "%a (%.9g)", v, v);
  } else {
    std::snprintf(text, sizeof text, "0x%llx", (unsigned long long)x);
  }
  return text;
}

// ---- running one case ----

template <class C>
__global__ void apply(const typename C::A* a, const typename C::B* b, const typename C::C_* c,
                      typename C::Result* r, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) r[i] = C::device(a[i], b[i], c[i]);
}

struct Buffer {  // an array of one type on the device
  void* data = nullptr;
  Buffer(Type type, const std::vector<Value>& v, bool filled) {
    cudaMalloc(&data, v.size() * kSize[type]);
    std::vector<char> packed(v.size() * kSize[type]);
    for (size_t i = 0; i < v.size(); i++) std::memcpy(&packed[i * kSize[type]], &v[i], kSize[type]);
    if (filled) cudaMemcpy(data, packed.data(), packed.size(), cudaMemcpyHostToDevice);
  }
  ~Buffer() { cudaFree(data); }
};

inline void run(const Case& k) {
  const size_t most = k.operands == 3 ? 14 : 1000;
  std::vector<Value> a, b, c;
  for (Value x : values(k.a, most))
    for (Value y : k.operands > 1 ? values(k.b, most) : std::vector<Value>{0})
      for (Value z : k.operands > 2 ? values(k.c, most) : std::vector<Value>{0})
        if (k.defined(x, y, z)) a.push_back(x), b.push_back(y), c.push_back(z);
  Buffer da(k.a, a, true), db(k.b, b, true), dc(k.c, c, true), dr(k.result, a, false);
  k.launch(da.data, db.data, dc.data, dr.data, int(a.size()));
  std::vector<char> r(a.size() * kSize[k.result]);
  cudaMemcpy(r.data(), dr.data, r.size(), cudaMemcpyDeviceToHost);
  if (cudaError_t e = cudaGetLastError()) return report(k.name, false, cudaGetErrorString(e));
  for (size_t i = 0; i < a.size(); i++) {
    Value got = 0;
    std::memcpy(&got, &r[i * kSize[k.result]], kSize[k.result]);
    const Value want = k.host(a[i], b[i], c[i]);
    if (same(k.result, got, want, k.ulps)) continue;
    std::string detail = show(k.a, a[i]);
    if (k.operands > 1) detail += ", " + show(k.b, b[i]);
    if (k.operands > 2) detail += ", " + show(k.c, c[i]);
    return report(k.name, false,
                  detail + " gave " + show(k.result, got) + ", want " + show(k.result, want));
  }
  report(k.name, true);
}

template <class C>
bool add() {
  using A = typename C::A;
  using B = typename C::B;
  using C_ = typename C::C_;
  all().push_back({C::name(), C::kOperands, C::kUlps, type_of<typename C::Result>(), type_of<A>(),
                   type_of<B>(), type_of<C_>(),
                   [](const void* a, const void* b, const void* c, void* r, int n) {
                     apply<C><<<(n + 255) / 256, 256>>>((const A*)a, (const B*)b, (const C_*)c,
                                                        (typename C::Result*)r, n);
                   },
                   [](Value a, Value b, Value c) {
                     return C::defined(bits_as<A>(a), bits_as<B>(b), bits_as<C_>(c));
                   },
                   [](Value a, Value b, Value c) {
                     return bits_of(C::host(bits_as<A>(a), bits_as<B>(b), bits_as<C_>(c)));
                   }});
  return true;
}
inline int run_all() {
  for (const Case& k : all()) run(k);
  std::printf("%zu cases, %d failures\n", all().size(), failures);
  return failures != 0;
}

}  // namespace cases

#define CASE_(ID, TEXT, OPERANDS, ULPS, R, A_, B_, C, ASM, OK, ...)                               \
  struct ID {                                                                                     \
    using Result = TYPE_##R;                                                                      \
    using A = TYPE_##A_;                                                                          \
    using B = TYPE_##B_;                                                                          \
    using C_ = TYPE_##C;                                                                          \
    static constexpr int kOperands = OPERANDS;                                                    \
    static constexpr double kUlps = ULPS;                                                         \
    static const char* name() { return TEXT; }                                                    \
    static __device__ Result device(A a, B b, C_ c) {                                             \
      Result r;                                                                                   \
      ASM;                                                                                        \
      return r;                                                                                   \
    }                                                                                             \
    static bool defined(A a, B b, C_ c) { return (void)a, (void)b, (void)c, OK; }                 \
    static Result host(A a, B b, C_ c) { return (void)a, (void)b, (void)c, Result(__VA_ARGS__); } \
  };                                                                                              \
  static const bool added_##ID = cases::add<ID>();

#define ID2_(x, y) x##y
#define ID_(line, counter) ID2_(Case_##line##_, counter)
#define HERE_ ID_(__LINE__, __COUNTER__)

// CASE1("neg.s32", s32, s32, -a): operands a, b, c of the given types, and what the host says.
#define CASE1(PTX, R, A, ...) CASE1_(HERE_, PTX, R, A, true, 0, __VA_ARGS__)
#define CASE2(PTX, R, A, B, ...) CASE2_(HERE_, PTX, R, A, B, true, 0, __VA_ARGS__)
#define CASE3(PTX, R, A, B, C, ...) CASE3_(HERE_, PTX, R, A, B, C, true, 0, __VA_ARGS__)
// The same where the instruction promises only so many units in the last place.
#define NEAR1(ULPS, PTX, R, A, ...) CASE1_(HERE_, PTX, R, A, true, ULPS, __VA_ARGS__)
#define NEAR2(ULPS, PTX, R, A, B, ...) CASE2_(HERE_, PTX, R, A, B, true, ULPS, __VA_ARGS__)
// The same on those inputs alone for which OK holds.
#define CASE2_IF(OK, PTX, R, A, B, ...) CASE2_(HERE_, PTX, R, A, B, OK, 0, __VA_ARGS__)

#define CASE1_(...) CASE1__(__VA_ARGS__)
#define CASE2_(...) CASE2__(__VA_ARGS__)
#define CASE3_(...) CASE3__(__VA_ARGS__)
#define CASE1__(ID, PTX, R, A, OK, ULPS, ...) \
  CASE_(ID, PTX, 1, ULPS, R, A, s32, s32,     \
        asm volatile(PTX " %0, %1;" : "=" REGISTER_##R(r) : REGISTER_##A(a)), OK, __VA_ARGS__)
#define CASE2__(ID, PTX, R, A, B, OK, ULPS, ...)                                                   \
  CASE_(ID, PTX, 2, ULPS, R, A, B, s32,                                                            \
        asm volatile(PTX " %0, %1, %2;" : "=" REGISTER_##R(r) : REGISTER_##A(a), REGISTER_##B(b)), \
        OK, __VA_ARGS__)
#define CASE3__(ID, PTX, R, A, B, C, OK, ULPS, ...)                                  \
  CASE_(ID, PTX, 3, ULPS, R, A, B, C,                                                \
        asm volatile(PTX " %0, %1, %2, %3;" : "=" REGISTER_##R(r) : REGISTER_##A(a), \
                     REGISTER_##B(b), REGISTER_##C(c)),                              \
        OK, __VA_ARGS__)
// Several instructions as one case; CODE is the whole asm text, with %0 the result and %1.. the
// operands.
#define CODE2(TEXT, CODE, R, A, B, ...) CODE2_(HERE_, TEXT, CODE, R, A, B, __VA_ARGS__)
#define CODE2_(...) CODE2__(__VA_ARGS__)
#define CODE2__(ID, TEXT, CODE, R, A, B, ...)                                              \
  CASE_(ID, TEXT, 2, 0, R, A, B, s32,                                                      \
        asm volatile(CODE : "=" REGISTER_##R(r) : REGISTER_##A(a), REGISTER_##B(b)), true, \
        __VA_ARGS__)
#define CODE3(TEXT, CODE, R, A, B, C, ...) CODE3_(HERE_, TEXT, CODE, R, A, B, C, __VA_ARGS__)
#define CODE3_(...) CODE3__(__VA_ARGS__)
#define CODE3__(ID, TEXT, CODE, R, A, B, C, ...)                                    \
  CASE_(ID, TEXT, 3, 0, R, A, B, C,                                                 \
        asm volatile(CODE : "=" REGISTER_##R(r) : REGISTER_##A(a), REGISTER_##B(b), \
                     REGISTER_##C(c)),                                              \
        true, __VA_ARGS__)
