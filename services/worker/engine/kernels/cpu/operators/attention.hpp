// Attention over paged keys and values, for decoding rows and prefill chunks alike: causal, but for blocks of tokens that
// see each other, and for rows of an encoder, which see all of their keys.
//
// A task takes up to kMaxLines lines (pairs of token and query head) that share a KV head, and goes through their keys
// block by block with a running maximum and sum (online softmax: Milakov and Gimelshein 2018). Blocks begin at
// multiples of kKeyBlock keys and masked keys add exact zeros, so a token's result depends neither on the chunk that it
// came in nor on its neighbours. Keys lie with successive keys in successive lanes: scores need no sum across lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector.hpp"

namespace pando {

constexpr int kKeyVectors = 4;
constexpr int kKeyBlock = kKeyVectors * kLanes;
constexpr int kDimVectors = 4;
constexpr int kMaxLines = 24;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileLines = 6;  // 6 x 4 sums, 4 keys and 1 query in 32 registers
#else
constexpr int kTileLines = 3;
#endif

struct AttentionArguments {
  const float* queries;        // [tokens, query_heads * head_dim] in rows `query_stride` apart, rotated
  float* outputs;              // [tokens, query_heads * head_dim]
  const int32_t* query_starts; // [rows + 1]
  const int32_t* key_lengths;  // [rows]
  const int32_t* page_table;   // [rows, table_width]
  const float* sinks;          // [query_heads] scores of one more key each, whose value is zero; or null
  const float* key_scales;     // [kv_heads] factors of keys in FP8; null with other types
  const float* value_scales;
  const int32_t* blocks;       // [block_count, 4] row, first token and after the last one in the batch, keys that these see
  int query_stride, rows, table_width, query_heads, kv_heads, head_dim, page_size, threads;
  int window_left;  // keys that a query sees before its own position; negative: all
  int is_chunked;   // whether it sees only those of its own chunk of window_left + 1 tokens
  int block_count;
  int sees_all;     // whether every query sees all keys of its row; there are no blocks then, and no window
  float scale;      // of scores before the softmax
  float softcap;    // scores are bent into (-softcap, softcap) by a hyperbolic tangent; 0: they are not
};

// Lines of one row that share a KV head: `tokens` from `first_token` on, times `heads` query heads from `first_head` on.
struct AttentionTask {
  int row, kv_head, first_token, tokens, first_head, heads;
};

struct alignas(64) AttentionScratch {
  // [lines, head_dim], close together: rows a power of two apart would all fall into the same few sets of the cache.
  float queries[kMaxLines * kMaxHeadDim];
  float outputs[kMaxLines * kMaxHeadDim];
  float scores[kMaxLines][kKeyBlock];
  Vector sums[kMaxLines];
  float maxima[kMaxLines];
};

// Into the second-level cache: the first level has too few requests in flight to keep up with memory.
inline void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

// One block of keys and values, and the block after it, which is fetched into the cache meanwhile.
template <typename Element>
struct KeyBlock {
  const Element* keys[kKeyVectors];  // component 0 of kLanes keys each; the next component is page_size further
  const Element* values[kKeyBlock];  // component 0 of one value each
  int count;                         // keys that exist; pointers after them are valid memory
};

// scores[line][key] = queries[line] . keys[key], for one block.
template <int Lines, typename Element>
inline void score(AttentionScratch& scratch, int first, const KeyBlock<Element>& block, const KeyBlock<Element>& next,
                  int head_dim, int page_size) {
  const float* queries = scratch.queries + first * head_dim;
  Vector sums[Lines][kKeyVectors];
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < kKeyVectors; ++v) sums[line][v] = Vector{};
  for (int i = 0; i < head_dim; ++i) {
    Vector key[kKeyVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kKeyVectors; ++v) key[v] = load(block.keys[v] + static_cast<long>(i) * page_size);
    if (first == 0) {
#pragma GCC unroll 8
      for (int v = 0; v < kKeyVectors; ++v) fetch(next.keys[v] + static_cast<long>(i) * page_size);
    }
#pragma GCC unroll 8
    for (int line = 0; line < Lines; ++line) {
      const Vector query = broadcast(queries[line * head_dim + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kKeyVectors; ++v) sums[line][v] += query * key[v];
    }
  }
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < kKeyVectors; ++v) store(scratch.scores[first + line] + v * kLanes, sums[line][v]);
}

