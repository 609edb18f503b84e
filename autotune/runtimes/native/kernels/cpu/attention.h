/* A decode step's attention over cached latents, and the choice of the pools that it may see. */
#include "linear.h"

typedef struct {
    int64_t kind, width; /* FP32, BF16 or INT8 (with `scale`); floats in a row */
    const char *rows;
    const uint16_t *scale; /* bf16 [S] */
} Latents;

INLINE void widen(const Latents *l, int64_t slot, float *to) {
    const char *row = l->rows + slot * row_bytes((int)l->kind, l->width);
    uint32_t bits = l->kind == INT8 ? (uint32_t)l->scale[slot] << 16 : 0x3f800000; /* 1.f without one */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    for (int64_t i = 0; i < l->width; i += LANES)
        store(to + i, (l->kind == FP32   ? load_weight(FP32, row, i)
                       : l->kind == BF16 ? load_weight(BF16, row, i)
                                         : load_weight(INT8, row, i)) * scale);
}

static void softmax(float *scores, int64_t count, float scale) {
    float most = -INFINITY, total = 0;
    for (int64_t i = 0; i < count; i++) most = scores[i] > most ? scores[i] : most;
    int64_t i = 0;
    vf sums = {};
    for (; i + LANES <= count; i += LANES) {
        vf e = vexp((load(scores + i) - most) * scale);
        store(scores + i, e);
        sums += e;
    }
    for (; i < count; i++) total += scores[i] = vexp(all((scores[i] - most) * scale))[0];
    total = 1.f / (total + sum(sums));
    for (i = 0; i < count; i++) scores[i] *= total;
}

/* One query of `heads` over the latents in `slots`: query, out [heads, width]. */
static void attend(const Latents *l, const float *query, int64_t heads, const int64_t *slots, int64_t count, float scale,
                   float *out) {
    int64_t width = l->width;
    float *rows = room(count * width), *scores = room(heads * count);
    for (int64_t t = 0; t < count; t++) widen(l, slots[t], rows + t * width);
    Weight keys = {FP32, count, width, 0, (const char *)rows, NULL};
    part_of(&keys, 0, count, query, heads, scores);
    for (int64_t h = 0; h < heads; h++) {
        softmax(scores + h * count, count, scale);
        for (int64_t c = 0; c < width; c += LANES) {
            vf a = {}, b = {};
            int64_t t = 0;
            for (; t + 2 <= count; t += 2) {
                a += scores[h * count + t] * load(rows + t * width + c);
                b += scores[h * count + t + 1] * load(rows + (t + 1) * width + c);
            }
            if (t < count) a += scores[h * count + t] * load(rows + t * width + c);
            store(out + h * width + c, a + b);
        }
    }
    free(rows);
    free(scores);
}

typedef struct {
    float score;
    int64_t pool;
} Ranked;

static int by_rank(const void *left, const void *right) {
    const Ranked *a = left, *b = right;
    if (a->score != b->score) return a->score < b->score ? 1 : -1;
    return a->pool < b->pool ? -1 : 1;
}
