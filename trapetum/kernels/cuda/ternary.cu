// Ternary and four-level weights in groups of 128: y = W x from "planes-v1" on integer tensor cores.
//
// Weights stay unsigned codes 0..3 and are never shifted: field s of four codes is a mask of the word, four times too big
// for each s; the products of the four fields are kept apart, and adding them up takes one shift-and-add each for a
// group of 128. "Minus 1" is one subtraction of the group's sum of activations. A row's share of a group is an exact
// integer; it is scaled and added in float32.
//
// One instruction holds 16 rows x 32 weights and 8 columns. Up to 4 tokens, a quad of lanes reads 64 bytes of a row, which
// are two groups: columns 2 m and 2 m + 1 are token m against the one and the other. Beyond, a quad reads a group.
#include "ternary.cuh"

#define ROWS 16
#define UNIT_INPUTS 256
#define RING 5             // units on their way from memory, for each warp

// `worker` of `workers` warps, four groups at a time.
template <bool BF16>
DEVICE void quantize_all(const u16* x, u8* codes, Group* groups, int tokens, int slots, int in_features, bool aligned,
                         int worker, int workers) {
    const int per_token = in_features / 128, lane = threadIdx.x & 31, place = lane & 7;
    for (int first = worker * 4; first < per_token * slots; first += workers * 4) {
        const int i = min(first + (lane >> 3), per_token * slots - 1);  // a lane without a group repeats the last
        const int token = i % slots, group = i / slots;
        const u64 at = (u64)min(token, tokens - 1) * in_features + group * 128;
        u32 words[4];
        Group found = quantize_group<BF16, false>(x + at + place * 16, aligned, words);
        if (token < tokens) {
#pragma unroll
            for (int s = 0; s < 4; ++s) *(u32*)(codes + at + place / 2 * 32 + s * 8 + place % 2 * 4) = words[s];
        } else {
            found = Group{0.f, 0};
        }
        if (place == 0) groups[group * slots + token] = found;
    }
}

// codes [tokens][K], groups [K / 128][slots]; slots beyond the tokens are zero.
#define QUANTIZE(NAME, BF16)                                                                                         \
    extern "C" __global__ void NAME(const u16* x, u8* codes, Group* groups, int tokens, int slots, int in_features,  \
                                    int aligned) {                                                                   \
        let_next_start();                                                                                            \
        wait_for_inputs();                                                                                           \
        quantize_all<BF16>(x, codes, groups, tokens, slots, in_features, aligned,                                    \
                           blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), gridDim.x * (blockDim.x >> 5));      \
    }
QUANTIZE(quantize_activations_f16, false)
QUANTIZE(quantize_activations_bf16, true)

// What a lane has of a unit: its words of rows g and g + 8, and the scales of the two groups.
struct Weights {
    uint2 row[2][2];  // [g, g + 8][first, second 8 bytes]
    u32 scales[2];    // two halves each
};

// A lane's place in its warp's ring of units that are on their way: 16 bytes of each row, then a pair of scales of each.
// It reads what it copied itself, so that no barrier is needed.
#define RING_BYTES 1280
template <int BYTES> DEVICE void copy_ahead(u32 to, const void* from) {
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

// Where a warp reads next; a quad takes 64 bytes of a row at once, or (SPLIT) two times 32. ODD: rows have an odd number of
// groups, so that the last unit is half empty and pairs of scales are not aligned.
template <bool SPLIT, bool ODD> struct Cursor {
    const u8* codes[2];
    const u16* scales[2];
    int tile, place;

    DEVICE void seek(const u8* planes, const Work& work) {
        const int lane = threadIdx.x & 31, groups = work.in_features / 128;
        const u16* all = (const u16*)(planes + (u64)work.rows * (work.in_features / 4));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = min(tile * ROWS + (lane >> 2) + 8 * r, work.rows - 1);
            codes[r] = planes + (u64)row * (work.in_features / 4) + place * 64 + (lane & 3) * (SPLIT ? 8 : 16);
            scales[r] = all + (u64)row * groups + 2 * place;
        }
    }

    DEVICE void next(u8* slot, const u8* planes, const Work& work) {
        const int lane = threadIdx.x & 31;
        const u32 to = (u32)__cvta_generic_to_shared(slot) + lane * 16;
        const u32 to_scales = (u32)__cvta_generic_to_shared(slot) + 1024 + lane * 4;
        const bool second = !ODD || 2 * place + 1 < work.in_features / 128;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (SPLIT) {
                copy_ahead<8>(to + r * 512, codes[r]);
                if (second) copy_ahead<8>(to + r * 512 + 8, codes[r] + 32);
            } else if (second || (lane & 3) < 2) {
                copy_ahead<16>(to + r * 512, codes[r]);
            }
            if (!ODD) copy_ahead<4>(to_scales + r * 128, scales[r]);
            codes[r] += 64;
            scales[r] += 2;
        }
        if (++place == work.per_tile) {
            ++tile;
            place = 0;
            seek(planes, work);
        }
    }
};

