// SPDX-License-Identifier: Apache-2.0
#include "clocks.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "state.h"

namespace ptx {

bool Knowledge::covers(uint32_t thread, uint32_t time) const {
  if (time <= floor) return true;
  for (const WarpTimes& w : warps)
    if (w.warp == thread / 32) return w.time[thread % 32] >= time;
  return false;
}
static WarpTimes& times_of(Knowledge& k, uint32_t warp) {
  for (WarpTimes& w : k.warps)
    if (w.warp == warp) return w;
  k.warps.push_back({warp, {}});
  return k.warps.back();
}
void Knowledge::learn(uint32_t thread, uint32_t time) {
  uint32_t& mine = times_of(*this, thread / 32).time[thread % 32];
  mine = std::max(mine, time);
}
void Knowledge::join(const Knowledge& other, uint32_t block_floor) {
  floor = std::max(floor, other.floor);
  for (const WarpTimes& w : other.warps) {
    uint32_t newest = 0;
    for (uint32_t time : w.time) newest = std::max(newest, time);
    if (newest <= block_floor) continue;  // known to all by now
    WarpTimes& mine = times_of(*this, w.warp);
    for (int lane = 0; lane < 32; lane++) mine.time[lane] = std::max(mine.time[lane], w.time[lane]);
  }
  for (Published* p : other.foreign)
    if (std::find(foreign.begin(), foreign.end(), p) == foreign.end()) foreign.push_back(p);
}

void forget(Knowledge*& known) {
  if (known && !--known->references) delete known;
  known = nullptr;
}
void share(Knowledge*& to, Knowledge* from) {
  if (from) from->references++;
  forget(to);
  to = from;
}

void clocks_start(Block* b) {
  b->tick = 1;
  b->floor = 0;
  b->foreign.clear();
  b->known_foreign.clear();
  forget(b->fenced);
  for (Thread* t : b->thread) {
    forget(t->known);
    forget(t->fenced);
    t->now = 1;
  }
}

// A fence of one thread, a barrier, a release by another thread: what the fence made visible comes
// along.
template <class Each>
static void share_fences(Block* b, Each each) {
  Knowledge* joined = nullptr;
  each([&](Thread* t) {
    if (!t->fenced) return;
    if (!joined) joined = new Knowledge;
    joined->join(*t->fenced, b->floor);
  });
  if (!joined) return;
  each([&](Thread* t) { share(t->fenced, joined); });
  forget(joined);
}

void meet_warp(Thread** warp, uint32_t mask) {
  Block* b = warp[__builtin_ctz(mask)]->block;
  Thread* first = warp[__builtin_ctz(mask)];
  const uint32_t tick = ++b->tick;
  // Nobody else holds what these lanes share: it can be brought up to date in place.
  bool same = first->known && first->known->references == __builtin_popcount(mask);
  for (uint32_t m = mask; m && same; m &= m - 1)
    same = warp[__builtin_ctz(m)]->known == first->known;
  Knowledge* joined = same ? first->known : new Knowledge;
  if (!same) {
    const Knowledge* last = nullptr;
    for (uint32_t m = mask; m; m &= m - 1) {
      const Knowledge* k = warp[__builtin_ctz(m)]->known;
      if (k && k != last) joined->join(*k, b->floor);
      if (k) last = k;
    }
  }
  WarpTimes& mine = times_of(*joined, first->warp);
  for (uint32_t m = mask; m; m &= m - 1) {
    Thread* t = warp[__builtin_ctz(m)];
    mine.time[t->lane] = std::max(mine.time[t->lane], t->now);
    t->now = tick;
    if (!same) share(t->known, joined);
  }
  if (!same) forget(joined);
  share_fences(b, [&](auto f) {
    for (uint32_t m = mask; m; m &= m - 1) f(warp[__builtin_ctz(m)]);
  });
}

void meet_block(Block* b) {
  for (Thread* t : b->thread)
    if (t->fenced) {
      if (!b->fenced) b->fenced = new Knowledge;
      b->fenced->join(*t->fenced, b->floor);
      forget(t->fenced);
    }
  b->floor = b->tick;
  const uint32_t now = ++b->tick;
  for (Thread* t : b->thread) {
    if (t->known) {
      for (Published* p : t->known->foreign)
        if (std::find(b->foreign.begin(), b->foreign.end(), p) == b->foreign.end())
          b->foreign.push_back(p);
      forget(t->known);
    }
    t->now = now;
  }
}

void arrive(Thread* t, Knowledge*& brought) {
  if (!brought) brought = new Knowledge;
  if (t->known) brought->join(*t->known, t->block->floor);
  brought->learn(t->index, t->now);
  t->now = ++t->block->tick;
}

void meet_some(Block* b, const std::vector<Thread*>& waiting, Knowledge*& brought) {
  Knowledge* joined = brought ? brought : new Knowledge;
  brought = nullptr;
  const Knowledge* last = nullptr;
  for (Thread* t : waiting) {
    if (t->known && t->known != last) joined->join(*t->known, b->floor);
    if (t->known) last = t->known;
    joined->learn(t->index, t->now);
  }
  const uint32_t tick = ++b->tick;
  for (Thread* t : waiting) {
    share(t->known, joined);
    t->now = tick;
  }
  forget(joined);
  share_fences(b, [&](auto f) {
    for (Thread* t : waiting) f(t);
  });
}

// ---- hand-offs: fence, release, acquire ----

// Everything the thread knows now, itself included.
static Knowledge* snapshot(Thread* t) {
  Block* b = t->block;
  Knowledge* k = new Knowledge;
  k->floor = b->floor;
  if (t->known) k->join(*t->known, b->floor);
  for (Published* p : b->foreign)
    if (std::find(k->foreign.begin(), k->foreign.end(), p) == k->foreign.end())
      k->foreign.push_back(p);
  k->learn(t->index, t->now);
  t->now = ++b->tick;
  return k;
}
void fence(Thread* t) {
  forget(t->fenced);
  t->fenced = snapshot(t);
}

namespace {
struct Shard {
  std::mutex mutex;
  std::unordered_map<uint64_t, Published*> held;  // location -> what was last released there
  std::vector<std::unique_ptr<Published>> all;
};
Shard shards[64];
}  // namespace

void acquire_and_release(Thread* t, uint64_t address, bool acquires, bool writes, bool updates,
                         bool release) {
  address &= ~uint64_t(3);
  Shard& shard = shards[(address >> 2) % 64];
  std::lock_guard<std::mutex> lock(shard.mutex);
  auto found = shard.held.find(address);
  Published* held = found == shard.held.end() ? nullptr : found->second;
  if (acquires && held) {
    const bool new_here =
        !t->known || t->known->foreign.empty() || t->known->foreign.back() != held;
    if (new_here) {
      Knowledge* k = new Knowledge;
      if (t->known) k->join(*t->known, t->block->floor);
      for (Published* p = held; p; p = p->before)
        if (p->block == t->block->serial) k->join(p->known, t->block->floor);
      k->foreign.push_back(held);
      share(t->known, k);
      forget(k);
    }
  }
  if (!writes) return;
  Knowledge* known = nullptr;
  if (release) {
    known = snapshot(t);
  } else if (t->fenced || t->block->fenced) {
    known = new Knowledge;
    if (t->block->fenced) known->join(*t->block->fenced, 0);
    if (t->fenced) known->join(*t->fenced, 0);
  }
  if (!known) {
    if (!updates) shard.held.erase(address);
    return;
  }
  shard.all.push_back(
      std::make_unique<Published>(Published{t->block->serial, *known, updates ? held : nullptr}));
  shard.held[address] = shard.all.back().get();
  forget(known);
}

bool knows_foreign(const Thread* t) {
  return !t->block->foreign.empty() || (t->known && !t->known->foreign.empty());
}

// Whether one of these, or what they in turn acquired, covers the access.
static bool reaches(std::vector<const Published*> todo, uint32_t block, uint32_t thread,
                    uint32_t time) {
  std::unordered_set<const Published*> seen;
  while (!todo.empty()) {
    const Published* p = todo.back();
    todo.pop_back();
    if (!p || !seen.insert(p).second) continue;
    if (p->block == block && p->known.covers(thread, time)) return true;
    todo.push_back(p->before);
    todo.insert(todo.end(), p->known.foreign.begin(), p->known.foreign.end());
  }
  return false;
}
bool foreign_known(const Thread* t, uint32_t block, uint32_t thread, uint32_t time) {
  Block* b = t->block;
  if (!b->foreign.empty()) {
    constexpr size_t kAnswers = 1024;
    if (b->known_foreign.empty()) b->known_foreign.resize(kAnswers);
    Block::Known& answer = b->known_foreign[(block * 37 + thread) % kAnswers];
    if (answer.block == block && answer.thread == thread && answer.time >= time) return true;
    if (reaches({b->foreign.begin(), b->foreign.end()}, block, thread, time)) {
      answer = {block, thread, time};
      return true;
    }
  }
  if (!t->known || t->known->foreign.empty()) return false;
  return reaches({t->known->foreign.begin(), t->known->foreign.end()}, block, thread, time);
}

void clocks_end_launch() {
  for (Shard& shard : shards) {
    shard.held.clear();
    shard.all.clear();
  }
}

}  // namespace ptx
