// Exports of what the ranks of a tensor-parallel group exchange.
#include "decoder_arguments.h"
#include "ranks.h"

namespace baton_ops {
namespace {

constexpr int64_t kAlignment = 256;  // of buffers and halves

int64_t InRange(const char* name, int64_t value, int64_t lowest, int64_t end) {
  if (value >= lowest && value < end) return value;
  TVM_FFI_THROW(ValueError) << name << " must be in [" << lowest << ", " << end << "), got "
                            << value;
}

const int64_t* BuffersOf(const TensorView& buffers) {
  const Checked checked(buffers, "buffers");
  checked.HasDtype(kInt64).HasRank(1).IsContiguous();
  if (buffers.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << "buffers must be on the host, got device type "
                              << buffers.device().device_type;
  }
  const int64_t ranks = buffers.size(0);
  if (ranks != 2 && ranks != 4 && ranks != 8) {
    TVM_FFI_THROW(ValueError) << "buffers must hold 2, 4 or 8 addresses, got " << ranks;
  }
  const auto* addresses = checked.Data<const int64_t>();
  for (int64_t r = 0; r < ranks; ++r) {
    if (addresses[r] != 0 && addresses[r] % kAlignment == 0) continue;
    TVM_FFI_THROW(ValueError) << "buffers[" << r << "] must be an address at a multiple of "
                              << kAlignment << " bytes, got " << addresses[r];
  }
  return addresses;
}

// Reads buffers, rank, half_bytes, limit_ns.
cuda::ExchangeInput ReadExchange(ArgumentReader* args) {
  const TensorView buffers = args->Tensor("buffers");
  cuda::ExchangeInput in{};
  in.buffers = BuffersOf(buffers);
  in.ranks = buffers.size(0);
  in.rank = InRange("rank", args->Int("rank"), 0, in.ranks);
  in.half_bytes = InRange("half_bytes", args->Int("half_bytes"), kAlignment, int64_t{1} << 40);
  if (in.half_bytes % kAlignment != 0) {
    TVM_FFI_THROW(ValueError) << "half_bytes must be a multiple of " << kAlignment << ", got "
                              << in.half_bytes;
  }
  in.limit_ns = InRange("limit_ns", args->Int("limit_ns"), 1, int64_t{1} << 62);
  return in;
}

int64_t BytesOf(const TensorView& tensor) { return tensor.numel() * (tensor.dtype().bits / 8); }

// A contiguous part that begins a half of this rank's buffer: tells which.
int64_t HalfOf(const TensorView& part, const cuda::ExchangeInput& in) {
  const Checked checked(part, "part");
  checked.HasRank(2).HasSizeAtLeast(0, 1).HasSizeAtLeast(1, 1).IsContiguous();
  if (part.size(1) * (part.dtype().bits / 8) % 16 != 0) {
    TVM_FFI_THROW(ValueError) << "part must have rows of a multiple of 16 bytes, got "
                              << part.size(1) << " elements of " << part.dtype().bits / 8;
  }
  if (BytesOf(part) > in.half_bytes) {
    TVM_FFI_THROW(ValueError) << "part must fit into half_bytes = " << in.half_bytes << ", got "
                              << BytesOf(part) << " bytes";
  }
  const int64_t at = reinterpret_cast<int64_t>(checked.Data<char>()) - in.buffers[in.rank];
  const int64_t into = at - cuda::ExchangeHeadBytes();
  if (into == 0 || into == in.half_bytes) return into / in.half_bytes;
  TVM_FFI_THROW(ValueError) << "part must begin one of the halves of buffers[" << in.rank
                            << "], got byte " << at << " of it";
}

// Memory that no other rank reads: outside of this rank's buffer.
void CheckOutside(const void* data, int64_t bytes, const char* name,
                  const cuda::ExchangeInput& in) {
  const auto address = reinterpret_cast<int64_t>(data);
  const int64_t begin = in.buffers[in.rank];
  const int64_t end = begin + cuda::ExchangeHeadBytes() + 2 * in.half_bytes;
  if (address < end && address + bytes > begin) {
    TVM_FFI_THROW(ValueError) << name << " must not lie in buffers[" << in.rank << "]";
  }
}

// The same of rows at any distance.
void CheckRowsOutside(const cuda::Rows& rows, const TensorView& tensor, const char* name,
                      const cuda::ExchangeInput& in) {
  const int64_t elements = (tensor.size(0) - 1) * rows.stride + tensor.size(1);
  CheckOutside(rows.data, elements * (tensor.dtype().bits / 8), name, in);
}

// The same, contiguous and on a vector.
void* OutOf(const TensorView& out, const char* name, const cuda::ExchangeInput& in) {
  char* data = Checked(out, name).IsContiguous().Data<char>();
  CheckOutside(data, BytesOf(out), name, in);
  if (reinterpret_cast<int64_t>(data) % 16 != 0) {
    TVM_FFI_THROW(ValueError) << name << " must begin at a multiple of 16 bytes";
  }
  return data;
}

// Reads part, buffers, rank, half_bytes, limit_ns, way, out.
void RunRankSum(ArgumentReader args) {
  const TensorView part = args.Tensor("part");
  const Call call(part, "part");
  cuda::RankSumInput in{};
  in.exchange = ReadExchange(&args);
  in.way = static_cast<cuda::SumWay>(InRange("way", args.Int("way"), 0, 3));
  in.exchange.half = HalfOf(part, in.exchange);
  const TensorView out = args.Tensor("out");
  Checked(out, "out")
      .HasRank(2)
      .HasSize(0, part.size(0))
      .HasSize(1, part.size(1))
      .IsOn(call.device);
  in.part_type = call.type;
  in.out_type = ElementTypeOf(out, "out");
  if (in.out_type == cuda::ElementType::kFloat32) Checked(part, "part").HasDtype(kFloat32);
  in.elements = part.numel();
  void* to = OutOf(out, "out", in.exchange);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("rank_sum", cuda::SumOverRanks(in, to, StreamOf(call.device)));
}

// Reads part, buffers, rank, half_bytes, limit_ns, room, residual, norm_weight, eps, out.
void RunRankSumNorm(ArgumentReader args) {
  const TensorView part = args.Tensor("part");
  const Call call(part, "part");
  cuda::RankSumInput in{};
  in.exchange = ReadExchange(&args);
  in.way = cuda::SumWay::kChosen;
  in.exchange.half = HalfOf(part, in.exchange);
  in.part_type = in.out_type = call.type;
  in.elements = part.numel();
  const TensorView room = args.Tensor("room"), residual = args.Tensor("residual");
  const TensorView weight = args.Tensor("norm_weight");
  const double eps = args.Float("eps");
  const TensorView out = args.Tensor("out");
  call.Rows(room, "room", part.size(0), part.size(1));
  call.Rows(residual, "residual", part.size(0), part.size(1));
  const cuda::AddNormInput norm = ReadNorm(call, residual, weight, "norm_weight", eps);
  const cuda::Rows to = call.Rows(out, "out", norm.rows, norm.columns);
  CheckRowsOutside(norm.residual, residual, "residual", in.exchange);
  CheckRowsOutside(to, out, "out", in.exchange);
  void* between = OutOf(room, "room", in.exchange);
  const tvm::ffi::CUDADeviceGuard guard(call.device.device_id);
  Raise("rank_sum_norm", cuda::SumOverRanksNorm(in, norm, between, to, StreamOf(call.device)));
}

// Reads part, buffers, rank, half_bytes, limit_ns, out.
void RunRankGather(ArgumentReader args) {
  const TensorView part = args.Tensor("part");
  RequireCuda(part, "part");
  cuda::ExchangeInput in = ReadExchange(&args);
  in.half = HalfOf(part, in);
  const TensorView out = args.Tensor("out");
  const Checked checked(out, "out");
  checked.HasDtype(part.dtype()).HasRank(3).HasSize(0, in.ranks).HasSize(1, part.size(0));
  checked.HasSize(2, part.size(1)).IsOn(part.device());
  void* to = OutOf(out, "out", in);
  const tvm::ffi::CUDADeviceGuard guard(part.device().device_id);
  Raise("rank_gather", cuda::GatherFromRanks(in, BytesOf(part), to, StreamOf(part.device())));
}

// Reads buffers, rank, half_bytes, limit_ns, out.
void RunRankErrors(ArgumentReader args) {
  const cuda::ExchangeInput in = ReadExchange(&args);
  const TensorView out = args.Tensor("out");
  RequireCuda(out, "out");
  Checked(out, "out").HasDtype(kInt32).HasRank(1).HasSize(0, in.ranks);
  auto* to = static_cast<int32_t*>(OutOf(out, "out", in));
  const tvm::ffi::CUDADeviceGuard guard(out.device().device_id);
  Raise("rank_errors", cuda::ErrorsOfRanks(in, to, StreamOf(out.device())));
}

int64_t ExchangeHeadBytes() { return cuda::ExchangeHeadBytes(); }

}  // namespace
}  // namespace baton_ops

BATON_EXPORT_CUDA(cuda_rank_sum, 7, RunRankSum)
BATON_EXPORT_CUDA(cuda_rank_sum_norm, 10, RunRankSumNorm)
BATON_EXPORT_CUDA(cuda_rank_gather, 6, RunRankGather)
BATON_EXPORT_CUDA(cuda_rank_errors, 5, RunRankErrors)

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_exchange_head_bytes, baton_ops::ExchangeHeadBytes)
