// SPDX-License-Identifier: Apache-2.0
// Blocks start in increasing order and each runs to its end on one OS thread; inside a block every
// GPU thread is a fiber. So a block that waits for an earlier one (decoupled look-back) always gets
// on, and a schedule is a choice among ready fibers.
#include <sys/mman.h>

#include <time.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "state.h"

// ---- context switch, x86-64 System V ----
extern "C" void ptx_switch(void** save, void* load);
extern "C" void ptx_fiber_entry();
asm(R"(
.text
.globl ptx_switch
.hidden ptx_switch
.type ptx_switch, @function
ptx_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.globl ptx_fiber_entry
.hidden ptx_fiber_entry
.type ptx_fiber_entry, @function
ptx_fiber_entry:
  movq %r12, %rdi
  call ptx_fiber_main
  ud2
)");

namespace ptx {

extern "C" __attribute__((visibility("hidden"), used)) void ptx_fiber_main(Thread* t) {
  t->block->launch->kernel->function(t, t->block->launch->parameters);
  thread_exit(t);
}

Worker::~Worker() {
  for (uint8_t* s : stacks) munmap(s, stack_bytes);
  for (Thread& t : pool) std::free(t.copies);
}
uint8_t* Worker::stack_top(size_t index) {
  while (stacks.size() <= index) {
    void* p = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
      std::perror("ptx_emulator: stack");
      std::abort();
    }
    mprotect(p, 4096, PROT_NONE);
    stacks.push_back(static_cast<uint8_t*>(p));
  }
  // Tops that differ in their low address bits: otherwise all fibers would share a few sets of the
  // L1 cache.
  return stacks[index] + stack_bytes - (index * 320) % 4096 / 64 * 64;
}

uint64_t next_random(Block* b) {
  b->random ^= b->random << 13;
  b->random ^= b->random >> 7;
  b->random ^= b->random << 17;
  return b->random * 0x2545f4914f6cdd1dull >> 32;
}

void enqueue(Block* b, Thread* t) {
  t->state = kReady;
  uint32_t at = b->queue_head + b->queue_size++;
  if (at >= b->queue.size()) at -= uint32_t(b->queue.size());
  b->queue[at] = t->index;
}
// In order, a warp whose lanes have met goes on until it waits for others: its stacks are still in
// the cache.
void enqueue_lanes(Block* b, Thread** warp, uint32_t lanes) {
  if (settings().seed != 0) {
    for (; lanes; lanes &= lanes - 1) enqueue(b, warp[__builtin_ctz(lanes)]);
    return;
  }
  while (lanes) {
    const uint32_t lane = 31 - uint32_t(__builtin_clz(lanes));
    lanes &= ~(1u << lane);
    warp[lane]->state = kReady;
    b->queue_head = (b->queue_head ? b->queue_head : uint32_t(b->queue.size())) - 1;
    b->queue_size++;
    b->queue[b->queue_head] = warp[lane]->index;
  }
}
static Thread* dequeue(Block* b) {
  if (!b->queue_size) return nullptr;
  const uint32_t capacity = uint32_t(b->queue.size());
  const uint64_t seed = settings().seed;
  if (seed == 1) {
    const uint32_t at = (b->queue_head + --b->queue_size) % capacity;
    return b->thread[b->queue[at]];
  }
  if (seed >= 2)
    std::swap(b->queue[b->queue_head],
              b->queue[(b->queue_head + next_random(b) % b->queue_size) % capacity]);
  const uint32_t picked = b->queue[b->queue_head];
  b->queue_head = b->queue_head + 1 == capacity ? 0 : b->queue_head + 1;
  b->queue_size--;
  return b->thread[picked];
}
void switch_away(Thread* t) {
  Block* b = t->block;
  Thread* next = dequeue(b);
  if (next == t) return;
  void* unused;
  ptx_switch(t->state == kDone ? &unused : &t->stack_pointer,
             next ? next->stack_pointer : b->main_stack);
}
void leave_block(Block* b) {
  void* unused;
  ptx_switch(&unused, b->main_stack);
  __builtin_unreachable();
}
void thread_exit(Thread* t) {
  Block* b = t->block;
  t->state = kDone;
  b->live--;
  b->warps[t->warp].live &= ~(1u << t->lane);
  collectives_after_exit(b, t->warp);
  barriers_after_exit(b);
  switch_away(t);
  __builtin_unreachable();
}
void yield(Thread* t, int site, bool always) {
  // Under a random schedule other threads may come in between at any strong access; in order, only
  // a thread that spins gives way.
  if (!always && (settings().seed >= 2 ? next_random(t->block) % 4 != 0 : ++t->spins < 64)) return;
  t->spins = 0;
  Block* b = t->block;
  if (b->launch->failed.load(std::memory_order_relaxed)) {
    b->abandoned = true;
    leave_block(b);
  }
  if ((++b->pauses & 0xfff) == 0 && std::chrono::steady_clock::now() - b->launch->progress.load() >
                                        std::chrono::seconds(settings().patience))
    fault(t, site, kDeadlock,
          "%u seconds of waiting in a loop, and no block gets on (PTX_EMULATOR_PATIENCE)",
          settings().patience);
  if (b->queue_size) {
    enqueue(b, t);
    switch_away(t);
  } else {
    std::this_thread::yield();
  }
}
uint64_t clock_ticks(Thread*) {
  static std::atomic<uint64_t> ticks{0};
  return ticks += 16;
}

