// Vectors of sixteen numbers, loaded from fp32 or bf16 and always computed with in fp32. They need AVX-512: with
// narrower vectors torch is faster than what is built of them.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int L = 16;  // lanes
typedef float vf __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef uint16_t bf16;

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

// The highest of a vector's lanes and count numbers, in some lane.
inline vf high_of(const float* x, int64_t count, vf high) {
  int64_t t = 0;
  for (; t + L <= count; t += L) high = larger(high, load(x + t));
  for (; t < count; t++) high = larger(high, splat(x[t]));
  return high;
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

// Memory of this thread alone, of undefined content.
float* scratch(size_t count) {
  thread_local std::vector<float> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

}  // namespace
