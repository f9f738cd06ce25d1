// What one decode step does between the matrix products on a CPU: norms, rotary embedding with attention, sampling.
// Called from kernels.py, which says what each argument is. Sums are in fp32 (across blocks of the vocabulary in fp64),
// whatever the dtype; no row's result depends on the rows beside it. They need AVX-512: with narrower vectors torch is
// faster.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <immintrin.h>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int L = 16;  // lanes
typedef float vf __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef uint16_t bf16;

constexpr int64_t TILE = 6;          // queries whose sums are kept in registers at a time
constexpr int64_t QUERIES = 12;      // queries that read keys and values together
constexpr int64_t AHEAD = 16 << 10;  // bytes of one row's keys that are asked for before they are used
constexpr int64_t BLOCK = 256;       // tokens of the vocabulary that are summed in fp32
constexpr int64_t SERIAL = 1 << 18;  // elements of a norm for which a second thread is not worth waking

inline vf splat(float x) { return vf{} + x; }

inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vf load(const bf16* p) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, vf v) {
  vu u = (vu)v;
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  rounded = v != v ? vu{} + 0x7fc0 : rounded;
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)rounded));
}
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t u = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}
inline vf larger(vf a, vf b) { return a > b ? a : b; }

// e^x for x <= 0; nan stays nan. Cephes' polynomial: relative error below 2e-7.
inline vf exp_neg(vf x) {
  const vf magic = splat(12582912.f);
  vf shifted = x * 1.44269504f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  vi power = ((vi)shifted - (vi)magic + 127) << 23;
  return x < -87.f ? vf{} : p * (vf)power;
}

inline float sum(vf v) {
  float lanes[L];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int step = L / 2; step; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
}
inline float highest(vf v) {
  float best = v[0];
  for (int i = 1; i < L; i++) best = std::max(best, v[i]);
  return best;
}

// Lane i of the result is the sum of the lanes of v[i].
inline vf sums(vf v[L]) {
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH(a, b) __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) v[i] = LOW(v[i], v[i + 1]) + HIGH(v[i], v[i + 1]);
#undef LOW
#undef HIGH
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) v[i] = LOW(v[i], v[i + 2]) + HIGH(v[i], v[i + 2]);
#undef LOW
#undef HIGH
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 8) v[i] = LOW(v[i], v[i + 4]) + HIGH(v[i], v[i + 4]);
#undef LOW
#undef HIGH
  return __builtin_shufflevector(v[0], v[8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(v[0], v[8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

float* scratch(size_t count) {
  thread_local std::vector<float> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

}  // namespace

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
inline vf high_of(const float* x, int64_t count, vf high) {
  int64_t t = 0;
  for (; t + L <= count; t += L) high = larger(high, load(x + t));
  for (; t < count; t++) high = larger(high, splat(x[t]));
  return high;
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

template <class T>
void attend(const Attend& a) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t index = 0; index < a.num_units * a.heads; index++) {
    const int64_t* unit = a.units + 3 * (index / a.heads);
    attend_unit<T>(a, unit[0], unit[1], unit[2], index % a.heads);
  }
}

constexpr int64_t ROWS = 14;            // rows of a product whose sums are kept in registers at a time
constexpr int64_t PANEL = 2 * L;        // columns of a product that are computed together
constexpr int64_t DEEP = 12 * ROWS;     // rows that pass over a panel of the weight before the next one is read
constexpr int64_t WAKE = 1 << 20;       // multiplications for which a second thread is woken
constexpr int64_t STRIDE = 8;           // words between two looks ahead
enum Behind { NOTHING, ADD, GATE };

}  // namespace

struct Product {
  const void *x, *weight, *bias, *other;
  int64_t rows, inner, columns, x_stride;
  int32_t wide, wide_out, behind;
  void* out;
};

namespace {

// A word is one fp32 number or two bf16 ones: what one lane multiplies at a time.
template <class T>
struct Word;
template <>
struct Word<float> {
  static constexpr int64_t numbers = 1;
  static inline vf multiply(vf sum, vf weight, float x) { return sum + weight * x; }
};
template <>
struct Word<bf16> {
  static constexpr int64_t numbers = 2;
#ifdef __AVX512BF16__
  static inline vf multiply(vf sum, vf weight, float x) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)splat_bits(x));
  }
  static inline vf splat_bits(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (vf)(vi{} + bits);
  }
#else
  static inline vf multiply(vf sum, vf, float) { return sum; }  // never called: see tranship_has_bf16
#endif
};

