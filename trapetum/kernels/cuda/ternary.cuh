// Activations as the integer kernels read them, made by one device function for all of them.
//
// Groups of 128 inputs: scale = max |x| / 127 in float32 (one IEEE division), codes = x / scale rounded half to even,
// a group of zeros has scale 0. The codes of 32 inputs are stored as 32 bytes in the order in which the weights' two-bit
// fields leave two words of 16: byte 8 s + 4 w + b is input 16 w + 4 b + s, so that the fields s of both words, masked and
// not shifted, meet 8 consecutive bytes. Beside a group's scale lies the sum of its codes: weights are stored as code - 1.
#pragma once
#include "partition.cuh"

struct Group {
    float scale;
    int sum;
};

// x / scale, rounded half to even: exactly what the division gives. A product with the reciprocal is off by less than
// 2**-22 of 127; only where that could matter is the division done.
DEVICE int quantized(float x, float scale, float inverse) {
    const float near = x * inverse;
    const float rounded = rintf(near);
    if (!(fabsf(fabsf(near - rounded) - 0.5f) >= 1e-4f)) return __float2int_rn(x / scale);  // also what is not finite
    return (int)rounded;
}

// The maximum, NaN where one is: fmaxf would pass a NaN by, and its token would go on with a zero in its place.
DEVICE float larger(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// Eight lanes quantize 128 inputs, 16 each; byte b of words[s] is the code of input 4 b + s of the lane's, or (PAIRS)
// of input 8 (s / 2) + 2 b + s % 2.
template <bool BF16, bool PAIRS> DEVICE Group quantize_group(const u16* x, bool aligned, u32 (&words)[4]) {
    float v[16];
    if (aligned) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint2 w = ((const uint2*)x)[i];
            v[4 * i] = to_float<BF16>((u16)w.x), v[4 * i + 1] = to_float<BF16>((u16)(w.x >> 16));
            v[4 * i + 2] = to_float<BF16>((u16)w.y), v[4 * i + 3] = to_float<BF16>((u16)(w.y >> 16));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = to_float<BF16>(x[i]);
    }
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) most = larger(most, fabsf(v[i]));
#pragma unroll
    for (int i = 1; i < 8; i *= 2) most = larger(most, __shfl_xor_sync(~0u, most, i));
    const float scale = most / 127.f, inverse = scale > 0.f ? 1.f / scale : 0.f;
    int sum = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) words[s] = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int q = scale > 0.f ? max(-127, min(127, quantized(v[i], scale, inverse))) : 0;
        const int s = PAIRS ? i / 8 * 2 + i % 2 : i % 4, b = PAIRS ? i % 8 / 2 : i / 4;
        words[s] |= (u32)(q & 255) << b * 8;
        sum += q;
    }
#pragma unroll
    for (int i = 1; i < 8; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    return Group{scale, sum};
}
