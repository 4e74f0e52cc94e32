#include "baton_ops/cpu/settings.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace baton_ops::cpu {
namespace {

constexpr int kDefaultMaxThreads = 8;

int UsableProcessors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

const BlockKernels* BestKernels() {
  const BlockKernels* avx2 = Avx2Kernels();
  return avx2 ? avx2 : &kPortableKernels;
}

const BlockKernels* KernelsByName(const char* name) {
  if (std::strcmp(name, "auto") == 0) return BestKernels();
  if (std::strcmp(name, kPortableKernels.name) == 0) return &kPortableKernels;
  const BlockKernels* avx2 = Avx2Kernels();
  return avx2 && std::strcmp(name, avx2->name) == 0 ? avx2 : nullptr;
}

std::atomic<int>& Threads() {
  static std::atomic<int> count{std::min(UsableProcessors(), kDefaultMaxThreads)};
  return count;
}

std::atomic<const BlockKernels*>& Kernels() {
  static std::atomic<const BlockKernels*> kernels{BestKernels()};
  return kernels;
}

}  // namespace

int ThreadCount() { return Threads().load(std::memory_order_relaxed); }

void SetThreadCount(int count) { Threads().store(count, std::memory_order_relaxed); }

const BlockKernels& ActiveKernels() { return *Kernels().load(std::memory_order_relaxed); }

bool SetKernels(const char* name) {
  const BlockKernels* kernels = KernelsByName(name);
  if (kernels) Kernels().store(kernels, std::memory_order_relaxed);
  return kernels != nullptr;
}

}  // namespace baton_ops::cpu
