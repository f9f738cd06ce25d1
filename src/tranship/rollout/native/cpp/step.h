// One decode step of a model with attention by heads, all layers in one go: the threads meet between two parts of a
// layer, and are woken once for a step. kernels.py says what each argument is. The numbers are those of the single
// kernels, to the bit.

#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "products.h"
#include "rows.h"

struct Layer {
  const void *attention_norm, *qkv, *qkv_bias, *head_norm, *o, *o_bias;
  const void *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
  const void *router, *experts_gate_up, *experts_down;
  int64_t num_experts, top_k, expert_mlp;
  float scale;
  int32_t normalised;
};

struct Step {
  Attend attend;
  const Layer* layers;
  const int64_t* storages;
  int64_t num_layers, rows, hidden, mlp, vocab;
  float eps;
  const void *norm, *head;
  void *x, *normed, *heads, *attended, *gated, *logits;
  void *scores, *chosen, *shares, *inputs, *made;
};

namespace {

constexpr int64_t SPINS = 1000;  // looks at what another thread has reached before the processor is given away

class Meeting {
 public:
  void expect(int64_t threads) { threads_ = threads; }
  void wait() {
    const int64_t round = round_.load(std::memory_order_acquire);
    if (here_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      here_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int64_t spin = 0; round_.load(std::memory_order_acquire) == round; spin++)
      spin < SPINS ? _mm_pause() : (void)sched_yield();
  }

 private:
  int64_t threads_ = 1;
  std::atomic<int64_t> here_{0}, round_{0};
};

template <class T>
class Worker {
 public:
  Worker(const Step& s, Meeting& meeting, Together& to, std::atomic<int64_t>* next, int64_t thread, int64_t threads)
      : s_(s), meeting_(meeting), to_(to), next_(next), thread_(thread), threads_(threads), a_(s.attend) {
    const int64_t dim = a_.dim, queries = a_.heads * a_.repeat;
    width_ = (queries + 2 * a_.heads) * dim, out_ = queries * dim;
    a_.q = s.heads, a_.keys_in = (const T*)s.heads + out_, a_.values_in = (const T*)s.heads + out_ + a_.heads * dim;
    a_.q_stride = a_.kv_stride = width_, a_.out = s.attended;
  }

  void run() {
    for (int64_t index = 0; index < s_.num_layers; index++) {
      const Layer& layer = s_.layers[index];
      const bool last = index + 1 == s_.num_layers;
      norm(layer.attention_norm, s_.x, s_.normed, 1, s_.hidden, s_.hidden, s_.eps);
      product<T>(s_.normed, layer.qkv, layer.qkv_bias, s_.hidden, width_, NOTHING, s_.heads,
                 start(layer.o, out_, s_.hidden, false));
      if (layer.head_norm)
        norm(layer.head_norm, s_.heads, s_.heads, a_.heads * (a_.repeat + 1), a_.dim, width_, s_.eps);
      attend(index);
      product<T>(s_.attended, layer.o, layer.o_bias, out_, s_.hidden, ADD, s_.x,
                 layer.router ? start(layer.router, s_.hidden, layer.num_experts, false)
                              : start(layer.gate_up, s_.hidden, 2 * s_.mlp, true));
      norm(layer.mlp_norm, s_.x, s_.normed, 1, s_.hidden, s_.hidden, s_.eps);
      if (layer.router) {
        experts(layer, index);
        continue;
      }
      product<T>(s_.normed, layer.gate_up, layer.gate_up_bias, s_.hidden, 2 * s_.mlp, GATE, s_.gated,
                 start(layer.down, s_.mlp, s_.hidden, false));
      product<T>(s_.gated, layer.down, layer.down_bias, s_.mlp, s_.hidden, ADD, s_.x,
                 last ? start(s_.head, s_.hidden, s_.vocab, false) : start(s_.layers[index + 1].qkv, s_.hidden, width_, false));
    }
    norm(s_.norm, s_.x, s_.normed, 1, s_.hidden, s_.hidden, s_.eps);
    product<float>(s_.normed, s_.head, nullptr, s_.hidden, s_.vocab, NOTHING, s_.logits, nullptr);
  }

