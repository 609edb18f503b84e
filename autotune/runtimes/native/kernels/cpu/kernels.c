/* What `library.py` calls: products, hyper-connections, the KDA step and routed experts of a few rows, in fp32.
   Shapes are in the signatures' comments; every tensor is contiguous unless a stride is passed. */
#include "attention.h"

#define STREAMS 6 /* as in library.py */
#define EXPERTS 1024

void linear(const Weight *w, const float *x, int64_t count, float *out, int64_t threads) {
    product(w, x, count, out, threads);
}

/* fp32 [rows, cols] of a stored weight; 4-bit rows are written whole, up to their padding. */
void dense(const Weight *w, float *out) {
    int64_t stride = row_bytes(w->kind, w->cols), padded = w->kind == INT4 ? stride * 2 : w->cols;
    for (int64_t r = 0; r < w->rows; r++, out += padded) {
        const char *row = w->data + r * stride;
        float scale = w->kind == INT8 ? ((const float *)w->scale)[r] : 1.f;
        if (w->kind != INT4)
            for (int64_t k = 0; k < padded; k += LANES) store(out + k, load_weight(w->kind, row, k) * scale);
        else
            for (int64_t g = 0; g < padded / w->group; g++) {
                vf both = load_bf16((const uint16_t *)w->scale + 2 * (r * (padded / w->group) + g));
                for (int64_t k = g * w->group; k < (g + 1) * w->group; k += 2 * LANES)
                    unpack(row + k / 2, both[1], both[0], out + k);
            }
    }
}

static float square_sum(const float *x, int64_t size) {
    vf a = {}, b = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        vf left = load(x + i), right = load(x + i + LANES);
        a += left * left;
        b += right * right;
    }
    float total = sum(a + b);
    for (; i < size; i++) total += x[i] * x[i];
    return total;
}

typedef struct {
    int64_t streams, size, iterations;
    float eps, norm_eps;
    const float *base, *scale, *norm;
    Weight fn; /* [(2 + N) N, N D] */
} Hyper;

/* Sinkhorn over [N*N][16] exponentials, a token a lane: columns once, then rows and columns in turn. */
INLINE void sinkhorn(vf *mix, int n, int64_t iterations, float eps) {
    for (int64_t pass = 0; pass < 2 * iterations - 1; pass++) {
        int rows = pass % 2, line = rows ? n : 1, step = rows ? 1 : n;
        for (int i = 0; i < n; i++) {
            vf total = all(eps);
            for (int j = 0; j < n; j++) total += mix[i * line + j * step];
            total = 1.f / total;
            for (int j = 0; j < n; j++) mix[i * line + j * step] *= total;
        }
    }
}

INLINE void hyper_gates(const Hyper *h, int n, const float *mixed, int64_t tokens, float *pre, float *post, float *mix) {
    int total = (2 + n) * n;
    vf value[(2 + STREAMS) * STREAMS];
    for (int i = 0; i < total; i++) {
        vf lanes = {};
        for (int64_t t = 0; t < tokens; t++) lanes[t] = mixed[t * total + i];
        value[i] = lanes;
    }
    for (int i = 0; i < 2 * n; i++) value[i] = vsigmoid(value[i]);
    vf *square = value + 2 * n;
    for (int row = 0; row < n; row++) {
        vf most = square[row * n], whole = {};
        for (int j = 1; j < n; j++) most = pick(square[row * n + j] > most, square[row * n + j], most);
        for (int j = 0; j < n; j++) whole += square[row * n + j] = vexp(square[row * n + j] - most);
        whole = 1.f / whole;
        for (int j = 0; j < n; j++) square[row * n + j] = square[row * n + j] * whole + h->eps;
    }
    sinkhorn(square, n, h->iterations, h->eps);
    for (int64_t t = 0; t < tokens; t++) {
        for (int i = 0; i < n; i++) {
            pre[t * n + i] = value[i][t] + h->eps;
            post[t * n + i] = 2 * value[n + i][t];
        }
        for (int i = 0; i < n * n; i++) mix[t * n * n + i] = square[i][t];
    }
}

