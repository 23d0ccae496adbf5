// Additive codebooks, 1 to 4 of 256 vectors of 8 weights: y = W x straight from the tiles "additive-v1"
// (docs/formats/planes.md).
//
// All rows share the codebooks, which lie in shared memory eight times side by side: eight lanes that read 16-byte vectors
// at once each have their own banks, whatever the codes. A vector is half an operand of the tensor cores as it comes (the
// order of inputs within an instruction is free), so the sum over codebooks costs no addition of its own and is exact in
// float32. Up to 8 tokens cost the same.
// Compiled for one number of codebooks, BOOKS.
#include "partition.cuh"

#define ROWS 16            // of a tile
#define PAIR_BYTES 65536   // two codebooks: [256 entries][2 codebooks][8 copies][16 bytes]

template <bool BF16> DEVICE void load_books(u8* table, const uint4* books, int count) {
    for (int i = threadIdx.x; i < count * 256; i += blockDim.x) {
        uint4 v = books[i];
        v = make_uint4(table_pair<BF16>(v.x), table_pair<BF16>(v.y), table_pair<BF16>(v.z), table_pair<BF16>(v.w));
        const int book = i >> 8, entry = i & 255;
        u8* to = table + (book >> 1) * PAIR_BYTES + entry * 256 + (book & 1) * 128;
#pragma unroll
        for (int copy = 0; copy < 8; ++copy) *(uint4*)(to + (copy + i & 7) * 16) = v;  // no two lanes on one bank
    }
}

// Words of 16 bytes a lane has of a unit, and groups of 8 inputs that they are for: 2 rows x GROUPS x BOOKS bytes.
#define LOADS (BOOKS == 3 ? 3 : 1)
#define GROUPS (8 * LOADS / BOOKS)
#define UNIT_INPUTS (4 * 8 * GROUPS)
#define UNIT_BYTES (512 * LOADS)

template <bool BF16, int TILES>  // TILES of 8 tokens
DEVICE void gemv(const u8* codes, const uint4* books, const u16* scales, const u16* x, void* y, Sums sums, Work work) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u32 flags[32];
    constexpr int AHEAD = BOOKS == 3 ? 1 : 2;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int g = lane >> 2, t = lane & 3;
    const int count = ROWS * work.tokens;
    const int first = boundary(work, blockIdx.x), last = boundary(work, blockIdx.x + 1);
    const Shares shares(first, last, warps);
    const int begin = shares.begin(warp), end = shares.begin(warp + 1);
    let_next_start();
    float* left = (float*)(shared + (BOOKS + 1) / 2 * PAIR_BYTES) + warp * 2 * count;

    uint4 coming[AHEAD][LOADS];
    const u8* at = codes + (u64)begin * UNIT_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, at += UNIT_BYTES)
        if (begin + i < end)
#pragma unroll
            for (int j = 0; j < LOADS; ++j) coming[i][j] = load_once(at + j * 512);

    load_books<BF16>(shared, books, BOOKS);
    wait_for_inputs();
    __syncthreads();

    const u16* token[TILES];
#pragma unroll
    for (int n = 0; n < TILES; ++n) token[n] = x + (u64)min(8 * n + g, work.tokens - 1) * work.in_features + 8 * t;

    for (int from = begin; from < end;) {
        const int tile = from / work.per_tile;
        const int to = min(end, (tile + 1) * work.per_tile);
        float acc[TILES][4] = {};
        int k = (from - tile * work.per_tile) * UNIT_INPUTS;
        for (int unit = from; unit < to; ++unit, k += UNIT_INPUTS) {
            u32 word[LOADS * 4];
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                word[4 * j] = coming[0][j].x, word[4 * j + 1] = coming[0][j].y;
                word[4 * j + 2] = coming[0][j].z, word[4 * j + 3] = coming[0][j].w;
            }
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; ++i)
#pragma unroll
                for (int j = 0; j < LOADS; ++j) coming[i][j] = coming[i + 1][j];
            if (unit + AHEAD < end)
