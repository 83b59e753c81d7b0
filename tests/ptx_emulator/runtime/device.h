// SPDX-License-Identifier: Apache-2.0
// What the C++ written from PTX sees: the running thread, the services it calls, and its accesses
// to memory.
#pragma once
#include <cstddef>

#include "numbers.h"

namespace ptx {

struct Block;
struct Knowledge;

// Classes of instructions that count mode tells apart; names in counters.cpp.
enum InstructionClass {
  kInteger,
  kFloat32,
  kFloat64,
  kHalf,
  kSpecial,
  kConvert,
  kMove,
  kControl,
  kParameter,
  kLocal,
  kGlobalLoad,
  kGlobalStore,
  kSharedLoad,
  kSharedStore,
  kMatrixLoad,
  kAsyncCopy,
  kAtomic,
  kMatrix,
  kCollective,
  kBarrier,
  kFence,
  kInstructionClasses
};

struct AsyncCopy {
  uint8_t* to;
  const uint8_t* from;
  uint32_t size, valid, group;
  int site;
  bool landed;
};

// One thread of the GPU: a fiber with a stack of its own.
struct Thread {
  void* stack_pointer = nullptr;  // while it does not run
  Block* block = nullptr;
  uint8_t* shared = nullptr;  // the block's shared memory
  uint32_t shared_size = 0, dynamic_offset = 0, dynamic_size = 0;
  uint32_t tid[3], ntid[3], ctaid[3], nctaid[3];
  uint32_t lane = 0, warp = 0, index = 0;
  int state = 0, site = 0, spins = 0, barrier = -1;
  uint32_t in[16], out[8];  // operands and results of warp collectives
  AsyncCopy* copies = nullptr;
  int copy_count = 0, copy_capacity = 0;
  uint32_t copy_group = 0;
  uint8_t *stack_low = nullptr, *stack_high = nullptr;
  // For the race check: what this thread knows to have happened (clocks.h).
  uint32_t now = 0;
  Knowledge *known = nullptr, *fenced = nullptr;
  uint64_t executed[kInstructionClasses];
};

enum Access : uint8_t {
  kLoad,
  kStore,
  kAsyncStore,
  kStrongLoad,
  kStoreRelaxed,
  kStoreRelease,
  kAtomicRelaxed,
  kAtomicRelease,
  kMatrixRead,
  kMatrixWrite
};
enum ShuffleMode { kUp_, kDown_, kButterfly, kIndex };
enum VoteMode { kVoteAll, kVoteAny, kVoteUniform, kBallot };
enum ReduceOp { kAdd, kAnd, kOr, kXor, kMin, kMax, kMinSigned, kMaxSigned };
enum BarrierReduction { kNoReduction, kCount, kAll, kAny };
enum MmaType { kBf16, kF16, kTf32 };

// ---- services of the runtime ----

uint32_t shuffle(Thread*, int site, ShuffleMode, uint32_t value, uint32_t lane, uint32_t clamp,
                 uint32_t mask, bool* in_range);
uint32_t vote(Thread*, int site, VoteMode, bool predicate, uint32_t mask);
uint32_t match(Thread*, int site, bool all, uint64_t value, uint32_t mask, bool* all_equal);
uint32_t reduce(Thread*, int site, ReduceOp, uint32_t value, uint32_t mask);
void warp_sync(Thread*, int site, uint32_t mask);
uint32_t block_barrier(Thread*, int site, uint32_t id, uint32_t count, BarrierReduction,
                       bool predicate);
void barrier_arrive(Thread*, int site, uint32_t id, uint32_t count);
// Operands by value, zeros for what a form does not have; four results that lie in the thread.
const uint32_t* mma(Thread*, int site, int k, MmaType, bool half_accumulator, uint32_t a0,
                    uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, uint32_t c0,
                    uint32_t c1, uint32_t c2, uint32_t c3);
const uint32_t* load_matrix(Thread*, int site, int count, bool transposed, const uint8_t* row);
void store_matrix(Thread*, int site, int count, bool transposed, uint8_t* row, uint32_t s0,
                  uint32_t s1, uint32_t s2, uint32_t s3);
uint32_t move_matrix(Thread*, int site, uint32_t a);
void async_copy(Thread*, int site, uint8_t* to, uint64_t from, uint32_t size, uint32_t valid);
void async_commit(Thread*);
void async_wait(Thread*, int pending_groups);  // -1: wait_all
void yield(Thread*, int site,
           bool always);  // lets other threads run; strong accesses do it now and then
void memory_fence(Thread*);
uint64_t clock_ticks(Thread*);
bool on_own_stack(const Thread*, uint64_t address);
int device_printf(const char* format, const uint8_t* arguments);
[[noreturn]] void device_assert(Thread*, const char* message, const char* file, uint32_t line,
                                const char* function);
[[noreturn]] void unsupported(Thread*, int site);
[[noreturn]] void trap(Thread*, int site);
[[noreturn]] void thread_exit(Thread*);
[[noreturn]] void bad_shared_access(Thread*, int site, uint64_t offset, uint32_t size);
[[noreturn]] void misaligned_access(Thread*, int site, uint64_t address, uint32_t size,
                                    bool shared);
[[noreturn]] void bad_local_access(Thread*, int site, uint64_t offset, uint32_t size,
                                   uint32_t bytes);
// What an access goes through that is misaligned, outside shared memory, or watched.
void check_shared(Thread*, int site, uint32_t offset, uint32_t size, Access);
void check_generic(Thread*, int site, uint64_t address, uint32_t size, Access);

// Set while any check or the counters want to see every access.
extern bool watching;

// ---- accesses ----

// One branch and one call for all that may be wrong: there are thousands of accesses to compile.
inline uint8_t* shared_at(Thread* c, uint32_t offset, uint32_t size, int site, Access access) {
  const bool check =
      (uint64_t(offset) + size > c->shared_size) | ((offset & (size - 1)) != 0) | watching;
  if (__builtin_expect(check, 0)) check_shared(c, site, offset, size, access);
  return c->shared + offset;
}
inline uint8_t* generic_at(Thread* c, uint64_t address, uint32_t size, int site, Access access) {
  const bool check = ((address & (size - 1)) != 0) | watching;
  if (__builtin_expect(check, 0)) check_generic(c, site, address, size, access);
  return reinterpret_cast<uint8_t*>(address);
}
// `arrays`: the local arrays of the function, which lie side by side.
inline uint8_t* local_at(Thread* c, uint64_t address, uint32_t size, int site,
                         const uint8_t* arrays, uint32_t bytes) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(arrays);
  const bool outside = (offset >= bytes) | (offset + size > bytes);
  if (__builtin_expect(outside, 0)) bad_local_access(c, site, offset, size, bytes);
  if (__builtin_expect((address & (size - 1)) != 0, 0))
    misaligned_access(c, site, address, size, false);
  return reinterpret_cast<uint8_t*>(address);
}
// What plain loads and stores of translated code go through: as memcpy would, without a call to
// inline for each.
using Memory8 = uint8_t;
using Memory16 __attribute__((may_alias, aligned(1))) = uint16_t;
using Memory32 __attribute__((may_alias, aligned(1))) = uint32_t;
using Memory64 __attribute__((may_alias, aligned(1))) = uint64_t;

