/* y = x W^T for few rows of fp32 activations and weights stored row by row at 32, 16, 8 or 4 bits.
   4 bits: 128 inputs are 16 words of eight nibbles, lowest first; groups share a bf16 scale and minimum. */
#include "vector.h"
#include <omp.h>

#ifndef BLOCK
#define BLOCK 4 /* output rows that share a load of the activations */
#endif
#ifndef AHEAD
#define AHEAD 8192 /* bytes by which each row's stream is prefetched */
#endif
#define CHUNK 128
#define TILE 8 /* activation rows that share a load of the weights, at most */
#define GRAIN 65536 /* weights a thread should have at least */

enum { FP32, BF16, INT8, INT4 };

typedef struct {
    int64_t kind, rows, cols, group;
    const char *data;
    const void *scale; /* INT8: fp32 [rows]; INT4: bf16 (minimum, scale) [rows, cols padded to 128 / group], 16 beyond */
} Weight;

INLINE int64_t row_bytes(int kind, int64_t cols) {
    if (kind == INT4) return (cols + CHUNK - 1) / CHUNK * (CHUNK / 2);
    return cols * (kind == FP32 ? 4 : kind == BF16 ? 2 : 1);
}

INLINE vf load_weight(int kind, const char *row, int64_t k) {
    if (kind == FP32) return load((const float *)row + k);
    if (kind == BF16) return load_bf16((const uint16_t *)row + k);
    return load_int8((const int8_t *)row + k);
}

