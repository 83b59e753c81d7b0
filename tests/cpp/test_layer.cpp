// SPDX-License-Identifier: Apache-2.0
//
// The convolution and the gated norm of every instruction set, and their gradients, against the
// formulas of docs/algorithm.md in double. Buffers are full of NaN, and have room behind the end.
#include <malloc.h>

#include "cpu/causal_conv1d.h"
#include "cpu/gated_rms_norm.h"
#include "support.h"

namespace deltanet::cpu {
namespace {

using testing_support::Buffer;
using testing_support::error_ratio;
using testing_support::normal;
using testing_support::Random;

constexpr int kRoom = 5;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// What roundings allow: half a unit in the last place of 16-bit results, a few of those in fp32.
double bound(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 1e-14;
    case DType::kFloat32:
      return 2e-6;
    case DType::kBFloat16:
      return 4e-3;
    default:
      return 5e-4;
  }
}

Buffer random_buffer(DType dtype, int64_t size, Random& random) {
  Buffer x(dtype, size);
  for (int64_t i = 0; i < size; ++i) x.set(i, normal(random));
  return x;
}

class Layer : public testing_support::EveryIsa {
 protected:
  void SetUp() override {
#ifdef __GLIBC__
    mallopt(M_PERTURB, 0x100);  // scratch memory is full of 0xff, a NaN in every type
#endif
    EveryIsa::SetUp();
  }
  static std::vector<double> values(const Buffer& x, const char* what) {
    std::vector<double> all;
    for (int64_t i = 0; i < x.size() - kRoom; ++i) all.push_back(x.get(i));
    for (int64_t i = x.size() - kRoom; i < x.size(); ++i)
      EXPECT_TRUE(x.is_untouched(i)) << what << ": wrote behind the end";
    return all;
  }
};

// One sequence after the other in a row, then tokens of nobody. x is [T, D] or [D, T] in memory.
void check_convolution(DType dtype, int64_t channels, std::vector<int64_t> lengths, int64_t tail,
                       int width, bool channels_first, bool silu) {
  Random random(uint64_t(channels * 100 + width));
  const int64_t sequences = int64_t(lengths.size()), past = width - 1;
  std::vector<TokenRun> runs;
  int64_t tokens = 0;
  for (int64_t n = 0; n < sequences; tokens += lengths[size_t(n++)])
    runs.push_back({0, tokens, tokens + lengths[size_t(n)], n});
  runs.push_back({0, tokens, tokens + tail, -1});
  tokens += tail;

  const Buffer x = random_buffer(dtype, channels * tokens, random);
  const Buffer weight = random_buffer(dtype, channels * width, random);
  const Buffer bias = random_buffer(dtype, channels, random);
  const Buffer states = random_buffer(dtype, sequences * channels * past, random);
  const Buffer dy = random_buffer(dtype, channels * tokens, random);
  const Buffer d_final = random_buffer(dtype, sequences * channels * past, random);
  Buffer y(dtype, channels * tokens + kRoom), d_x(dtype, channels * tokens + kRoom);
  Buffer final_states(dtype, sequences * channels * past + kRoom);
  Buffer d_weight(dtype, channels * width + kRoom), d_bias(dtype, channels + kRoom);
  Buffer d_states(dtype, sequences * channels * past + kRoom);

  const int64_t by_channel = channels_first ? tokens : 1, by_token = channels_first ? 1 : channels;
  CausalConv1dBackwardParams p;
  p.batch = 1;
  p.channels = channels;
  p.tokens = tokens;
  p.width = width;
  p.state_tokens = past;
  p.runs = runs.data();
  p.run_count = int64_t(runs.size());
  p.silu = silu;
  p.x = {x.data(), dtype, {0, by_channel, by_token}};
  p.weight = {weight.data(), dtype, {width, 1}};
  p.bias = {bias.data(), dtype, {1}};
  p.initial_states = {states.data(), dtype, {channels * past, past, 1}};
  p.output = {y.data(), dtype, {0, by_channel, by_token}};
  p.final_states = {final_states.data(), dtype, {channels * past, past, 1}};
  causal_conv1d(p, SerialParallel());
  p.grad_output = {dy.data(), dtype, {0, by_channel, by_token}};
  p.grad_final_states = {d_final.data(), dtype, {channels * past, past, 1}};
  p.d_x = {d_x.data(), dtype, {0, by_channel, by_token}};
  p.d_weight = {d_weight.data(), dtype, {width, 1}};
  p.d_bias = {d_bias.data(), dtype, {1}};
  p.d_initial_states = {d_states.data(), dtype, {channels * past, past, 1}};
  causal_conv1d_backward(p, SerialParallel());

  std::vector<double> want_y(size_t(channels * tokens)), want_dx(size_t(channels * tokens));
  std::vector<double> want_final(size_t(sequences * channels * past)), want_ds = want_final;
  std::vector<double> want_dw(size_t(channels * width)), want_db(size_t(channels), 0);
  for (int64_t c = 0; c < channels; ++c)
    for (const TokenRun& run : runs) {
      if (run.sequence < 0) continue;
      // Position i is token run.begin + i - past.
      const int64_t count = run.end - run.begin;
      const auto at = [&](int64_t i) {
        return i < past ? states.get((run.sequence * channels + c) * past + i)
                        : x.get(c * by_channel + (run.begin + i - past) * by_token);
      };
      std::vector<double> d(size_t(past + count), 0.0);
      for (int64_t t = 0; t < count; ++t) {
        double z = bias.get(c);
        for (int j = 0; j < width; ++j) z += weight.get(c * width + j) * at(t + j);
        const int64_t place = c * by_channel + (run.begin + t) * by_token;
        const double s = sigmoid(z);
        want_y[size_t(place)] = silu ? z * s : z;
        const double dz = dy.get(place) * (silu ? s * (1 + z * (1 - s)) : 1);
        want_db[size_t(c)] += dz;
        for (int j = 0; j < width; ++j) {
          want_dw[size_t(c * width + j)] += dz * at(t + j);
          d[size_t(t + j)] += dz * weight.get(c * width + j);
        }
      }
      for (int64_t i = 0; i < past; ++i) {
        const int64_t place = (run.sequence * channels + c) * past + i;
        want_final[size_t(place)] = at(count + i);
        d[size_t(count + i)] += d_final.get(place);
      }
      for (int64_t i = 0; i < past + count; ++i)
        if (i < past)
          want_ds[size_t((run.sequence * channels + c) * past + i)] = d[size_t(i)];
        else
          want_dx[size_t(c * by_channel + (run.begin + i - past) * by_token)] = d[size_t(i)];
    }

  SCOPED_TRACE(testing::Message() << testing_support::name_of(dtype) << " D=" << channels
                                  << " T=" << tokens << " W=" << width
                                  << (channels_first ? " channels-first" : ""));
  const auto all = [&](Buffer& got) {
    std::vector<double> numbers;
    for (int64_t i = 0; i < got.size() - kRoom; ++i) numbers.push_back(got.get(i));
    for (int64_t i = got.size() - kRoom; i < got.size(); ++i)
      EXPECT_TRUE(got.is_untouched(i)) << "wrote behind the end";
    return numbers;
  };
  EXPECT_LE(error_ratio(all(y), want_y), bound(dtype));
  EXPECT_EQ(all(final_states), want_final);
  EXPECT_LE(error_ratio(all(d_x), want_dx), bound(dtype));
  EXPECT_LE(error_ratio(all(d_weight), want_dw), bound(dtype));
  EXPECT_LE(error_ratio(all(d_bias), want_db), bound(dtype));
  EXPECT_LE(error_ratio(all(d_states), want_ds), bound(dtype));
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};

TEST_P(Layer, ConvolutionOfEveryWidth) {
  for (DType dtype : kTypes)
    for (int width = 1; width <= kMaxConvWidth; ++width)
      for (bool channels_first : {false, true})
        check_convolution(dtype, 20, {37, 0, 2, 64}, 3, width, channels_first, width % 2 == 0);
}

TEST_P(Layer, ConvolutionOfEveryNumberOfChannels) {
  for (int64_t channels : {1, 7, 8, 9, 15, 16, 17, 127, 128, 129, 300})
    for (bool channels_first : {false, true})
      check_convolution(DType::kBFloat16, channels, {33, 5}, 0, 4, channels_first, true);
}

TEST_P(Layer, ConvolutionUpdatesItsStateInPlace) {
  constexpr int64_t kChannels = 130;
  for (int kept : {3, 4, 9})
    for (int64_t tokens : {1, 2, 40}) {
      Random random(uint64_t(kept * 100 + tokens));
      const Buffer x = random_buffer(DType::kFloat32, kChannels * tokens, random);
      const Buffer weight = random_buffer(DType::kFloat32, kChannels * 4, random);
      Buffer state = random_buffer(DType::kFloat32, kChannels * kept, random);
      const Buffer before = state;
      Buffer y(DType::kFloat32, kChannels * tokens);
      const TokenRun run{0, 0, tokens, 0};
      CausalConv1dParams p;
      p.batch = 1;
      p.channels = kChannels;
      p.tokens = tokens;
      p.width = 4;
      p.state_tokens = kept;
      p.runs = &run;
      p.run_count = 1;
      p.x = {x.data(), DType::kFloat32, {0, 1, kChannels}};
      p.weight = {weight.data(), DType::kFloat32, {4, 1}};
      p.initial_states = {state.data(), DType::kFloat32, {0, kept, 1}};
      p.output = {y.data(), DType::kFloat32, {0, 1, kChannels}};
      p.final_states = {state.data(), DType::kFloat32, {0, kept, 1}};
      causal_conv1d(p, SerialParallel());
      for (int64_t c = 0; c < kChannels; ++c) {
        const auto at = [&](int64_t i) {
          return i < kept ? before.get(c * kept + i) : x.get((i - kept) * kChannels + c);
        };
        for (int64_t i = 0; i < kept; ++i) ASSERT_EQ(state.get(c * kept + i), at(tokens + i));
        for (int64_t t = 0; t < tokens; ++t) {
          double z = 0;
          for (int j = 0; j < 4; ++j) z += weight.get(c * 4 + j) * at(kept - 3 + t + j);
          ASSERT_NEAR(y.get(t * kChannels + c), z, 1e-5);
        }
      }
    }
}

TEST_P(Layer, GatedNorm) {
  for (DType dtype : kTypes)
    for (int64_t columns : {2, 7, 8, 16, 17, 128, 129, 2100})
      for (int64_t rows : {1, 17}) {
        Random random(uint64_t(columns * 100 + rows));
        const Buffer x = random_buffer(dtype, rows * columns, random);
        const Buffer gate = random_buffer(dtype, rows * columns, random);
        const Buffer weight = random_buffer(dtype, columns, random);
        const Buffer dy = random_buffer(dtype, rows * columns, random);
        Buffer y(dtype, rows * columns + kRoom), d_x(dtype, rows * columns + kRoom);
        Buffer d_gate(dtype, rows * columns + kRoom), d_weight(dtype, columns + kRoom);
        GatedRmsNormBackwardParams p;
        p.rows = rows;
        p.columns = columns;
        p.eps = 0.1;
        p.x = {x.data(), dtype, {columns, 1}};
        p.gate = {gate.data(), dtype, {columns, 1}};
        p.weight = {weight.data(), dtype, {1}};
        p.output = {y.data(), dtype, {columns, 1}};
        gated_rms_norm(p, SerialParallel());
        p.grad_output = {dy.data(), dtype, {columns, 1}};
        p.d_x = {d_x.data(), dtype, {columns, 1}};
        p.d_gate = {d_gate.data(), dtype, {columns, 1}};
        p.d_weight = {d_weight.data(), dtype, {1}};
        gated_rms_norm_backward(p, SerialParallel());

        std::vector<double> want_y, want_dx, want_dg, want_dw(size_t(columns), 0);
        for (int64_t i = 0; i < rows * columns; i += columns) {
          double squares = 0, product = 0;
          for (int64_t c = 0; c < columns; ++c) squares += x.get(i + c) * x.get(i + c);
          const double r = 1 / std::sqrt(squares / double(columns) + p.eps);
          std::vector<double> dn;
          for (int64_t c = 0; c < columns; ++c) {
            const double n = r * x.get(i + c), g = gate.get(i + c), s = sigmoid(g);
            want_y.push_back(weight.get(c) * n * g * s);
            want_dg.push_back(dy.get(i + c) * weight.get(c) * n * s * (1 + g * (1 - s)));
            want_dw[size_t(c)] += dy.get(i + c) * g * s * n;
            dn.push_back(dy.get(i + c) * weight.get(c) * g * s);
            product += dn.back() * n;
          }
          for (int64_t c = 0; c < columns; ++c)
            want_dx.push_back(r * (dn[size_t(c)] - r * x.get(i + c) * product / double(columns)));
        }
        SCOPED_TRACE(testing::Message()
                     << testing_support::name_of(dtype) << " rows=" << rows << " C=" << columns);
        EXPECT_LE(error_ratio(values(y, "y"), want_y), bound(dtype));
        EXPECT_LE(error_ratio(values(d_x, "d_x"), want_dx), bound(dtype));
        EXPECT_LE(error_ratio(values(d_gate, "d_gate"), want_dg), bound(dtype));
        EXPECT_LE(error_ratio(values(d_weight, "d_weight"), want_dw), bound(dtype));
      }
}

DELTANET_FOR_EVERY_ISA(Layer);

}  // namespace
}  // namespace deltanet::cpu
