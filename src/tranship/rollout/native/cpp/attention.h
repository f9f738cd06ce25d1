// Decode attention of one layer: one new token for each row, over its prompt and its response. kernels.py says what each
// argument is. No row's result depends on the rows beside it.

#pragma once

#include <limits>

#include "vectors.h"

struct Attend {
  const void *q, *keys_in, *values_in;
  int64_t q_stride, kv_stride;
  const float* turns;
  float scale;
  int32_t wide;
  void *keys, *values;
  int64_t room;
  const void *prompt_keys, *prompt_values;
  int64_t prompt_room;
  const int64_t *columns, *prompt_lengths, *order, *units;
  int64_t num_units, heads, repeat, dim;
  void* out;
};

namespace {

constexpr int64_t TILE = 6;          // queries whose sums are kept in registers at a time
constexpr int64_t QUERIES = 12;      // queries that read keys and values together
constexpr int64_t AHEAD = 16 << 10;  // bytes of one row's keys that are asked for before they are used

// What is read after the present part, asked for from memory a few cache lines at a time.
struct Ahead {
  static constexpr int64_t MOST = 2 * QUERIES;
  const char* starts[MOST];
  int64_t lines[MOST], count = 0, segment = 0, line = 0, total = 0;
  void add(const void* start, int64_t bytes) {
    if (count == MOST || !bytes) return;
    starts[count] = (const char*)start, lines[count] = std::min<int64_t>(bytes, AHEAD) / 64, total += lines[count];
    count++;
  }
  void fetch(int64_t wanted) {
    for (; wanted > 0 && segment < count; wanted--) {
      __builtin_prefetch(starts[segment] + 64 * line);
      if (++line == lines[segment]) line = 0, segment++;
    }
  }
};

// dim elements, pairs turned by complex factors (or not), times scale.
template <class T, class U>
inline void turn(const T* x, const float* turns, float scale, int64_t dim, U* out) {
  const vi swapped = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
  const vi evens = {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
  const vi odds = evens + 1;
  const vf sign = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
  for (int64_t d = 0; d < dim; d += L) {
    vf v = load(x + d);
    if (turns) {
      vf t = load(turns + d);
      v = v * __builtin_shuffle(t, evens) + __builtin_shuffle(v, swapped) * sign * __builtin_shuffle(t, odds);
    }
    store(out + d, v * scale);
  }
}

// out[m][t] = q[m] . keys[t] for m < queries and t < count, rounded up to whole vectors (keys has that many rows).
template <class T>
inline void scores(const float* q, int64_t queries, const T* keys, int64_t count, int64_t dim, float* wide,
                   int64_t stride, float* out, Ahead& ahead, int64_t lines) {
  for (int64_t t = 0; t < count; t += L) {
    const float* rows = wide;
    if (sizeof(T) == sizeof(float))
      rows = (const float*)(keys + t * dim);
    else
      for (int64_t d = 0; d < L * dim; d += L) store(wide + d, load(keys + t * dim + d));
    for (int64_t m = 0; m < queries; m++) {
      ahead.fetch(lines);
      const float* one = q + m * dim;
      vf acc[L];
      vf part = load(one);
#pragma GCC unroll 16
      for (int i = 0; i < L; i++) acc[i] = part * load(rows + i * dim);
      for (int64_t d = L; d < dim; d += L) {
        part = load(one + d);
#pragma GCC unroll 16
        for (int i = 0; i < L; i++) acc[i] += part * load(rows + i * dim + d);
      }
      store(out + m * stride + t, sums(acc));
    }
  }
}

// out[m][d] += sum over t < count of probs[m][t] * values[t][d], for M queries and W vectors from column d on.
template <int M, int W, class T>
inline void weigh_tile(const float* probs, int64_t probs_stride, const T* values, int64_t count, int64_t dim,
                       float* out) {
  vf acc[M][W];
  for (int m = 0; m < M; m++)
    for (int w = 0; w < W; w++) acc[m][w] = load(out + m * dim + w * L);
  for (int64_t t = 0; t < count; t++) {
    vf v[W];
    for (int w = 0; w < W; w++) v[w] = load(values + t * dim + w * L);
    for (int m = 0; m < M; m++) {
      vf p = splat(probs[m * probs_stride + t]);
      for (int w = 0; w < W; w++) acc[m][w] += p * v[w];
    }
  }
  for (int m = 0; m < M; m++)
    for (int w = 0; w < W; w++) store(out + m * dim + w * L, acc[m][w]);
}
template <int W, class T>
inline void weigh_queries(const float* probs, int64_t stride, int64_t m, const T* values, int64_t count, int64_t dim,
                          float* out) {
  while (m >= TILE) {
    weigh_tile<TILE, W>(probs, stride, values, count, dim, out);
    probs += TILE * stride, out += TILE * dim, m -= TILE;
  }
  switch (m) {
    case 5: return weigh_tile<5, W>(probs, stride, values, count, dim, out);
    case 4: return weigh_tile<4, W>(probs, stride, values, count, dim, out);
    case 3: return weigh_tile<3, W>(probs, stride, values, count, dim, out);
    case 2: return weigh_tile<2, W>(probs, stride, values, count, dim, out);
    case 1: return weigh_tile<1, W>(probs, stride, values, count, dim, out);
  }
}
template <class T>
inline void weigh(const float* probs, int64_t stride, int64_t m, const T* values, int64_t count, int64_t dim,
                  float* out) {
  int64_t d = 0;
  for (; d + 4 * L <= dim; d += 4 * L) weigh_queries<4>(probs, stride, m, values + d, count, dim, out + d);
  for (; d + 2 * L <= dim; d += 2 * L) weigh_queries<2>(probs, stride, m, values + d, count, dim, out + d);
  for (; d < dim; d += L) weigh_queries<1>(probs, stride, m, values + d, count, dim, out + d);
}

inline int64_t whole(int64_t count) { return (count + L - 1) / L * L; }

// In place: e^(x - highest) of the first count of x, 0 up to a whole vector; highest is given.
inline vf exponents(float* x, int64_t count, vf high) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vf total = {};
  for (int64_t t = 0; t < count; t += L) {
    vf e = exp_neg(load(x + t) - high);
    e = lane < int32_t(std::min<int64_t>(count - t, L)) ? e : vf{};
    store(x + t, e);
    total += e;
  }
  return total;
}
// Rows order[first .. first + rows) of one prompt and one key head: keep their keys and values, then attend.
template <class T>
void attend_unit(const Attend& a, int64_t prompt, int64_t first, int64_t rows, int64_t head) {
  const int64_t dim = a.dim, repeat = a.repeat;
  const int64_t prompt_length = a.prompt_lengths[a.order[first]], prompt_width = whole(prompt_length);
  const T* prompt_keys = (const T*)a.prompt_keys + (prompt * a.heads + head) * a.prompt_room * dim;
  const T* prompt_values = (const T*)a.prompt_values + (prompt * a.heads + head) * a.prompt_room * dim;
  int64_t longest = 0;
  Ahead ahead;
  for (int64_t i = 0; i < rows; i++) {
    const int64_t row = a.order[first + i], column = a.columns[row];
    const int64_t begin = (row * a.heads + head) * a.room * dim, at = begin + column * dim;
    ahead.add((T*)a.keys + begin, column * dim * sizeof(T));
    if (a.values != a.keys) ahead.add((T*)a.values + begin, column * dim * sizeof(T));
    longest = std::max(longest, column + 1);
    turn((const T*)a.keys_in + row * a.kv_stride + head * dim, a.turns ? a.turns + row * dim : nullptr, 1.f, dim,
         (T*)a.keys + at);
    if (a.values != a.keys)
      std::memcpy((T*)a.values + at, (const T*)a.values_in + row * a.kv_stride + head * dim, dim * sizeof(T));
  }
  const int64_t width = prompt_width + whole(longest);
  float* q = scratch(QUERIES * (2 * dim + width + 1) + L * dim);
  float *made = q + QUERIES * dim, *probs = made + QUERIES * dim, *totals = probs + QUERIES * width;
  float* wide = totals + QUERIES;
  for (int64_t start = 0; start < rows * repeat; start += QUERIES) {
    const int64_t count = std::min(QUERIES, rows * repeat - start);
    for (int64_t m = 0; m < count; m++) {
      const int64_t row = a.order[first + (start + m) / repeat], q_head = head * repeat + (start + m) % repeat;
      turn((const T*)a.q + row * a.q_stride + q_head * dim, a.turns ? a.turns + row * dim : nullptr, a.scale, dim,
           q + m * dim);
    }
    const int64_t parts = count * (prompt_width / L);
    scores(q, count, prompt_keys, prompt_length, dim, wide, width, probs, ahead, (ahead.total + parts - 1) / parts);
    for (int64_t m = 0; m < count;) {
      const int64_t i = (start + m) / repeat, row = a.order[first + i];
      const int64_t of_row = std::min((i + 1) * repeat - start, count) - m;
      scores(q + m * dim, of_row, (const T*)a.keys + (row * a.heads + head) * a.room * dim, a.columns[row] + 1, dim,
             wide, width, probs + m * width + prompt_width, ahead, 0);
      m += of_row;
    }
    for (int64_t m = 0; m < count; m++) {
      float *shared = probs + m * width, *own = shared + prompt_width;
      const int64_t kept = a.columns[a.order[first + (start + m) / repeat]] + 1;
      vf high = splat(-std::numeric_limits<float>::infinity());
      high = splat(highest(high_of(own, kept, high_of(shared, prompt_length, high))));
      totals[m] = sum(exponents(shared, prompt_length, high) + exponents(own, kept, high));
    }
    std::memset(made, 0, count * dim * sizeof(float));
    weigh(probs, width, count, prompt_values, prompt_length, dim, made);
    for (int64_t m = 0; m < count;) {
      const int64_t i = (start + m) / repeat, row = a.order[first + i];
      const int64_t of_row = std::min((i + 1) * repeat - start, count) - m;
      weigh(probs + m * width + prompt_width, width, of_row, (const T*)a.values + (row * a.heads + head) * a.room * dim,
            a.columns[row] + 1, dim, made + m * dim);
      for (int64_t j = m; j < m + of_row; j++) {
        T* out = (T*)a.out + (row * a.heads * repeat + head * repeat + (start + j) % repeat) * dim;
        for (int64_t d = 0; d < dim; d += L) store(out + d, load(made + j * dim + d) * (1.f / totals[j]));
      }
      m += of_row;
    }
  }
}

// Unit by unit, the one of number `index` < num_units * heads.
template <class T>
inline void attend_at(const Attend& a, int64_t index) {
  const int64_t* unit = a.units + 3 * (index / a.heads);
  attend_unit<T>(a, unit[0], unit[1], unit[2], index % a.heads);
}

}  // namespace
