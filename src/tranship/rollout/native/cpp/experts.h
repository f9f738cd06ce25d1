// The routed experts of one layer in one go: tokens are put together by expert, each expert's weights are read once.
// kernels.py says what each argument is. What a token gets does not depend on the others.

#pragma once

#include <omp.h>

#include <vector>

#include "products.h"

struct Experts {
  const void* x;
  const int64_t* chosen;
  const float* shares;
  const int64_t *gate_up, *down;
  int64_t rows, hidden, mlp, count, top_k;
  int32_t wide;
  void *inputs, *gated, *made;
  float* out;
};

namespace {

constexpr int64_t BUSY = 4;  // experts for each thread from which on an expert is not shared by threads

// The rows of one expert among all, put together by expert.
struct Stretch {
  int64_t expert, start, rows;
};

template <class T>
void experts_product(const Experts& e, const std::vector<Stretch>& stretches, int64_t parts, bool first) {
  const int64_t inner = first ? e.hidden : e.mlp, columns = first ? 2 * e.mlp : e.hidden;
  const int64_t width = first ? e.mlp : e.hidden;
  const T* x = (const T*)(first ? e.inputs : e.gated);
  T* out = (T*)(first ? e.gated : e.made);
#pragma omp for schedule(dynamic, 1)
  for (int64_t unit = 0; unit < (int64_t)stretches.size() * parts; unit++) {
    const Stretch& s = stretches[unit / parts];
    const void* weight = (const void*)(first ? e.gate_up : e.down)[s.expert];
    T* to = out + s.start * width;
    Product g{x + s.start * inner, weight, nullptr, to, s.rows, inner, columns, inner, 0, 0, first ? GATE : NOTHING, to};
    product_share<T, T>(g, unit % parts, parts, nullptr);
  }
}

template <class T>
void experts(const Experts& e) {
  const int64_t pairs = e.rows * e.top_k;
  std::vector<int64_t> start(e.count + 1), place(pairs);
  for (int64_t i = 0; i < pairs; i++) start[e.chosen[i] + 1]++;
  std::vector<Stretch> stretches;
  for (int64_t expert = 0; expert < e.count; expert++) {
    if (start[expert + 1]) stretches.push_back({expert, start[expert], start[expert + 1]});
    start[expert + 1] += start[expert];
  }
  for (int64_t i = 0; i < pairs; i++) place[i] = start[e.chosen[i]]++;
#pragma omp parallel if (pairs * e.hidden * e.mlp * 3 > (1 << 20))
  {
    const int64_t threads = omp_get_num_threads();
    const int64_t parts = (int64_t)stretches.size() < BUSY * threads ? threads : 1;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < pairs; i++)
      std::memcpy((T*)e.inputs + place[i] * e.hidden, (const T*)e.x + i / e.top_k * e.hidden, e.hidden * sizeof(T));
    experts_product<T>(e, stretches, parts, true);
    experts_product<T>(e, stretches, parts, false);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < e.rows; row++)
      for (int64_t d = 0; d < e.hidden; d += L) {
        const int64_t count = std::min<int64_t>(L, e.hidden - d);
        vf total{};
        for (int64_t i = row * e.top_k; i < (row + 1) * e.top_k; i++)
          total += load_some((const T*)e.made + place[i] * e.hidden + d, count) * e.shares[i];
        store_some(e.out + row * e.hidden + d, total, count);
      }
  }
}

}  // namespace
