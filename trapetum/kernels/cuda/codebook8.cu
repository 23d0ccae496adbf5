// Codebooks of 17 to 256 entries a row: y = W x straight from the tiles "codebook8-v1" (docs/formats/planes.md).
//
// A code is one input of one row, its entry one half. The tables of 128 rows lie in shared memory as the file has them:
// row c of the table holds entry c of all of them, two rows to a 32-bit column, so that a lane's loads stay in its own
// bank: it takes the low half for one row and the high half for another. The rest is as in codebook4.cu.
#include "partition.cuh"

#define ROWS 128           // of a tile
#define UNIT_INPUTS 8
#define UNIT_BYTES 1024    // [64-row half][lane][16 bytes]
#define TABLE_BYTES 65536

// Copied without a register in between, all of it on its way at once; awaited by table_arrived().
DEVICE void load_table(uint4* table, const u32* tables, int tile) {
    const uint4* from = (const uint4*)(tables + (u64)tile * (TABLE_BYTES / 4));
    for (int i = threadIdx.x; i < TABLE_BYTES / 16; i += blockDim.x) {
        const u32 to = (u32)__cvta_generic_to_shared(table + i);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + i) : "memory");
    }
}

template <bool BF16> DEVICE void table_arrived(uint4* table) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (BF16)
        for (int i = threadIdx.x; i < TABLE_BYTES / 16; i += blockDim.x) {  // what this thread copied itself
            uint4 v = table[i];
            v = make_uint4(table_pair<true>(v.x), table_pair<true>(v.y), table_pair<true>(v.z), table_pair<true>(v.w));
            table[i] = v;
        }
}

DEVICE u32 look_up(const u8* table, u32 offset) { return *(const u32*)(table + offset); }