#pragma unroll
                for (int j = 0; j < LOADS; ++j) coming[AHEAD - 1][j] = load_once(at + j * 512);
            at += UNIT_BYTES;
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                u32 b[TILES][4] = {};
#pragma unroll
                for (int n = 0; n < TILES; ++n)
                    if (k + 32 * i < work.in_features - 8 * t)
                        load_inputs<8>(b[n], token[n], k + 32 * i, work.in_features - 8 * t, work.aligned);
#pragma unroll
                for (int m = 0; m < BOOKS; ++m) {
                    // Bytes of a lane: [group][row g or g + 8][codebook].
                    const int low = (2 * i) * BOOKS + m, high = low + BOOKS;
                    const u32 column = (lane & 7) * 16 + (m & 1) * 128;
                    const u8* table = shared + (m >> 1) * PAIR_BYTES;
                    const uint4 v = *(const uint4*)(table + table_offset(word[low / 4], column, low % 4));
                    const uint4 u = *(const uint4*)(table + table_offset(word[high / 4], column, high % 4));
                    const u32 a0[4] = {v.x, u.x, v.y, u.y}, a1[4] = {v.z, u.z, v.w, u.w};
#pragma unroll
                    for (int n = 0; n < TILES; ++n) {
                        multiply<BF16>(acc[n], a0, b[n][0], b[n][1]);
                        multiply<BF16>(acc[n], a1, b[n][2], b[n][3]);
                    }
                }
            }
        }
        // d[0], d[1]: row g of tokens 2t, 2t + 1; d[2], d[3]: row g + 8.
        const bool whole = from == tile * work.per_tile && to == from + work.per_tile;
        float* mine = left + (from == tile * work.per_tile) * count;
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int m = 8 * n + 2 * t + (i & 1), row = g + (i >> 1) * 8;
                if (m >= work.tokens) continue;
                if (!whole) mine[m * ROWS + row] = acc[n][i];
                else if (tile * ROWS + row < work.rows)
                    store(y, work.out_kind, (u64)m * work.rows + tile * ROWS + row,
                          acc[n][i] * half_to_float(scales[tile * ROWS + row]));
            }
        from = to;
    }
    __syncthreads();
    settle_warps(work, sums, first, last, left - warp * 2 * count, count, flags, [&](int tile, int i, float sum) {
        const int row = tile * ROWS + i % ROWS;
        if (row < work.rows)
            store(y, work.out_kind, (u64)(i / ROWS) * work.rows + row, sum * half_to_float(scales[row]));
    });
}

#define GEMV(NAME, BF16, TILES)                                                                                       \
    extern "C" __global__ void __launch_bounds__(512, BOOKS > 2 || TILES > 1 ? 1 : 2)                                 \
    NAME(const u8* codes, const uint4* books, const u16* scales, const u16* x, void* y, float* partial, u32* arrived, \
         WORK_PARAMETERS) {                                                                                           \
        gemv<BF16, TILES>(codes, books, scales, x, y, Sums{partial, arrived}, WORK);                                  \
    }
GEMV(additive_gemv_f16_8, false, 1)
GEMV(additive_gemv_f16_16, false, 2)
GEMV(additive_gemv_bf16_8, true, 1)
GEMV(additive_gemv_bf16_16, true, 2)

