// Attention of many positions of one sequence over the cache: tensor cores, softmax on the fly (Dao 2023).
//
// A block of four warps takes 64 queries of one head, a warp 16; keys and values pass through shared memory 64 at a
// time, 16-byte chunks swizzled by the row, so that ldmatrix meets no bank conflict. Scores, their running maximum and
// sum, and the output stay in float32 registers; probabilities are rounded to the activations' type for the second
// product, as everywhere. Registers of a lane: D / 4 queries, 32 scores, D / 2 outputs, so D up to 128 fits without
// spilling; D = 256 spills and is still right.
//
// HEAD_DIM: multiple of 16, at most 256. Dynamic shared memory: 2 * 64 * HEAD_DIM * 2 bytes.
// Bound: 4 * D * keys flops a query and head on the tensor cores; keys and values come from L2.

#include "common.cuh"

#ifdef TRAPETUM_BF16
#define BF16 true
#else
#define BF16 false
#endif
typedef u16 act;
DEVICE u32 pack(float a, float b) {
    return BF16 ? float_to_bfloat(a) | (u32)float_to_bfloat(b) << 16 : float_to_half(a) | (u32)float_to_half(b) << 16;
}

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#define TILE 64
#define CHUNKS (HEAD_DIM / 8)
#define INFINITE __int_as_float(0x7f800000)

// Where chunk `c` (8 numbers) of row `r` of a tile lies, in chunks. Rows of fewer than 8 chunks swizzle within them.
DEVICE int place(int r, int c) {
    return r * CHUNKS + (CHUNKS % 8 == 0 ? c ^ (r & 7) : (c + r) % CHUNKS);
}

template <bool TRANSPOSED>
DEVICE void load_four(u32* out, const act* tile, int r, int c) {
    u32 address = (u32)__cvta_generic_to_shared(tile + place(r, c) * 8);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address));
}

DEVICE void load_tile(act* tile, const act* from, int first, int stop) {
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += blockDim.x) {
        int r = i / CHUNKS, c = i % CHUNKS;
        uint4 value = make_uint4(0, 0, 0, 0);
        if (first + r < stop) value = *reinterpret_cast<const uint4*>(from + (size_t)(first + r) * HEAD_DIM + c * 8);
        *reinterpret_cast<uint4*>(tile + place(r, c) * 8) = value;
    }
}

// q, out: act [tokens][heads][D], positions past .. past + tokens - 1; keys, values: act [kv_heads][capacity][D] of
// the sequence, the new positions included. Grid (ceil(tokens / 64), heads), 128 threads.
extern "C" __global__ void __launch_bounds__(128) attend_prefill(
    const act* q, const act* keys, const act* values, act* out, const float* sinks, int tokens, int past, int heads,
    int kv_heads, int capacity, int window, float scale, float cap) {
    let_next_start();
    wait_for_inputs();
    extern __shared__ __align__(16) unsigned char memory[];
    act* key_tile = reinterpret_cast<act*>(memory);
    act* value_tile = key_tile + TILE * HEAD_DIM;
    int head = blockIdx.y, kv = head / (heads / kv_heads);
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
    int first = blockIdx.x * TILE + warp * 16 + row;  // this lane's queries: first and first + 8
    keys += (size_t)kv * capacity * HEAD_DIM;
    values += (size_t)kv * capacity * HEAD_DIM;

    u32 query[HEAD_DIM / 16][4];
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int token = min(first + (i & 1) * 8, tokens - 1), d = k * 16 + (i >> 1) * 8 + column;
            query[k][i] = *reinterpret_cast<const u32*>(q + ((size_t)token * heads + head) * HEAD_DIM + d);
        }
    float result[HEAD_DIM / 8][4];
#pragma unroll
    for (int t = 0; t < HEAD_DIM / 8; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) result[t][i] = 0.0f;
    float largest[2], sum[2];
    for (int i = 0; i < 2; ++i) {
        largest[i] = sinks ? sinks[head] : -INFINITE;
        sum[i] = sinks && (lane & 3) == 0 ? 1.0f : 0.0f;  // sums of four lanes are added at the end
    }

    int oldest = past + blockIdx.x * TILE, newest = past + min((int)(blockIdx.x + 1) * TILE, tokens) - 1;
    int begin = window > 0 ? max(0, oldest - window + 1) / TILE * TILE : 0;
    for (int base = begin; base <= newest; base += TILE) {
        __syncthreads();
        load_tile(key_tile, keys, base, newest + 1);
        load_tile(value_tile, values, base, newest + 1);
        __syncthreads();
        float score[TILE / 8][4];
#pragma unroll
        for (int t = 0; t < TILE / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) score[t][i] = 0.0f;
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 16; ++k)
#pragma unroll
            for (int t = 0; t < TILE / 8; t += 2) {
                u32 b[4];
                load_four<false>(b, key_tile, t * 8 + (lane >> 4) * 8 + (lane & 7), k * 2 + ((lane >> 3) & 1));
                multiply<BF16>(score[t], query[k], b[0], b[1]);
                multiply<BF16>(score[t + 1], query[k], b[2], b[3]);
            }
        bool edge = base + TILE - 1 > oldest || (window > 0 && base <= newest - window);
        float now[2] = {largest[0], largest[1]};
#pragma unroll
        for (int t = 0; t < TILE / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float s = score[t][i] * scale;
                if (cap > 0.0f) s = cap * tanhf(s / cap);
                if (edge) {
                    int key = base + t * 8 + column + (i & 1), own = past + first + (i >> 1) * 8;
                    if (key > own || (window > 0 && key <= own - window)) s = -INFINITE;
                }
                score[t][i] = s;
                now[i >> 1] = fmaxf(now[i >> 1], s);
            }
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            now[i] = fmaxf(now[i], __shfl_xor_sync(0xffffffffu, now[i], 1));
            now[i] = fmaxf(now[i], __shfl_xor_sync(0xffffffffu, now[i], 2));
            float safe = now[i] == -INFINITE ? 0.0f : now[i];  // nothing seen yet: all differences are -inf
            factor[i] = __expf(largest[i] - safe);
            largest[i] = now[i];
            now[i] = safe;
            sum[i] *= factor[i];
        }
#pragma unroll
        for (int t = 0; t < TILE / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float p = __expf(score[t][i] - now[i >> 1]);
                score[t][i] = p;
                sum[i >> 1] += p;
            }
#pragma unroll
        for (int t = 0; t < HEAD_DIM / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) result[t][i] *= factor[i >> 1];
#pragma unroll
        for (int k = 0; k < TILE / 16; ++k) {
            u32 a[4] = {pack(score[2 * k][0], score[2 * k][1]), pack(score[2 * k][2], score[2 * k][3]),
                             pack(score[2 * k + 1][0], score[2 * k + 1][1]),
                             pack(score[2 * k + 1][2], score[2 * k + 1][3])};
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 8; t += 2) {
                u32 b[4];
                load_four<true>(b, value_tile, k * 16 + ((lane >> 3) & 1) * 8 + (lane & 7), t + (lane >> 4));
                multiply<BF16>(result[t], a, b[0], b[1]);
                multiply<BF16>(result[t + 1], a, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        int token = first + i * 8;
        if (token >= tokens) continue;
        act* to = out + ((size_t)token * heads + head) * HEAD_DIM + column;
        float inverse = 1.0f / sum[i];
#pragma unroll
        for (int t = 0; t < HEAD_DIM / 8; ++t)
            *reinterpret_cast<u32*>(to + t * 8) = pack(result[t][2 * i] * inverse, result[t][2 * i + 1] * inverse);
    }
}
