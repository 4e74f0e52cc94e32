// A group of ranks under C names, laid out by baton_testing/host_ranks.py: each rank makes its
// calls one after another, with what writes its part before each; ranks run side by side.
#include "baton_ops/row_norm.cuh"
#include "cuda_runtime.h"
#include "orders.h"
#include "rewritten/early_launch.h"
#include "rewritten/element_types.h"
#include "rewritten/norm_launch.h"
#include "rewritten/ranks.h"
#include "shims/ranks.h"

using namespace baton_ops::cuda;

namespace baton_ops::cuda {

// As decoder_rows.cu launches rows that a warp takes in one go.
Error AddNorm(const AddNormInput& in, const Rows& out, Stream stream) {
  const Grid grid{static_cast<unsigned>(in.rows), NormThreads(in.columns)};
  return ForElement(in.type, [&](auto element) {
    using E = decltype(element);
    const auto kernel =
        IsNormWide(in, out) ? AddNormKernel<E, true, 1> : AddNormKernel<E, false, 1>;
    return LaunchEarly(kernel, grid, stream, NormParamsOf<E>(in, out));
  });
}

}  // namespace baton_ops::cuda

namespace {

enum Kind : int64_t { kSum, kGather, kErrors, kSumNorm, kSumThenNorm };

// One call of a rank, and the 16-byte vectors that are its part. Eight bytes a member.
struct HostCall {
  const uint4* part;
  int64_t bytes;
  int64_t kind;  // of Kind
  int64_t part_type;
  int64_t out_type;
  int64_t way;
  int64_t half;
  void* out;
  int64_t columns;  // of what is normed
  void* residual;
  const void* weight;
  void* room;
};

struct HostGroup {
  const int64_t* buffers;
  int64_t ranks;
  int64_t half_bytes;
  int64_t limit_ns;
  int64_t most_delay;            // in turns, drawn before each part is written
  const HostCall* const* calls;  // of each rank
  const int64_t* n_calls;
  int64_t still_rank;  // reads nothing in its call `still_call` before all others have ended, or -1
  int64_t still_call;
};

struct Launch {
  const HostCall* call;
  std::function<void()> kernel;
  unsigned blocks;
  uint4* half;
  bool is_first;  // of its call
};

std::vector<std::vector<Launch>> streams;  // by rank
std::vector<unsigned> grids;               // of the launch that a fiber is in
std::vector<host_cuda::Meeting> ends;      // where a rank's grids follow each other
std::vector<int64_t> calls_made;           // by fiber
std::vector<unsigned> ended;               // fibers of each rank that have made all calls
unsigned blocks_of_rank;
int64_t most_delay, still_rank, still_call;

unsigned MyRank() { return host_cuda::Me().block / blocks_of_rank; }

bool StandsStill() {
  if (MyRank() != still_rank) return false;
  if (calls_made[host_cuda::cluster.current] != still_call) return false;
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    if (rank != MyRank() && ended[rank] != blocks_of_rank * blockDim.x) return true;
  }
  return false;
}

ExchangeInput ExchangeOf(const HostGroup& group, int64_t rank, const HostCall& call) {
  return {group.buffers, group.ranks, rank, group.half_bytes, call.half, group.limit_ns};
}

Error LaunchCall(const HostGroup& group, int64_t rank, const HostCall& call) {
  const ExchangeInput exchange = ExchangeOf(group, rank, call);
  if (call.kind == kGather) return GatherFromRanks(exchange, call.bytes, call.out, nullptr);
  if (call.kind == kErrors)
    return ErrorsOfRanks(exchange, static_cast<int32_t*>(call.out), nullptr);
  const auto part = static_cast<ElementType>(call.part_type);
  const int64_t elements = call.bytes / (part == ElementType::kFloat32 ? 4 : 2);
  const RankSumInput sum{exchange, part, static_cast<ElementType>(call.out_type), elements,
                         static_cast<SumWay>(call.way)};
  if (call.kind == kSum) return SumOverRanks(sum, call.out, nullptr);
  AddNormInput norm{};
  norm.residual = {call.residual, call.columns};
  norm.weight = call.weight;
  norm.eps = 1e-6f;
  norm.rows = elements / call.columns;
  norm.columns = call.columns;
  norm.type = part;
  const Rows out{call.out, call.columns};
  if (call.kind == kSumNorm) return SumOverRanksNorm(sum, norm, call.room, out, nullptr);
  norm.x = {call.room, call.columns};
  const Error error = SumOverRanks(sum, call.room, nullptr);
  return error ? error : AddNorm(norm, out, nullptr);
}