// Two rows by four inputs: words of codes -> the operand of the tensor cores.
DEVICE void decode(u32 (&a)[4], const u8* table, u32 column, u32 low_row, u32 high_row) {
    u32 v[4], u[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = look_up(table, table_offset(low_row, column, j));
#pragma unroll
    for (int j = 0; j < 4; ++j) u[j] = look_up(table, table_offset(high_row, column, j));
    a[0] = low_halves(v[0], v[1]);
    a[2] = low_halves(v[2], v[3]);
    a[1] = high_halves(u[0], u[1]);
    a[3] = high_halves(u[2], u[3]);
}

// PAIRS of tokens. STAGED: activations fit beside the table in shared memory.
template <bool BF16, int PAIRS, bool STAGED>
DEVICE void gemv(const u8* codes, const u32* tables, const u16* x, void* y, Sums sums, Work work) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u32 flag;
    constexpr int AHEAD = 2;  // units on their way from memory, in registers
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const int first = boundary(work, blockIdx.x), last = boundary(work, blockIdx.x + 1);
    let_next_start();
    load_table((uint4*)shared, tables, first / work.per_tile);

    uint4 coming[AHEAD][2];
    const u8* at = codes + (u64)(first + warp) * UNIT_BYTES + lane * 16;
    int next = first + warp;
    const auto fetch = [&](uint4 (&to)[2]) {
        if (next < last) {
            to[0] = load_once(at);
            to[1] = load_once(at + 512);
        }
        next += warps;
        at += warps * UNIT_BYTES;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(coming[i]);

    // Lane t of quad g holds tokens g / 4, g / 4 + 2 ... where g % 4 is t; elsewhere B is zero.
    const int tokens = (g & 3) == t ? work.tokens - (g >> 2) : 0;
    u16* staged = (u16*)(shared + TABLE_BYTES + ROWS * 4 * 2 * PAIRS);
    const int pitch = STAGED ? work.per_tile * UNIT_INPUTS : work.in_features;
    const u16* mine = (STAGED ? staged : x) + (u64)(g >> 2) * pitch;

    const auto finish = [&](int tile, int i, float sum) {
        const int half = i / (64 * work.tokens), token = i / 64 % work.tokens;
        const int row = tile * ROWS + half * 64 + i % 64;
        if (row < work.rows) store(y, work.out_kind, (u64)token * work.rows + row, sum);
    };

    int unit = first + warp;
    for (int from = first; from < last;) {
        const int tile = from / work.per_tile;
        const int to = min(last, (tile + 1) * work.per_tile);
        if (from != first) load_table((uint4*)shared, tables, tile);
        table_arrived<BF16>((uint4*)shared);
        if (from == first) {
            wait_for_inputs();
            if (STAGED) stage_inputs(staged, pitch, x, work.tokens, work.in_features, work.aligned);
        }
        __syncthreads();
        if (to < last) {  // the next table comes as far as L2
            const u8* next_table = (const u8*)(tables + (u64)(tile + 1) * (TABLE_BYTES / 4));
            for (int i = threadIdx.x * 128; i < TABLE_BYTES; i += blockDim.x * 128)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(next_table + i));
        }

        float acc[2][PAIRS][4] = {};
        int k = (unit - tile * work.per_tile) * UNIT_INPUTS;
        const auto step = [&](uint4 (&now)[2]) {
            u32 b[PAIRS][4] = {};
            const auto inputs = [&](u32 (&to)[4], int p) {
                if (tokens > 2 * p)
                    load_inputs<8>(to, mine + (u64)(2 * p) * pitch, k, work.in_features, STAGED || work.aligned);
            };
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) inputs(b[p], p);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 column = lane * 4 + half * 128;
                u32 a[2][4];
                decode(a[0], shared, column, now[half].x, now[half].y);
                decode(a[1], shared, column, now[half].z, now[half].w);
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    multiply<BF16>(acc[half][p], a[0], b[p][0], b[p][1]);
                    multiply<BF16>(acc[half][p], a[1], b[p][2], b[p][3]);
                }
            }
            fetch(now);
            unit += warps;
            k += warps * UNIT_INPUTS;
        };
        while (unit + (AHEAD - 1) * warps < to) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) step(coming[i]);
        }
        if (unit < to) {
            step(coming[0]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 newest = coming[0][i];
                coming[0][i] = coming[1][i];
                coming[1][i] = newest;
            }
        }

        // Column n of the products is token n / 4 of the pair and row 4g + n % 4 (and 32 more) of the half.
        __syncthreads();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* left = (float*)shared + warp * (2 * PAIRS * 64);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    left[(2 * p + (t >> 1)) * 64 + 4 * g + (2 * t & 3) + (i & 1) + (i >> 1) * 32] = acc[half][p][i];
            __syncthreads();
            // The sums of the warps take the place of the first warp's.
            for (int i = threadIdx.x; i < 64 * work.tokens; i += blockDim.x) {
                float sum = 0.f;
                for (int w = 0; w < warps; ++w) sum += ((const float*)shared)[w * (2 * PAIRS * 64) + i];
                ((float*)shared)[TABLE_BYTES / 4 + half * 64 * work.tokens + i] = sum;
            }
            __syncthreads();
        }
        leave<BlockTeam>(
            work, sums, tile, from, to, ROWS * work.tokens,
            [&](int i) { return ((const float*)shared)[TABLE_BYTES / 4 + i]; },
            [&](int i, float sum) { finish(tile, i, sum); });
        __syncthreads();
        from = to;
    }
    const int head = first / work.per_tile, tail = (last - 1) / work.per_tile;
    if (min(last, (head + 1) * work.per_tile) - first < work.per_tile)
        collect<BlockTeam>(work, sums, head, ROWS * work.tokens, &flag, [&](int i, float sum) { finish(head, i, sum); });
    if (tail != head && last < (tail + 1) * work.per_tile)
        collect<BlockTeam>(work, sums, tail, ROWS * work.tokens, &flag, [&](int i, float sum) { finish(tail, i, sum); });
}

