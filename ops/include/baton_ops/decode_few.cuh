// Splits of contexts for up to eight rows, with the bits of DecodeConsumer's: keys and values are
// the products' 64 rows, and the queries, of which there are few, their columns.
//
// So a product is 64 x 8 and not 64 x 128 of mostly zeros, and all tiles of a split are multiplied
// by the queries before the first is weighed. Then each warp has a tile's probabilities: what the
// tiles before it have as their largest score is all that one needs to know of them. What is left
// to do in order are the products with values.
#ifndef BATON_OPS_DECODE_FEW_CUH_
#define BATON_OPS_DECODE_FEW_CUH_

#include "baton_ops/decode_work.cuh"

namespace baton_ops::cuda {

constexpr int kFewDecodeRows = 8;
static_assert(kSplitTiles == kDecodeConsumers / 32);

// Lies where other rows' queries would. Of a tile first its scores, then its probabilities, that
// are laid out as queries are.
struct DecodeFewShared {
  // From one row's scores to the next; so lanes of a quad, and quads, have banks of their own.
  static constexpr int kScoresOfRow = kTile + 8;
  struct alignas(1024) Tile {
    float scores[kFewDecodeRows * kScoresOfRow];
  };
  static constexpr int kHalf = kFewDecodeRows * 128;  // of queries or probabilities
  alignas(1024) uint8_t q[2 * kHalf];
  Tile tiles[kSplitTiles];
  // Of a tile's rows: the largest score, what is multiplied by what was made before, and the lanes'
  // sums of probabilities.
  float tops[kSplitTiles][kFewDecodeRows], alphas[kSplitTiles][kFewDecodeRows];
  float sums[kSplitTiles][kFewDecodeRows][4];
};
static_assert(sizeof(DecodeFewShared) <= kQueryBytes);

// A lane has row `lane / 4` of a tile that its warp makes probabilities of, and of sums. Of what is
// made it has elements 64 i + 16 warp + 8 h + lane / 4 of rows lane % 4 * 2 and the next: at [i][2
// h] and [i][2 h + 1].
class DecodeFewConsumer : DecodeWork {
 public:
  __device__ DecodeFewConsumer(DecodeShared& shared, const PagedKeys& keys,
                               const DecodeShape& shape, const DecodeLeft& left)
      : DecodeWork(shared, keys, shape, left),
        few_(*reinterpret_cast<DecodeFewShared*>(shared.q)),
        warp_(threadIdx.x / 32),
        row_(threadIdx.x % 32 / 4) {}

  __device__ __forceinline__ void Compute(const __nv_bfloat16* q, __nv_bfloat16* out) {
    ClearQueries<sizeof(few_.q)>();
    shared_.contexts.ForEachRun(shape_.rows, keys_.kv_heads, [&](const Run& run) {
      const DecodeMerge merge(left_, shape_, shared_.contexts, run);
      LoadQueries<DecodeFewShared::kHalf>(run, q);
      position_ = run.context - shape_.queries + row_ / shape_.heads_a_kv;
      SoftmaxRow all;
      ForEachElement([&](int i, int j) { total_[i][j] = 0.f; });
#pragma unroll 1
      for (int split = run.first; split < run.last; ++split) {
        const SoftmaxRow row = Attend(run, split);
        if (run.first == 0) {
          MergeSplit(all, row);
        } else {
          Leave(row, made_, split - run.first);
        }
      }
      if (run.IsWhole()) {
        Store(run, all, out);
      } else {
        if (run.first == 0) Leave(all, total_, left_.slots - 1);
        Bring(run, merge, out);
      }
    });
  }