/* streams [T, N, D] -> x [T, D], post [T, N], mix [T, N, N]; the formulas are those of `kernels.hyper`. */
void hyper_read(const Hyper *h, const float *streams, int64_t count, float *x, float *post, float *mix, int64_t threads) {
    int n = (int)h->streams;
    int64_t size = h->size, whole = n * size, total = (2 + n) * n;
    float *mixed = room(count * total);
    product(&h->fn, streams, count, mixed, threads);
    for (int64_t t0 = 0; t0 < count; t0 += LANES) {
        int64_t tokens = count - t0 < LANES ? count - t0 : LANES;
        float pre[LANES * STREAMS];
        for (int64_t t = t0; t < t0 + tokens; t++) {
            float inverse = 1.f / sqrtf(square_sum(streams + t * whole, whole) / whole + h->norm_eps);
            for (int64_t i = 0; i < total; i++)
                mixed[t * total + i] = mixed[t * total + i] * inverse * h->scale[i] + h->base[i];
        }
        if (n == 4) hyper_gates(h, 4, mixed + t0 * total, tokens, pre, post + t0 * n, mix + t0 * n * n);
        else hyper_gates(h, n, mixed + t0 * total, tokens, pre, post + t0 * n, mix + t0 * n * n);
        for (int64_t t = 0; t < tokens; t++) {
            const float *from = streams + (t0 + t) * whole;
            float *to = x + (t0 + t) * size;
            for (int64_t d = 0; d < size; d += LANES) {
                vf value = {};
                for (int i = 0; i < n; i++) value += pre[t * n + i] * load(from + i * size + d);
                store(to + d, value);
            }
            float inverse = 1.f / sqrtf(square_sum(to, size) / size + h->norm_eps);
            for (int64_t d = 0; d < size; d += LANES) store(to + d, load(to + d) * inverse * load(h->norm + d));
        }
    }
    free(mixed);
}

/* streams [T, N, D] <- mix^T streams + post output, in place; output [T, D]. */
void hyper_write(float *streams, const float *output, const float *post, const float *mix, int64_t count, int64_t n,
                 int64_t size) {
    for (int64_t t = 0; t < count; t++, streams += n * size, output += size, post += n, mix += n * n)
        for (int64_t d = 0; d < size; d += LANES) {
            vf old[STREAMS], fresh = load(output + d);
            for (int64_t i = 0; i < n; i++) old[i] = load(streams + i * size + d);
            for (int64_t j = 0; j < n; j++) {
                vf value = post[j] * fresh;
                for (int64_t i = 0; i < n; i++) value += mix[i * n + j] * old[i];
                store(streams + j * size + d, value);
            }
        }
}

typedef struct {
    int64_t heads, size, taps, narrow; /* narrow: the state is stored in bf16 */
    float bound, eps;
    const float *conv_taps, *dt_bias, *rate, *o_norm;
} Kda;

INLINE vf load_state(const char *at, int64_t i, int narrow) {
    return narrow ? load_bf16((const uint16_t *)at + i) : load((const float *)at + i);
}

/* S <- diag(decay) S + k (beta (v - k^T diag(decay) S))^T; out = q^T S, for one head of size d. */
INLINE void delta(char *state, int64_t d, const float *q, const float *k, const float *v, const float *decay, float beta,
                  float *out, int narrow) {
    for (int64_t c = 0; c < d; c += LANES) {
        vf seen = {}, read = {};
        for (int64_t i = 0; i < d; i++) seen += (k[i] * decay[i]) * load_state(state, i * d + c, narrow);
        vf change = (load(v + c) - seen) * beta;
        for (int64_t i = 0; i < d; i++) {
            vf value = load_state(state, i * d + c, narrow) * decay[i] + k[i] * change;
            read += q[i] * value;
            if (narrow) store_bf16((uint16_t *)state + i * d + c, value);
            else store((float *)state + i * d + c, value);
        }
        store(out + c, read);
    }
}

