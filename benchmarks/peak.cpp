// SPDX-License-Identifier: Apache-2.0
//
// What this machine can do at this moment, to set figures against: multiply-adds from registers
// only, and passes over memory in place. Built by machine.py with the system compiler when a
// benchmark starts.

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

#if defined(__x86_64__)
// Twelve independent chains of multiply-adds in fixed registers: enough to hide the latency of two
// units, and nothing can spill. The registers hold zeros, which cost what other numbers cost.
#define FMA(R, D) "vfmadd231ps %%" R "12, %%" R "13, %%" R D "\n\t"
#define FMA_LOOP(R)                                                                             \
  asm volatile("1:\n\t" FMA(R, "0") FMA(R, "1") FMA(R, "2") FMA(R, "3") FMA(R, "4") FMA(R, "5") \
                   FMA(R, "6") FMA(R, "7") FMA(R, "8") FMA(R, "9") FMA(R, "10")                 \
                       FMA(R, "11") "dec %0\n\tjnz 1b"                                          \
               : "+r"(n)                                                                        \
               :                                                                                \
               : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",  \
                 "xmm9", "xmm10", "xmm11", "xmm12", "xmm13")

void multiply_add(int bits, int64_t n) {
  asm volatile("vzeroall" ::: "xmm12", "xmm13");
  if (bits == 512)
    FMA_LOOP("zmm");
  else
    FMA_LOOP("ymm");
}
int widest() {
  if (__builtin_cpu_supports("avx512f")) return 512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 256 : 0;
}
#else
void multiply_add(int, int64_t) {}
int widest() { return 0; }
#endif

template <class Body>
double timed_on_threads(int threads, Body body) {
  const auto start = Clock::now();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(body, i);
  body(0);
  for (auto& other : others) other.join();
  return seconds_since(start);
}

}  // namespace

extern "C" {

// Vector width of the widest multiply-add here in bits, 0 when unknown.
int vector_bits() { return widest(); }

// fp32 multiply-adds from registers, in GFLOP/s.
double fma_gflops(int bits, int threads, int64_t rounds) {
  const double seconds = timed_on_threads(threads, [=](int) { multiply_add(bits, rounds); });
  return double(rounds) * 12 * 2 * (bits / 32) * threads / seconds / 1e9;
}

// x *= factor over n floats in place, `passes` times: GB/s, reading and writing counted. Each
// thread has its part.
double update_gbs(float* x, int64_t n, int threads, int passes) {
  const double seconds = timed_on_threads(threads, [=](int i) {
    const int64_t begin = n * i / threads, end = n * (i + 1) / threads;
    for (int pass = 0; pass < passes; ++pass) {
      for (int64_t j = begin; j < end; ++j) x[j] *= 1.0001f;
      asm volatile("" ::: "memory");  // or the compiler would merge the passes
    }
  });
  return double(n) * 8 * passes / seconds / 1e9;
}
}