inline vf silu(vf x) {
  vf e = exp_neg(x > 0.f ? -x : x);
  return x * (x > 0.f ? splat(1.f) : e) / (1.f + e);
}

// Up to a vector of numbers, count of them.
template <class T>
inline vf load_some(const T* p, int64_t count) {
  if (count >= L) return load(p);
  T part[L] = {};
  std::memcpy(part, p, count * sizeof(T));
  return load(part);
}
template <class T>
inline void store_some(T* p, vf v, int64_t count) {
  if (count >= L) return store(p, v);
  T part[L];
  store(part, v);
  std::memcpy(p, part, count * sizeof(T));
}

// Write one vector of a product, with what is behind it.
template <class T, class O>
inline void finish(const Product& g, int64_t row, int64_t column, vf sum) {
  const int64_t count = g.columns - column, at = row * g.columns + column;
  if (count <= 0) return;
  if (g.bias) sum += load_some((const T*)g.bias + column, count);
  if (g.behind == ADD) sum += load_some((const O*)g.other + at, count);
  store_some((O*)g.out + at, sum, count);
}

// M rows of x times one panel of the weight, with what is behind it. ahead: the next panel, of which `lines` cache lines
// are asked for every few words.
template <int M, class T, class O>
void product_tile(const Product& g, int64_t row, int64_t panel, const char* ahead, int64_t lines) {
  const int64_t words = g.inner / Word<T>::numbers, x_words = g.x_stride / Word<T>::numbers;
  const float* weight = (const float*)g.weight + panel * words * PANEL;
  const float* x = (const float*)g.x + row * x_words;
  vf acc[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = vf{};
  for (int64_t start = 0; start < words; start += STRIDE) {
    for (int64_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    const int64_t stop = std::min(start + STRIDE, words);
    for (int64_t k = start; k < stop; k++) {
      const vf low = load(weight + k * PANEL), high = load(weight + k * PANEL + L);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const float factor = x[m * x_words + k];
        acc[m][0] = Word<T>::multiply(acc[m][0], low, factor);
        acc[m][1] = Word<T>::multiply(acc[m][1], high, factor);
      }
    }
  }
  if (g.behind == GATE) {
    const T* bias = (const T*)g.bias;
    const int64_t width = g.columns / 2, column = panel * L, count = std::min<int64_t>(L, width - column);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      vf gate = acc[m][0], up = acc[m][1];
      if (bias) gate += load_some(bias + column, count), up += load_some(bias + width + column, count);
      store_some((O*)g.out + (row + m) * width + column, silu(gate) * up, count);
    }
    return;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    finish<T, O>(g, row + m, panel * PANEL, acc[m][0]);
    finish<T, O>(g, row + m, panel * PANEL + L, acc[m][1]);
  }
}

template <class T, class O>
void product_rows(const Product& g, int64_t row, int64_t count, int64_t panel, const char* ahead, int64_t lines) {
  switch (count) {
#define CASE(M) \
  case M: return product_tile<M, T, O>(g, row, panel, ahead, lines);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#undef CASE
  }
}

inline int64_t num_panels(int64_t columns, bool gate) { return gate ? (columns / 2 + L - 1) / L : (columns + PANEL - 1) / PANEL; }