/* Causal convolution and SiLU of one token; `window` [taps - 1, wide] holds the inputs before it and moves on by one. */
static void convolve(const Kda *a, const float *input, float *window, float *out) {
    int64_t wide = 3 * a->heads * a->size, kept = a->taps - 1;
    for (int64_t c = 0; c < wide; c += LANES) {
        vf value = load(input + c) * load(a->conv_taps + kept * wide + c);
        for (int64_t i = 0; i < kept; i++) {
            vf old = load(window + i * wide + c);
            value += old * load(a->conv_taps + i * wide + c);
            if (i) store(window + (i - 1) * wide + c, old);
        }
        store(window + (kept - 1) * wide + c, load(input + c));
        store(out + c, value * vsigmoid(value));
    }
}

/* Head h of one token: `mixed` [3, H d] (q, k, v) and `forget` [H d] are overwritten, `own` is the head's state. */
INLINE void head_step(const Kda *a, int64_t h, float *mixed, float *forget, float beta, const float *gate, char *own,
                      float *out, int narrow) {
    int64_t d = a->size, inner = a->heads * d;
    float *q = mixed + h * d, *k = q + inner, *v = k + inner, *decay = forget + h * d, *to = out + h * d;
    float inverse_q = 1.f / sqrtf((square_sum(q, d) + 1e-6f) * d), inverse_k = 1.f / sqrtf(square_sum(k, d) + 1e-6f);
    for (int64_t c = 0; c < d; c += LANES) {
        store(q + c, load(q + c) * inverse_q);
        store(k + c, load(k + c) * inverse_k);
        store(decay + c, vexp(a->bound * vsigmoid(a->rate[h] * (load(decay + c) + load(a->dt_bias + h * d + c)))));
    }
    delta(own, d, q, k, v, decay, vsigmoid(all(beta))[0], to, narrow);
    float inverse = 1.f / sqrtf(square_sum(to, d) / d + a->eps);
    for (int64_t c = 0; c < d; c += LANES)
        store(to + c, load(to + c) * inverse * load(a->o_norm + c) * vsigmoid(load(gate + h * d + c)));
}

/* One token of each of `count` sequences, the pools changed in place: qkv [Q, 3 H d], forget, gate, out [Q, H d], beta
   [Q, H], slots [Q], conv [S, taps - 1, 3 H d], state [S, H, d, d]. `forget` is overwritten. */
void kda_step(const Kda *a, const float *qkv, float *forget, const float *beta, const float *gate, const int64_t *slots,
              float *conv, char *state, float *out, int64_t count) {
    int64_t d = a->size, inner = a->heads * d, wide = 3 * inner, bytes = d * d * (a->narrow ? 2 : 4);
    float *mixed = room(wide);
    for (int64_t s = 0; s < count; s++) {
        convolve(a, qkv + s * wide, conv + slots[s] * (a->taps - 1) * wide, mixed);
        for (int64_t h = 0; h < a->heads; h++) {
            char *own = state + (slots[s] * a->heads + h) * bytes;
            float b = beta[s * a->heads + h];
            if (a->narrow) head_step(a, h, mixed, forget + s * inner, b, gate + s * inner, own, out + s * inner, 1);
            else head_step(a, h, mixed, forget + s * inner, b, gate + s * inner, own, out + s * inner, 0);
        }
    }
    free(mixed);
}

/* `count` tokens of the sequence in one slot, otherwise as kda_step; the state stays in fp32 until the last of them.
   `window` [taps - 1, 3 H d] and `state` [H, d, d] are the slot's; after each of `borders` tokens (ascending) they are
   copied, the state as it is stored, to `windows` and `states`. */