Error Record(const HostGroup& group, int64_t rank, const HostCall& call) {
  char* at = reinterpret_cast<char*>(group.buffers[rank]) + ExchangeHeadBytes();
  auto* half = reinterpret_cast<uint4*>(at + call.half * group.half_bytes);
  const size_t before = streams[rank].size();
  host_cuda::recorder = [&, rank, half](const auto& kernel, const host_cuda::Shape& shape) {
    const bool is_first = streams[rank].size() == before;
    streams[rank].push_back({&call, kernel, shape.grid.x, half, is_first});
    blockDim = {shape.threads, 1, 1};
    blocks_of_rank = max(blocks_of_rank, shape.grid.x);
  };
  return LaunchCall(group, rank, call);
}

void WritePart(const Launch& launch) {
  for (uint64_t turns = host_cuda::Draw() % (most_delay + 1); turns > 0; --turns) {
    host_cuda::Yield();
  }
  const int64_t vectors = launch.call->bytes / 16;
  for (int64_t i = 0; i < vectors; ++i) {
    host_cuda::WriteVector(launch.half + i, launch.call->part[i]);
  }
}

void RunKernel(const Launch& launch) {
  grids[host_cuda::cluster.current] = gridDim.x = launch.blocks;
  host_cuda::Me().waited_for_grids = false;
  host_cuda::BeginKernel();
  launch.kernel();
  if (!host_cuda::Me().waited_for_grids) host_cuda::Fail("a thread waited for no earlier grid", 0);
}

// What a thread of a block number does over all calls of its rank.
void RunRank() {
  const unsigned rank = MyRank();
  for (const Launch& launch : streams[rank]) {
    if (launch.is_first && blockIdx.x == 0 && threadIdx.x == 0) WritePart(launch);
    host_cuda::MeetInOrder(ends[rank], -1);
    if (blockIdx.x < launch.blocks) RunKernel(launch);
    host_cuda::MeetInOrder(ends[rank], -2);
    ++calls_made[host_cuda::cluster.current];
  }
  ++ended[rank];
}

void RunAll(unsigned ranks) {
  const unsigned threads = blockDim.x, fibers = ranks * blocks_of_rank * threads;
  std::vector<host_cuda::Index> blocks;
  for (unsigned b = 0; b < ranks * blocks_of_rank; ++b)
    blocks.push_back({b % blocks_of_rank, 0, 0});
  ends.assign(ranks, {});
  for (auto& end : ends) end.members = blocks_of_rank * threads;
  grids.assign(fibers, 0);
  calls_made.assign(fibers, 0);
  ended.assign(ranks, 0);
  host_cuda::stands_still = StandsStill;
  host_cuda::BeginClocks(fibers);
  host_cuda::cluster.random = host_cuda::settings.seed;
  host_cuda::on_switch = [] { gridDim.x = grids[host_cuda::cluster.current]; };
  host_cuda::RunCluster(RunRank, blocks, threads, 0);
}

}  // namespace

extern "C" {

void host_settings(uint64_t seed, int planted, int finds_races) {
  host_cuda::settings.seed = seed;
  host_cuda::planted = planted;
  host_cuda::finds_races = finds_races != 0;
}

int64_t host_head_bytes() { return ExchangeHeadBytes(); }
int64_t host_launches() { return static_cast<int64_t>(streams.front().size()); }
uint64_t host_nanoseconds() { return host_cuda::nanoseconds; }

Error host_ranks(const HostGroup* group) {
  streams.assign(group->ranks, {});
  blocks_of_rank = 1;
  most_delay = group->most_delay;
  still_rank = group->still_rank;
  still_call = group->still_call;
  host_cuda::failure[0] = 0;
  for (int64_t rank = 0; rank < group->ranks; ++rank) {
    for (int64_t i = 0; i < group->n_calls[rank]; ++i) {
      if (const Error error = Record(*group, rank, group->calls[rank][i])) return error;
    }
  }
  RunAll(static_cast<unsigned>(group->ranks));
  return host_cuda::failure[0] == 0 ? nullptr : host_cuda::failure;
}
}