static void prepare_thread(Block& b, Worker& w, uint32_t i) {
  const Launch& launch = *b.launch;
  const Extent &grid = launch.grid, &block = launch.block;
  Thread& t = w.pool[i];
  b.thread[i] = &t;
  t.block = &b;
  t.shared = w.shared;
  const uint32_t alignment = std::max(16u, launch.kernel->dynamic_alignment);
  t.dynamic_offset = (launch.kernel->static_shared + alignment - 1) / alignment * alignment;
  t.dynamic_size = launch.dynamic_shared;
  t.shared_size = launch.dynamic_shared ? t.dynamic_offset + launch.dynamic_shared
                                        : launch.kernel->static_shared;
  t.index = i, t.lane = i % 32, t.warp = i / 32;
  t.spins = 0, t.barrier = -1, t.copy_count = 0, t.copy_group = 0, t.site = -1;
  const uint32_t tid[] = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
  const uint32_t cta[] = {uint32_t(b.linear % grid.x), uint32_t(b.linear / grid.x % grid.y),
                          uint32_t(b.linear / (uint64_t(grid.x) * grid.y))};
  const uint32_t ntid[] = {block.x, block.y, block.z}, ncta[] = {grid.x, grid.y, grid.z};
  for (int d = 0; d < 3; d++)
    t.tid[d] = tid[d], t.ctaid[d] = cta[d], t.ntid[d] = ntid[d], t.nctaid[d] = ncta[d];
  std::fill(std::begin(t.executed), std::end(t.executed), 0);
  t.stack_high = w.stack_top(i);
  t.stack_low = w.stacks[i];
  // The frame that ptx_switch pops: six registers, then the entry as its return address. The stack
  // is 16-aligned there.
  auto** top = reinterpret_cast<void**>(t.stack_high);
  *--top = nullptr;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(ptx_fiber_entry);
  *--top = nullptr;  // rbp
  *--top = nullptr;  // rbx
  *--top = &t;       // r12
  *--top = nullptr;
  *--top = nullptr;
  *--top = nullptr;
  t.stack_pointer = top;
  enqueue(&b, &t);
}

static void run_block(Worker& w, Launch& launch, uint64_t linear) {
  Block& b = w.block;
  b.worker = &w;
  b.launch = &launch;
  b.linear = linear;
  b.serial = launch.first_serial + uint32_t(linear);
  b.abandoned = false;
  b.pauses = 0;
  b.threads = b.live = uint32_t(launch.block.volume());
  b.random = (settings().seed * 0x9e3779b97f4a7c15ull) ^ ((linear + 1) * 0xbf58476d1ce4e5b9ull) ^
             0x94d049bb133111ebull;
  const uint32_t alignment = std::max(16u, launch.kernel->dynamic_alignment);
  const size_t size = (launch.kernel->static_shared + alignment - 1) / alignment * alignment +
                      launch.dynamic_shared;
  if (w.shared_storage.size() < size + 2048) w.shared_storage.resize(size + 2048);
  w.shared = reinterpret_cast<uint8_t*>(
      (reinterpret_cast<uintptr_t>(w.shared_storage.data()) + 1023) & ~uintptr_t(1023));
  std::memset(w.shared, 0xff, size);  // NaN in every float format
  if (settings().initialised) w.shared_initialised.assign(size + 16, 0);
  if (settings().races) w.shared_shadow.resize(size + 16);
  if (w.pool.size() < b.threads) w.pool.resize(b.threads);
  b.thread.resize(b.threads);
  b.warps.resize((b.threads + 31) / 32);
  for (uint32_t i = 0; i < b.warps.size(); i++) {
    const uint32_t lanes = std::min(32u, b.threads - i * 32);
    b.warps[i].live = b.warps[i].present = lanes == 32 ? ~0u : (1u << lanes) - 1;
    b.warps[i].used = 0;
  }
  b.queue.assign(b.threads + 1, 0);
  b.queue_head = b.queue_size = 0;
  for (Barrier& x : b.barriers) {
    forget(x.known);
    x = Barrier();
  }
  for (uint32_t i = 0; i < b.threads; i++) prepare_thread(b, w, i);
  clocks_start(&b);
  Thread* first = dequeue(&b);
  ptx_switch(&b.main_stack, first->stack_pointer);
  if (b.abandoned) return;
  if (b.live) return report_deadlock(&b);
  if (settings().count) {
    fold_block(&b);
    for (Thread* t : b.thread)
      for (int i = 0; i < kInstructionClasses; i++) w.counts.executed[i] += t->executed[i];
  }
}