#define GEMV(NAME, BF16, PAIRS, STAGED)                                                                               \
    extern "C" __global__ void __launch_bounds__(512, PAIRS > 1 ? 1 : 2)                                              \
    NAME(const u8* codes, const u32* tables, const u16* x, void* y, float* partial, u32* arrived, WORK_PARAMETERS) {  \
        gemv<BF16, PAIRS, STAGED>(codes, tables, x, y, Sums{partial, arrived}, WORK);                                 \
    }
#define GEMVS(TYPE, BF16)                               \
    GEMV(codebook8_gemv_##TYPE##_2, BF16, 1, false)     \
    GEMV(codebook8_gemv_##TYPE##_4, BF16, 2, false)     \
    GEMV(codebook8_gemv_##TYPE##_8, BF16, 4, false)     \
    GEMV(codebook8_staged_##TYPE##_2, BF16, 1, true)    \
    GEMV(codebook8_staged_##TYPE##_4, BF16, 2, true)    \
    GEMV(codebook8_staged_##TYPE##_8, BF16, 4, true)
GEMVS(f16, false)
GEMVS(bf16, true)

// Row i of the result is row ids[i] of the matrix, or row i without ids; a thread decodes 8 inputs of a row.
extern "C" __global__ void codebook8_rows(const u8* codes, const u32* tables, const int* ids, int count, void* out,
                                          WORK_PARAMETERS) {
    const Work work = WORK;
    let_next_start();
    wait_for_inputs();
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const int i = (int)(thread / work.per_tile), k = (int)(thread % work.per_tile) * UNIT_INPUTS;
    if (i >= count) return;
    const int row = ids ? ids[i] : i;
    const bool inside = row >= 0 && row < work.rows;
    const int lane = row & 31, high = row >> 5 & 1, half = row >> 6 & 1;
    const u8* unit = codes + ((u64)(row / ROWS) * work.per_tile + k / UNIT_INPUTS) * UNIT_BYTES + half * 512 + lane * 16;
    const u16* table = (const u16*)(tables + (u64)(row / ROWS) * (TABLE_BYTES / 4)) + (half * 32 + lane) * 2 + high;
    for (int j = 0; j < UNIT_INPUTS && k + j < work.in_features; ++j) {
        const u16 entry = inside ? table[(int)unit[(j / 4 * 2 + high) * 4 + j % 4] * 128] : 0x7e00;
        store(out, work.out_kind, (u64)i * work.in_features + k + j, half_to_float(entry));
    }
}

// Tiles from `first` on as rows of halves, the first of them at `out`; blocks of a column share a tile's units.
template <bool BF16>
DEVICE void dense(const u8* codes, const u32* tables, int first, u16* out, const Work& work) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int tile = first + blockIdx.x;
    let_next_start();
    load_table((uint4*)shared, tables, tile);
    table_arrived<BF16>((uint4*)shared);
    wait_for_inputs();
    __syncthreads();
    for (int unit = blockIdx.y * warps + warp; unit < work.per_tile; unit += gridDim.y * warps) {
        const u8* at = codes + ((u64)tile * work.per_tile + unit) * UNIT_BYTES + lane * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 v = load_once(at + half * 512);
            u32 a[2][4];
            decode(a[0], shared, lane * 4 + half * 128, v.x, v.y);
            decode(a[1], shared, lane * 4 + half * 128, v.z, v.w);
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int row = half * 64 + high * 32 + lane;
                if (tile * ROWS + row >= work.rows) continue;
                store_eight(out + ((u64)blockIdx.x * ROWS + row) * work.in_features, unit * UNIT_INPUTS, work.in_features,
                            make_uint4(a[0][high], a[0][high + 2], a[1][high], a[1][high + 2]));
            }
        }
    }
}

#define DENSE(NAME, BF16)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
    NAME(const u8* codes, const u32* tables, int first, u16* out, WORK_PARAMETERS) {                                 \
        dense<BF16>(codes, tables, first, out, WORK);                                                                \
    }
DENSE(codebook8_dense_f16, false)
DENSE(codebook8_dense_bf16, true)
