// What kernels.py calls.

#include <omp.h>

#include "attention.h"
#include "experts.h"
#include "products.h"
#include "rows.h"
#include "step.h"

namespace {

constexpr int64_t SERIAL = 1 << 18;  // elements of a norm for which a second thread is not worth waking

template <class T, class O>
void product(const Product& g) {
#pragma omp parallel if (g.rows * g.columns * g.inner > WAKE)
  product_share<T, O>(g, omp_get_thread_num(), omp_get_num_threads(), nullptr);
}

template <class T>
void norm(const void* x, const void* weight, int64_t rows, int64_t inner, int64_t dim, int64_t stride, float eps,
          void* out) {
#pragma omp parallel for if (rows * inner * dim > SERIAL)
  for (int64_t row = 0; row < rows; row++)
    norm_rows((const T*)x, (const T*)weight, row, row + 1, inner, dim, stride, inner * dim, eps, (T*)out);
}

template <class T>
void attend(const Attend& a) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t index = 0; index < a.num_units * a.heads; index++) attend_at<T>(a, index);
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

void tranship_attend(const Attend* a) { a->wide ? attend<float>(*a) : attend<bf16>(*a); }

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

void tranship_norm(const void* x, const void* weight, int64_t rows, int64_t inner, int64_t dim, int64_t stride,
                   float eps, int32_t wide, void* out) {
  (wide ? norm<float> : norm<bf16>)(x, weight, rows, inner, dim, stride, eps, out);
}

void tranship_draw(const float* logits, int64_t rows, int64_t vocab, const float* temperature, const double* uniform,
                   int64_t* token, float* logprob) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; row++)
    draw_row(logits + row * vocab, vocab, temperature[row], uniform[row], token + row, logprob + row);
}

void tranship_route(const float* logits, int64_t rows, int64_t count, int64_t top_k, int32_t normalised, float scale,
                    int64_t* chosen, float* shares) {
#pragma omp parallel for if (rows * count > SERIAL)
  for (int64_t row = 0; row < rows; row++)
    route_row(logits + row * count, count, top_k, normalised, scale, chosen + row * top_k, shares + row * top_k);
}

void tranship_experts(const Experts* e) { e->wide ? experts<float>(*e) : experts<bf16>(*e); }

void tranship_step(const Step* s) { s->attend.wide ? step<float>(*s) : step<bf16>(*s); }
}