void kda_segment(const Kda *a, const float *qkv, float *forget, const float *beta, const float *gate, float *window,
                 char *state, float *out, int64_t count, const int64_t *borders, int64_t many, float *windows,
                 char *states) {
    int64_t d = a->size, inner = a->heads * d, wide = 3 * inner, kept = (a->taps - 1) * wide, cells = d * d;
    int64_t bytes = cells * (a->narrow ? 2 : 4);
    float *mixed = room(count * wide), *own = room(cells);
    for (int64_t t = 0, next = 0; t < count; t++) {
        convolve(a, qkv + t * wide, window, mixed + t * wide);
        if (next < many && borders[next] == t + 1) memcpy(windows + next++ * kept, window, kept * sizeof(float));
    }
    for (int64_t h = 0; h < a->heads; h++) {
        char *stored = state + h * bytes;
        for (int64_t c = 0; c < cells; c += LANES) store(own + c, load_state(stored, c, a->narrow));
        for (int64_t t = 0, next = 0; t < count; t++) {
            head_step(a, h, mixed + t * wide, forget + t * inner, beta[t * a->heads + h], gate + t * inner, (char *)own,
                      out + t * inner, 0);
            int border = next < many && borders[next] == t + 1;
            char *to = border ? states + (next++ * a->heads + h) * bytes : stored;
            if (!border && t + 1 < count) continue;
            for (int64_t c = 0; c < cells; c += LANES)
                if (a->narrow) store_bf16((uint16_t *)to + c, load(own + c));
                else store((float *)to + c, load(own + c));
            if (border && t + 1 == count) memcpy(stored, to, bytes);
        }
    }
    free(mixed);
    free(own);
}

typedef struct {
    int64_t experts, first, local, top, size; /* `local` experts from `first` on are held here */
    float scaling, limit;
    const float *bias;
    Weight router;
    const Weight *gate_up, *down; /* one of each for every local expert, then the shared one */
} Moe;

INLINE void swiglu(float *both, int64_t inner, float limit) {
    for (int64_t i = 0; i < inner; i += LANES) {
        vf gate = load(both + i), up = load(both + inner + i);
        gate = pick(gate > limit, all(limit), gate);
        up = pick(up > limit, all(limit), pick(up < -limit, all(-limit), up));
        store(both + i, gate * vsigmoid(gate) * up);
    }
}

/* The `top` experts of one token by score plus bias, and their normalised scores times the scaling. */
static void route(const Moe *m, const float *logits, int64_t *chosen, float *weights) {
    float score[EXPERTS], rank[EXPERTS], total = 0;
    for (int64_t e = 0; e < m->experts; e++) {
        score[e] = vsigmoid(all(logits[e]))[0];
        rank[e] = score[e] + m->bias[e];
    }
    for (int64_t i = 0; i < m->top; i++) {
        int64_t best = 0;
        for (int64_t e = 1; e < m->experts; e++)
            if (rank[e] > rank[best]) best = e;
        rank[best] = -INFINITY;
        chosen[i] = best;
        total += weights[i] = score[best];
    }
    for (int64_t i = 0; i < m->top; i++) weights[i] = weights[i] / (total + 1e-20f) * m->scaling;
}

/* x [T, D] -> out [T, D]: the shared expert plus the routed ones, each read once for all of its tokens. */
void experts(const Moe *m, const float *x, int64_t count, float *out, int64_t threads) {
    int64_t size = m->size, wide = m->gate_up[m->local].rows;
    if (m->local && m->gate_up[0].rows > wide) wide = m->gate_up[0].rows;
    float *memory = room(count * (2 * size + 2 * wide + m->experts + m->top));
    float *rows = memory, *part = rows + count * size, *both = part + count * size, *packed = both + count * wide;
    float *logits = packed + count * wide, *weights = logits + count * m->experts;
    int64_t *chosen = malloc(count * m->top * sizeof(int64_t)), *token = malloc(count * sizeof(int64_t));
    product(&m->router, x, count, logits, 1);
    for (int64_t t = 0; t < count; t++) route(m, logits + t * m->experts, chosen + t * m->top, weights + t * m->top);
    for (int64_t e = m->local; e >= 0; e--) { /* the shared one first: it fills `out` */
        int shared = e == m->local;
        int64_t found = 0, inner = m->gate_up[e].rows / 2;
        float strength[count];
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < (shared ? 1 : m->top); i++)
                if (shared || chosen[t * m->top + i] == m->first + e) {
                    strength[found] = weights[t * m->top + i];
                    token[found++] = t;
                    break; /* NaN may choose one expert twice */
                }
        if (!found) continue;
        for (int64_t f = 0; f < found; f++) memcpy(rows + f * size, x + token[f] * size, size * sizeof(float));
        product(&m->gate_up[e], rows, found, both, threads);
        for (int64_t f = 0; f < found; f++) {
            swiglu(both + f * 2 * inner, inner, m->limit);
            memcpy(packed + f * inner, both + f * 2 * inner, inner * sizeof(float));
        }
        product(&m->down[e], packed, found, shared ? out : part, threads);
        if (shared) continue;
        for (int64_t f = 0; f < found; f++)
            for (int64_t d = 0; d < size; d += LANES)
                store(out + token[f] * size + d, load(out + token[f] * size + d) + strength[f] * load(part + f * size + d));
    }
    free(memory);
    free(chosen);
    free(token);
}