// ---- workers that wait for launches ----

namespace {

class Pool {
 public:
  explicit Pool(unsigned threads) : workers_(threads) {
    for (auto& w : workers_) w = std::make_unique<Worker>();
    for (unsigned i = 1; i < threads; i++) std::thread([this, i] { serve(*workers_[i]); }).detach();
  }
  void clear() {
    for (auto& w : workers_) w->shared_shadow.clear();
  }
  void run(Launch& launch) {
    // Local arrays of the kernel live on the fiber's stack.
    const size_t stack =
        std::max<size_t>(128 << 10, (64 << 10) + (launch.kernel->local_bytes + 4095) / 4096 * 4096);
    for (auto& w : workers_)
      if (w->stack_bytes < stack) {
        for (uint8_t* s : w->stacks) munmap(s, w->stack_bytes);
        w->stacks.clear();
        w->stack_bytes = stack;
      }
    const bool alone = launch.grid.volume() == 1 || workers_.size() == 1;
    if (!alone) {
      std::lock_guard<std::mutex> lock(mutex_);
      launch_ = &launch;
      generation_++;
      busy_ = workers_.size() - 1;
      wake_.notify_all();
    }
    work(*workers_[0], launch);
    if (!alone) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [&] { return busy_ == 0; });
    }
    for (auto& w : workers_) {
      launch.counts.add(w->counts);
      w->counts = Counts();
    }
  }

 private:
  static void work(Worker& w, Launch& launch) {
    const uint64_t blocks = launch.grid.volume(), begin = processor_time();
    for (uint64_t i;
         !launch.failed.load(std::memory_order_relaxed) && (i = launch.next++) < blocks;) {
      run_block(w, launch, i);
      launch.progress = std::chrono::steady_clock::now();
    }
    launch.nanoseconds += processor_time() - begin;
  }
  static uint64_t processor_time() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return uint64_t(t.tv_sec) * 1000000000 + uint64_t(t.tv_nsec);
  }
  void serve(Worker& w) {
    for (uint64_t seen = 0;;) {
      Launch* launch;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        launch = launch_;
      }
      work(w, *launch);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }
  std::vector<std::unique_ptr<Worker>> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Launch* launch_ = nullptr;
  uint64_t generation_ = 0;
  size_t busy_ = 0;
};

}  // namespace

int run(Launch& launch) {
  static Pool* pool = new Pool(settings().threads);
  static uint32_t next_serial = 1;
  const uint64_t blocks = launch.grid.volume();
  if (blocks >= 0xf0000000u - next_serial) {  // serials start again: forget who touched what
    for (Allocation* a : allocations()) a->shadow.clear();
    pool->clear();
    next_serial = 1;
  }
  if (settings().races)
    for (Allocation* a : allocations())
      if (!a->read_only) a->shadow.resize(a->size + 4);
  launch.first_serial = next_serial;
  next_serial += uint32_t(blocks);
  if (settings().count)
    for (Allocation* a : allocations()) {
      a->sectors_read.assign(a->size / 32 + 2, 0);
      a->sectors_written.assign(a->size / 32 + 2, 0);
    }
  const auto begin = std::chrono::steady_clock::now();
  launch.progress = begin;
  pool->run(launch);
  if (settings().times)
    std::fprintf(stderr, "{\"kernel\": \"%s\", \"processor_seconds\": %.6f, \"seconds\": %.6f}\n",
                 launch.kernel->name, double(launch.nanoseconds) * 1e-9,
                 std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  if (settings().races) clocks_end_launch();
  if (settings().count && !launch.failed) write_counts(launch);
  return launch.error;
}

}  // namespace ptx
