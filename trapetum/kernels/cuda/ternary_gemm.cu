// Many tokens by ternary weights in groups of 128: y = W x from "planes-v1" on Hopper's integer tensor cores.
//
// A block multiplies 128 rows by 128 tokens. Two warpgroups take 64 rows each: codes come from memory into registers and
// are turned into bytes -1, 0, 1, 2 there, four by one permutation of a constant; they are the first operand as they
// are. The second are activations that one bulk copy a group brings into shared memory: they were quantized into tiles of
// 128 tokens x 128 inputs, in the order in which codes come apart, and in the 128-byte swizzle that the tensor cores read
// without bank conflicts. The integer products of a group are scaled and added in float32, half of the tokens at a time,
// while the other half is multiplied.
#include "ternary.cuh"

#define TILE 128                                         // rows, tokens and inputs
#define STAGES 4
#define CODE_BYTES (TILE * TILE)
#define STAGE_BYTES (CODE_BYTES + 1024)                  // codes, then scales, and swizzles begin at multiples of 1024
#define BARRIERS (STAGES * STAGE_BYTES)                  // where they are in shared memory
#define PITCH (TILE + 4)                                 // of the result in shared memory, in floats

// Tiles [tokens / 128][K / 128]: 128 x 128 codes, and apart from them 128 scales; tokens beyond the last are zero.
template <bool BF16>
DEVICE void quantize_tiles(const u16* x, u8* codes, float* scales, int tokens, int in_features, bool aligned) {
    const int per_token = in_features / TILE, place = threadIdx.x & 7;
    const int all = (tokens + TILE - 1) / TILE * TILE * per_token;
    const int i = min((blockIdx.x * blockDim.x + threadIdx.x) / 8, all - 1);
    const int token = i / per_token, group = i % per_token;
    const u64 row = ((u64)(token / TILE) * per_token + group) * TILE + token % TILE;
    let_next_start();
    wait_for_inputs();
    u32 words[4];
    const u64 at = (u64)min(token, tokens - 1) * in_features + group * TILE;
    Group found = quantize_group<BF16, true>(x + at + place * 16, aligned, words);
    if (token >= tokens) {
        found.scale = 0.f;
        for (int s = 0; s < 4; ++s) words[s] = 0;
    }
    // Word s of lane w is bytes 4 (w / 2) .. of chunk 2 s + w % 2 of 16 bytes; chunks of row r lie at chunk ^ r % 8.
    u8* to = codes + row * TILE + place / 2 * 4;
    for (int s = 0; s < 4; ++s) *(u32*)(to + ((2 * s + place % 2) ^ (token & 7)) * 16) = words[s];
    if (place == 0) scales[row] = found.scale;
}

extern "C" __global__ void quantize_tiles_f16(const u16* x, u8* codes, float* scales, int tokens, int in_features,
                                              int aligned) {
    quantize_tiles<false>(x, codes, scales, tokens, in_features, aligned);
}
extern "C" __global__ void quantize_tiles_bf16(const u16* x, u8* codes, float* scales, int tokens, int in_features,
                                               int aligned) {
    quantize_tiles<true>(x, codes, scales, tokens, in_features, aligned);
}

DEVICE u32 address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

DEVICE void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

DEVICE void bulk_copy(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Operand in shared memory: rows of 128 bytes, swizzled, 8 rows to 1024 bytes.
DEVICE u64 descriptor(u32 at) { return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

// d = or += a (64 x 32, registers) . b (32 x 64, shared memory), signed.
DEVICE void multiply_tokens(int (&d)[32], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31}, {%32,%33,%34,%35}, %36, p;\n}"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
          "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]),
          "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]),
          "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Four operands of a group, from words 2t and 2t + 1 of rows g and g + 8. Of a word of 16 codes, operand s has the four
// codes 8 (s / 2) + 2 b + s % 2; a code is the selector that picks its byte.
DEVICE void take_apart(u32 (&a)[4][4], const uint2 (&rows)[2]) {
    const u32 words[4] = {rows[0].x, rows[1].x, rows[0].y, rows[1].y};
    u32 bytes;  // a register, which the compiler would else make anew for each use
    asm volatile("mov.b32 %0, 0x020100ff;" : "=r"(bytes));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 even = words[i] & 0x33333333, odd = words[i] >> 2 & 0x33333333;
        a[0][i] = __byte_perm(bytes, 0, even);
        a[1][i] = __byte_perm(bytes, 0, odd);
        a[2][i] = __byte_perm(bytes, 0, even >> 16);
        a[3][i] = __byte_perm(bytes, 0, odd >> 16);
    }
}

