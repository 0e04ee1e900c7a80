// Attention of a batch as tasks that threads share, by the operators of the element type of keys and values.
#pragma once

#include "attention.hpp"
#include "tile_attention.hpp"

namespace pando {

// Tokens whose lines a task takes together. Tiles take more of them, so that a block is laid out for many, unless threads
// would wait: results do not depend on it.
template <typename Element>
int tokens_per_task(const AttentionArguments& a, int heads) {
  const int most = (attends_by_tiles<Element>() ? kTileTaskLines : kMaxLines) / heads;
  if (!attends_by_tiles<Element>()) return std::max(1, most);
  const long shared = static_cast<long>(a.query_starts[a.rows]) * a.kv_heads / (8 * a.threads);
  return std::max(1, std::min(most, std::max(kTileTaskLines / 4 / heads, static_cast<int>(shared))));
}

// Longest tasks come first, so that no thread begins a long one when the others are done: a row's last tokens see most.
template <typename Element>
std::vector<AttentionTask> split_tasks(const AttentionArguments& a) {
  std::vector<AttentionTask> tasks;
  const int group = a.query_heads / a.kv_heads, heads = std::min(group, kMaxLines);
  const int step = tokens_per_task<Element>(a, heads);
  for (int row = a.rows - 1; row >= 0; --row) {
    const int tokens = a.query_starts[row + 1] - a.query_starts[row];
    for (int last = tokens; last > 0; last -= step) {
      const int first = std::max(0, last - step);
      for (int kv_head = 0; kv_head < a.kv_heads; ++kv_head)
        for (int head = 0; head < group; head += heads)
          tasks.push_back({row, kv_head, first, last - first, kv_head * group + head, std::min(heads, group - head)});
    }
  }
  return tasks;
}

template <typename Element>
void run_any_task(const AttentionArguments& a, const AttentionTask& task, const AttentionTask& following,
                  const Element* keys, const Element* values) {
#ifdef PANDO_TILES
  if constexpr (std::is_same_v<Element, BFloat16>)
    if (attends_by_tiles<Element>()) return run_tile_task(a, task, following, keys, values);
#endif
  run_task(a, task, following, keys, values);
}

// Runs all tasks, with the threads of the parallel region around it, and waits for them. Tasks that follow each other read
// neighbouring memory, but a thread must not hold back many of them.
template <typename Element>
void share_tasks(const AttentionArguments& a, const std::vector<AttentionTask>& tasks, const Element* keys,
                 const Element* values) {
  const int count = static_cast<int>(tasks.size());
  const int chunk = std::max(1, std::min(a.kv_heads, count / (8 * a.threads)));
#pragma omp for schedule(dynamic, chunk)
  for (int i = 0; i < count; ++i) run_any_task(a, tasks[i], tasks[std::min(i + 1, count - 1)], keys, values);
}

template <typename Element>
void attend(const AttentionArguments& a, const Element* keys, const Element* values) {
  const std::vector<AttentionTask> tasks = split_tasks<Element>(a);
#pragma omp parallel num_threads(a.threads)
  {
    share_tasks(a, tasks, keys, values);
    release_tiles();
  }
}

}  // namespace pando
