// SPDX-License-Identifier: Apache-2.0
#include "ops/allocate.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <sstream>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>

#include <cstdlib>
#include <mutex>

// Part of torch's stable ABI since 2.11. Older ones lack it, and nothing is kept.
extern "C" __attribute__((weak, visibility("default"))) AOTITorchError torch_from_blob(
    void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t storage_offset,
    int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* result,
    int32_t layout, const uint8_t* opaque_metadata, int64_t opaque_metadata_size,
    void (*deleter)(void* data, void* context), void* context);
#endif

namespace deltanet::ops {
namespace {

std::atomic<bool> poison{false};
std::atomic<int64_t> poisoned{0};

void poison_if_asked(void* data, size_t bytes) {
  if (!poison) return;
  if (bytes) std::memset(data, 0xff, bytes);
  ++poisoned;
}

std::vector<int64_t> contiguous_strides(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1))
    strides[i] = stride;  // as torch has them where a size is 0
  return strides;
}

// torch's number for one of its enumerators.
template <class Enum>
int32_t number_of(Enum x) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(x));
}

// A tensor of torch's allocator, or nothing: by the one function that does not go through the
// dispatcher, which takes a microsecond of a decode step's few dozen.
std::optional<Tensor> allocate_directly(const Tensor& like,
                                        torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                        ScalarType dtype) {
  if (!like.is_cpu()) return {};
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      int64_t(sizes.size()), sizes.data(), contiguous_strides(sizes).data(), number_of(dtype),
      number_of(torch::headeronly::DeviceType::CPU), -1, &handle);
  if (error) return {};
  const Tensor made(handle);
  poison_if_asked(made.mutable_data_ptr(), size_t(made.numel() * size_of(to_dtype(dtype))));
  return made;
}

#if defined(__linux__)

constexpr size_t kPage = 4096, kHugePage = 2 << 20;
constexpr size_t kLarge = 1 << 20;  // smaller results are left to malloc

size_t kept_bytes_allowed() {
  const char* text = std::getenv("DELTANET_KEEP_MB");
  if (!text || !*text) return size_t(256) << 20;
  char* end = nullptr;
  const long long megabytes = std::strtoll(text, &end, 10);
  STD_TORCH_CHECK(*end == '\0' && megabytes >= 0 && megabytes < (1 << 30), "DELTANET_KEEP_MB is '",
                  text, "'; supported: a number of megabytes, 0 or more");
  return size_t(megabytes) << 20;
}

// Freed blocks, at most kept_bytes_allowed() of them. Memory may be freed by any thread, and by a
// process that is about to end: the one instance is never destroyed.
class LargeBlocks {
 public:
  static LargeBlocks& instance() {
    static LargeBlocks* const blocks = new LargeBlocks;
    return *blocks;
  }

  struct Block {
    void* data = nullptr;
    size_t bytes = 0;
  };

  // At least `bytes`. Null where the system has no more.
  Block take(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      size_t best = kept_.size();
      for (size_t i = 0; i < kept_.size(); ++i)
        if (kept_[i].bytes >= bytes && kept_[i].bytes <= bytes + bytes / 4 &&
            (best == kept_.size() || kept_[i].bytes <= kept_[best].bytes))
          best = i;  // of equal ones the last: it is the likeliest to be in a cache
      if (best < kept_.size()) {
        const Block block = kept_[best];
        kept_.erase(kept_.begin() + std::ptrdiff_t(best));
        kept_bytes_ -= block.bytes;
        return block;
      }
    }
    return map((bytes + kPage - 1) / kPage * kPage);
  }

  void give_back(Block block) {
    std::vector<Block> dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      kept_.push_back(block);
      kept_bytes_ += block.bytes;
      while (kept_bytes_ > allowed_) {  // those that were not asked for the longest
        dropped.push_back(kept_.front());
        kept_bytes_ -= kept_.front().bytes;
        kept_.erase(kept_.begin());
      }
    }
    for (const Block& old : dropped) munmap(old.data, old.bytes);
  }

 private:
  static Block map(size_t bytes) {
    // Room to begin on a huge page; the rest goes back.
    const size_t mapped = bytes + kHugePage;
    void* const base =
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return {};
    char* const begin = static_cast<char*>(base);
    const size_t before = (kHugePage - uintptr_t(begin) % kHugePage) % kHugePage;
    const size_t after = mapped - before - bytes;
    if (before) munmap(begin, before);
    if (after) munmap(begin + before + bytes, after);
#if defined(MADV_HUGEPAGE)
    (void)madvise(begin + before, bytes, MADV_HUGEPAGE);  // advice only
#endif
    return {begin + before, bytes};
  }

  std::mutex mutex_;
  std::vector<Block> kept_;
  size_t kept_bytes_ = 0;
  const size_t allowed_ = kept_bytes_allowed();
};

// A tensor of a large block, or nothing.
std::optional<Tensor> allocate_large(const Tensor& like,
                                     torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                     ScalarType dtype) {
  if (!torch_from_blob || !like.is_cpu()) return {};
  size_t bytes = size_of(to_dtype(dtype));
  for (const int64_t size : sizes)
    if (__builtin_mul_overflow(bytes, size_t(size), &bytes)) return {};
  if (bytes <= kLarge || bytes > SIZE_MAX / 4) return {};
  const LargeBlocks::Block block = LargeBlocks::instance().take(bytes);
  if (!block.data) return {};
  poison_if_asked(block.data, block.bytes);

  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = torch_from_blob(
      block.data, int64_t(sizes.size()), sizes.data(), contiguous_strides(sizes).data(), 0,
      number_of(dtype), number_of(torch::headeronly::DeviceType::CPU), -1, &handle,
      number_of(torch::headeronly::Layout::Strided), nullptr, 0,
      [](void* data, void* size) { LargeBlocks::instance().give_back({data, size_t(size)}); },
      reinterpret_cast<void*>(block.bytes));
  if (error) {
    LargeBlocks::instance().give_back(block);
    return {};
  }
  return Tensor(handle);
}

#else

std::optional<Tensor> allocate_large(const Tensor&, torch::headeronly::IntHeaderOnlyArrayRef,
                                     ScalarType) {
  return {};
}

#endif

}  // namespace

Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                ScalarType dtype) {
  if (std::optional<Tensor> large = allocate_large(like, sizes, dtype)) return *large;
  if (std::optional<Tensor> small = allocate_directly(like, sizes, dtype)) return *small;
  try {
    return torch::stable::new_empty(like, sizes, dtype);
  } catch (const std::exception&) {  // its text names a file of torch, not what was wanted
    double bytes = double(size_of(to_dtype(dtype)));
    std::ostringstream text;
    for (size_t i = 0; i < sizes.size(); ++i) {
      text << (i ? ", " : "") << sizes[i];
      bytes *= double(sizes[i]);
    }
    STD_TORCH_CHECK(false, "out of memory: a result of shape [", text.str(), "] (", bytes / 1e9,
                    " GB) could not be allocated");
  }
}

int64_t poison_results(bool on) {
  poison = on;
  return poisoned.exchange(0);
}

}  // namespace deltanet::ops