 private:
  void norm(const void* weight, const void* x, void* out, int64_t inner, int64_t dim, int64_t stride, float eps) {
    norm_rows((const T*)x, (const T*)weight, s_.rows * thread_ / threads_, s_.rows * (thread_ + 1) / threads_, inner,
              dim, stride, stride, eps, (T*)out);
    meeting_.wait();
  }

  template <class O>
  void product(const void* x, const void* weight, const void* bias, int64_t inner, int64_t columns, Behind behind,
               void* out, const char* after) {
    Product g{x, weight, bias, out, s_.rows, inner, columns, inner, 0, 0, behind, out};
    product_share<T, O>(g, thread_, threads_, after);
    meeting_.wait();
  }

  void attend(int64_t index) {
    const int64_t* storages = s_.storages + 4 * index;
    a_.keys = (void*)storages[0], a_.values = (void*)storages[1];
    a_.prompt_keys = (const void*)storages[2], a_.prompt_values = (const void*)storages[3];
    const int64_t count = a_.num_units * a_.heads;
    for (int64_t unit; (unit = next_[index].fetch_add(1, std::memory_order_relaxed)) < count;) attend_at<T>(a_, unit);
    meeting_.wait();
  }

  void experts(const Layer& layer, int64_t index) {
    product<T>(s_.normed, layer.router, nullptr, s_.hidden, layer.num_experts, NOTHING, s_.scores, nullptr);
    const int64_t count = layer.num_experts, top_k = layer.top_k, pairs = s_.rows * top_k;
    int64_t* chosen = (int64_t*)s_.chosen;
    float* shares = (float*)s_.shares;
    const int64_t first = s_.rows * thread_ / threads_, last = s_.rows * (thread_ + 1) / threads_;
    for (int64_t row = first; row < last; row++)
      route_row((const T*)s_.scores + row * count, count, top_k, layer.normalised, layer.scale, chosen + row * top_k,
                shares + row * top_k);
    meeting_.wait();
    const Experts e{s_.normed, chosen, shares, (const int64_t*)layer.experts_gate_up, (const int64_t*)layer.experts_down,
                    s_.rows, s_.hidden, layer.expert_mlp, count, top_k, 0, s_.inputs, s_.gated, s_.made, nullptr};
    if (!thread_) put_together(e, to_);
    meeting_.wait();
    for (int64_t i = pairs * thread_ / threads_; i < pairs * (thread_ + 1) / threads_; i++) bring_pair<T>(e, to_, i);
    meeting_.wait();
    const int64_t parts = expert_parts(to_, threads_), units = (int64_t)to_.stretches.size() * parts;
    for (int64_t turn = 0; turn < 2; turn++) {
      std::atomic<int64_t>& next = next_[(turn + 1) * s_.num_layers + index];
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;)
        expert_product<T>(e, to_, !turn, parts, unit);
      meeting_.wait();
    }
    for (int64_t row = first; row < last; row++)
      for (int64_t d = 0; d < s_.hidden; d += L) {
        const int64_t some = std::min<int64_t>(L, s_.hidden - d);
        T* x = (T*)s_.x + row * s_.hidden + d;
        T rounded[L];
        store_some(rounded, experts_sum<T>(e, to_, row, d, some), L);
        store_some(x, load_some(x, some) + load(rounded), some);
      }
    meeting_.wait();
  }

  const char* start(const void* weight, int64_t inner, int64_t columns, bool gate) const {
    return share_start<T>(weight, inner, columns, gate, thread_, threads_);
  }

  const Step& s_;
  Meeting& meeting_;
  Together& to_;
  std::atomic<int64_t>* next_;
  const int64_t thread_, threads_;
  Attend a_;
  int64_t width_, out_;
};

template <class T>
void step(const Step& s) {
  std::vector<std::atomic<int64_t>> next(3 * s.num_layers);
  Meeting meeting;
  Together to;
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads();
#pragma omp single
    meeting.expect(threads);
    Worker<T>(s, meeting, to, next.data(), omp_get_thread_num(), threads).run();
  }
}

}  // namespace
