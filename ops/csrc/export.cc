// The functions that the library exports through the tvm-ffi C ABI.
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "arguments.h"
#include "baton_ops/cpu/settings.h"
#include "logprob_arguments.h"
#include "logprob_run.h"
#include "read_arguments.h"
#include "verify_arguments.h"

// Exports a function over an ArgumentReader, which names arguments where tvm-ffi's typed export
// would number them.
#define BATON_EXPORT(name, arguments, function)                                                   \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                                     TVMFFIAny*) {                                \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                    \
    const auto* views = reinterpret_cast<const tvm::ffi::AnyView*>(args);                         \
    function(baton_ops::ArgumentReader(views, count, arguments));                                 \
    TVM_FFI_SAFE_CALL_END();                                                                      \
  }

BATON_EXPORT(logprobs, baton_ops::kLogprobArguments, baton_ops::RunLogprobs)
BATON_EXPORT(read_rows, baton_ops::kReadRowsArguments, baton_ops::RunReadRows)
BATON_EXPORT(verify_greedy, baton_ops::kVerifyGreedyArguments, baton_ops::RunVerifyGreedy)
BATON_EXPORT(verify_sampled, baton_ops::kVerifySampledArguments, baton_ops::RunVerifySampled)

namespace baton_ops {
namespace {

// What Python knows as baton_ops.interface.INTERFACE, where it is said when it rises.
constexpr int64_t kInterface = 3;

int64_t Interface() { return kInterface; }

int64_t Threads() { return cpu::ThreadCount(); }

void SetThreads(int64_t count) {
  if (count < 1 || count > cpu::kMaxThreads) {
    TVM_FFI_THROW(ValueError) << "threads must be in [1, " << cpu::kMaxThreads << "], got "
                              << count;
  }
  cpu::SetThreadCount(static_cast<int>(count));
}

tvm::ffi::String Isa() { return cpu::ActiveKernels().name; }

void SetIsa(const tvm::ffi::String& name) {
  if (cpu::SetKernels(name.c_str())) return;
  TVM_FFI_THROW(ValueError) << "isa must be auto, portable or avx2 (on a processor with AVX2, FMA "
                            << "and F16C), got " << name;
}

}  // namespace
}  // namespace baton_ops

TVM_FFI_DLL_EXPORT_TYPED_FUNC(interface, baton_ops::Interface)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(logprobs_workspace_bytes, baton_ops::LogprobsWorkspaceBytes)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(threads, baton_ops::Threads)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_threads, baton_ops::SetThreads)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa, baton_ops::Isa)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_isa, baton_ops::SetIsa)