// Row i of the result is row ids[i] of the matrix, or row i without ids; a thread decodes a group of 8 inputs of a row.
extern "C" __global__ void additive_rows(const u8* codes, const u16* books, const u16* scales, const int* ids, int count,
                                         void* out, WORK_PARAMETERS) {
    const Work work = WORK;
    let_next_start();
    wait_for_inputs();
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const int groups = work.in_features / 8;
    const int i = (int)(thread / groups), group = (int)(thread % groups);
    if (i >= count) return;
    const int row = ids ? ids[i] : i;
    const bool inside = row >= 0 && row < work.rows;
    const int lane = (row & 7) * 4 + (group & 3), high = row >> 3 & 1, place = group / 4 % GROUPS;
    const u8* unit = codes + ((u64)(row / ROWS) * work.per_tile + group / (4 * GROUPS)) * UNIT_BYTES;
    float sum[8] = {};
    for (int m = 0; inside && m < BOOKS; ++m) {
        const int byte = (2 * place + high) * BOOKS + m;
        const u16* vector = books + ((u64)m * 256 + unit[byte / 16 * 512 + lane * 16 + byte % 16]) * 8;
        for (int d = 0; d < 8; ++d) sum[d] += half_to_float(vector[d]);
    }
    const float scale = half_to_float(inside ? scales[row] : 0x7e00);
    for (int d = 0; d < 8; ++d) store(out, work.out_kind, (u64)i * work.in_features + group * 8 + d, sum[d] * scale);
}

// Tiles from `first` on as rows of halves, the first of them at `out`: vectors are added and scaled in float32, then
// rounded once. Blocks of a column share a tile's units.
template <bool BF16>
DEVICE void dense(const u8* codes, const uint4* books, const u16* scales, int first, int tiles, u16* out,
                  const Work& work) {
    extern __shared__ __align__(1024) u8 shared[];
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    let_next_start();
    load_books<false>(shared, books, BOOKS);
    wait_for_inputs();
    __syncthreads();
    const int warps = gridDim.x * (blockDim.x >> 5);
    for (int i = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); i < tiles * work.per_tile; i += warps) {
        const int tile = first + i / work.per_tile, unit = i % work.per_tile;
        const u8* at = codes + ((u64)tile * work.per_tile + unit) * UNIT_BYTES + lane * 16;
        u32 word[LOADS * 4];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const uint4 v = load_once(at + j * 512);
            word[4 * j] = v.x, word[4 * j + 1] = v.y, word[4 * j + 2] = v.z, word[4 * j + 3] = v.w;
        }
#pragma unroll
        for (int high = 0; high < 2; ++high) {
            const int row = tile * ROWS + g + 8 * high;
            if (row >= work.rows) continue;
            const float scale = half_to_float(scales[row]);
            u16* to = out + (u64)(row - first * ROWS) * work.in_features;
#pragma unroll
            for (int place = 0; place < GROUPS; ++place) {
                float sum[8] = {};
#pragma unroll
                for (int m = 0; m < BOOKS; ++m) {
                    const int byte = (2 * place + high) * BOOKS + m;
                    const u32 column = (lane & 7) * 16 + (m & 1) * 128;
                    const uint4 v = *(const uint4*)(shared + (m >> 1) * PAIR_BYTES +
                                                    table_offset(word[byte / 4], column, byte % 4));
                    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int d = 0; d < 8; ++d) sum[d] += half_to_float((u16)(w[d / 2] >> d % 2 * 16));
                }
                u32 w[4];
#pragma unroll
                for (int d = 0; d < 4; ++d) {
                    const float low = sum[2 * d] * scale, top = sum[2 * d + 1] * scale;
                    w[d] = BF16 ? float_to_bfloat(low) | (u32)float_to_bfloat(top) << 16
                                : float_to_half(low) | (u32)float_to_half(top) << 16;
                }
                store_eight(to, unit * UNIT_INPUTS + place * 32 + 8 * t, work.in_features,
                            make_uint4(w[0], w[1], w[2], w[3]));
            }
        }
    }
}

#define DENSE(NAME, BF16)                                                                                            \
    extern "C" __global__ void __launch_bounds__(512)                                                                \
    NAME(const u8* codes, const uint4* books, const u16* scales, int first, int tiles, u16* out, WORK_PARAMETERS) {  \
        dense<BF16>(codes, books, scales, first, tiles, out, WORK);                                                  \
    }
DENSE(additive_dense_f16, false)
DENSE(additive_dense_bf16, true)