/* out[m, r] for `rows` weight rows and `many` activation rows; both are constants where this is inlined. */
INLINE void tile(int kind, int rows, int many, const Weight *w, int64_t r0, const float *x, float *out) {
    int64_t stride = row_bytes(kind, w->cols), cols = w->cols;
    const char *row = w->data + r0 * stride;
    vf acc[BLOCK][TILE] = {};
    for (int64_t k = 0; k < cols; k += LANES) {
        vf values[TILE];
        UNROLL for (int m = 0; m < many; m++) values[m] = load(x + m * cols + k);
        UNROLL for (int r = 0; r < rows; r++) {
            const char *at = row + r * stride;
            if (AHEAD) __builtin_prefetch(at + row_bytes(kind, k) + AHEAD);
            vf weight = load_weight(kind, at, k);
            UNROLL for (int m = 0; m < many; m++) acc[r][m] += weight * values[m];
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        float scale = kind == INT8 ? ((const float *)w->scale)[r0 + r] : 1.f;
        UNROLL for (int m = 0; m < many; m++) out[m * w->rows + r0 + r] = sum(acc[r][m]) * scale;
    }
}

/* Nibble i of each word as a float, 16^i times too large where that saves the shift: the activations make up for it. */
#ifdef __AVX512F__
#define LARGE(i) ((i) == 1 || (i) == 3 || (i) == 5) /* the rest through a table, whose port would else be idle */
#else
#define LARGE(i) ((i) > 0 && (i) < 7)
#endif
INLINE vf nibble(vu words, int i) {
    if (LARGE(i)) return __builtin_convertvector((vi)(words & (15u << (4 * i))), vf);
#ifdef __AVX512F__
    vf codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; /* a look-up reads four bits of its index */
    return (vf)_mm512_permutexvar_ps((__m512i)(words >> (4 * i)), (__m512)codes);
#else
    return __builtin_convertvector((vi)(words >> (4 * i) & 15), vf);
#endif
}

/* The activations in the order in which nibbles come out of their words: [chunk][9][16], the ninth their sums. */
static void arrange(const float *x, int64_t cols, float *to) {
    for (int64_t c = 0; c * CHUNK < cols; c++, to += 9 * LANES)
        for (int lane = 0; lane < LANES; lane++) {
            float total = 0;
            for (int i = 0; i < 8; i++) {
                int64_t k = c * CHUNK + lane * 8 + i;
                float value = k < cols ? x[k] : 0.f;
                to[i * LANES + lane] = LARGE(i) ? value / (float)(1 << (4 * i)) : value;
                total += value;
            }
            to[8 * LANES + lane] = total;
        }
}

INLINE void tile4(int rows, int many, const Weight *w, int64_t r0, const float *x, float *out) {
    int64_t chunks = (w->cols + CHUNK - 1) / CHUNK, stride = chunks * (CHUNK / 2), each = CHUNK / w->group;
    vi lane = (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi spread = w->group == 32 ? lane >> 2 : w->group == 64 ? lane >> 3 : lane >> 4;
    vf acc[BLOCK][TILE] = {};
    for (int64_t c = 0; c < chunks; c++) {
        const float *now = x + c * 9 * LANES;
        UNROLL for (int r = 0; r < rows; r++) {
            const char *at = w->data + (r0 + r) * stride + c * (CHUNK / 2);
            if (AHEAD) __builtin_prefetch(at + AHEAD);
            vu words = *(const vu_any *)at;
            vu both = *(const vu_any *)((const uint32_t *)w->scale + ((r0 + r) * chunks + c) * each);
            both = __builtin_shuffle(both, (vu)spread);
            vf scale = (vf)(both & 0xffff0000), low = (vf)(both << 16), part[TILE] = {};
            UNROLL for (int i = 0; i < 8; i++) {
                vf weight = nibble(words, i);
                UNROLL for (int m = 0; m < many; m++) part[m] += weight * load(now + (m * chunks * 9 + i) * LANES);
            }
            UNROLL for (int m = 0; m < many; m++)
                acc[r][m] += part[m] * scale + low * load(now + (m * chunks * 9 + 8) * LANES);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int m = 0; m < many; m++) out[m * w->rows + r0 + r] = sum(acc[r][m]);
}

/* 32 weights of one group, in order. */
INLINE void unpack(const char *at, float scale, float low, float *out) {
    vb_any bytes = *(const vb_any *)at, even = bytes & 15, odd = (bytes >> 4) & 15;
    vb_any first = __builtin_shuffle(even, odd, (vb_any){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
    vb_any last = __builtin_shuffle(even, odd, (vb_any){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    store(out, load_int8((const int8_t *)&first) * scale + low);
    store(out + LANES, load_int8((const int8_t *)&last) * scale + low);
}

INLINE void tiles(int kind, int rows, int many, const Weight *w, int64_t r0, const float *x, float *out) {
    if (kind == INT4) tile4(rows, many, w, r0, x, out);
    else tile(kind, rows, many, w, r0, x, out);
}

INLINE void rows_of(int kind, int many, const Weight *w, int64_t from, int64_t to, const float *x, float *out) {
    int64_t r = from, rows = many > 4 ? BLOCK / 2 : BLOCK; /* their product is what registers hold */
    for (; r + rows <= to; r += rows) tiles(kind, many > 4 ? BLOCK / 2 : BLOCK, many, w, r, x, out);
    for (; r < to; r++) tiles(kind, 1, many, w, r, x, out);
}

INLINE void span(int kind, const Weight *w, int64_t from, int64_t to, const float *x, int64_t count, float *out) {
    int64_t step = kind == INT4 ? (w->cols + CHUNK - 1) / CHUNK * 9 * LANES : w->cols, m = 0;
    for (; m + 8 <= count; m += 8) rows_of(kind, 8, w, from, to, x + m * step, out + m * w->rows);
    for (; m + 4 <= count; m += 4) rows_of(kind, 4, w, from, to, x + m * step, out + m * w->rows);
    for (; m + 2 <= count; m += 2) rows_of(kind, 2, w, from, to, x + m * step, out + m * w->rows);
    for (; m < count; m++) rows_of(kind, 1, w, from, to, x + m * step, out + m * w->rows);
}

static void part_of(const Weight *w, int64_t from, int64_t to, const float *x, int64_t count, float *out) {
    switch (w->kind) {
    case FP32: span(FP32, w, from, to, x, count, out); break;
    case BF16: span(BF16, w, from, to, x, count, out); break;
    case INT8: span(INT8, w, from, to, x, count, out); break;
    case INT4: span(INT4, w, from, to, x, count, out); break;
    }
}

/* x [count, cols] -> out [count, rows] on at most `threads` threads. */
static void product(const Weight *w, const float *x, int64_t count, float *out, int64_t threads) {
    float *arranged = NULL;
    if (w->kind == INT4) {
        int64_t step = (w->cols + CHUNK - 1) / CHUNK * 9 * LANES;
        arranged = room(count * step);
        for (int64_t m = 0; m < count; m++) arrange(x + m * w->cols, w->cols, arranged + m * step);
        x = arranged;
    }
    int64_t most = w->rows * w->cols / GRAIN, team = threads < most ? threads : most;
    if (team < 2) part_of(w, 0, w->rows, x, count, out);
    else {
        int64_t share = ((w->rows + team - 1) / team + BLOCK - 1) / BLOCK * BLOCK;
#pragma omp parallel for num_threads(team) schedule(static)
        for (int64_t t = 0; t < team; t++) {
            int64_t from = t * share, to = from + share < w->rows ? from + share : w->rows;
            if (from < to) part_of(w, from, to, x, count, out);
        }
    }
    free(arranged);
}
