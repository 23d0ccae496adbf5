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

// One warp quantizes 128 inputs. place(element) is where the code of one goes.
template <bool BF16, class Place> DEVICE Group quantize_group(const u16* x, bool aligned, Place place) {
    const int lane = threadIdx.x & 31;
    float v[4];
    if (aligned) {
        const uint2 w = *(const uint2*)(x + lane * 4);
        v[0] = to_float<BF16>((u16)w.x), v[1] = to_float<BF16>((u16)(w.x >> 16));
        v[2] = to_float<BF16>((u16)w.y), v[3] = to_float<BF16>((u16)(w.y >> 16));
    } else {
#pragma unroll
        for (int s = 0; s < 4; ++s) v[s] = to_float<BF16>(x[lane * 4 + s]);
    }
    const float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    // Non-negative floats are ordered like their bits.
    const float scale = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most))) / 127.f;
    int sum = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const int q = scale > 0.f ? max(-127, min(127, __float2int_rn(v[s] / scale))) : 0;
        *place(s) = (u8)q;
        sum += q;
    }
    return Group{scale, __reduce_add_sync(~0u, sum)};
}
