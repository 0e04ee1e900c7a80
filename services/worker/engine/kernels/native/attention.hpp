// Causal attention over paged keys and values, for decoding rows and prefill chunks alike.
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
constexpr int kMaxHeadDim = 256;
constexpr int kMaxLines = 24;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileLines = 6;  // 6 x 4 sums, 4 keys and 1 query in 32 registers
#else
constexpr int kTileLines = 3;
#endif

struct AttentionArguments {
  const float* queries;        // [tokens, query_heads * head_dim], rotated
  float* outputs;              // as queries
  const int32_t* query_starts; // [rows + 1]
  const int32_t* key_lengths;  // [rows]
  const int32_t* page_table;   // [rows, table_width]
  int rows, table_width, query_heads, kv_heads, head_dim, page_size, threads;
};

// Lines of one row that share a KV head: `tokens` from `first_token` on, times `heads` query heads from `first_head` on.
struct AttentionTask {
  int row, kv_head, first_token, tokens, first_head, heads;
};

struct alignas(64) AttentionScratch {
  float queries[kMaxLines][kMaxHeadDim];
  float outputs[kMaxLines][kMaxHeadDim];
  float scores[kMaxLines][kKeyBlock];
  Vector sums[kMaxLines];
  float maxima[kMaxLines];
};

// scores[line][key] = queries[line] . keys[key], for one block of keys; `keys` has a pointer per kLanes keys.
template <int Lines, typename Element>
inline void score(AttentionScratch& scratch, int first, const Element* const (&keys)[kKeyVectors], int head_dim,
                  int page_size) {
  Vector sums[Lines][kKeyVectors];
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < kKeyVectors; ++v) sums[line][v] = Vector{};
  for (int i = 0; i < head_dim; ++i) {
    Vector key[kKeyVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kKeyVectors; ++v) key[v] = load(keys[v] + static_cast<long>(i) * page_size);
#pragma GCC unroll 8
    for (int line = 0; line < Lines; ++line) {
      const Vector query = broadcast(scratch.queries[first + line][i]);
#pragma GCC unroll 4
      for (int v = 0; v < kKeyVectors; ++v) sums[line][v] += query * key[v];
    }
  }
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < kKeyVectors; ++v) store(scratch.scores[first + line] + v * kLanes, sums[line][v]);
}

// Adds scores[line] x values for `count` keys and `Vectors` vectors of components from `start` on.
template <int Lines, int Vectors, typename Element>
inline void blend(AttentionScratch& scratch, int first, int start, const Element* const* values, int count) {
  Vector sums[Lines][Vectors];
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < Vectors; ++v) sums[line][v] = load(scratch.outputs[first + line] + start + v * kLanes);
  for (int k = 0; k < count; ++k) {
    Vector value[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) value[v] = load(values[k] + start + v * kLanes);
#pragma GCC unroll 8
    for (int line = 0; line < Lines; ++line) {
      const Vector share = broadcast(scratch.scores[first + line][k]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[line][v] += share * value[v];
    }
  }
  for (int line = 0; line < Lines; ++line)
    for (int v = 0; v < Vectors; ++v) store(scratch.outputs[first + line] + start + v * kLanes, sums[line][v]);
}

template <int Lines, int Vectors, typename Element>
inline void blend_rest(AttentionScratch& scratch, int first, int start, int vectors, const Element* const* values,
                       int count) {
  if (vectors == Vectors) {
    blend<Lines, Vectors>(scratch, first, start, values, count);
  } else if constexpr (Vectors > 1) {
    blend_rest<Lines, Vectors - 1>(scratch, first, start, vectors, values, count);
  }
}

// Turns a line's scores into shares; keys from `visible` on are masked.
inline void soften(AttentionScratch& scratch, int line, int visible, int head_dim) {
  float* scores = scratch.scores[line];
  const float infinity = std::numeric_limits<float>::infinity();
  for (int k = std::max(0, visible); k < kKeyBlock; ++k) scores[k] = -infinity;
  Vector highest = load(scores);
  for (int v = 1; v < kKeyVectors; ++v) highest = maximum(highest, load(scores + v * kLanes));
  const float before = scratch.maxima[line];
  const float after = std::max(before, largest(highest));
  if (after > before) {
    // Nothing was summed yet at the first block, where `before` is -infinity and the factor 0.
    const Vector factor = exponential(broadcast(before) - broadcast(after));
    scratch.sums[line] *= factor;
    for (int i = 0; i < head_dim; i += kLanes)
      store(scratch.outputs[line] + i, load(scratch.outputs[line] + i) * factor);
    scratch.maxima[line] = after;
  }
  for (int v = 0; v < kKeyVectors; ++v) {
    const Vector shares = exponential(load(scores + v * kLanes) - broadcast(after));
    store(scores + v * kLanes, shares);
    scratch.sums[line] += shares;
  }
}

