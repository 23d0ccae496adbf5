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

    DEVICE void next(Weights& to, const u8* planes, const Work& work) {
        const int groups = work.in_features / 128;
        const bool second = !ODD || 2 * place + 1 < groups;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (SPLIT) {
                to.row[r][0] = load_once8(codes[r]);
                to.row[r][1] = second ? load_once8(codes[r] + 32) : make_uint2(0, 0);
            } else {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (second || (threadIdx.x & 3) < 2) v = load_once(codes[r]);
                to.row[r][0] = make_uint2(v.x, v.y), to.row[r][1] = make_uint2(v.z, v.w);
            }
            if (ODD) to.scales[r] = __ldg(scales[r]) | (second ? (u32)__ldg(scales[r] + 1) << 16 : 0);
            else to.scales[r] = __ldg((const u32*)scales[r]);
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
    constexpr int AHEAD = 2;
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

    Weights coming[AHEAD];
    Cursor<SPLIT, ODD> cursor;
    cursor.tile = begin / work.per_tile;
    cursor.place = begin - cursor.tile * work.per_tile;
    cursor.seek(planes, work);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (begin + i < end) cursor.next(coming[i], planes, work);

    wait_for_inputs();
    if (FUSED) {
        u8* own = shared + warps * 2 * count * 4;
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

    for (int from = begin; from < end;) {
        const int tile = from / work.per_tile;
        const int to = min(end, (tile + 1) * work.per_tile);
        float acc[OUT][2] = {};  // rows g, g + 8
        for (int unit = from; unit < to; ++unit) {
            const Weights now = coming[0];
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; ++i) coming[i] = coming[i + 1];
            if (unit + AHEAD < end) cursor.next(coming[AHEAD - 1], planes, work);
            const int place = unit - tile * work.per_tile;
            const bool second = !ODD || place * 256 + 128 < work.in_features;
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

// One or two tokens: a quad takes 128 bytes of a row at once, which are four groups, and column 4 m + j of the products is
// token m against group j. The sums of a row are scaled once for four groups; half as many instructions a weight.
#define WIDE_INPUTS 512

struct WideWeights {
    uint4 row[2][2];  // [g, g + 8][first, second 64 bytes]
    u32 scales[2];    // of groups 2 (t % 2) and the next, two halves
};

// TAIL: the groups of a row are not a multiple of four.
template <bool TAIL> struct WideCursor {
    const u8* codes[2];
    const u16* scales[2];
    int tile, place;

    DEVICE void seek(const u8* planes, const Work& work) {
        const int lane = threadIdx.x & 31, groups = work.in_features / 128;
        const u16* all = (const u16*)(planes + (u64)work.rows * (work.in_features / 4));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = min(tile * ROWS + (lane >> 2) + 8 * r, work.rows - 1);
            codes[r] = planes + (u64)row * (work.in_features / 4) + place * 128 + (lane & 3) * 16;
            scales[r] = all + (u64)row * groups + 4 * place + 2 * (lane & 1);
        }
    }

    DEVICE void next(WideWeights& to, const u8* planes, const Work& work) {
        const int t = threadIdx.x & 3, left = work.in_features / 128 - 4 * place;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                to.row[r][j] = make_uint4(0, 0, 0, 0);
                if (!TAIL || 2 * j + (t >> 1) < left) to.row[r][j] = load_once(codes[r] + 64 * j);
            }
            if (TAIL) {
                const int of = 2 * (t & 1);
                to.scales[r] = (of < left ? __ldg(scales[r]) : 0) | (of + 1 < left ? (u32)__ldg(scales[r] + 1) << 16 : 0);
            } else {
                to.scales[r] = __ldg((const u32*)scales[r]);
            }
            codes[r] += 128;
            scales[r] += 4;
        }
        if (++place == work.per_tile) {
            ++tile;
            place = 0;
            seek(planes, work);
        }
    }
};