template <class T>
T load(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
void store(uint8_t* p, T v) {
  std::memcpy(p, &v, sizeof v);
}
template <class T>
T load_strong(const uint8_t* p) {
  return __atomic_load_n(reinterpret_cast<const T*>(p), __ATOMIC_ACQUIRE);
}
template <class T>
void store_strong(uint8_t* p, T v) {
  __atomic_store_n(reinterpret_cast<T*>(p), v, __ATOMIC_RELEASE);
}
template <class T, class F>
T atomic_update(uint8_t* p, F f) {
  T* word = reinterpret_cast<T*>(p);
  T old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (
      !__atomic_compare_exchange_n(word, &old, f(old), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
  }
  return old;
}

// ---- what a translated module exports ----

struct Site {
  int line;           // of the PTX
  const char* text;   // the instruction
  const char* where;  // file:line < file:line of the call it was inlined at ...
};
struct Kernel {
  const char* name;
  void (*function)(Thread*, const uint8_t*);
  const Site* sites;
  uint32_t static_shared, dynamic_alignment, parameters;
  const uint32_t *offsets, *sizes;
  uint32_t parameter_bytes, max_threads, local_bytes;
};
struct Variable {
  const char* name;
  void* address;
  uint64_t size;
  int constant;
};
struct Relocation {  // a variable whose initial value is an address
  Relocation(uint8_t* variable, int offset, uint64_t value) { store(variable + offset, value); }
};
struct CompiledModule {
  const Kernel* kernels;
  uint32_t kernel_count;
  const Variable* variables;
  uint32_t variable_count;
  const Site* sites;
  uint32_t site_count;
};

}  // namespace ptx
