/* Products with weights of small floats.

   small_floats: 4-bit values that are places in a table of 16 numbers, in blocks with a scale.

   values: [rows, columns / 2], the first of two in the low bits; scales: [rows, columns / block], places in a table of
   256, or floats, if there is no table.
   even and odd: the columns of x [count, columns] of even and odd number, [count, columns / 2] each; y: [count, rows].
   block_bytes: 8 or a multiple of 16; columns: a multiple of 32.

   byte_floats: 8-bit floats in blocks of block_rows by block_columns, a multiple of 16, with a scale in float.
   values: [rows, columns]; scales: [row blocks, columns / block_columns]; x: [count, columns]; y: [count, rows].
   They are the high bytes of half floats (E5M2), or with `mantissa` have one bit of it more, and one of exponent less (E4M3):
   moved to where a half float has them, they stand for 1/256 of themselves, subnormal numbers too. */

#include <stdint.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define CHUNK 16 /* bytes */

static inline float scale_of(const void *scales, long place, const float *scale_table)
{
    return scale_table ? scale_table[((const uint8_t *)scales)[place]] : ((const float *)scales)[place];
}

#if defined(__AVX512F__)

static float row(const uint8_t *values, const void *scales, const float *even, const float *odd, long chunks,
                 long block_bytes, const float *table, const float *scale_table)
{
    const __m512 numbers = _mm512_loadu_ps(table);
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (long chunk = 0; chunk < chunks; chunk++) {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(values + CHUNK * chunk)));
        const __m512 low = _mm512_permutexvar_ps(bytes, numbers);
        const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers);
        __m512 product = _mm512_mul_ps(low, _mm512_loadu_ps(even + CHUNK * chunk));
        product = _mm512_fmadd_ps(high, _mm512_loadu_ps(odd + CHUNK * chunk), product);
        __m512 scale;
        if (block_bytes >= CHUNK)
            scale = _mm512_set1_ps(scale_of(scales, CHUNK * chunk / block_bytes, scale_table));
        else
            scale = _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(scale_of(scales, 2 * chunk, scale_table)),
                                         _mm512_set1_ps(scale_of(scales, 2 * chunk + 1, scale_table)));
        sums[chunk & 1] = _mm512_fmadd_ps(product, scale, sums[chunk & 1]);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
}

#elif defined(__AVX2__)

/* The numbers of both halves of a table, of which bit 3 of a place says the half. */
static inline __m256 look_up(__m256i places, __m256 first, __m256 second)
{
    const __m256 half = _mm256_castsi256_ps(_mm256_slli_epi32(places, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first, places), _mm256_permutevar8x32_ps(second, places), half);
}

static float row(const uint8_t *values, const void *scales, const float *even, const float *odd, long chunks,
                 long block_bytes, const float *table, const float *scale_table)
{
    const __m256 first = _mm256_loadu_ps(table), second = _mm256_loadu_ps(table + 8);
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (long half = 0; half < 2 * chunks; half++) {
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(values + 8 * half)));
        const __m256 low = look_up(bytes, first, second);
        const __m256 high = look_up(_mm256_srli_epi32(bytes, 4), first, second);
        __m256 product = _mm256_mul_ps(low, _mm256_loadu_ps(even + 8 * half));
        product = _mm256_fmadd_ps(high, _mm256_loadu_ps(odd + 8 * half), product);
        const __m256 scale = _mm256_set1_ps(scale_of(scales, 8 * half / block_bytes, scale_table));
        sums[half & 1] = _mm256_fmadd_ps(product, scale, sums[half & 1]);
    }
    float parts[8], sum = 0;
    _mm256_storeu_ps(parts, _mm256_add_ps(sums[0], sums[1]));
    for (int i = 0; i < 8; i++)
        sum += parts[i];
    return sum;
}

#else

static float row(const uint8_t *values, const void *scales, const float *even, const float *odd, long chunks,
                 long block_bytes, const float *table, const float *scale_table)
{
    float sum = 0;
    for (long block = 0; block < CHUNK * chunks / block_bytes; block++) {
        float part = 0;
        for (long i = block * block_bytes; i < (block + 1) * block_bytes; i++)
            part += table[values[i] & 15] * even[i] + table[values[i] >> 4] * odd[i];
        sum += part * scale_of(scales, block, scale_table);
    }
    return sum;
}