template <int Lines, typename Element>
inline void run_lines(AttentionScratch& scratch, int lines, int first, int head_dim, int page_size,
                      const Element* const (&keys)[kKeyVectors], const Element* const* values, int count, bool scores) {
  if (lines == Lines) {
    if (scores) {
      score<Lines>(scratch, first, keys, head_dim, page_size);
      return;
    }
    for (int start = 0; start < head_dim; start += kDimVectors * kLanes) {
      const int vectors = std::min(kDimVectors, (head_dim - start) / kLanes);
      blend_rest<Lines, kDimVectors>(scratch, first, start, vectors, values, count);
    }
  } else if constexpr (Lines > 1) {
    run_lines<Lines - 1>(scratch, lines, first, head_dim, page_size, keys, values, count, scores);
  }
}

template <typename Element>
void run_task(const AttentionArguments& a, const AttentionTask& task, const Element* keys, const Element* values) {
  AttentionScratch scratch;
  const int lines = task.tokens * task.heads;
  const int new_tokens = a.query_starts[task.row + 1] - a.query_starts[task.row];
  // The position of the task's first token; line i belongs to token i / heads.
  const int position = a.key_lengths[task.row] - new_tokens + task.first_token;
  const long width = static_cast<long>(a.query_heads) * a.head_dim;
  const long origin = (a.query_starts[task.row] + task.first_token) * width + static_cast<long>(task.first_head) * a.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim));
  for (int line = 0; line < lines; ++line) {
    const float* query = a.queries + origin + line / task.heads * width + line % task.heads * a.head_dim;
    for (int i = 0; i < a.head_dim; ++i) scratch.queries[line][i] = query[i] * scale;
    std::fill_n(scratch.outputs[line], a.head_dim, 0.0f);
    scratch.sums[line] = Vector{};
    scratch.maxima[line] = -std::numeric_limits<float>::infinity();
  }
  const int32_t* table = a.page_table + static_cast<long>(task.row) * a.table_width;
  const long page_width = static_cast<long>(a.kv_heads) * a.head_dim * a.page_size;
  const long head_start = static_cast<long>(task.kv_head) * a.head_dim * a.page_size;
  const int keys_seen = position + task.tokens;
  for (int block = 0; block < keys_seen; block += kKeyBlock) {
    const int count = std::min(kKeyBlock, keys_seen - block);
    const Element* key_vectors[kKeyVectors];
    const Element* value_rows[kKeyBlock];
    for (int v = 0; v < kKeyVectors; ++v) {
      // Vectors behind the last key point at valid memory; their scores are masked.
      const int key = std::min(block + v * kLanes, (keys_seen - 1) / kLanes * kLanes);
      key_vectors[v] = keys + table[key / a.page_size] * page_width + head_start + key % a.page_size;
    }
    for (int k = 0; k < count; ++k) {
      const int key = block + k;
      value_rows[k] = values + table[key / a.page_size] * page_width + head_start + key % a.page_size * static_cast<long>(a.head_dim);
    }
    for (int first = 0; first < lines; first += kTileLines)
      run_lines<kTileLines>(scratch, std::min(kTileLines, lines - first), first, a.head_dim, a.page_size, key_vectors, value_rows, count, true);
    for (int line = 0; line < lines; ++line)
      soften(scratch, line, position + line / task.heads + 1 - block, a.head_dim);
    for (int first = 0; first < lines; first += kTileLines)
      run_lines<kTileLines>(scratch, std::min(kTileLines, lines - first), first, a.head_dim, a.page_size, key_vectors, value_rows, count, false);
  }
  for (int line = 0; line < lines; ++line) {
    float* output = a.outputs + origin + line / task.heads * width + line % task.heads * a.head_dim;
    const float divisor = sum(scratch.sums[line]);
    for (int i = 0; i < a.head_dim; ++i) output[i] = scratch.outputs[line][i] / divisor;
  }
}

// Longest tasks come first, so that no thread begins a long one when the others are done: a row's last tokens see most.
inline std::vector<AttentionTask> split_tasks(const AttentionArguments& a) {
  std::vector<AttentionTask> tasks;
  const int group = a.query_heads / a.kv_heads, heads = std::min(group, kMaxLines);
  const int tokens_per_task = std::max(1, kMaxLines / heads);
  for (int row = a.rows - 1; row >= 0; --row) {
    const int tokens = a.query_starts[row + 1] - a.query_starts[row];
    for (int last = tokens; last > 0; last -= tokens_per_task) {
      const int first = std::max(0, last - tokens_per_task);
      for (int kv_head = 0; kv_head < a.kv_heads; ++kv_head)
        for (int head = 0; head < group; head += heads)
          tasks.push_back({row, kv_head, first, last - first, kv_head * group + head, std::min(heads, group - head)});
    }
  }
  return tasks;
}

template <typename Element>
void attend(const AttentionArguments& a, const Element* keys, const Element* values) {
  const std::vector<AttentionTask> tasks = split_tasks(a);
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
  for (size_t i = 0; i < tasks.size(); ++i) run_task(a, tasks[i], keys, values);
}

}  // namespace pando