// Adds scores[line] x values for `count` keys and `Vectors` vectors of components from `start` on.
template <int Lines, int Vectors, typename Element>
inline void blend(AttentionScratch& scratch, int first, int start, int head_dim, const KeyBlock<Element>& block,
                  const KeyBlock<Element>& next) {
  float* outputs = scratch.outputs + first * head_dim + start;
  Vector sums[Lines][Vectors];
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < Vectors; ++v) sums[line][v] = load(outputs + line * head_dim + v * kLanes);
  for (int k = 0; k < block.count; ++k) {
    Vector value[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) value[v] = load(block.values[k] + start + v * kLanes);
    if (first == 0) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) fetch(next.values[k] + start + v * kLanes);
    }
#pragma GCC unroll 8
    for (int line = 0; line < Lines; ++line) {
      const Vector share = broadcast(scratch.scores[first + line][k]);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sums[line][v] += share * value[v];
    }
  }
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < Vectors; ++v) store(outputs + line * head_dim + v * kLanes, sums[line][v]);
}

template <int Lines, int Vectors, typename Element>
inline void blend_rest(AttentionScratch& scratch, int first, int start, int vectors, int head_dim,
                       const KeyBlock<Element>& block, const KeyBlock<Element>& next) {
  if (vectors == Vectors) {
    blend<Lines, Vectors>(scratch, first, start, head_dim, block, next);
  } else if constexpr (Vectors > 1) {
    blend_rest<Lines, Vectors - 1>(scratch, first, start, vectors, head_dim, block, next);
  }
}

// Bends a line's scores into (-cap, cap): tanh(x) = 1 - 2 / (e^2x + 1).
inline void bend(AttentionScratch& scratch, int line, float cap) {
  float* scores = scratch.scores[line];
  for (int v = 0; v < kKeyVectors; ++v) {
    const Vector score = load(scores + v * kLanes);
    store(scores + v * kLanes, cap - 2.0f * cap / (exponential(score * (2.0f / cap)) + 1.0f));
  }
}

// Turns a line's scores into shares; keys before `first` and from `visible` on are masked.
inline void soften(AttentionScratch& scratch, int line, int first, int visible, int head_dim) {
  float* scores = scratch.scores[line];
  const float infinity = std::numeric_limits<float>::infinity();
  if (first >= kKeyBlock) {  // the window of a later token begins after this block: it adds exact zeros
    std::fill_n(scores, kKeyBlock, 0.0f);
    return;
  }
  for (int k = 0; k < first; ++k) scores[k] = -infinity;
  for (int k = std::max(0, visible); k < kKeyBlock; ++k) scores[k] = -infinity;
  Vector highest = load(scores);
  for (int v = 1; v < kKeyVectors; ++v) highest = maximum(highest, load(scores + v * kLanes));
  const float before = scratch.maxima[line];
  const float after = std::max(before, largest(highest));
  scratch.maxima[line] = after;
  // At a line's first block nothing was summed yet: the maximum before is -infinity and this factor 0. Where the maximum
  // stays it is 1: multiplying costs less than a branch that cannot be predicted.
  const Vector factor = exponential(broadcast(before) - broadcast(after));
  Vector total = scratch.sums[line] * factor;
  float* outputs = scratch.outputs + line * head_dim;
  for (int i = 0; i < head_dim; i += kLanes) store(outputs + i, load(outputs + i) * factor);
  for (int v = 0; v < kKeyVectors; ++v) {
    const Vector shares = exponential(load(scores + v * kLanes) - broadcast(after));
    store(scores + v * kLanes, shares);
    total += shares;
  }
  scratch.sums[line] = total;
}