template <bool BF16, bool TAIL>
DEVICE void gemv_wide(const u8* planes, const u16* x, void* y, Sums sums, Work work) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u32 flags[32];
    constexpr int AHEAD = 2;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const int count = ROWS * work.tokens, groups_of_row = work.in_features / 128;
    const int first = boundary(work, blockIdx.x), last = boundary(work, blockIdx.x + 1);
    const Shares shares(first, last, warps);
    const int begin = shares.begin(warp), end = shares.begin(warp + 1);
    let_next_start();
    float* all_left = (float*)shared;
    float* left = all_left + warp * 2 * count;

    WideWeights coming[AHEAD];
    WideCursor<TAIL> cursor;
    cursor.tile = begin / work.per_tile;
    cursor.place = begin - cursor.tile * work.per_tile;
    cursor.seek(planes, work);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (begin + i < end) cursor.next(coming[i], planes, work);

    // Padded to whole units: codes and scales beyond a row are zero.
    const int pitch = work.per_tile * WIDE_INPUTS;
    u8* codes = shared + warps * 2 * count * 4;
    Group* groups = (Group*)(codes + work.tokens * pitch);
    wait_for_inputs();
    for (int i = warp * 4; i < work.tokens * (pitch / 128); i += warps * 4) {
        const int place = lane & 7, mine = min(i + (lane >> 3), work.tokens * (pitch / 128) - 1);
        const int token = mine / (pitch / 128), group = mine % (pitch / 128);
        u32 words[4];
        const u16* from = x + (u64)token * work.in_features + min(group, groups_of_row - 1) * 128 + place * 16;
        Group found = quantize_group<BF16, false>(from, work.aligned, words);
        if (group >= groups_of_row) found = Group{0.f, 0};
        u8* to = codes + token * pitch + group * 128 + place / 2 * 32 + place % 2 * 4;
#pragma unroll
        for (int s = 0; s < 4; ++s) *(u32*)(to + s * 8) = group < groups_of_row ? words[s] : 0;
        if (place == 0) groups[token * (pitch / 128) + group] = found;
    }
    __syncthreads();

    // Column g: token g / 4, group g % 4; lane t holds group 2 j + t / 2 of the j-th 64 bytes.
    const uint4* of_token = (const uint4*)(codes + min(g >> 2, work.tokens - 1) * pitch) + 4 * t;
    const bool owner = (t >> 1) == (g & 1);
    const int owned = (g >> 1) & 1;  // the j whose groups are the column's
    // Products: columns 2t and 2t + 1 are token t / 2 against groups 2 (t % 2) and the next.
    const Group* of_groups = groups + min(t >> 1, work.tokens - 1) * (pitch / 128) + 2 * (t & 1);

    for (int from = begin; from < end;) {
        const int tile = from / work.per_tile;
        const int to = min(end, (tile + 1) * work.per_tile);
        float acc[2] = {};  // rows g, g + 8
        for (int unit = from; unit < to; ++unit) {
            const WideWeights now = coming[0];
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; ++i) coming[i] = coming[i + 1];
            if (unit + AHEAD < end) cursor.next(coming[AHEAD - 1], planes, work);
            const int place = unit - tile * work.per_tile;
            const uint4* q = of_token + place * 32;
            int d[4][4] = {};
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const bool wanted = owner && owned == j;
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    uint4 q0 = make_uint4(0, 0, 0, 0), q1 = q0;
                    if (wanted) q0 = q[16 * j + 2 * p], q1 = q[16 * j + 2 * p + 1];
                    const uint4 low = now.row[0][j], high = now.row[1][j];
                    multiply_fields(d, p ? make_uint2(low.z, low.w) : make_uint2(low.x, low.y),
                                    p ? make_uint2(high.z, high.w) : make_uint2(high.x, high.y), q0, q1);
                }
            }
            const int4 info = *(const int4*)(of_groups + 4 * place);  // scale and sum of two groups
            const float even = __int_as_float(info.x), odd = __int_as_float(info.z);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                acc[r] += group_sum(d, 2 * r, info.y) * (half_to_float((u16)now.scales[r]) * even);
                acc[r] += group_sum(d, 2 * r + 1, info.w) * (half_to_float((u16)(now.scales[r] >> 16)) * odd);
            }
        }
        const bool whole = from == tile * work.per_tile && to == from + work.per_tile;
        float* mine = left + (from == tile * work.per_tile) * count;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = acc[r] + __shfl_xor_sync(~0u, acc[r], 1);
            const int m = t >> 1, row = g + 8 * r;
            if (t % 2 || m >= work.tokens) continue;
            if (!whole) mine[m * ROWS + row] = sum;
            else if (tile * ROWS + row < work.rows)
                store(y, work.out_kind, (u64)m * work.rows + tile * ROWS + row, sum);
        }
        from = to;
    }
    __syncthreads();
    settle_warps(work, sums, first, last, all_left, count, flags, [&](int tile, int i, float sum) {
        const int row = tile * ROWS + i % ROWS;
        if (row < work.rows) store(y, work.out_kind, (u64)(i / ROWS) * work.rows + row, sum);
    });
}

#define WIDE(NAME, BF16, TAIL)                                                                                        \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                              \
    NAME(const u8* planes, const u16* x, const u8* codes, const Group* groups, int slots, void* y, float* partial,    \
         u32* arrived, WORK_PARAMETERS) {                                                                             \
        gemv_wide<BF16, TAIL>(planes, x, y, Sums{partial, arrived}, WORK);                                            \
    }
WIDE(ternary_gemv_f16_2, false, false)
WIDE(ternary_gemv_bf16_2, true, false)
WIDE(ternary_gemv_f16_2_odd, false, true)
WIDE(ternary_gemv_bf16_2_odd, true, true)

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
