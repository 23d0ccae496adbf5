// Codebooks of up to 16 entries a row: y = W x straight from the tiles "codebook4-v1" (docs/formats/planes.md).
//
// A code byte is two consecutive inputs of one row. A block expands the entries of 64 rows into a table of all 256 pairs,
// 64 columns wide, in shared memory: a code byte turns into the address of its pair by one byte permutation, into two
// weights by one load that no bank conflict slows (a lane has its own columns), and into products by tensor cores, which
// keep float32 sums. Two instructions a byte; two FMAs on halves, folded into float32, took five and lost bits.
//
// Tensor cores want four lanes to hold one row; here each lane holds two rows of its own. So B is block diagonal: the
// inputs of lane t of a quad meet activations only in columns t and t + 4, which are two tokens. One instruction
// multiplies 64 rows by 4 inputs for 2 tokens; 8 tokens take four of them on the same decoded weights.
#include "partition.cuh"

#define ROWS 64            // of a tile
#define UNIT_INPUTS 16
#define UNIT_BYTES 512     // 32 lanes, 16 bytes each
#define TABLE_BYTES 65536
#define ENTRY_BYTES 2048   // 16 halves of each row of a tile

// The entries of a tile, on their way to one of two places behind the table while another tile is multiplied.
DEVICE void fetch_entries(u8* shared, const u16* entries, int tile) {
    if (threadIdx.x >= ENTRY_BYTES / 16) return;
    const u32 to = (u32)__cvta_generic_to_shared(shared + TABLE_BYTES + tile % 2 * ENTRY_BYTES + threadIdx.x * 16);
    const u8* from = (const u8*)entries + (u64)tile * ENTRY_BYTES + threadIdx.x * 16;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void entries_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// table[pair code][column] of the tile's rows; columns 0..31 are rows 0..31 and 32..63 the others.
template <bool BF16> DEVICE void expand_table(u32* table, const u16* entries) {
    const int column = threadIdx.x & 63, part = threadIdx.x >> 6, parts = blockDim.x >> 6;
    const u16* row = entries + column * 16;
    const uint4 first = ((const uint4*)row)[0], second = ((const uint4*)row)[1];
    u32 e[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = table_pair<BF16>(e[i]);
    for (int high = part; high < 16; high += parts) {
        const u32 odd = table_entry<BF16>(row[high]);
        u32* to = table + high * 16 * 64 + column;
#pragma unroll
        for (int low = 0; low < 16; ++low)
            to[low * 64] = low & 1 ? __byte_perm(e[low / 2], odd, 0x5432) : low_halves(e[low / 2], odd);
    }
}

DEVICE u32 look_up(const u8* table, u32 offset) { return *(const u32*)(table + offset); }

// PAIRS of tokens. STAGED: activations fit beside the table in shared memory.
template <bool BF16, int PAIRS, bool STAGED>
DEVICE void gemv(const u8* codes, const u16* entries, const u16* x, void* y, Sums sums, Work work) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u32 flag;
    constexpr int AHEAD = PAIRS > 1 ? 2 : 3;  // units on their way from memory, in registers
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const u32 column = lane * 4;
    const int first = boundary(work, blockIdx.x), last = boundary(work, blockIdx.x + 1);
    let_next_start();

    fetch_entries(shared, entries, first / work.per_tile);
    if ((first / work.per_tile + 1) * work.per_tile < last) fetch_entries(shared, entries, first / work.per_tile + 1);

    uint4 coming[AHEAD];
    const u8* at = codes + (u64)(first + warp) * UNIT_BYTES + lane * 16;
    int next = first + warp;
    const auto fetch = [&](uint4& to) {
        if (next < last) to = load_once(at);
        next += warps;
        at += warps * UNIT_BYTES;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) fetch(coming[i]);

    // Lane t of quad g holds tokens g / 4, g / 4 + 2 ... where g % 4 is t; elsewhere B is zero.
    const int tokens = (g & 3) == t ? work.tokens - (g >> 2) : 0;
    u16* staged = (u16*)(shared + TABLE_BYTES + 2 * ENTRY_BYTES);
    const int pitch = STAGED ? work.per_tile * UNIT_INPUTS : work.in_features;
    const u16* mine = (STAGED ? staged : x) + (u64)(g >> 2) * pitch;

    const auto finish = [&](int tile, int i, float sum) {
        const int row = tile * ROWS + i % ROWS;
        if (row < work.rows) store(y, work.out_kind, (u64)(i / ROWS) * work.rows + row, sum);
    };

    int unit = first + warp;
    entries_arrived();
    __syncthreads();
    for (int from = first; from < last;) {
        const int tile = from / work.per_tile;
        const int to = min(last, (tile + 1) * work.per_tile);
        expand_table<BF16>((u32*)shared, (const u16*)(shared + TABLE_BYTES + tile % 2 * ENTRY_BYTES));
        if (from == first) {
            wait_for_inputs();
            if (STAGED) stage_inputs(staged, pitch, x, work.tokens, work.in_features, work.aligned);
        }
        __syncthreads();
        if ((tile + 2) * work.per_tile < last) fetch_entries(shared, entries, tile + 2);

        float acc[PAIRS][4] = {};
        int k = (unit - tile * work.per_tile) * UNIT_INPUTS;
        const auto step = [&](uint4& codes_of_unit) {
            u32 b[PAIRS][8] = {}, a[4][4];
#pragma unroll
            for (int p = 0; p < PAIRS; ++p)
                if (tokens > 2 * p)
                    load_inputs<16>(b[p], mine + (u64)(2 * p) * pitch, k, work.in_features, STAGED || work.aligned);
            const u32 word[4] = {codes_of_unit.x, codes_of_unit.y, codes_of_unit.z, codes_of_unit.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i][0] = look_up(shared, table_offset(word[i], column, 0));
                a[i][2] = look_up(shared, table_offset(word[i], column, 1));
                a[i][1] = look_up(shared, table_offset(word[i], column + 128, 2));
                a[i][3] = look_up(shared, table_offset(word[i], column + 128, 3));
            }
            fetch(codes_of_unit);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) multiply<BF16>(acc[p], a[i], b[p][2 * i], b[p][2 * i + 1]);
            unit += warps;
            k += warps * UNIT_INPUTS;
        };
        while (unit + (AHEAD - 1) * warps < to) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) step(coming[i]);
        }
        while (unit < to) {
            step(coming[0]);
            const uint4 newest = coming[0];
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; ++i) coming[i] = coming[i + 1];
            coming[AHEAD - 1] = newest;
        }

        // Column n of the products is token n / 4 of the pair and row 4g + n % 4 (and 32 more).
        __syncthreads();
        float* left = (float*)shared + warp * (2 * PAIRS * ROWS);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                left[(2 * p + (t >> 1)) * ROWS + 4 * g + (2 * t & 3) + (i & 1) + (i >> 1) * 32] = acc[p][i];
        __syncthreads();
        leave<BlockTeam>(
            work, sums, tile, from, to, ROWS * work.tokens,
            [&](int i) {
                float sum = 0.f;
                for (int w = 0; w < warps; ++w) sum += ((const float*)shared)[w * (2 * PAIRS * ROWS) + i];
                return sum;
            },
            [&](int i, float sum) { finish(tile, i, sum); });
        entries_arrived();
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
    extern "C" __global__ void __launch_bounds__(512, PAIRS > 2 ? 1 : 2)                                              \
    NAME(const u8* codes, const u16* entries, const u16* x, void* y, float* partial, u32* arrived, WORK_PARAMETERS) { \
        gemv<BF16, PAIRS, STAGED>(codes, entries, x, y, Sums{partial, arrived}, WORK);                                \
    }
