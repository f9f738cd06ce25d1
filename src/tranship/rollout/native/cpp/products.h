// Products with a packed weight. kernels.py says what each argument is. No row's result depends on the rows beside it:
// every sum runs over the words in order.

#pragma once

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

struct Product {
  const void *x, *weight, *bias, *other;
  int64_t rows, inner, columns, x_stride;
  int32_t wide, wide_out, behind;
  void* out;
};

namespace {

constexpr int64_t ROWS = 14;            // rows of a product whose sums are kept in registers at a time
constexpr int64_t PANEL = 2 * L;        // columns of a product that are computed together
constexpr int64_t DEEP = 12 * ROWS;     // rows that pass over a panel of the weight before the next one is read
constexpr int64_t STRIDE = 8;           // words between two looks ahead
constexpr int64_t WAKE = 1 << 20;       // multiplications of a product for which a second thread is woken
constexpr int64_t SLICE = 64;           // words of a panel that are written together, within the first cache
enum Behind { NOTHING, ADD, GATE };

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

// M rows of x times one panel of the weight, in words. ahead: the next panel, of which `lines` cache lines are asked
// for every few words.
template <int M, class T>
void product_tile(const float* x, int64_t x_words, const float* weight, int64_t words, const char* ahead, int64_t lines,
                  float* out) {
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
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) store(out + m * PANEL, acc[m][0]), store(out + m * PANEL + L, acc[m][1]);
}

template <class T>
void product_rows(int64_t rows, const float* x, int64_t x_words, const float* weight, int64_t words, const char* ahead,
                  int64_t lines, float* out) {
  switch (rows) {
#define CASE(M) \
  case M: return product_tile<M, T>(x, x_words, weight, words, ahead, lines, out);
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
#undef CASE
  }
}

// Write the sums of one row and panel, with what is behind the product.
template <class T, class O>
void finish(const Product& g, int64_t row, int64_t panel, const float* sums) {
  const T* bias = (const T*)g.bias;
  vf parts[2] = {load(sums), load(sums + L)};
  if (g.behind == GATE) {
    const int64_t width = g.columns / 2, column = panel * L, count = width - column;
    if (bias) parts[0] += load_some(bias + column, count), parts[1] += load_some(bias + width + column, count);
    return store_some((O*)g.out + row * width + column, silu(parts[0]) * parts[1], count);
  }
  for (int half = 0; half < 2; half++) {
    const int64_t column = panel * PANEL + half * L, count = g.columns - column, at = row * g.columns + column;
    if (count <= 0) return;
    if (bias) parts[half] += load_some(bias + column, count);
    if (g.behind == ADD) parts[half] += load_some((const O*)g.other + at, count);
    store_some((O*)g.out + at, parts[half], count);
  }
}

inline int64_t num_panels(int64_t columns, bool gate) {
  return gate ? (columns / 2 + L - 1) / L : (columns + PANEL - 1) / PANEL;
}

#ifdef __AMX_BF16__

// Whether the kernel gives this process the registers of AMX (their use must be asked for).
inline bool has_tiles() {
  constexpr long ask = 0x1023, data = 18;
  static const bool given = !syscall(SYS_arch_prctl, ask, data);
  return given;
}

constexpr int64_t TILE_ROWS = 2 * L;          // rows of a product in two registers
constexpr int64_t TILE_WORDS = L;             // words that are multiplied at a time
constexpr int64_t TILE_DEEP = 8 * TILE_ROWS;  // as DEEP

// Registers 0, 1: rows of x; 2, 3: the halves of a panel; 4 .. 7: the sums of each row register with each half.
inline void begin_tiles(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } c;
  const int64_t first = std::min(rows, L * int64_t(1)), second = std::max<int64_t>(rows - L, 1);
  for (int i = 0; i < 8; i++) {
    c.bytes[i] = 64;
    c.rows[i] = i == 2 || i == 3 ? L : i == 1 || i > 5 ? second : first;
  }
  _tile_loadconfig(&c);
}

