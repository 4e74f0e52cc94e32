// Drives the host kernels without Python, for builds with sanitizers: buffers end exactly where the
// kernels may last read or write. Exits with 1 and a message at the first wrong result.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "baton_ops/cpu/logprobs.h"
#include "baton_ops/cpu/pool.h"
#include "baton_ops/cpu/read_rows.h"
#include "baton_ops/cpu/settings.h"
#include "baton_ops/cpu/verify.h"

namespace {

std::atomic<int64_t> allocations{0};
std::atomic<size_t> largest_array{0};  // of those that are asked for without throwing
std::atomic<bool> refuses_arrays{false};

}  // namespace

void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  size_t largest = largest_array.load();
  while (size > largest && !largest_array.compare_exchange_weak(largest, size)) {
  }
  return refuses_arrays ? nullptr : std::malloc(size);
}

void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

namespace {

using baton_ops::RankMode;
using baton_ops::cpu::LogitType;

#define REQUIRE(condition)                                               \
  if (!(condition)) {                                                    \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                        \
  }

constexpr float kInf = std::numeric_limits<float>::infinity();

// NaN first, then larger, then the lower id.
bool Before(const std::vector<float>& row, int a, int b) {
  const bool nan_a = std::isnan(row[a]);
  const bool nan_b = std::isnan(row[b]);
  if (nan_a != nan_b) return nan_a;
  if (!nan_a && row[a] != row[b]) return row[a] > row[b];
  return a < b;
}

double ExpectedLogprob(const std::vector<float>& row, int id) {
  double max = -kInf;
  double sum = 0;
  for (float x : row) max = std::max<double>(max, x);
  for (float x : row) sum += std::exp(x - max);
  const bool masked = row[id] == -kInf;
  return masked ? baton_ops::kLowestLogprob : row[id] - max - std::log(sum);
}

struct Batch {
  int vocab;
  std::vector<std::vector<float>> rows;
  std::vector<float> floats;
  std::vector<uint16_t> bfloats;
  std::vector<int32_t> token, k, row_offset, topk_offset;
  std::vector<float> logprob, topk_logprob;
  std::vector<int32_t> rank, topk_token;
};

Batch MakeBatch(int vocab, int n_rows, std::mt19937* random, bool specials) {
  const float special[] = {kInf, -kInf, std::nanf(""), 0.0f, -0.0f};
  std::normal_distribution<float> normal(0, 4);
  Batch batch{};
  batch.vocab = vocab;
  for (int t = 0; t < n_rows; ++t) {
    std::vector<float> row(vocab);
    for (float& x : row) {
      // Multiples of 1/8 are exact in bfloat16 here, and tie often.
      x = std::round(std::clamp(normal(*random), -15.0f, 15.0f) * 8) / 8;
      if (specials && (*random)() % 16 == 0) x = special[(*random)() % 5];
      batch.floats.push_back(x);
      batch.bfloats.push_back(baton_ops::BitsOfFloat(x) >> 16);
    }
    batch.rows.push_back(row);
    batch.token.push_back((*random)() % vocab);
    batch.k.push_back(std::min<int>(vocab, static_cast<int>((*random)() % 66) - 1));
    batch.row_offset.push_back(batch.logprob.size());
    batch.topk_offset.push_back(batch.topk_token.size());
    if (batch.k[t] >= 0) batch.logprob.push_back(7);
    batch.topk_token.resize(batch.topk_token.size() + std::max(batch.k[t], 0));
  }
  batch.rank.resize(batch.logprob.size());
  batch.topk_logprob.resize(batch.topk_token.size());
  return batch;
}

void Run(Batch* b, LogitType type) {
  const bool narrow = type == LogitType::kBFloat16;
  const void* logits = narrow ? static_cast<const void*>(b->bfloats.data()) : b->floats.data();
  const int64_t rows = b->rows.size();
  const baton_ops::cpu::LogprobInput in{
      logits,          type,        b->vocab, b->vocab, rows,
      b->token.data(), b->k.data(), nullptr,  nullptr,  RankMode::kAtLeast};
  const baton_ops::cpu::LogprobOutput out{b->row_offset.data(), b->topk_offset.data(),
                                          b->logprob.data(),    b->rank.data(),
                                          b->topk_token.data(), b->topk_logprob.data()};
  baton_ops::cpu::Logprobs(in, out);
}

void CheckRow(const Batch& b, int t) {
  const std::vector<float>& row = b.rows[t];
  std::vector<int> order(b.vocab);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int x, int y) { return Before(row, x, y); });
  for (int i = 0; i < b.k[t]; ++i) REQUIRE(b.topk_token[b.topk_offset[t] + i] == order[i]);
  const double want = ExpectedLogprob(row, b.token[t]);
  const double got = b.logprob[b.row_offset[t]];
  REQUIRE(std::isnan(want) ? std::isnan(got)
                           : std::abs(got - want) <= 2e-6 + 2e-7 * std::abs(want));
}