#define GEMVS(TYPE, BF16)                               \
    GEMV(codebook4_gemv_##TYPE##_2, BF16, 1, false)     \
    GEMV(codebook4_gemv_##TYPE##_4, BF16, 2, false)     \
    GEMV(codebook4_gemv_##TYPE##_8, BF16, 4, false)     \
    GEMV(codebook4_staged_##TYPE##_2, BF16, 1, true)    \
    GEMV(codebook4_staged_##TYPE##_4, BF16, 2, true)    \
    GEMV(codebook4_staged_##TYPE##_8, BF16, 4, true)
GEMVS(f16, false)
GEMVS(bf16, true)

// Row i of the result is row ids[i] of the matrix, or row i without ids; a thread decodes 16 inputs of a row.
extern "C" __global__ void codebook4_rows(const u8* codes, const u16* entries, const int* ids, int count, void* out,
                                          WORK_PARAMETERS) {
    const Work work = WORK;
    let_next_start();
    wait_for_inputs();
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const int i = (int)(thread / work.per_tile), k = (int)(thread % work.per_tile) * UNIT_INPUTS;
    if (i >= count) return;
    const int row = ids ? ids[i] : i;
    const int lane = row & 31, half = row >> 5 & 1;
    const u8* unit = codes + ((u64)(row / ROWS) * work.per_tile + k / UNIT_INPUTS) * UNIT_BYTES + lane * 16;
    for (int j = 0; j < UNIT_INPUTS && k + j < work.in_features; ++j) {
        const u32 pair = row < 0 || row >= work.rows ? 0 : unit[j / 4 * 4 + half * 2 + j / 2 % 2];
        const u16 entry = row < 0 || row >= work.rows ? 0x7e00 : entries[(u64)row * 16 + (j & 1 ? pair >> 4 : pair & 15)];
        store(out, work.out_kind, (u64)i * work.in_features + k + j, half_to_float(entry));
    }
}

// Tiles from `first` on as rows of halves, the first of them at `out`; blocks of a column share a tile's units.
template <bool BF16>
DEVICE void dense(const u8* codes, const u16* entries, int first, u16* out, const Work& work) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int tile = first + blockIdx.x;
    let_next_start();
    expand_table<BF16>((u32*)shared, entries + (u64)tile * (ENTRY_BYTES / 2));
    wait_for_inputs();
    __syncthreads();
    for (int unit = blockIdx.y * warps + warp; unit < work.per_tile; unit += gridDim.y * warps) {
        const uint4 v = load_once(codes + ((u64)tile * work.per_tile + unit) * UNIT_BYTES + lane * 16);
        const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 pair[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                pair[i] = look_up(shared, table_offset(word[i / 2], lane * 4 + half * 128, 2 * half + i % 2));
            const int row = half * 32 + lane;
            if (tile * ROWS + row >= work.rows) continue;
            u16* to = out + ((u64)blockIdx.x * ROWS + row) * work.in_features;
            store_eight(to, unit * UNIT_INPUTS, work.in_features, make_uint4(pair[0], pair[1], pair[2], pair[3]));
            store_eight(to, unit * UNIT_INPUTS + 8, work.in_features, make_uint4(pair[4], pair[5], pair[6], pair[7]));
        }
    }
}

#define DENSE(NAME, BF16)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
    NAME(const u8* codes, const u16* entries, int first, u16* out, WORK_PARAMETERS) {                                \
        dense<BF16>(codes, entries, first, out, WORK);                                                               \
    }
DENSE(codebook4_dense_f16, false)
DENSE(codebook4_dense_bf16, true)
