// Routed experts: tokens are put together by expert, and each expert's weights are read once. kernels.py says what each
// argument is. What a token gets does not depend on the others.

#pragma once

#include <omp.h>

#include <limits>
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

constexpr int64_t BUSY = 4;  // experts for each thread from which on no expert is shared by threads

// The experts of one row: softmax over all of them, the largest ones, of equal ones the first.
template <class T>
void route_row(const T* logits, int64_t count, int64_t top_k, bool normalised, float scale, int64_t* chosen,
               float* shares) {
  const float lowest = -std::numeric_limits<float>::infinity();
  const int64_t padded = (count + L - 1) / L * L;
  float* p = scratch(padded);
  float high = lowest;
  for (int64_t i = 0; i < padded; i++) {
    p[i] = i < count ? widen(logits[i]) : lowest;
    high = std::max(high, p[i]);
  }
  vf total{};
  for (int64_t i = 0; i < padded; i += L) {
    const vf e = exp_neg(load(p + i) - high);
    store(p + i, e);
    total += e;
  }
  const float all = sum(total);
  float kept = 0;
  for (int64_t k = 0; k < top_k; k++) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
      if (!(p[i] < 0) && (best < 0 || p[i] > p[best])) best = i;
    chosen[k] = best;
    kept += shares[k] = p[best] / all;
    p[best] = -1;
  }
  for (int64_t k = 0; k < top_k; k++) shares[k] = (normalised ? shares[k] / kept : shares[k]) * scale;
}

// The rows of one expert among all pairs of a row and an expert, put together by expert.
struct Stretch {
  int64_t expert, start, rows;
};

struct Together {
  std::vector<int64_t> start, place;
  std::vector<Stretch> stretches;
};

inline void put_together(const Experts& e, Together& to) {
  const int64_t pairs = e.rows * e.top_k;
  to.start.assign(e.count + 1, 0);
  to.place.resize(pairs);
  to.stretches.clear();
  for (int64_t i = 0; i < pairs; i++) to.start[e.chosen[i] + 1]++;
  for (int64_t expert = 0; expert < e.count; expert++) {
    if (to.start[expert + 1]) to.stretches.push_back({expert, to.start[expert], to.start[expert + 1]});
    to.start[expert + 1] += to.start[expert];
  }
  for (int64_t i = 0; i < pairs; i++) to.place[i] = to.start[e.chosen[i]]++;
}

template <class T>
inline void bring_pair(const Experts& e, const Together& to, int64_t i) {
  std::memcpy((T*)e.inputs + to.place[i] * e.hidden, (const T*)e.x + i / e.top_k * e.hidden, e.hidden * sizeof(T));
}

inline int64_t expert_parts(const Together& to, int64_t threads) {
  return (int64_t)to.stretches.size() < BUSY * threads ? threads : 1;
}

// One part of one expert's first product (gate and up), or of its second one.
template <class T>
void expert_product(const Experts& e, const Together& to, bool first, int64_t parts, int64_t unit) {
  const Stretch& s = to.stretches[unit / parts];
  const int64_t inner = first ? e.hidden : e.mlp, width = first ? e.mlp : e.hidden;
  const T* x = (const T*)(first ? e.inputs : e.gated) + s.start * inner;
  T* out = (T*)(first ? e.gated : e.made) + s.start * width;
  const void* weight = (const void*)(first ? e.gate_up : e.down)[s.expert];
  const int64_t columns = first ? 2 * width : width;
  const Product g{x, weight, nullptr, out, s.rows, inner, columns, inner, 0, 0, first ? GATE : NOTHING, out};
  product_share<T, T>(g, unit % parts, parts, nullptr);
}

// Up to a vector of what a row's experts have made, from number d on.
template <class T>
inline vf experts_sum(const Experts& e, const Together& to, int64_t row, int64_t d, int64_t count) {
  vf total{};
  for (int64_t i = row * e.top_k; i < (row + 1) * e.top_k; i++)
    total += load_some((const T*)e.made + to.place[i] * e.hidden + d, count) * e.shares[i];
  return total;
}

template <class T>
void experts(const Experts& e) {
  Together to;
  put_together(e, to);
  const int64_t pairs = e.rows * e.top_k;
#pragma omp parallel if (pairs * e.hidden * e.mlp * 3 > WAKE)
  {
    const int64_t parts = expert_parts(to, omp_get_num_threads()), units = (int64_t)to.stretches.size() * parts;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < pairs; i++) bring_pair<T>(e, to, i);
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; unit++) expert_product<T>(e, to, true, parts, unit);
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; unit++) expert_product<T>(e, to, false, parts, unit);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < e.rows; row++)
      for (int64_t d = 0; d < e.hidden; d += L) {
        const int64_t count = std::min<int64_t>(L, e.hidden - d);
        store_some(e.out + row * e.hidden + d, experts_sum<T>(e, to, row, d, count), count);
      }
  }
}

}  // namespace
