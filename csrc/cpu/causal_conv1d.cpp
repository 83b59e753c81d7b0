// SPDX-License-Identifier: Apache-2.0
#include "cpu/causal_conv1d.h"

#include <algorithm>
#include <vector>

#include "cpu/registry.h"
#include "cpu/tasks.h"

namespace deltanet::cpu {
namespace {

// An output takes as long as this many multiply-adds: most of it is the exp in silu.
constexpr int64_t kWorkPerOutput = 16;

// How the tokens of every run and the channels are cut into tasks.
class ConvPlan {
 public:
  explicit ConvPlan(const CausalConv1dParams& p) : p_(p) {
    // Neighbors in memory are handled one after the other: all channels of a few tokens, or many
    // tokens of some channels. An update in place reads and writes a state in one task.
    const bool channels_are_neighbors = p.x.stride[1] <= p.x.stride[2];
    piece_ = p.updates_in_place()     ? std::max<int64_t>(p.tokens, 1)
             : channels_are_neighbors ? kConvTokens
                                      : 16 * kConvTokens;
    first_piece_.reserve(size_t(p.run_count) + 1);
    int64_t pieces = 0;
    for (int64_t i = 0; i < p.run_count; ++i) {
      first_piece_.push_back(pieces);
      const int64_t tokens = p.runs[i].end - p.runs[i].begin;
      pieces += std::max<int64_t>(1, (tokens + piece_ - 1) / piece_);
    }
    first_piece_.push_back(pieces);
  }

  int64_t tasks() const { return first_piece_.back() * channel_blocks(); }

  ConvTask task(int64_t i) const {
    const int64_t piece = i / channel_blocks();
    const auto next = std::upper_bound(first_piece_.begin(), first_piece_.end(), piece);
    const int64_t run = next - first_piece_.begin() - 1;
    ConvTask t;
    t.run = p_.runs[run];
    t.begin = t.run.begin + (piece - first_piece_[size_t(run)]) * piece_;
    t.end = std::min(t.begin + piece_, t.run.end);
    t.channel_begin = i % channel_blocks() * kConvChannels;
    t.channels = int(std::min<int64_t>(kConvChannels, p_.channels - t.channel_begin));
    return t;
  }

 private:
  int64_t channel_blocks() const { return (p_.channels + kConvChannels - 1) / kConvChannels; }

  const CausalConv1dParams& p_;
  int64_t piece_;                     // tokens of a task
  std::vector<int64_t> first_piece_;  // of each run
};

}  // namespace

void causal_conv1d(const CausalConv1dParams& p, const Parallel& parallel) {
  const Kernels& kernels = p.is_double() ? kernels_f64() : kernels_f32();
  const ConvPlan plan(p);
  run_tasks(plan.tasks(), p.batch * p.tokens * p.channels * kWorkPerOutput,
            kernels.conv_scratch_bytes(p), parallel,
            [&](int64_t i, void* mine) { kernels.conv_forward(p, plan.task(i), mine); });
}

void causal_conv1d_backward(const CausalConv1dBackwardParams& p, const Parallel& parallel) {
  const Kernels& kernels = p.is_double() ? kernels_f64() : kernels_f32();
  run_tasks((p.channels + kConvChannels - 1) / kConvChannels,
            2 * p.batch * p.tokens * p.channels * kWorkPerOutput,
            kernels.conv_backward_scratch_bytes(p), parallel, [&](int64_t i, void* mine) {
              const int64_t begin = i * kConvChannels;
              kernels.conv_backward(
                  p, begin, int(std::min<int64_t>(kConvChannels, p.channels - begin)), mine);
            });
}

}  // namespace deltanet::cpu
