// SPDX-License-Identifier: Apache-2.0
// Happens-before, kept as vector clocks over the threads of a block and hand-offs between blocks.
//
// Every thread has a time of its own (`now`), which moves on whenever it synchronises. A thread
// *knows* an access (thread u, time s) when some chain of barriers, __syncwarp or release/acquire
// leads from it to here. A barrier of the whole block makes all that happened known to all:
// `Block::floor`. Between such barriers, what a thread knows is a Knowledge: times of single lanes,
// warp by warp, and what other blocks have handed over.
#pragma once
#include <cstdint>
#include <vector>

namespace ptx {

struct Thread;
struct Block;
struct Published;

struct WarpTimes {
  uint32_t warp;
  uint32_t time[32];
};

struct Knowledge {
  int references = 1;
  uint32_t floor = 0;
  std::vector<WarpTimes> warps;
  std::vector<Published*> foreign;

  bool covers(uint32_t thread, uint32_t time) const;
  void learn(uint32_t thread, uint32_t time);
  void join(const Knowledge& other, uint32_t floor);
};

// What a thread released: kept until the launch ends, because other blocks may still acquire it.
struct Published {
  uint32_t block;
  Knowledge known;
  Published* before;  // what the location held, for atomics (a release sequence)
};

void forget(Knowledge*& known);
void share(Knowledge*& to, Knowledge* from);

void clocks_start(Block*);
void meet_warp(Thread** warp, uint32_t mask);  // __syncwarp
void meet_block(Block*);                       // a barrier of all threads
void meet_some(Block*, const std::vector<Thread*>& waiting,
               Knowledge*& brought);        // a barrier of some
void arrive(Thread*, Knowledge*& brought);  // bar.arrive
void fence(Thread*);
void acquire_and_release(Thread*, uint64_t address, bool acquires, bool writes, bool updates,
                         bool release);
bool foreign_known(const Thread*, uint32_t block, uint32_t thread, uint32_t time);
bool knows_foreign(const Thread*);
void clocks_end_launch();

}  // namespace ptx