 private:
  template <class Body>
  static __device__ __forceinline__ void ForEachElement(Body body) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) body(i, j);
    }
  }
  // Which row, and where in it, an element is.
  __device__ __forceinline__ int RowOf(int j) const { return quad_ * 2 + j % 2; }
  __device__ __forceinline__ int PlaceOf(int i, int j) const {
    return i * 64 + warp_ * 16 + j / 2 * 8 + row_;
  }
  // What the lanes of row RowOf(j) have.
  __device__ __forceinline__ float OfRow(float value, int j) const {
    return __shfl_sync(~0u, value, RowOf(j) * 4);
  }

  __device__ __forceinline__ SoftmaxRow Attend(const Run& run, int split) {
    const int tiles = run.Tiles(split), first_key = split * kSplitKeys;
    for (int tile = 0; tile < tiles; ++tile) Score(tile);
    Sync();
    SoftenTiles(tiles, first_key);
    Sync();
    SoftmaxRow row;
    ForEachElement([&](int i, int j) { made_[i][j] = 0.f; });
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      row.top = fmaxf(row.top, few_.tops[tile][row_]);
      row.sum = fmaf(row.sum, few_.alphas[tile][row_], few_.sums[tile][row_][quad_]);
      ForEachElement([&](int i, int j) { made_[i][j] *= few_.alphas[tile][RowOf(j)]; });
      Weigh(tile, run.context - first_key - tile * kTile);
    }
    Sync();  // the next split's scores lie where these probabilities do
    return row;
  }

  // Scores of a tile's keys: row r, key k at [r * kScoresOfRow + k].
  __device__ __forceinline__ void Score(int tile) {
    const UniformDescriptor q(few_.q), keys(NextTile());
    float sums[2][4];
    Settle(sums);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint64_t queries = q.Behind(i / 4 * DecodeFewShared::kHalf) + i % 4 * 2;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint64_t rows = keys.Behind(i / 4 * kHalfBytes + part * 64 * 128) + i % 4 * 2;
        Wgmma<kFewDecodeRows>::Multiply(sums[part], rows, queries, i != 0);
      }
    }
    Finish(sums);
    ReleaseTile();
    ForEachElement([&](int i, int j) {
      few_.tiles[tile].scores[RowOf(j) * DecodeFewShared::kScoresOfRow + PlaceOf(i, j)] =
          sums[i][j];
    });
  }

  // Makes probabilities of all tiles' scores, a tile by a warp, as Soften does one after the other.
  __device__ __forceinline__ void SoftenTiles(int tiles, int first_key) {
    float scores[64];  // as Soften wants them: of two rows, of which only the first is there
    SoftmaxRow row;
    const bool is_there = warp_ < tiles;
    if (is_there) {
      LoadScores(scores, first_key + warp_ * kTile);
      SoftmaxRow own;
      float largest = scores[0];
#pragma unroll
      for (int j = 1; j < 32; ++j) largest = fmaxf(largest, scores[j / 2 * 4 + j % 2]);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      own.top = fmaxf(own.top, __fmul_rn(largest, shape_.scale_log2));
      if (quad_ == 0) few_.tops[warp_][row_] = own.top;
    }
    Sync();
    if (is_there) {
      for (int tile = 0; tile < warp_; ++tile) row.top = fmaxf(row.top, few_.tops[tile][row_]);
      const float alpha = Soften(row, scores, 0, shape_.scale_log2);
      if (quad_ == 0) few_.alphas[warp_][row_] = alpha;
      few_.sums[warp_][row_][quad_] = row.sum;
      StoreWeights(scores);
    }
    PublishShared();
  }

  // Of a tile's row, the lane's columns, of which what a query must not see is hidden.
  __device__ __forceinline__ void LoadScores(float (&scores)[64], int first_key) const {
    const float* own = few_.tiles[warp_].scores + row_ * DecodeFewShared::kScoresOfRow + quad_ * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(own + j * 8);
      const int key = first_key + j * 8 + quad_ * 2;
      scores[j * 4] = key > position_ ? -INFINITY : pair.x;
      scores[j * 4 + 1] = key + 1 > position_ ? -INFINITY : pair.y;
    }
  }

  // Rounds probabilities, and stores them where the tile's scores were.
  __device__ __forceinline__ void StoreWeights(const float (&scores)[64]) {
    __syncwarp();
    uint8_t* own = reinterpret_cast<uint8_t*>(few_.tiles + warp_) + row_ * 128 + quad_ * 4;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      *reinterpret_cast<uint32_t*>(own + j / 8 * DecodeFewShared::kHalf + (j % 8 ^ row_) * 16) =
          PackedPair(scores[j * 4], scores[j * 4 + 1]);
    }
  }

  // Adds the weighted values of a tile, of which so many are there.
  __device__ __forceinline__ void Weigh(int tile, int there) {
    uint8_t* values = NextTile();
    if (there < kTile) {
      ClearValues(values, there);
      Sync();
    }
    const UniformDescriptor weights(few_.tiles + tile), rows(values);
    Settle(made_);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint64_t columns = weights.Behind(i / 4 * DecodeFewShared::kHalf) + i % 4 * 2;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        WgmmaOfTurned::Add(made_[part], rows.Behind(part * kHalfBytes + i * 2048), columns);
      }
    }
    Finish(made_);
    ReleaseTile();
  }

  static __device__ __forceinline__ void Settle(float (&sums)[2][4]) {
    Hold(sums[0]);
    Hold(sums[1]);
    FenceProducts();
  }
  static __device__ __forceinline__ void Finish(float (&sums)[2][4]) {
    CommitProducts();
    AwaitProducts<0>();
    Hold(sums[0]);
    Hold(sums[1]);
  }

  __device__ __forceinline__ void MergeSplit(SoftmaxRow& all, const SoftmaxRow& row) {
    const Merge merged(all, row);
    Merge of_rows[2] = {merged, merged};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      of_rows[j].before = OfRow(merged.before, j);
      of_rows[j].next = OfRow(merged.next, j);
    }
    ForEachElement(
        [&](int i, int j) { total_[i][j] = of_rows[j % 2].Sum(total_[i][j], made_[i][j]); });
  }

  __device__ __forceinline__ void Store(const Run& run, const SoftmaxRow& all, __nv_bfloat16* out) {
    const float share = ShareOf(all.sum), shares[2] = {OfRow(share, 0), OfRow(share, 1)};
    ForEachElement([&](int i, int j) {
      if (RowOf(j) >= shape_.UsedRows()) return;
      out[Element(run, RowOf(j)) + PlaceOf(i, j)] =
          __float2bfloat16_rn(total_[i][j] * shares[j % 2]);
    });
  }

  __device__ __forceinline__ void Leave(const SoftmaxRow& row, const float (&made)[2][4],
                                        int slot) {
    const uint32_t first = left_.Place(blockIdx.x, slot, shape_.UsedRows(), 0);
    if (warp_ == 0 && row_ < shape_.UsedRows()) {
      left_.sums[(first + row_) * 4 + quad_] = row.sum;
      if (quad_ == 0) left_.tops[first + row_] = row.top;
    }
    ForEachElement([&](int i, int j) {
      if (RowOf(j) >= shape_.UsedRows()) return;
      left_.made[static_cast<size_t>(first + RowOf(j)) * kHeadDim + PlaceOf(i, j)] = made[i][j];
    });
  }

  DecodeFewShared& few_;
  const int warp_, row_;
  int position_ = 0;
  float made_[2][4], total_[2][4];
};

}  // namespace baton_ops::cuda

#endif  // BATON_OPS_DECODE_FEW_CUH_