template <class T, class O>
void product(const Product& g) {
  const int64_t panels = num_panels(g.columns, g.behind == GATE), words = g.inner / Word<T>::numbers;
#pragma omp parallel if (g.rows * g.columns * g.inner > WAKE)
  {
    int64_t thread = 0, threads = 1;
#ifdef _OPENMP
    thread = omp_get_thread_num(), threads = omp_get_num_threads();
#endif
    const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
    for (int64_t top = 0; top < g.rows; top += DEEP) {
      const int64_t deep = std::min(DEEP, g.rows - top), tiles = (deep + ROWS - 1) / ROWS;
      for (int64_t panel = first; panel < last; panel++) {
        const int64_t lines = panel + 1 < last ? (2 * STRIDE + tiles - 1) / tiles : 0;
        const char* ahead = (const char*)((const float*)g.weight + (panel + 1) * words * PANEL);
        for (int64_t tile = 0; tile < tiles; tile++) {
          const int64_t from = deep * tile / tiles, to = deep * (tile + 1) / tiles;
          product_rows<T, O>(g, top + from, to - from, panel, ahead, lines);
          ahead += 64 * lines * ((words + STRIDE - 1) / STRIDE);
        }
      }
    }
  }
}

// The weight [columns, inner] as panels, word by word; a gate's panel has its own columns, then those that it gates.
template <class W>
void pack(const W* weight, int64_t columns, int64_t words, bool gate, W* out) {
  const int64_t panels = num_panels(columns, gate);
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels; panel++)
    for (int64_t lane = 0; lane < PANEL; lane++) {
      int64_t row = panel * PANEL + lane, end = columns;
      if (gate) {
        const int64_t half = columns / 2, up = lane >= L;
        row = panel * L + lane % L + up * half, end = half + up * half;
      }
      W* to = out + panel * words * PANEL + lane;
      const W* from = weight + row * words;
      for (int64_t k = 0; k < words; k++) to[k * PANEL] = row < end ? from[k] : 0;
    }
}

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

template <class T>
void norm(const T* x, const T* weight, int64_t rows, int64_t inner, int64_t dim, int64_t stride, float eps, T* out) {
#pragma omp parallel for if (rows * inner * dim > SERIAL)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < inner; i++)
      norm_one(x + row * stride + i * dim, weight ? weight + i * dim : nullptr, dim, eps,
               out + (row * inner + i) * dim);
}

template <class T>
void draw_row(const T* logits, int64_t vocab, float temperature, double uniform, int64_t* token, float* logprob) {
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
  for (; v < padded; v++) z[v] = v < vocab ? widen(logits[v]) / divisor[0] : -infinity;
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

template <class T>
void draw(const T* logits, int64_t rows, int64_t vocab, const float* temperature, const double* uniform, int64_t* token,
          float* logprob) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; row++)
    draw_row(logits + row * vocab, vocab, temperature[row], uniform[row], token + row, logprob + row);
}

}  // namespace

extern "C" {

// Whether this processor multiplies bf16.
int32_t tranship_has_bf16() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

void tranship_product(const Product* g) {
  if (g->wide)
    product<float, float>(*g);
  else if (g->wide_out)
    product<bf16, float>(*g);
  else
    product<bf16, bf16>(*g);
}

void tranship_pack(const void* weight, int64_t columns, int64_t words, int32_t gate, void* out) {
  pack((const uint32_t*)weight, columns, words, gate, (uint32_t*)out);
}

void tranship_attend(const Attend* a) { a->wide ? attend<float>(*a) : attend<bf16>(*a); }

void tranship_norm(const void* x, const void* weight, int64_t rows, int64_t inner, int64_t dim, int64_t stride,
                   float eps, int32_t wide, void* out) {
  if (wide)
    norm((const float*)x, (const float*)weight, rows, inner, dim, stride, eps, (float*)out);
  else
    norm((const bf16*)x, (const bf16*)weight, rows, inner, dim, stride, eps, (bf16*)out);
}

void tranship_draw(const void* logits, int64_t rows, int64_t vocab, const float* temperature, const double* uniform,
                   int32_t wide, int64_t* token, float* logprob) {
  if (wide)
    draw((const float*)logits, rows, vocab, temperature, uniform, token, logprob);
  else
    draw((const bf16*)logits, rows, vocab, temperature, uniform, token, logprob);
}
}
