// Process-wide settings of the host path. They change speed, never which answer is right.
#ifndef BATON_OPS_CPU_SETTINGS_H_
#define BATON_OPS_CPU_SETTINGS_H_

#include "baton_ops/cpu/block.h"

namespace baton_ops::cpu {

constexpr int kMaxThreads = 64;

// At first the processors that this process may use, at most 8.
int ThreadCount();
void SetThreadCount(int count);  // requires 1 <= count <= kMaxThreads

// At first the best that this processor has.
const BlockKernels& ActiveKernels();
bool SetKernels(const char* name);  // "auto", "portable" or "avx2"; false if not available here

}  // namespace baton_ops::cpu

#endif  // BATON_OPS_CPU_SETTINGS_H_