/* A decode step over latents: query, out [Q, heads, width], slots [Q, L] (a row's stride), positions [Q]. Without pools
   every token up to the position; with chosen [Q, K] and real [Q, K] only those pools and the unfinished last one. */
void latent_step(const Latents *l, const float *query, int64_t count, int64_t heads, const int64_t *slots, int64_t stride,
                 const int64_t *positions, int64_t kpool, const int64_t *chosen, const char *real, int64_t picks,
                 float scale, float *out, int64_t threads) {
#pragma omp parallel for num_threads(threads < count ? threads : count) if (threads > 1 && count > 1)
    for (int64_t s = 0; s < count; s++) {
        int64_t end = positions[s] + 1, tail = end / kpool * kpool, found = 0;
        const int64_t *from = slots + s * stride;
        int64_t *seen = malloc((chosen ? (picks + 1) * kpool : 1) * sizeof(int64_t));
        if (chosen) {
            for (int64_t i = 0; i < picks; i++)
                if (real[s * picks + i])
                    for (int64_t t = 0; t < kpool; t++) seen[found++] = from[chosen[s * picks + i] * kpool + t];
            for (int64_t t = tail; t < end; t++) seen[found++] = from[t];
        }
        int64_t each = heads * l->width;
        attend(l, query + s * each, heads, chosen ? seen : from, chosen ? found : end, scale, out + s * each);
        free(seen);
    }
}

/* The best `picks` pools of each query by sum over heads of weight * relu(query . key / sqrt(size)), ties to the earlier:
   queries [Q, heads, size], weights [Q, heads], keys [Q, pools, size], positions [Q] -> chosen, real [Q, picks]. */
void choose(const float *queries, const float *weights, const float *keys, const int64_t *positions, int64_t count,
            int64_t heads, int64_t size, int64_t pools, int64_t kpool, int64_t picks, int64_t *chosen, char *real) {
    float *scores = room(heads * pools), scale = 1.f / sqrtf((float)size);
    Ranked *ranked = malloc(pools * sizeof(Ranked));
    for (int64_t s = 0; s < count; s++) {
        Weight rows = {FP32, pools, size, 0, (const char *)(keys + s * pools * size), NULL};
        part_of(&rows, 0, pools, queries + s * heads * size, heads, scores);
        for (int64_t p = 0; p < pools; p++) {
            float total = 0;
            for (int64_t h = 0; h < heads; h++) {
                float score = scores[h * pools + p] * scale;
                total += score > 0 ? score * weights[s * heads + h] : 0;
            }
            ranked[p] = (Ranked){p * kpool + kpool - 1 > positions[s] ? -INFINITY : total, p};
        }
        qsort(ranked, pools, sizeof(Ranked), by_rank);
        for (int64_t i = 0; i < picks; i++) {
            chosen[s * picks + i] = ranked[i].pool;
            real[s * picks + i] = ranked[i].score > -INFINITY;
        }
    }
    free(scores);
    free(ranked);
}