#endif

void small_floats(const uint8_t *values, const void *scales, const float *even, const float *odd, float *y,
                  long count, long rows, long columns, long block_bytes, const float *table, const float *scale_table)
{
    const long bytes = columns / 2, scale_bytes = bytes / block_bytes * (scale_table ? 1 : (long)sizeof(float));
#pragma omp parallel for if (rows * columns > 1 << 17)
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < count; i++)
            y[i * rows + r] = row(values + r * bytes, (const char *)scales + r * scale_bytes, even + i * bytes, odd + i * bytes,
                                  bytes / CHUNK, block_bytes, table, scale_table);
}

#if defined(__AVX512F__)

static float bytes_row(const uint8_t *values, const float *x, const float *scales, long columns, long block_columns,
                       int mantissa)
{
    const __m256i magnitude = _mm256_set1_epi16(0x3FFF), sign = _mm256_set1_epi16((short)0x8000);
    __m512 sum = _mm512_setzero_ps();
    for (long start = 0; start < columns; start += block_columns) {
        __m512 part = _mm512_setzero_ps();
        for (long i = start; i < start + block_columns; i += 16) {
            __m256i half = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(values + i)));
            const __m256i high = _mm256_slli_epi16(half, 8);
            half = mantissa ? _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(half, 7), magnitude),
                                              _mm256_and_si256(high, sign))
                            : high;
            part = _mm512_fmadd_ps(_mm512_cvtph_ps(half), _mm512_loadu_ps(x + i), part);
        }
        sum = _mm512_fmadd_ps(part, _mm512_set1_ps(scales[start / block_columns]), sum);
    }
    return _mm512_reduce_add_ps(sum) * (mantissa ? 256 : 1);
}

#elif defined(__AVX2__)

static float bytes_row(const uint8_t *values, const float *x, const float *scales, long columns, long block_columns,
                       int mantissa)
{
    const __m128i magnitude = _mm_set1_epi16(0x3FFF), sign = _mm_set1_epi16((short)0x8000);
    float lanes[8], total = 0;
    __m256 sum = _mm256_setzero_ps();
    for (long start = 0; start < columns; start += block_columns) {
        __m256 part = _mm256_setzero_ps();
        for (long i = start; i < start + block_columns; i += 8) {
            __m128i half = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(values + i)));
            const __m128i high = _mm_slli_epi16(half, 8);
            half = mantissa ? _mm_or_si128(_mm_and_si128(_mm_slli_epi16(half, 7), magnitude), _mm_and_si128(high, sign))
                            : high;
            part = _mm256_fmadd_ps(_mm256_cvtph_ps(half), _mm256_loadu_ps(x + i), part);
        }
        sum = _mm256_fmadd_ps(part, _mm256_set1_ps(scales[start / block_columns]), sum);
    }
    _mm256_storeu_ps(lanes, sum);
    for (int i = 0; i < 8; i++)
        total += lanes[i];
    return total * (mantissa ? 256 : 1);
}

#else

static float bytes_row(const uint8_t *values, const float *x, const float *scales, long columns, long block_columns,
                       int mantissa)
{
    float sum = 0;
    for (long start = 0; start < columns; start += block_columns) {
        float part = 0;
        for (long i = start; i < start + block_columns; i++) {
            const int low = mantissa ? 3 : 2, bias = mantissa ? 7 : 15;
            const int exponent = (values[i] & 0x7F) >> low, rest = values[i] & ((1 << low) - 1);
            const float whole = (float)(exponent ? rest + (1 << low) : rest);
            union { uint32_t bits; float number; } power = {(uint32_t)((exponent ? exponent : 1) - bias - low + 127) << 23};
            part += (values[i] & 0x80 ? -whole : whole) * power.number * x[i];
        }
        sum += part * scales[start / block_columns];
    }
    return sum;
}

#endif

void byte_floats(const uint8_t *values, const float *scales, const float *x, float *y, long count, long rows,
                 long columns, long block_rows, long block_columns, long mantissa)
{
    const long across = columns / block_columns;
#pragma omp parallel for if (rows * columns > 1 << 17)
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < count; i++)
            y[i * rows + r] = bytes_row(values + r * columns, x + i * columns, scales + r / block_rows * across,
                                        columns, block_columns, (int)mantissa);
}
