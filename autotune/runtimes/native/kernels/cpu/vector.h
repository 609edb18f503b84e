/* Sixteen floats at a time, in GCC's portable vectors: one AVX-512 register, two of AVX2, four of NEON. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(1), may_alias));
typedef int8_t vb_any __attribute__((vector_size(16), aligned(1), may_alias));

static float *room(int64_t floats) { return aligned_alloc(64, (floats * sizeof(float) + 127) / 64 * 64); }
INLINE vf load(const float *at) { return *(const vf_any *)at; }
INLINE void store(float *at, vf x) { *(vf_any *)at = x; }
INLINE vf all(float x) { return (vf){} + x; }

/* Widening loads; GCC 12 makes poor code of the portable ones. */
INLINE vf load_bf16(const uint16_t *at) {
#ifdef __AVX512F__
    return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)) << 16);
#else
    return (vf)(__builtin_convertvector(*(const vh_any *)at, vu) << 16);
#endif
}
INLINE vf load_int8(const int8_t *at) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
    union { __m256i half[2]; vi whole; } wide;
    wide.half[0] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
    wide.half[1] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(at + 8)));
    return __builtin_convertvector(wide.whole, vf);
#else
    return __builtin_convertvector(*(const vb_any *)at, vf);
#endif
}

/* Round to nearest even, as torch does; NaN is not expected here. */
INLINE void store_bf16(uint16_t *at, vf x) {
    vu bits = (vu)x;
    *(vh_any *)at = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, vh_any);
}

INLINE float sum(vf x) {
    float total = 0;
    UNROLL for (int step = 8; step; step /= 2) {
        vi to = (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} ^ step;
        x += __builtin_shuffle(x, to);
    }
    return total + x[0];
}

INLINE vf pick(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }

/* e^x to 2 ulp between -87 and 88, clamped beyond (Cephes' expf reduction and polynomial). */
INLINE vf vexp(vf x) {
    x = pick(x < -87.f, all(-87.f), pick(x > 88.f, all(88.f), x));
    vf n = x * 1.44269504f + 12582912.f; /* adding 1.5 * 2^23 rounds to a whole number */
    vi whole = (vi)n - 0x4b400000;
    n -= 12582912.f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.f;
    return y * (vf)((whole + 127) << 23);
}

INLINE vf vsigmoid(vf x) { return 1.f / (1.f + vexp(-x)); }