// The oldest unit of the ring; `second`: it has two groups.
template <bool ODD> DEVICE Weights read_slot(const u8* slot, const u8* planes, const Work& work, int tile, int place, bool second) {
    const int lane = threadIdx.x & 31, groups = work.in_features / 128;
    Weights w;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint4 v = *(const uint4*)(slot + r * 512 + lane * 16);
        w.row[r][0] = make_uint2(v.x, v.y), w.row[r][1] = make_uint2(v.z, v.w);
        if (ODD) {
            const u16* all = (const u16*)(planes + (u64)work.rows * (work.in_features / 4));
            const u16* scale = all + (u64)min(tile * ROWS + (lane >> 2) + 8 * r, work.rows - 1) * groups + 2 * place;
            w.scales[r] = __ldg(scale) | (second ? (u32)__ldg(scale + 1) << 16 : 0);
        } else {
            w.scales[r] = *(const u32*)(slot + 1024 + r * 128 + lane * 4);
        }
    }
    return w;
}

// Field s of each code of rows g and g + 8, two words each, times the activations of these words, fields 0, 1 and 2, 3.
DEVICE void multiply_fields(int (&d)[4][4], uint2 low, uint2 high, uint4 q0, uint4 q1) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const u32 mask = 0x03030303u << 2 * s;
        const uint4 q = s < 2 ? q0 : q1;
        const u32 b0 = s & 1 ? q.z : q.x, b1 = s & 1 ? q.w : q.y;
        multiply_bytes(d[s], low.x & mask, high.x & mask, low.y & mask, high.y & mask, b0, b1);
    }
}

DEVICE float group_sum(const int (&d)[4][4], int i, int sum) {
    return (float)(d[0][i] + (d[1][i] >> 2) + (d[2][i] >> 4) + (d[3][i] >> 6) - sum);
}

// SPLIT: a quad reads one group, TILES x 8 tokens; otherwise two groups, up to 4 tokens. FUSED: x holds activations that
// every block quantizes for itself; otherwise `codes` and `groups` are those of quantize_activations.
template <bool FUSED, bool BF16, bool SPLIT, int TILES, bool ODD>
DEVICE void gemv(const u8* planes, const u16* x, const u8* codes, const Group* groups, int slots, void* y, Sums sums,
                 Work work) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u32 flags[32];
    constexpr int AHEAD = RING;
    constexpr int OUT = SPLIT ? 2 * TILES : 1;  // tokens a lane has sums of
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const int count = ROWS * work.tokens;
    const int first = boundary(work, blockIdx.x), last = boundary(work, blockIdx.x + 1);
    const Shares shares(first, last, warps);
    const int begin = shares.begin(warp), end = shares.begin(warp + 1);
    let_next_start();
    float* all_left = (float*)shared;
    float* left = all_left + warp * 2 * count;

    u8* ring = shared + warps * 2 * count * 4 + warp * AHEAD * RING_BYTES;
    Cursor<SPLIT, ODD> cursor;
    cursor.tile = begin / work.per_tile;
    cursor.place = begin - cursor.tile * work.per_tile;
    cursor.seek(planes, work);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
        if (begin + i < end) cursor.next(ring + i * RING_BYTES, planes, work);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    wait_for_inputs();
    if (FUSED) {
        u8* own = shared + warps * (2 * count * 4 + AHEAD * RING_BYTES);
        Group* own_groups = (Group*)(own + work.tokens * work.in_features);
        quantize_all<BF16>(x, own, own_groups, work.tokens, work.tokens, work.in_features, work.aligned, warp, warps);
        __syncthreads();
        codes = own;
        groups = own_groups;
        slots = work.tokens;
    }

    const uint4* token[SPLIT ? TILES : 1];
