// SPDX-License-Identifier: Apache-2.0
// The runtime's own state: a launch, the workers (OS threads) that run its blocks, and a running
// block.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clocks.h"
#include "counters.h"
#include "device.h"
#include "memory.h"
#include "settings.h"

namespace ptx {

enum State { kReady, kAtCollective, kAtBarrier, kDone };

struct Extent {
  uint32_t x, y, z;
  uint64_t volume() const { return uint64_t(x) * y * z; }
};

struct Launch {
  const Kernel* kernel;
  const uint8_t* parameters;
  Extent grid, block;
  uint32_t dynamic_shared;
  uint32_t first_serial;  // block i has serial first_serial + i; smaller serials belong to earlier
                          // launches
  std::atomic<uint64_t> next{0};
  std::atomic<bool> failed{false};
  std::atomic<uint64_t> nanoseconds{0};  // of processor time, all workers together
  std::atomic<std::chrono::steady_clock::time_point> progress;  // when a block last ended
  int error = 0;
  std::mutex counts_mutex;
  Counts counts;
};

struct Barrier {
  uint32_t arrived = 0, needed = 0, votes = 0, waiting = 0;
  bool counted = false;        // a thread count was given
  Knowledge* known = nullptr;  // what threads that arrived without waiting bring along
};
// A warp collective that some lanes have reached: they meet those that name the same mask and
// operation.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  int operation = 0;
};
struct Warp {
  uint32_t live = 0, present = 0;
  int used = 0;
  Meeting meetings[32];
};

struct Worker;

struct Block {
  Worker* worker = nullptr;
  Launch* launch = nullptr;
  uint64_t linear = 0;
  uint32_t serial = 0, threads = 0, live = 0;
  std::vector<Thread*> thread;
  std::vector<Warp> warps;
  std::vector<uint32_t> queue;  // ready threads, a ring
  uint32_t queue_head = 0, queue_size = 0;
  Barrier barriers[16];
  void* main_stack = nullptr;
  uint64_t random = 0, pauses = 0;
  // race check: every access with a time up to `floor` happened before everything that follows
  uint32_t tick = 0, floor = 0;
  std::vector<Published*> foreign;
  struct Known {
    uint32_t block = 0, thread = 0, time = 0;
  };
  std::vector<Known>
      known_foreign;  // answers about `foreign`, by hash: what all threads know, they keep knowing
  Knowledge* fenced = nullptr;  // what fences before the last barrier of all threads made visible
  bool abandoned = false;

  Thread* first_lane(uint32_t warp) { return thread[warp * 32]; }
};

struct Worker {
  std::vector<uint8_t*> stacks;
  size_t stack_bytes = 0;
  std::vector<Thread> pool;
  std::vector<uint8_t> shared_storage, shared_initialised;
  uint8_t* shared = nullptr;
  Shadow shared_shadow;
  Block block;
  PageCache pages;
  AccessLog log;
  Counts counts;
  ~Worker();
  uint8_t* stack_top(size_t index);
};

// ---- scheduler.cpp ----
int run(Launch& launch);  // 0, or the cudaError of what went wrong
void enqueue(Block*, Thread*);
void enqueue_lanes(Block*, Thread** warp, uint32_t lanes);
void switch_away(Thread*);  // the thread is queued, waiting or done
[[noreturn]] void leave_block(Block*);
uint64_t next_random(Block*);

// ---- barriers.cpp and warp.cpp, for the scheduler ----
void barriers_after_exit(Block*);
void collectives_after_exit(Block*, uint32_t warp);

// ---- report.cpp ----
enum Finding {
  kOutside,
  kMisaligned,
  kRace,
  kUninitialised,
  kDivergent,
  kDeadlock,
  kAssertion,
  kTrapped,
  kUnsupportedCode
};
[[noreturn]] void fault(Thread*, int site, Finding, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
void report_deadlock(Block*);
void report_host(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string describe_site(const Launch&, int site);
std::string describe_thread(const Block&, uint32_t index);
const char* last_report();
void clear_report();

}  // namespace ptx
