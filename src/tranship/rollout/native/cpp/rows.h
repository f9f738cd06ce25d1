// Norms, and drawing a token from each row's logits. kernels.py says what each argument is. No row's result depends on
// the rows beside it.

#pragma once

#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 256;  // tokens of the vocabulary that are summed in fp32

template <class T>
void norm_one(const T* x, const T* weight, int64_t dim, float eps, T* out) {
  vf part[4] = {};
  int64_t d = 0;
  for (; d + 4 * L <= dim; d += 4 * L)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const vf v = load(x + d + i * L);
      part[i] += v * v;
    }
  for (; d + L <= dim; d += L) {
    const vf v = load(x + d);
    part[0] += v * v;
  }
  const vf total = (part[0] + part[1]) + (part[2] + part[3]);
  float rest = 0;
  for (; d < dim; d++) rest += widen(x[d]) * widen(x[d]);
  const float scale = 1.f / std::sqrt((sum(total) + rest) / dim + eps);
  for (d = 0; d < dim; d += L) {
    const int64_t count = std::min<int64_t>(L, dim - d);
    const vf v = load_some(x + d, count) * scale;
    store_some(out + d, weight ? v * load_some(weight + d, count) : v, count);
  }
}

// Rows first .. last of x [rows, inner, dim].
template <class T>
void norm_rows(const T* x, const T* weight, int64_t first, int64_t last, int64_t inner, int64_t dim, int64_t stride,
               int64_t out_stride, float eps, T* out) {
  for (int64_t row = first; row < last; row++)
    for (int64_t i = 0; i < inner; i++)
      norm_one(x + row * stride + i * dim, weight ? weight + i * dim : nullptr, dim, eps,
               out + row * out_stride + i * dim);
}

void draw_row(const float* logits, int64_t vocab, float temperature, double uniform, int64_t* token, float* logprob) {
  const int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK, blocks = padded / BLOCK;
  float* z = scratch(padded);
  thread_local std::vector<double> ends;
  ends.resize(blocks);
  const float infinity = std::numeric_limits<float>::infinity();
  const vf divisor = splat(temperature > 0 ? temperature : 1.f);
  vf high = splat(-infinity);
  int64_t v = 0;
  for (; v + L <= vocab; v += L) {
    vf x = load(logits + v) / divisor;
    store(z + v, x);
    high = larger(high, x);
  }
  for (; v < padded; v++) z[v] = v < vocab ? logits[v] / divisor[0] : -infinity;
  const float best = highest(high_of(z + vocab / L * L, vocab % L, high));
  double total = 0;
  for (int64_t block = 0; block < blocks; block++) {
    vf part = {};
    for (int64_t i = 0; i < BLOCK; i += L) part += exp_neg(load(z + block * BLOCK + i) - best);
    ends[block] = total += sum(part);
  }
  int64_t chosen = 0;
  if (temperature > 0 && total == total) {
    const double target = uniform * total;
    int64_t block = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin();
    if (block == blocks) block = std::lower_bound(ends.begin(), ends.end(), total) - ends.begin();
    double at = block ? ends[block - 1] : 0.0;
    float e[BLOCK];
    for (int64_t i = 0; i < BLOCK; i += L) store(e + i, exp_neg(load(z + block * BLOCK + i) - best));
    for (int64_t i = 0; i < BLOCK; i++) {
      if (e[i] == 0) continue;
      chosen = block * BLOCK + i;
      at += e[i];
      if (at > target) break;
    }
  } else {
    while (chosen + 1 < vocab && z[chosen] != best) chosen++;
  }
  *token = chosen;
  *logprob = float(z[chosen] - best - std::log(total));
}

}  // namespace
