// Attention over keys and values in bfloat16 by AMX's tiles, for decoding rows and prefill chunks alike.
//
// As attention.hpp, with up to kTileTaskLines lines in a task, which share the keys and values of a block once these are
// laid out for tiles. Products are of bfloat16 with float32 sums: queries and shares are rounded to it, keys and values are
// it. A line's sums are added up in the same order whatever the number of lines, so it has the same bits in any batch.
#pragma once

#include "attention.hpp"
#include "tiles.hpp"

namespace pando {

constexpr int kTileTaskLines = 96;

// Whether attention over elements of this type is that of tiles.
template <typename Element>
bool attends_by_tiles() {
  return uses_tiles<Element>();
}

#ifdef PANDO_TILES

// Keys, or values, of a block in pairs, as tiles multiply them.
constexpr int kPairRow = kTileDepth, kPairTile = kTileHeight * kPairRow;
constexpr int kBlockDepth = kKeyBlock / kTileDepth;
constexpr int kMaxDepth = (kMaxHeadDim + kTileDepth - 1) / kTileDepth * kTileDepth;
static_assert(kLanes == kTileHeight && kKeyVectors == 4 && kTileTaskLines % kTileHeight == 0, "tiles are full");

struct alignas(64) TileScratch {
  BFloat16 queries[kTileTaskLines * kMaxDepth];    // [lines, depth]: head_dim, filled up with zeros
  float outputs[kTileTaskLines * kMaxHeadDim];     // [lines, head_dim], components in the order of `value_order`
  BFloat16 keys[kKeyBlock * kMaxDepth];            // [kKeyVectors, depth / 2, kLanes, 2]
  BFloat16 values[kKeyBlock * kMaxHeadDim];        // [kBlockDepth, head_dim / kLanes, kTileHeight, kLanes, 2]
  float scores[kTileHeight * kKeyBlock];
  BFloat16 shares[kTileHeight * kKeyBlock];
  Vector sums[kTileTaskLines];
  float maxima[kTileTaskLines];
  int begins[kTileTaskLines], ends[kTileTaskLines];  // of the keys that a line sees
};

inline int depth_of(int head_dim) { return (head_dim + kTileDepth - 1) / kTileDepth * kTileDepth; }

// Words of two rows of 16, one after the other, in pairs.
inline __m512i pair_up(const BFloat16* first, const BFloat16* second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
  return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

inline void lay_out_keys(const KeyBlock<BFloat16>& block, const KeyBlock<BFloat16>& next, int head_dim, int page_size,
                         BFloat16* target) {
  const int depth = depth_of(head_dim);
  for (int v = 0; v < kKeyVectors; ++v)
    for (int i = 0; i < head_dim; i += 2) {
      const long place = static_cast<long>(i) * page_size;
      const BFloat16* keys = block.keys[v] + place;
      fetch(next.keys[v] + place);
      if (page_size > kLanes) fetch(next.keys[v] + place + page_size);
      _mm512_store_si512(target + (v * depth + i) * kLanes, pair_up(keys, keys + page_size));
    }
}

// Pairs of 32 components are made within quarters of a register, so that the first tile has every other four of them.
inline void lay_out_values(const KeyBlock<BFloat16>& block, const KeyBlock<BFloat16>& next, int head_dim,
                           BFloat16* target) {
  const int tiles = head_dim / kLanes;
  for (int k = 0; k < kKeyBlock; k += 2) {
    const BFloat16 *first = block.values[k], *second = block.values[k + 1];
    BFloat16* row = target + k / kTileDepth * tiles * kPairTile + k % kTileDepth / 2 * kPairRow;
    int i = 0;
    for (; i + 2 * kLanes <= head_dim; i += 2 * kLanes, row += 2 * kPairTile) {
      fetch(next.values[k] + i);
      fetch(next.values[k + 1] + i);
      const __m512i lhs = _mm512_loadu_si512(first + i), rhs = _mm512_loadu_si512(second + i);
      _mm512_store_si512(row, _mm512_unpacklo_epi16(lhs, rhs));
      _mm512_store_si512(row + kPairTile, _mm512_unpackhi_epi16(lhs, rhs));
    }
    if (i < head_dim) _mm512_store_si512(row, pair_up(first + i, second + i));
  }
}

// Writes a line of components, laid out as `lay_out_values` does, in their own order, times `factor`.
inline void put_line(const float* line, float factor, int head_dim, float* target) {
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  int i = 0;
  for (; i + 2 * kLanes <= head_dim; i += 2 * kLanes) {
    const __m512 first = _mm512_loadu_ps(line + i), second = _mm512_loadu_ps(line + i + kLanes);
    store(target + i, (Vector)_mm512_permutex2var_ps(first, low, second) * factor);
    store(target + i + kLanes, (Vector)_mm512_permutex2var_ps(first, high, second) * factor);
  }
  if (i < head_dim) store(target + i, load(line + i) * factor);
}

// scores [kTileHeight, kKeyBlock] = queries [kTileHeight, depth] x keys
inline void score_tile(const BFloat16* queries, const BFloat16* keys, int depth, float* scores) {
  constexpr long kLine = kKeyBlock * sizeof(float);
  const long bytes = depth * static_cast<long>(sizeof(BFloat16)), vector = static_cast<long>(depth) * kLanes;
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int i = 0; i < depth; i += kTileDepth) {
    const BFloat16* step = keys + static_cast<long>(i) * kLanes;
    _tile_loadd(6, queries + i, bytes);
    _tile_loadd(7, step, kTileBytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, step + vector, kTileBytes);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(7, step + 2 * vector, kTileBytes);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(7, step + 3 * vector, kTileBytes);
    _tile_dpbf16ps(3, 6, 7);
  }
  _tile_stored(0, scores, kLine);
  _tile_stored(1, scores + kLanes, kLine);
  _tile_stored(2, scores + 2 * kLanes, kLine);
  _tile_stored(3, scores + 3 * kLanes, kLine);
  settle_memory();
}

// outputs [kTileHeight, head_dim] += shares [kTileHeight, kKeyBlock] x values
inline void blend_tile(const BFloat16* shares, const BFloat16* values, int head_dim, float* outputs) {
  constexpr long kLine = kKeyBlock * sizeof(BFloat16);
  const long line = head_dim * static_cast<long>(sizeof(float)), second = static_cast<long>(head_dim) * kTileDepth;
  static_assert(kBlockDepth == 2, "shares fill two registers");
  settle_memory();
  _tile_loadd(5, shares, kLine);
  _tile_loadd(6, shares + kTileDepth, kLine);
  int i = 0;
  for (; i + 2 * kLanes <= head_dim; i += 2 * kLanes) {
    const BFloat16* step = values + static_cast<long>(i) * kTileDepth;
    _tile_loadd(0, outputs + i, line);
    _tile_loadd(1, outputs + i + kLanes, line);
    _tile_loadd(7, step, kTileBytes);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(7, step + kPairTile, kTileBytes);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(7, step + second, kTileBytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, step + second + kPairTile, kTileBytes);
    _tile_dpbf16ps(1, 6, 7);
    _tile_stored(0, outputs + i, line);
    _tile_stored(1, outputs + i + kLanes, line);
  }
  if (i < head_dim) {
    const BFloat16* step = values + static_cast<long>(i) * kTileDepth;
    _tile_loadd(0, outputs + i, line);
    _tile_loadd(7, step, kTileBytes);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(7, step + second, kTileBytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_stored(0, outputs + i, line);
  }
  settle_memory();
}

// 2^x for x <= 0 with a relative error below 2^-22, and 0 below -126, also for -infinity: numbers that are not normal
// would take a hundred times as long. 2^0 is 1. The polynomial is the one of the smallest relative error for fractions in
// [0, 1) that is exact at 0.
inline __m512 power_of_two(__m512 x) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // or NaN, which stays
  const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 series = _mm512_set1_ps(0.0018671300495043397f);
  series = _mm512_fmadd_ps(series, fraction, _mm512_set1_ps(0.009017030708491802f));
  series = _mm512_fmadd_ps(series, fraction, _mm512_set1_ps(0.05579991266131401f));
  series = _mm512_fmadd_ps(series, fraction, _mm512_set1_ps(0.24016444385051727f));
  series = _mm512_fmadd_ps(series, fraction, _mm512_set1_ps(0.6931512951850891f));
  series = _mm512_fmadd_ps(series, fraction, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(is_normal, series, x);
}

// The largest lane of each of 16 registers: half of the lanes are left after each step, of twice as many registers.
inline __m512 largest_of(const __m512 (&lines)[kTileHeight]) {
  __m512 pairs[8], fours[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    pairs[i] = _mm512_max_ps(_mm512_unpacklo_ps(lines[i], lines[i + 8]), _mm512_unpackhi_ps(lines[i], lines[i + 8]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d first = _mm512_castps_pd(pairs[i]), second = _mm512_castps_pd(pairs[i + 4]);
    fours[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
  }
  const __m512 low = _mm512_max_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                                   _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  const __m512 high = _mm512_max_ps(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88),
                                    _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
  const __m512 mixed = _mm512_max_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 13, 9, 5, 1, 14, 10, 6, 2, 12, 8, 4, 0);
  return _mm512_permutexvar_ps(order, mixed);
}

// Bits of the keys from `begin` to `end`, of a block from key `start` on.
inline uint64_t seen_keys(int begin, int end, int start) {
  const int first = std::max(0, begin - start), after = std::min(kKeyBlock, end - start);
  if (first >= after) return 0;
  return ~uint64_t{0} << first & ~uint64_t{0} >> (kKeyBlock - after);
}

// Turns scores of `lines` lines from `first` on into shares, and scales what was summed before to the new maxima.
inline void soften_tile(TileScratch& scratch, int first, int lines, int start, bool is_whole, int head_dim,
                        float softcap) {
  constexpr float kLog2E = 1.44269504f;
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  __m512 highest[kTileHeight];
  if (lines < kTileHeight) std::fill_n(highest, kTileHeight, -infinity);
  for (int line = 0; line < lines; ++line) {
    float* scores = scratch.scores + line * kKeyBlock;
    __m512 score[kKeyVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kKeyVectors; ++v) score[v] = _mm512_load_ps(scores + v * kLanes);
    if (softcap > 0.0f)
      for (int v = 0; v < kKeyVectors; ++v) {
        const Vector bent = softcap - 2.0f * softcap / (exponential((Vector)score[v] * (2.0f / softcap)) + 1.0f);
        score[v] = (__m512)(bent * kLog2E);
        _mm512_store_ps(scores + v * kLanes, score[v]);
      }
    if (!is_whole) {
      const uint64_t seen = seen_keys(scratch.begins[first + line], scratch.ends[first + line], start);
      for (int v = 0; v < kKeyVectors; ++v) {
        score[v] = _mm512_mask_mov_ps(-infinity, static_cast<__mmask16>(seen >> v * kLanes), score[v]);
        _mm512_store_ps(scores + v * kLanes, score[v]);
      }
    }
    highest[line] = _mm512_max_ps(_mm512_max_ps(score[0], score[1]), _mm512_max_ps(score[2], score[3]));
  }
  const __m512 before = _mm512_load_ps(scratch.maxima + first);
  const __m512 after = _mm512_max_ps(before, largest_of(highest));
  _mm512_store_ps(scratch.maxima + first, after);
  alignas(64) float factors[kTileHeight];
  _mm512_store_ps(factors, power_of_two(before - after));
  for (int line = 0; line < lines; ++line) {
    const float* scores = scratch.scores + line * kKeyBlock;
    const __m512 maximum = _mm512_set1_ps(scratch.maxima[first + line]);
    __m512 shares[kKeyVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kKeyVectors; ++v) shares[v] = power_of_two(_mm512_load_ps(scores + v * kLanes) - maximum);
    const __m512 total = (shares[0] + shares[1]) + (shares[2] + shares[3]);
    Vector& sums = scratch.sums[first + line];
    sums = (Vector)_mm512_fmadd_ps((__m512)sums, _mm512_set1_ps(factors[line]), total);
    BFloat16* target = scratch.shares + line * kKeyBlock;
    _mm512_store_si512(target, (__m512i)_mm512_cvtne2ps_pbh(shares[1], shares[0]));
    _mm512_store_si512(target + 2 * kLanes, (__m512i)_mm512_cvtne2ps_pbh(shares[3], shares[2]));
  }
  if (_mm512_cmp_ps_mask(before, after, _CMP_NEQ_UQ) == 0) return;
  for (int line = 0; line < lines; ++line) {
    float* outputs = scratch.outputs + (first + line) * head_dim;
    const Vector factor = broadcast(factors[line]);
    for (int i = 0; i < head_dim; i += kLanes) store(outputs + i, load(outputs + i) * factor);
  }
}

// Lines of a task, from [tokens, heads] of the batch, as tiles want them.
inline void load_lines(const AttentionArguments& a, const AttentionTask& task, int padded, TileScratch& scratch) {
  constexpr float kLog2E = 1.44269504f;
  const int lines = task.tokens * task.heads, depth = depth_of(a.head_dim), position = position_of(a, task);
  const int token = a.query_starts[task.row] + task.first_token;
  const float unit = a.softcap > 0.0f ? 1.0f : kLog2E;  // scores are powers of two once they are bent
  for (int line = 0; line < lines; ++line) {
    const int own = line / task.heads, head = task.first_head + line % task.heads;
    const float* query = a.queries + static_cast<long>(token + own) * a.query_stride + head * a.head_dim;
    BFloat16* target = scratch.queries + line * depth;
    for (int i = 0; i < a.head_dim; i += kLanes) {
      const Vector scaled = load(query + i) * (a.scale * unit);
      _mm256_store_si256(reinterpret_cast<__m256i*>(target + i), (__m256i)_mm512_cvtneps_pbh((__m512)scaled));
    }
    std::fill(target + a.head_dim, target + depth, BFloat16{});
    scratch.begins[line] = least_key(a, position + own);
    scratch.ends[line] = key_end(a, task.row, token + own, position + own);
    scratch.sums[line] = Vector{};
    // A finite maximum: where a line sees no key of its first blocks, its shares are zero and no number is undefined.
    scratch.maxima[line] = std::numeric_limits<float>::lowest();
    if (a.sinks != nullptr) {
      scratch.sums[line][0] = 1.0f;
      scratch.maxima[line] = a.sinks[head] * kLog2E;
    }
  }
  std::fill(scratch.queries + lines * depth, scratch.queries + padded * depth, BFloat16{});
  std::fill(scratch.maxima + lines, scratch.maxima + (lines + kTileHeight - 1) / kTileHeight * kTileHeight, 0.0f);
  std::fill_n(scratch.outputs, padded * a.head_dim, 0.0f);
  // Components after the last one are multiplied with zeros, which must meet finite numbers.
  if (depth > a.head_dim) std::fill_n(scratch.keys, kKeyBlock * depth, BFloat16{});
}

// As `run_task` of attention.hpp.
inline void run_tile_task(const AttentionArguments& a, const AttentionTask& task, const AttentionTask& following,
                          const BFloat16* keys, const BFloat16* values) {
  TileScratch scratch;
  const int lines = task.tokens * task.heads, depth = depth_of(a.head_dim);
  const int height = std::min(lines, kTileHeight);
  load_lines(a, task, lines > kTileHeight ? (lines + kTileHeight - 1) / kTileHeight * kTileHeight : lines, scratch);
  const HeadPages<BFloat16> pages = pages_of(a, task, keys, values);
  const int length = end_of(a, task);
  shape_tiles(height);
  KeyBlock<BFloat16> next = first_block(a, task, keys, values);
  for (int start = pages.least / kKeyBlock * kKeyBlock; start < length; start += kKeyBlock) {
    const KeyBlock<BFloat16> block = next;
    next = start + kKeyBlock < length ? pages.block(start + kKeyBlock, length) : first_block(a, following, keys, values);
    lay_out_keys(block, next, a.head_dim, a.page_size, scratch.keys);
    lay_out_values(block, next, a.head_dim, scratch.values);
    for (int first = 0; first < lines; first += kTileHeight) {
      const int count = std::min(kTileHeight, lines - first);
      const auto [least_begin, last_begin] = std::minmax_element(scratch.begins + first, scratch.begins + first + count);
      const auto [first_end, last_end] = std::minmax_element(scratch.ends + first, scratch.ends + first + count);
      if (*last_end <= start || *least_begin >= start + kKeyBlock) continue;  // shares would be zero
      const bool is_whole = *last_begin <= start && *first_end >= start + kKeyBlock;
      score_tile(scratch.queries + first * depth, scratch.keys, depth, scratch.scores);
      soften_tile(scratch, first, count, start, is_whole, a.head_dim, a.softcap);
      blend_tile(scratch.shares, scratch.values, a.head_dim, scratch.outputs + first * a.head_dim);
    }
  }
  const long first_token = a.query_starts[task.row] + task.first_token;
  for (int line = 0; line < lines; ++line) {
    float* output = a.outputs + (first_token + line / task.heads) * a.query_heads * a.head_dim +
                    (task.first_head + line % task.heads) * a.head_dim;
    put_line(scratch.outputs + line * a.head_dim, 1.0f / sum(scratch.sums[line]), a.head_dim, output);
  }
}

#endif

}  // namespace pando
