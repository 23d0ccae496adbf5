// What every kernel shares: number formats, loads, table addresses, tensor-core instructions.
//
// The sources include nothing from outside, so that NVRTC needs no header files: half precision lives in 32-bit words of
// two values and is touched by inline PTX only. Activations are float16 or bfloat16, chosen by the template parameter
// BF16; sums are float32 always (tensor cores accumulate in float32, so nothing overflows at 65504).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// What a kernel writes; the Python side passes the number.
enum Output { OUT_FLOAT16 = 0, OUT_BFLOAT16 = 1, OUT_FLOAT32 = 2 };

// A kernel may start while the one before it still runs, and load weights: nothing that a kernel writes is read or
// written before wait_for_inputs(), which returns when everything before is done (programmatic dependent launch).
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

DEVICE float bfloat_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

DEVICE u16 float_to_bfloat(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

template <bool BF16> DEVICE float to_float(u16 bits) { return BF16 ? bfloat_to_float(bits) : half_to_float(bits); }

// Tables are stored in float16; bfloat16 activations meet entries rounded to bfloat16, as a dense model would have them.
template <bool BF16> DEVICE u16 table_entry(u16 bits) { return BF16 ? float_to_bfloat(half_to_float(bits)) : bits; }

template <bool BF16> DEVICE u32 table_pair(u32 pair) {
    if (!BF16) return pair;
    return (u32)table_entry<true>((u16)pair) | (u32)table_entry<true>((u16)(pair >> 16)) << 16;
}

DEVICE void store(void* out, int kind, u64 index, float value) {
    if (kind == OUT_FLOAT32) ((float*)out)[index] = value;
    else ((u16*)out)[index] = kind == OUT_BFLOAT16 ? float_to_bfloat(value) : float_to_half(value);
}

// Sixteen values to a multiple of sixteen, as 16-byte stores.
DEVICE void store_run(void* out, int kind, u64 index, const float (&v)[16]) {
    if (kind == OUT_FLOAT32) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            ((float4*)((float*)out + index))[j] = make_float4(v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
        return;
    }
    u32 w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
        w[j] = kind == OUT_BFLOAT16 ? float_to_bfloat(v[2 * j]) | (u32)float_to_bfloat(v[2 * j + 1]) << 16
                                    : float_to_half(v[2 * j]) | (u32)float_to_half(v[2 * j + 1]) << 16;
    uint4* to = (uint4*)((u16*)out + index);
    to[0] = make_uint4(w[0], w[1], w[2], w[3]);
    to[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

// Eight halves to a row of `length`; what is beyond its end is dropped.
DEVICE void store_eight(u16* row, int k, int length, uint4 v) {
    if (length % 8 == 0) {
        if (k < length) *(uint4*)(row + k) = v;
        return;
    }
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (k + j < length) row[k + j] = (u16)(w[j / 2] >> j % 2 * 16);
}

// Weights are read once: they pass L1 by, and L2 fetches whole 128-byte lines.
DEVICE uint4 load_once(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

DEVICE uint2 load_once8(const void* at) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}

// Byte `which` of `word` becomes byte 1 of an offset whose byte 0 is that of `base`: with 256-byte table rows a code is
// its row's address after this one instruction. `base` must be below 256.
DEVICE u32 table_offset(u32 word, u32 base, int which) { return __byte_perm(word, base, 0x7604 | which << 4); }

DEVICE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
DEVICE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// d += a (16 x 16, row) . b (16 x 8, column). With g = lane / 4 and t = lane % 4: a[0], a[2] hold row g, a[1], a[3] row
// g + 8, of the two inputs 2t, 2t + 1 and (a[2], a[3]) 2t + 8, 2t + 9; b0, b1 the same inputs of column g; d[0], d[1]
// are row g of columns 2t, 2t + 1, and d[2], d[3] row g + 8.
template <bool BF16> DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (BF16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same for bytes: d (int32) += a (unsigned, 16 x 32) . b (signed, 32 x 8); a word holds inputs 4t .. 4t + 3, and 16 more.
DEVICE void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// COUNT activations of one token from `k` on, a multiple of 8, as words. `aligned`: they are all there, and rows begin at
// multiples of 16 bytes; otherwise inputs at in_features and beyond are zero.
template <int COUNT>
DEVICE void load_inputs(u32 (&words)[COUNT / 2], const u16* token, int k, int in_features, bool aligned) {
    if (aligned) {
#pragma unroll
        for (int i = 0; i < COUNT / 8; ++i) {
            const uint4 v = ((const uint4*)(token + k))[i];
            words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const u32 low = k + 2 * i < in_features ? token[k + 2 * i] : 0;
        const u32 high = k + 2 * i + 1 < in_features ? token[k + 2 * i + 1] : 0;
        words[i] = low | high << 16;
    }
}

// Inputs of all tokens into shared memory, `pitch` halves a token (a multiple of 8), zero beyond in_features; by a block.
DEVICE void stage_inputs(u16* staged, int pitch, const u16* x, int tokens, int in_features, bool aligned) {
    const int chunks = pitch / 8;
    for (int i = threadIdx.x; i < chunks * tokens; i += blockDim.x) {
        const int token = i / chunks, k = i % chunks * 8;
        const u16* row = x + (u64)token * in_features;
        u32 w[4] = {};
        if (k < in_features) load_inputs<8>(w, row, k, in_features, aligned && k + 8 <= in_features);
        *(uint4*)(staged + (u64)token * pitch + k) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}