// As product_tile, for up to L rows, or more in two registers.
template <bool two>
inline void tile_sums(const float* x, int64_t x_words, const float* weight, int64_t words, const char* ahead,
                      int64_t lines, float* out) {
  _tile_zero(4);
  _tile_zero(5);
  if (two) {
    _tile_zero(6);
    _tile_zero(7);
  }
  for (int64_t k = 0; k < words; k += TILE_WORDS) {
    for (int64_t i = 0; i < lines; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    _tile_loadd(2, weight + k * PANEL, PANEL * 4);
    _tile_loadd(3, weight + k * PANEL + L, PANEL * 4);
    _tile_loadd(0, x + k, x_words * 4);
    _tile_dpbf16ps(4, 0, 2);
    _tile_dpbf16ps(5, 0, 3);
    if (two) {
      _tile_loadd(1, x + L * x_words + k, x_words * 4);
      _tile_dpbf16ps(6, 1, 2);
      _tile_dpbf16ps(7, 1, 3);
    }
  }
  _tile_stored(4, out, PANEL * 4);
  _tile_stored(5, out + L, PANEL * 4);
  if (two) {
    _tile_stored(6, out + L * PANEL, PANEL * 4);
    _tile_stored(7, out + L * PANEL + L, PANEL * 4);
  }
}

// As product_share. The last rows are computed with some before them, so that one shape of registers does.
template <class O>
void tile_share(const Product& g, int64_t thread, int64_t threads, const char* after) {
  const int64_t panels = num_panels(g.columns, g.behind == GATE);
  const int64_t words = g.inner / 2, x_words = g.x_stride / 2, together = std::min(g.rows, TILE_ROWS);
  const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
  float sums[TILE_ROWS * PANEL];
  begin_tiles(together);
  for (int64_t top = 0; top < g.rows; top += TILE_DEEP) {
    const int64_t bottom = std::min(top + TILE_DEEP, g.rows), tiles = (bottom - top + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t panel = first; panel < last; panel++) {
      const float* weight = (const float*)g.weight + panel * words * PANEL;
      const char* ahead = panel + 1 < last ? (const char*)(weight + words * PANEL) : after;
      const int64_t lines = ahead ? (2 * TILE_WORDS + tiles - 1) / tiles : 0;
      for (int64_t row = top; row < bottom; row += TILE_ROWS) {
        const int64_t from = std::min(row, g.rows - together), to = std::min(row + TILE_ROWS, bottom);
        const float* x = (const float*)g.x + from * x_words;
        (together > L ? tile_sums<true> : tile_sums<false>)(x, x_words, weight, words, ahead, lines, sums);
        for (int64_t r = row; r < to; r++) finish<bf16, O>(g, r, panel, sums + (r - from) * PANEL);
        if (ahead) ahead += 64 * lines * (words / TILE_WORDS);
      }
    }
  }
  _tile_release();
}

#endif

// The share of one thread. after: what it reads next, if that is known.
template <class T, class O>
void product_share(const Product& g, int64_t thread, int64_t threads, const char* after) {
#ifdef __AMX_BF16__
  if (Word<T>::numbers == 2 && g.inner % (2 * TILE_WORDS) == 0 && has_tiles())
    return tile_share<O>(g, thread, threads, after);
#endif
  const int64_t panels = num_panels(g.columns, g.behind == GATE);
  const int64_t words = g.inner / Word<T>::numbers, x_words = g.x_stride / Word<T>::numbers;
  const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
  float sums[ROWS * PANEL];
  for (int64_t top = 0; top < g.rows; top += DEEP) {
    const int64_t deep = std::min(DEEP, g.rows - top), tiles = (deep + ROWS - 1) / ROWS;
    for (int64_t panel = first; panel < last; panel++) {
      const float* weight = (const float*)g.weight + panel * words * PANEL;
      const char* ahead = panel + 1 < last ? (const char*)(weight + words * PANEL) : after;
      const int64_t lines = ahead ? (2 * STRIDE + tiles - 1) / tiles : 0;
      for (int64_t tile = 0; tile < tiles; tile++) {
        const int64_t from = top + deep * tile / tiles, to = top + deep * (tile + 1) / tiles;
        product_rows<T>(to - from, (const float*)g.x + from * x_words, x_words, weight, words, ahead, lines, sums);
        for (int64_t row = from; row < to; row++) finish<T, O>(g, row, panel, sums + (row - from) * PANEL);
        if (ahead) ahead += 64 * lines * ((words + STRIDE - 1) / STRIDE);
      }
    }
  }
}

// Where the share of one thread begins in a weight.
template <class T>
inline const char* share_start(const void* weight, int64_t inner, int64_t columns, bool gate, int64_t thread,
                               int64_t threads) {
  const int64_t first = num_panels(columns, gate) * thread / threads;
  return (const char*)((const float*)weight + first * (inner / Word<T>::numbers) * PANEL);
}

// The weight [columns, inner] as panels, word by word; a gate's panel has its own columns, then those that it gates.
template <class W>
void pack(const W* weight, int64_t columns, int64_t words, bool gate, W* out) {
  const int64_t panels = num_panels(columns, gate);
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels; panel++)
    for (int64_t start = 0; start < words; start += SLICE)
      for (int64_t lane = 0; lane < PANEL; lane++) {
        int64_t row = panel * PANEL + lane, end = columns;
        if (gate) {
          const int64_t half = columns / 2, up = lane >= L;
          row = panel * L + lane % L + up * half, end = half + up * half;
        }
        W* to = out + panel * words * PANEL + lane;
        const W* from = weight + row * words;
        for (int64_t k = start; k < std::min(start + SLICE, words); k++) to[k * PANEL] = row < end ? from[k] : 0;
      }
}

}  // namespace
