// SPDX-License-Identifier: Apache-2.0
//
// Runs the tasks of a call on the workers at hand.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "core/parallel.h"
#include "cpu/kernels.h"

namespace deltanet::cpu {

// A worker is worth waking for about as many multiply-adds as torch's own operators give each of
// theirs; waking one costs microseconds, and on a busy machine a time slice.
constexpr int64_t kWorkPerWorker = 32768;

// How many workers a call of about `work` multiply-adds is worth.
inline int workers_for(int64_t work, const Parallel& parallel) {
  const int64_t worth_waking = std::max<int64_t>(1, work / kWorkPerWorker);
  return int(std::min<int64_t>(worth_waking, std::max(1, parallel.max_workers())));
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// `count` pieces of scratch memory, each aligned(bytes) behind the one before.
constexpr size_t aligned(size_t bytes) {
  const size_t units = (bytes + kScratchAlignment - 1) / kScratchAlignment;
  return std::max<size_t>(units, 1) * kScratchAlignment;
}
using AlignedMemory = std::unique_ptr<char, Free>;
inline AlignedMemory aligned_memory(size_t bytes, int64_t count) {
  AlignedMemory memory(
      static_cast<char*>(std::aligned_alloc(kScratchAlignment, aligned(bytes) * size_t(count))));
  if (!memory) throw std::bad_alloc();
  return memory;
}

// Runs task 0 .. count - 1, together about `work` multiply-adds, each worker with scratch of its
// own. A worker takes the next task when it is free, so tasks may differ in size; which worker runs
// which task changes no result.
template <class Task>
void run_tasks(int64_t count, int64_t work, size_t scratch_bytes, const Parallel& parallel,
               const Task& task) {
  if (count == 0) return;
  const int workers = int(std::min<int64_t>(count, workers_for(work, parallel)));
  const AlignedMemory scratch = aligned_memory(scratch_bytes, workers);

  struct Shared {
    const Task& task;
    const int64_t count;
    const size_t bytes;
    char* const scratch;
    std::atomic<int64_t> next{0};
    std::atomic<int> worker{0};
  } shared{task, count, aligned(scratch_bytes), scratch.get()};
  parallel.run(
      workers,
      [](void* context) {
        Shared& shared = *static_cast<Shared*>(context);
        char* mine = shared.scratch + shared.bytes * shared.worker.fetch_add(1);
        for (int64_t i; (i = shared.next.fetch_add(1)) < shared.count;) shared.task(i, mine);
      },
      &shared);
}

}  // namespace deltanet::cpu