// Products of 64 tokens, scaled by row and token.
DEVICE void add_scaled(float* acc, int (&d)[32], const float2* scales, float low, float high) {
#pragma unroll
    for (int j = 0; j < 32; ++j) asm volatile("" : "+r"(d[j])::"memory");
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float2 v = scales[4 * j];  // of tokens 8 j + 2 t and the next
        acc[4 * j] += (float)d[4 * j] * (low * v.x);
        acc[4 * j + 1] += (float)d[4 * j + 1] * (low * v.y);
        acc[4 * j + 2] += (float)d[4 * j + 2] * (high * v.x);
        acc[4 * j + 3] += (float)d[4 * j + 3] * (high * v.y);
    }
}

#define WAIT_FOR_ALL_BUT(COUNT) asm volatile("wgmma.wait_group.sync.aligned " #COUNT ";" ::: "memory")

struct Rows {
    uint2 codes[2];  // rows g and g + 8: words 2t and 2t + 1 of a group
    u32 scales[2];
};

// Warps 0..7 multiply, one thread of warp 8 fetches. Columns of the launch are tiles of tokens, so that blocks that run
// together share weights in L2.
extern "C" __global__ void __launch_bounds__(288, 1)
ternary_gemm(const u8* planes, const u8* codes, const float* scales, void* y, WORK_PARAMETERS) {
    const Work work = WORK;
    extern __shared__ __align__(1024) u8 shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int count = work.in_features / TILE;
    const u32 full = address(shared) + BARRIERS, empty = full + STAGES * 8;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();

    if (warp >= 8) {
        if (threadIdx.x == 256) {
            wait_for_inputs();
            const u64 tiles = (u64)blockIdx.x * count * TILE;
            for (int i = 0; i < count; ++i) {
                const int stage = i % STAGES;
                if (i >= STAGES) barrier_wait(empty + stage * 8, (i / STAGES - 1) & 1);
                const u32 to = address(shared) + stage * STAGE_BYTES;
                barrier_expect(full + stage * 8, CODE_BYTES + TILE * 4);
                bulk_copy(to, codes + (tiles + (u64)i * TILE) * TILE, CODE_BYTES, full + stage * 8);
                bulk_copy(to + CODE_BYTES, scales + tiles + (u64)i * TILE, TILE * 4, full + stage * 8);
            }
        }
    } else {
        const int first = blockIdx.y * TILE + warp * 16 + g;
        const u8* from[2];
        const u16* row_scales[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u64 row = min(first + 8 * r, work.rows - 1);
            from[r] = planes + row * (work.in_features / 4) + t * 8;
            row_scales[r] = (const u16*)(planes + (u64)work.rows * (work.in_features / 4)) + row * count;
        }
        const auto fetch = [&](Rows& to, int i) {
            i = min(i, count - 1);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                to.codes[r] = __ldg((const uint2*)(from[r] + (u64)i * 32));
                to.scales[r] = __ldg((const u16*)row_scales[r] + i);
            }
        };
        float acc[64] = {};
        Rows now, coming;
        // The products of half of the tokens are taken over while the other half is being multiplied, here or in the
        // other warpgroup.
        fetch(now, 0);
        fetch(coming, 1);
        for (int i = 0; i < count; ++i) {
            u32 a[4][4];
            take_apart(a, now.codes);
            const float low = half_to_float((u16)now.scales[0]), high = half_to_float((u16)now.scales[1]);
            now = coming;
            fetch(coming, i + 2);
            const u8* stage = shared + i % STAGES * STAGE_BYTES;
            const float2* of_tokens = (const float2*)(stage + CODE_BYTES) + t;
            barrier_wait(full + i % STAGES * 8, i / STAGES & 1);
            int d[2][32];
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u64 b = descriptor(address(stage) + half * (CODE_BYTES / 2));
#pragma unroll
                for (int s = 0; s < 4; ++s) multiply_tokens(d[half], a[s], b + s * 2, s > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            }
            WAIT_FOR_ALL_BUT(1);
            add_scaled(acc, d[0], of_tokens, low, high);
            WAIT_FOR_ALL_BUT(0);
            add_scaled(acc + 32, d[1], of_tokens + 32, low, high);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + i % STAGES * 8);
        }
        // Through shared memory, so that rows of the result are written whole; all stages are read by now.
        asm volatile("bar.sync 1, 256;" ::: "memory");
        float* result = (float*)shared;
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                result[(8 * j + 2 * t + (i & 1)) * PITCH + warp * 16 + g + (i >> 1) * 8] = acc[4 * j + i];
        asm volatile("bar.sync 1, 256;" ::: "memory");
        for (int m = warp; m < TILE; m += 8) {
            const int token = blockIdx.x * TILE + m;
            if (token >= work.tokens) break;
            for (int i = lane; i < TILE; i += 32) {
                const int row = blockIdx.y * TILE + i;
                if (row < work.rows) store(y, work.out_kind, (u64)token * work.rows + row, result[m * PITCH + i]);
            }
        }
    }
}
