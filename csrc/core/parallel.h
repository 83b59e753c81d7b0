// SPDX-License-Identifier: Apache-2.0
//
// How a backend gets its threads: the caller supplies them, so that kernels know no thread library.
#pragma once

namespace deltanet {

class Parallel {
 public:
  virtual ~Parallel() = default;
  // How many workers may run at once, at least 1.
  virtual int max_workers() const = 0;
  // Calls body(context) `workers` times, at once or one after another. `body` must not throw.
  virtual void run(int workers, void (*body)(void* context), void* context) const = 0;
};

class SerialParallel final : public Parallel {
 public:
  int max_workers() const override { return 1; }
  void run(int workers, void (*body)(void*), void* context) const override {
    for (int i = 0; i < workers; ++i) body(context);
  }
};

}  // namespace deltanet