#pragma unroll
    for (int n = 0; n < (SPLIT ? TILES : 1); ++n) {
        const int m = min(SPLIT ? 8 * n + g : g >> 1, work.tokens - 1);
        token[n] = (const uint4*)(codes + (u64)m * work.in_features) + (SPLIT ? 2 * t : 4 * t);
    }
    const bool owner = (t >> 1) == (g & 1);  // of the column's group, when a quad has two

    int slot = 0;
    for (int from = begin; from < end;) {
        const int tile = from / work.per_tile;
        const int to = min(end, (tile + 1) * work.per_tile);
        float acc[OUT][2] = {};  // rows g, g + 8
        for (int unit = from; unit < to; ++unit) {
            const int place = unit - tile * work.per_tile;
            const bool second = !ODD || place * 256 + 128 < work.in_features;
            asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
            u8* oldest = ring + slot * RING_BYTES;
            slot = slot + 1 == AHEAD ? 0 : slot + 1;
            const Weights now = read_slot<ODD>(oldest, planes, work, tile, place, second);
            if (unit + AHEAD < end) cursor.next(oldest, planes, work);
            asm volatile("cp.async.commit_group;" ::: "memory");
            const float w[2][2] = {{half_to_float((u16)now.scales[0]), half_to_float((u16)(now.scales[0] >> 16))},
                                   {half_to_float((u16)now.scales[1]), half_to_float((u16)(now.scales[1] >> 16))}};
            if (SPLIT) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (j == 1 && !second) break;
#pragma unroll
                    for (int n = 0; n < TILES; ++n) {
                        const uint4* q = token[n] + place * 16 + j * 8;
                        int d[4][4] = {};
                        multiply_fields(d, now.row[0][j], now.row[1][j], q[0], q[1]);
                        const Group* info = groups + (2 * place + j) * slots + 8 * n + 2 * t;
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const Group token_group = info[i];
                            acc[2 * n + i][0] += group_sum(d, i, token_group.sum) * (w[0][j] * token_group.scale);
                            acc[2 * n + i][1] += group_sum(d, i + 2, token_group.sum) * (w[1][j] * token_group.scale);
                        }
                    }
                }
            } else {
                int d[4][4] = {};
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    uint4 q0 = make_uint4(0, 0, 0, 0), q1 = q0;
                    if (owner && (second || t < 2)) {
                        q0 = token[0][place * 16 + 2 * p];
                        q1 = token[0][place * 16 + 2 * p + 1];
                    }
                    multiply_fields(d, now.row[0][p], now.row[1][p], q0, q1);
                }
                const Group* info = groups + 2 * place * slots + min(t, work.tokens - 1);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    if (j == 1 && !second) break;
                    const Group token_group = info[j * slots];
                    acc[0][0] += group_sum(d, j, token_group.sum) * (w[0][j] * token_group.scale);
                    acc[0][1] += group_sum(d, j + 2, token_group.sum) * (w[1][j] * token_group.scale);
                }
            }
        }
        const bool whole = from == tile * work.per_tile && to == from + work.per_tile;
        float* mine = left + (from == tile * work.per_tile) * count;
#pragma unroll
        for (int n = 0; n < OUT; ++n) {
            const int m = SPLIT ? 8 * (n / 2) + 2 * t + n % 2 : t;
            if (m >= work.tokens) continue;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = g + 8 * r;
                if (!whole) mine[m * ROWS + row] = acc[n][r];
                else if (tile * ROWS + row < work.rows)
                    store(y, work.out_kind, (u64)m * work.rows + tile * ROWS + row, acc[n][r]);
            }
        }
        from = to;
    }
    __syncthreads();
    settle_warps(work, sums, first, last, all_left, count, flags, [&](int tile, int i, float sum) {
        const int row = tile * ROWS + i % ROWS;
        if (row < work.rows) store(y, work.out_kind, (u64)(i / ROWS) * work.rows + row, sum);
    });
}

#define GEMV(NAME, FUSED, BF16, SPLIT, TILES, ODD)                                                                    \
    extern "C" __global__ void __launch_bounds__(384, TILES > 1 ? 1 : 2)                                              \
    NAME(const u8* planes, const u16* x, const u8* codes, const Group* groups, int slots, void* y, float* partial,    \
         u32* arrived, WORK_PARAMETERS) {                                                                                   \
        gemv<FUSED, BF16, SPLIT, TILES, ODD>(planes, x, codes, groups, slots, y, Sums{partial, arrived}, WORK);       \
    }
#define GEMVS(ODD, SUFFIX)                                                   \
    GEMV(ternary_gemv_f16_4##SUFFIX, true, false, false, 1, ODD)             \
    GEMV(ternary_gemv_bf16_4##SUFFIX, true, true, false, 1, ODD)             \
    GEMV(ternary_gemv_q8_4##SUFFIX, false, false, false, 1, ODD)             \
    GEMV(ternary_gemv_q8_8##SUFFIX, false, false, true, 1, ODD)              \
    GEMV(ternary_gemv_q8_16##SUFFIX, false, false, true, 2, ODD)
GEMVS(false, )
GEMVS(true, _odd)

// Row i of the result is row ids[i] of the matrix, or row first + i without ids; a thread decodes 16 inputs of a row.
extern "C" __global__ void ternary_rows(const u8* planes, const int* ids, int first, int count, void* out,
                                        WORK_PARAMETERS) {
    const Work work = WORK;
    let_next_start();
    wait_for_inputs();
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const int words = work.in_features / 16;
    const int i = (int)(thread / words), word = (int)(thread % words);
    if (i >= count) return;
    const int row = ids ? ids[i] : first + i;
    const bool inside = row >= 0 && row < work.rows;
    const u32 codes = inside ? ((const u32*)planes)[(u64)row * words + word] : 0;
    const u16* scales = (const u16*)(planes + (u64)work.rows * (work.in_features / 4));
    const float scale = half_to_float(inside ? scales[(u64)row * (work.in_features / 128) + word / 8] : 0x7e00);
    float v[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) v[j] = ((int)(codes >> 2 * j & 3) - 1) * scale;
    store_run(out, work.out_kind, (u64)i * work.in_features + word * 16, v);
}