template <int Lines, typename Element>
inline void score_lines(AttentionScratch& scratch, int lines, int first, const KeyBlock<Element>& block,
                        const KeyBlock<Element>& next, int head_dim, int page_size) {
  if (lines == Lines) {
    score<Lines>(scratch, first, block, next, head_dim, page_size);
  } else if constexpr (Lines > 1) {
    score_lines<Lines - 1>(scratch, lines, first, block, next, head_dim, page_size);
  }
}

template <int Lines, typename Element>
inline void blend_lines(AttentionScratch& scratch, int lines, int first, const KeyBlock<Element>& block,
                        const KeyBlock<Element>& next, int head_dim) {
  if (lines == Lines) {
    for (int start = 0; start < head_dim; start += kDimVectors * kLanes) {
      const int vectors = std::min(kDimVectors, (head_dim - start) / kLanes);
      blend_rest<Lines, kDimVectors>(scratch, first, start, vectors, head_dim, block, next);
    }
  } else if constexpr (Lines > 1) {
    blend_lines<Lines - 1>(scratch, lines, first, block, next, head_dim);
  }
}

// Where one KV head's pages of one row are.
template <typename Element>
struct HeadPages {
  const Element* keys;
  const Element* values;
  const int32_t* table;
  long page_width;
  int head_dim, page_size;
  int least;  // the first key that anyone sees: pages before it may be gone

  // The block from key `first` on, of a row with `length` keys.
  KeyBlock<Element> block(int first, int length) const {
    KeyBlock<Element> result;
    result.count = std::min(kKeyBlock, length - first);
#pragma GCC unroll 8
    for (int v = 0; v < kKeyVectors; ++v) {
      const int key = std::min(std::max(first + v * kLanes, least / kLanes * kLanes), (length - 1) / kLanes * kLanes);
      result.keys[v] = keys + table[key / page_size] * page_width + key % page_size;
    }
    int key = std::max(first, std::min(least, first + result.count - 1));
    const int start = key;
    while (key < first + result.count) {
      const Element* value = values + table[key / page_size] * page_width + key % page_size * static_cast<long>(head_dim);
      for (int end = std::min(first + result.count, (key / page_size + 1) * page_size); key < end; value += head_dim)
        result.values[key++ - first] = value;
    }
    for (int k = first; k < start; ++k) result.values[k - first] = result.values[start - first];
    for (int k = result.count; k < kKeyBlock; ++k) result.values[k] = result.values[result.count - 1];
    return result;
  }
};

// Position of a task's first token.
inline int position_of(const AttentionArguments& a, const AttentionTask& task) {
  return a.key_lengths[task.row] - (a.query_starts[task.row + 1] - a.query_starts[task.row]) + task.first_token;
}

// The first key that the query at `position` sees.
inline int least_key(const AttentionArguments& a, int position) {
  if (a.window_left < 0) return 0;
  return a.is_chunked ? position - position % (a.window_left + 1) : std::max(0, position - a.window_left);
}

// After the last key that `token` of the batch sees, whose own key is the one of `row` at `position`.
inline int key_end(const AttentionArguments& a, int row, int token, int position) {
  if (a.sees_all) return a.key_lengths[row];
  for (int i = 0; i < a.block_count; ++i) {
    const int32_t* block = a.blocks + 4 * i;
    if (block[1] <= token && token < block[2]) return block[3];
  }
  return position + 1;
}

// After the last key that anyone sees: a task's last token sees most.
inline int end_of(const AttentionArguments& a, const AttentionTask& task) {
  const int last = task.tokens - 1;
  return key_end(a, task.row, a.query_starts[task.row] + task.first_token + last, position_of(a, task) + last);
}

