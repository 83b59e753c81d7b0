// SPDX-License-Identifier: Apache-2.0
// Block barriers: bar.sync, bar.red and bar.arrive, with and without a thread count.
#include "state.h"

namespace ptx {

// Two lanes of a warp that wait at different instructions would hang or corrupt the barrier's count
// on a GPU.
static void check_convergence(Block* b, Barrier& barrier, uint32_t id) {
  for (Thread* t : b->thread) {
    if (!t->lane || t->state != kAtBarrier || t->barrier != int(id)) continue;
    Thread* before = b->thread[t->index - 1];
    if (before->state == kAtBarrier && before->barrier == int(id) && before->site != t->site)
      fault(t, t->site, kDivergent,
            "lanes of one warp meet at different barrier instructions\n  other    %s at %s",
            describe_thread(*b, before->index).c_str(),
            describe_site(*b->launch, before->site).c_str());
  }
  if (barrier.counted) return;
  // Warps may have come to different copies of one __syncthreads (an unrolled loop), but not to
  // different ones: the condition around a __syncthreads has to be the same for the whole block.
  // Roles that meet use a barrier with a thread count.
  const Thread* first = nullptr;
  for (Thread* t : b->thread) {
    if (t->state != kAtBarrier || t->barrier != int(id)) continue;
    if (!first) first = t;
    const Site *here = &b->launch->kernel->sites[t->site],
               *there = &b->launch->kernel->sites[first->site];
    if (here != there && std::strcmp(here->where, there->where) != 0)
      fault(t, t->site, kDivergent,
            "warps of one block meet at different __syncthreads\n  other    %s at %s",
            describe_thread(*b, first->index).c_str(),
            describe_site(*b->launch, first->site).c_str());
  }
  if (b->live == b->threads) return;
  // Threads that ended are not counted by the hardware, but __syncthreads asks for all threads of
  // the block.
  for (Thread* t : b->thread)
    if (t->state == kDone) {
      for (Thread* waiting : b->thread)
        if (waiting->state == kAtBarrier && waiting->barrier == int(id))
          fault(waiting, waiting->site, kDivergent,
                "%u of %u threads wait at __syncthreads, %s and others have ended without it",
                b->live, b->threads, describe_thread(*b, t->index).c_str());
    }
}

static void complete(Block* b, uint32_t id) {
  Barrier& barrier = b->barriers[id];
  const uint32_t needed = barrier.counted ? barrier.needed : b->live;
  if (!barrier.arrived || barrier.arrived < needed) return;
  if (settings().barriers) check_convergence(b, barrier, id);
  static thread_local std::vector<Thread*> waiting;
  waiting.clear();
  for (Thread* t : b->thread)
    if (t->state == kAtBarrier && t->barrier == int(id)) waiting.push_back(t);
  if (settings().races) {
    if (waiting.size() == b->live && !barrier.known)
      meet_block(b);
    else
      meet_some(b, waiting, barrier.known);
  }
  if (settings().count)
    for (uint32_t warp = 0, lanes = 0; Thread* t : waiting) {
      if (t->warp != warp) lanes = 0;
      warp = t->warp;
      lanes |= 1u << t->lane;
      if (lanes == b->warps[warp].live) fold_warp(b, warp);
    }
  const uint32_t votes = barrier.votes, arrived = barrier.arrived;
  barrier = Barrier();
  for (Thread* t : waiting) {
    t->out[0] = votes;
    t->out[1] = arrived;
    enqueue(b, t);
  }
}
void barriers_after_exit(Block* b) {
  for (uint32_t id = 0; id < 16; id++)
    if (b->barriers[id].arrived) complete(b, id);
}

static Barrier& reach(Thread* t, int site, uint32_t id, uint32_t count, bool has_count) {
  Block* b = t->block;
  if (id >= 16) fault(t, site, kDivergent, "barrier %u; a block has 16", id);
  if (has_count && (!count || count % 32 || count > (b->threads + 31) / 32 * 32))
    fault(t, site, kDivergent,
          "a barrier of %u threads; it must be a multiple of 32, up to the %u of the block", count,
          b->threads);
  Barrier& barrier = b->barriers[id];
  if (settings().barriers && barrier.arrived &&
      (barrier.counted != has_count || (has_count && barrier.needed != count)))
    fault(t, site, kDivergent,
          "barrier %u is waited for with %u threads here and with %u by threads that are there "
          "already",
          id, has_count ? count : b->live, barrier.counted ? barrier.needed : b->live);
  barrier.arrived++;
  barrier.counted = has_count;
  barrier.needed = count;
  t->site = site;
  return barrier;
}

uint32_t block_barrier(Thread* t, int site, uint32_t id, uint32_t count, BarrierReduction reduction,
                       bool predicate) {
  Block* b = t->block;
  if (settings().count && t->lane == 0) b->worker->counts.barriers++;
  Barrier& barrier = reach(t, site, id, count, count != 0);
  barrier.votes += predicate;
  t->barrier = int(id);
  t->state = kAtBarrier;
  complete(b, id);
  switch_away(t);
  t->barrier = -1;
  switch (reduction) {
    case kCount:
      return t->out[0];
    case kAll:
      return t->out[0] == t->out[1];
    case kAny:
      return t->out[0] != 0;
    default:
      return 0;
  }
}
void barrier_arrive(Thread* t, int site, uint32_t id, uint32_t count) {
  Barrier& barrier = reach(t, site, id, count, true);
  if (settings().races) arrive(t, barrier.known);
  complete(t->block, id);
}

}  // namespace ptx