void CheckLogprobs(const char* isa) {
  if (!baton_ops::cpu::SetKernels(isa)) return;
  std::mt19937 random(1);
  for (int vocab : {1, 2, 7, 8, 9, 127, 128, 129, 1000, 1023, 1024, 1025, 3001}) {
    for (LogitType type : {LogitType::kFloat32, LogitType::kBFloat16}) {
      for (bool specials : {false, true}) {
        Batch batch = MakeBatch(vocab, 5, &random, specials);
        Run(&batch, type);
        for (int t = 0; t < 5; ++t) {
          if (batch.k[t] >= 0) CheckRow(batch, t);
        }
      }
    }
  }
}

// Several callers at once, one of which gets the pool.
void CheckPool() {
  baton_ops::cpu::SetThreadCount(4);
  std::mt19937 random(2);
  const Batch batch = MakeBatch(9000, 64, &random, false);
  Batch alone = batch;
  Run(&alone, LogitType::kFloat32);
  std::vector<Batch> results(3, batch);
  std::vector<std::thread> callers;
  for (Batch& result : results) {
    callers.emplace_back([&result] {
      for (int i = 0; i < 10; ++i) Run(&result, LogitType::kFloat32);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const Batch& result : results) {
    REQUIRE(result.logprob == alone.logprob && result.rank == alone.rank);
    REQUIRE(result.topk_token == alone.topk_token && result.topk_logprob == alone.topk_logprob);
  }
  const int64_t before = allocations.load();
  Run(&alone, LogitType::kFloat32);
  REQUIRE(allocations.load() == before);
}

void CheckVerify() {
  constexpr int kVocab = 5003;
  constexpr int kBatch = 40;
  constexpr int kDrafts = 2;
  std::mt19937 random(3);
  std::uniform_real_distribution<float> unit(0, 1);
  const auto fill = [&](auto* values) {
    for (auto& value : *values) value = unit(random) * 0.999f;
  };
  std::vector<float> p(kBatch * (kDrafts + 1) * kVocab), q(kBatch * kDrafts * kVocab);
  std::vector<double> uniform(kBatch * (kDrafts + 1)), residual(kBatch * (kDrafts + 1));
  fill(&p);
  fill(&q);
  fill(&uniform);
  fill(&residual);
  std::vector<int32_t> draft(kBatch * kDrafts), count(kBatch, kDrafts), cu_rows(kBatch + 1);
  for (int32_t& id : draft) id = random() % kVocab;
  for (int b = 0; b <= kBatch; ++b) cu_rows[b] = b * (kDrafts + 1);
  std::vector<int32_t> n_accepted(kBatch), token(kBatch * (kDrafts + 1));
  const baton_ops::cpu::Drafts drafts{kBatch, kDrafts, draft.data(), count.data(), cu_rows.data()};
  const baton_ops::cpu::Acceptance out{n_accepted.data(), token.data()};
  const baton_ops::cpu::TargetProbs target{p.data(), kVocab, kVocab, uniform.data()};
  const baton_ops::cpu::DraftProbs proposal{q.data(), residual.data()};
  for (const baton_ops::cpu::DraftProbs* with :
       {static_cast<const baton_ops::cpu::DraftProbs*>(nullptr), &proposal}) {
    const auto bad = baton_ops::cpu::VerifySampled(target, with, drafts, out);
    REQUIRE(bad.which == baton_ops::cpu::Distribution::kNone);
    for (int b = 0; b < kBatch; ++b) {
      REQUIRE(n_accepted[b] >= 0 && n_accepted[b] <= kDrafts);
      REQUIRE(token[b * (kDrafts + 1) + n_accepted[b]] >= 0);
    }
  }
}

// The caller's own part of a call may throw; the pool is as good as before.
void CheckThrowing() {
  struct Call {
    std::thread::id caller = std::this_thread::get_id();
    mutable std::atomic<bool> threw{false};
    mutable std::atomic<int> done{0};
  };
  const auto body = [](const void* context, int64_t) {
    const Call& call = *static_cast<const Call*>(context);
    if (std::this_thread::get_id() == call.caller) {
      call.threw = true;
      throw std::bad_alloc();
    }
    while (!call.threw) std::this_thread::yield();  // so that there is something for the caller
    ++call.done;
  };
  const auto count = [](const void* context, int64_t) {
    ++static_cast<const Call*>(context)->done;
  };
  for (int round = 0; round < 20; ++round) {
    const Call call, next;
    bool was_told = false;
    try {
      baton_ops::cpu::ParallelBeside(1000, 4, body, &call);
    } catch (const std::bad_alloc&) {
      was_told = true;
    }
    REQUIRE(was_told);
    baton_ops::cpu::ParallelBeside(1000, 4, count, &next);
    REQUIRE(next.done == 1000);
  }
}

// What is converted goes through a block a thread, and without memory for it the read fails.
void CheckReadMemory() {
  using baton_ops::cpu::Number;
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  const std::vector<uint16_t> values(100 * 1000);
  REQUIRE(std::fwrite(values.data(), 2, values.size(), file) == values.size());
  REQUIRE(std::fflush(file) == 0);
  const baton_ops::cpu::StoredRows rows{fileno(file), 0,          1,
                                        100 * 1000,   200 * 1000, Number::kFloat16};
  std::vector<float> wide(100 * 1000);
  largest_array = 0;
  REQUIRE(ReadRows(rows, Number::kFloat32, wide.data(), 3000, 4).error == 0);
  REQUIRE(largest_array == 3000);
  refuses_arrays = true;
  const auto told = ReadRows(rows, Number::kFloat32, wide.data(), 6000, 4);
  REQUIRE(told.error == ENOMEM && told.at == 0);
  refuses_arrays = false;
  REQUIRE(ReadRows(rows, Number::kFloat32, wide.data(), 6000, 4).error == 0);
  std::fclose(file);
}

// Several callers at once, all of which get threads; one file is read too far.
void CheckReads() {
  using baton_ops::cpu::Number;
  std::mt19937 random(4);
  std::vector<uint16_t> values(100 * 1000);
  for (uint16_t& value : values) value = random() & 0x3FFF;
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  REQUIRE(std::fwrite(values.data(), 2, values.size(), file) == values.size());
  REQUIRE(std::fflush(file) == 0);
  const baton_ops::cpu::StoredRows rows{fileno(file), 400, 100, 800, 2000, Number::kBFloat16};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&rows, &values] {
      std::vector<uint16_t> narrow(100 * 800);
      std::vector<float> wide(100 * 800);
      for (int block_bytes : {1, 5000, 1 << 20}) {
        REQUIRE(ReadRows(rows, Number::kBFloat16, narrow.data(), block_bytes, 4).error == 0);
        REQUIRE(ReadRows(rows, Number::kFloat32, wide.data(), block_bytes, 4).is_finite);
        for (int i = 0; i < 100 * 800; ++i) {
          const uint32_t want = uint32_t{values[200 + i / 800 * 1000 + i % 800]} << 16;
          REQUIRE(narrow[i] == want >> 16 && std::memcmp(&wide[i], &want, 4) == 0);
        }
      }
      baton_ops::cpu::StoredRows beyond = rows;
      beyond.offset = 2000;
      const auto told = ReadRows(beyond, Number::kBFloat16, narrow.data(), 3000, 4);
      REQUIRE(told.error == baton_ops::cpu::kEndOfFile && told.at == 200 * 1000);
    });
  }
  for (std::thread& caller : callers) caller.join();
  std::fclose(file);
}

}  // namespace

int main() {
  CheckLogprobs("portable");
  CheckLogprobs("avx2");
  CheckPool();
  CheckVerify();
  CheckThrowing();
  CheckReadMemory();
  CheckReads();
  std::puts("ok");
}