template <typename Element>
HeadPages<Element> pages_of(const AttentionArguments& a, const AttentionTask& task, const Element* keys,
                            const Element* values) {
  const long page_width = static_cast<long>(a.kv_heads) * a.head_dim * a.page_size;
  const long head_start = static_cast<long>(task.kv_head) * a.head_dim * a.page_size;
  const int32_t* table = a.page_table + static_cast<long>(task.row) * a.table_width;
  const int least = least_key(a, position_of(a, task));
  return {keys + head_start, values + head_start, table, page_width, a.head_dim, a.page_size, least};
}

// The first block of a task, which begins at a multiple of kKeyBlock.
template <typename Element>
KeyBlock<Element> first_block(const AttentionArguments& a, const AttentionTask& task, const Element* keys,
                              const Element* values) {
  const HeadPages<Element> pages = pages_of(a, task, keys, values);
  return pages.block(pages.least / kKeyBlock * kKeyBlock, end_of(a, task));
}

// `following` is what this thread probably does next: its first block is fetched during the last one of `task`.
template <typename Element>
void run_task(const AttentionArguments& a, const AttentionTask& task, const AttentionTask& following,
              const Element* keys, const Element* values) {
  AttentionScratch scratch;
  const int lines = task.tokens * task.heads;
  const int position = position_of(a, task);  // line i belongs to the token at position + i / heads
  const long first_token = a.query_starts[task.row] + task.first_token, first_head = task.first_head * a.head_dim;
  const float scale = a.scale * (a.key_scales ? a.key_scales[task.kv_head] : 1.0f);
  const float value_scale = a.value_scales ? a.value_scales[task.kv_head] : 1.0f;
  for (int line = 0; line < lines; ++line) {
    const float* query = a.queries + (first_token + line / task.heads) * a.query_stride + first_head +
                         line % task.heads * a.head_dim;
    for (int i = 0; i < a.head_dim; ++i) scratch.queries[line * a.head_dim + i] = query[i] * scale;
    std::fill_n(scratch.outputs + line * a.head_dim, a.head_dim, 0.0f);
    scratch.sums[line] = Vector{};
    scratch.maxima[line] = -std::numeric_limits<float>::infinity();
    if (a.sinks != nullptr) {
      scratch.sums[line][0] = 1.0f;
      scratch.maxima[line] = a.sinks[task.first_head + line % task.heads];
    }
  }
  const HeadPages<Element> pages = pages_of(a, task, keys, values);
  const int length = end_of(a, task);
  int ends[kMaxLines];  // of each token
  for (int i = 0; i < task.tokens; ++i) ends[i] = key_end(a, task.row, static_cast<int>(first_token) + i, position + i);
  KeyBlock<Element> next = first_block(a, task, keys, values);
  for (int start = pages.least / kKeyBlock * kKeyBlock; start < length; start += kKeyBlock) {
    const KeyBlock<Element> block = next;
    next = start + kKeyBlock < length ? pages.block(start + kKeyBlock, length) : first_block(a, following, keys, values);
    for (int first = 0; first < lines; first += kTileLines)
      score_lines<kTileLines>(scratch, std::min(kTileLines, lines - first), first, block, next, a.head_dim, a.page_size);
    for (int line = 0; line < lines; ++line) {
      const int own = position + line / task.heads;
      if (a.softcap > 0.0f) bend(scratch, line, a.softcap);
      soften(scratch, line, least_key(a, own) - start, ends[line / task.heads] - start, a.head_dim);
    }
    for (int first = 0; first < lines; first += kTileLines)
      blend_lines<kTileLines>(scratch, std::min(kTileLines, lines - first), first, block, next, a.head_dim);
  }
  for (int line = 0; line < lines; ++line) {
    float* output = a.outputs + (first_token + line / task.heads) * a.query_heads * a.head_dim + first_head +
                    line % task.heads * a.head_dim;
    const float divisor = sum(scratch.sums[line]);
    for (int i = 0; i < a.head_dim; ++i) output[i] = scratch.outputs[line * a.head_dim + i] / divisor * value_scale;
  }
}

}  // namespace pando
