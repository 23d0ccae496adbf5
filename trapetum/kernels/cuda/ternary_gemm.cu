// Many tokens by ternary weights in groups of 128: y = W x from "planes-v1" on Hopper's integer tensor cores.
//
// A block multiplies 128 rows by 128 tokens. Two warpgroups take 64 rows each: codes come from memory into registers,
// are taken apart there (shift and mask) and are the first operand as they are. The second are activations that one bulk
// copy a group brings into shared memory: they were quantized into tiles of 128 tokens x 128 inputs, in the order that
// taking codes apart asks for, and in the 128-byte swizzle that the tensor cores read without bank conflicts. The integer
// products of a group are scaled and added in float32; while one warpgroup does that, the other multiplies.
#include "ternary.cuh"

#define TILE 128                                         // rows, tokens and inputs
#define STAGES 4
#define CODE_BYTES (TILE * TILE)
#define STAGE_BYTES (CODE_BYTES + TILE * 8)              // codes, then groups
#define BARRIERS (STAGES * STAGE_BYTES)                  // where they are in shared memory
#define PITCH (TILE + 4)                                 // of the result in shared memory, in floats

// Tiles [tokens / 128][K / 128]: 128 x 128 codes, and apart from them 128 groups; tokens beyond the last are zero.
template <bool BF16>
DEVICE void quantize_tiles(const u16* x, u8* codes, Group* groups, int tokens, int in_features, bool aligned) {
    const int per_token = in_features / TILE, lane = threadIdx.x & 31;
    const int all = (tokens + TILE - 1) / TILE * TILE * per_token;
    const int i = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    let_next_start();
    wait_for_inputs();
    if (i >= all) return;
    const int token = i / per_token, group = i % per_token;
    const u64 row = ((u64)(token / TILE) * per_token + group) * TILE + token % TILE;
    // Input 16 w + 4 b + s is byte 4 (w / 2) + b of chunk 2 s + w % 2 of 16 bytes; chunks of row r lie at chunk ^ r % 8.
    const int w = lane / 4, b = lane % 4;
    u8* to = codes + row * TILE + w / 2 * 4 + b;
    const auto place = [&](int s) { return to + ((2 * s + w % 2) ^ (token & 7)) * 16; };
    Group found = {0.f, 0};
    if (token < tokens) {
        found = quantize_group<BF16>(x + (u64)token * in_features + group * TILE, aligned, place);
    } else {
        for (int s = 0; s < 4; ++s) *place(s) = 0;
    }
    if (lane == 0) groups[row] = found;
}

extern "C" __global__ void quantize_tiles_f16(const u16* x, u8* codes, Group* groups, int tokens, int in_features,
                                              int aligned) {
    quantize_tiles<false>(x, codes, groups, tokens, in_features, aligned);
}
extern "C" __global__ void quantize_tiles_bf16(const u16* x, u8* codes, Group* groups, int tokens, int in_features,
                                               int aligned) {
    quantize_tiles<true>(x, codes, groups, tokens, in_features, aligned);
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

// d = or += a (64 x 32 unsigned, registers) . b (32 x 128 signed, shared memory).
DEVICE void multiply_group(int (&d)[64], const u32 (&a)[4], u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
        "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,"
        "%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p;\n}"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
          "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]),
          "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]),
          "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), "+r"(d[32]),
          "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]),
          "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), "+r"(d[48]),
          "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), "+r"(d[56]),
          "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

struct Rows {
    uint2 codes[2];  // rows g and g + 8: words 2t and 2t + 1 of a group
    u16 scales[2];
};

// Warps 0..7 multiply, warp 8 fetches. Columns of the launch are tiles of tokens, so that blocks that run together share
// weights in L2.
extern "C" __global__ void __launch_bounds__(288, 1)
ternary_gemm(const u8* planes, const u8* codes, const Group* groups, void* y, WORK_PARAMETERS) {
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

    if (warp == 8) {
        if (lane == 0) {
            wait_for_inputs();
            const u64 tiles = (u64)blockIdx.x * count * TILE;
            for (int i = 0; i < count; ++i) {
                const int stage = i % STAGES;
                if (i >= STAGES) barrier_wait(empty + stage * 8, (i / STAGES - 1) & 1);
                const u32 to = address(shared) + stage * STAGE_BYTES;
                barrier_expect(full + stage * 8, STAGE_BYTES);
                bulk_copy(to, codes + (tiles + (u64)i * TILE) * TILE, CODE_BYTES, full + stage * 8);
                bulk_copy(to + CODE_BYTES, groups + tiles + (u64)i * TILE, TILE * 8, full + stage * 8);
            }
        }
    } else {
        const int first = blockIdx.y * TILE + warp * 16 + g;
        const u8* from[2];
        const u16* scales[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u64 row = min(first + 8 * r, work.rows - 1);
            from[r] = planes + row * (work.in_features / 4) + t * 8;
            scales[r] = (const u16*)(planes + (u64)work.rows * (work.in_features / 4)) + row * count;
        }
        Rows coming[2];
        const auto fetch = [&](Rows& to, int i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                to.codes[r] = __ldg((const uint2*)(from[r] + (u64)i * 32));
                to.scales[r] = __ldg(scales[r] + i);
            }
        };
        fetch(coming[0], 0);
        fetch(coming[1], min(1, count - 1));
        float acc[64] = {};
        int d[64];
        for (int i = 0; i < count; ++i) {
            const Rows now = coming[0];
            coming[0] = coming[1];
            fetch(coming[1], min(i + 2, count - 1));
            const int stage = i % STAGES;
            const u8* at = shared + stage * STAGE_BYTES;
            u32 a[4][4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                a[s][0] = now.codes[0].x >> 2 * s & 0x03030303;
                a[s][1] = now.codes[1].x >> 2 * s & 0x03030303;
                a[s][2] = now.codes[0].y >> 2 * s & 0x03030303;
                a[s][3] = now.codes[1].y >> 2 * s & 0x03030303;
            }
            barrier_wait(full + stage * 8, i / STAGES & 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int s = 0; s < 4; ++s) multiply_group(d, a[s], descriptor(address(at) + s * 32), s > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int j = 0; j < 64; ++j) asm volatile("" : "+r"(d[j])::"memory");

            const float low = half_to_float(now.scales[0]), high = half_to_float(now.scales[1]);
            const int4* info = (const int4*)(at + CODE_BYTES) + t;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const int4 v = info[4 * j];  // scale and sum of tokens 8 j + 2 t and the next
                const float even = __int_as_float(v.x), odd = __int_as_float(v.z);
                acc[4 * j] += (float)(d[4 * j] - v.y) * (low * even);
                acc[4 * j + 1] += (float)(d[4 * j + 1] - v.w) * (low * odd);
                acc[4 * j + 2] += (float)(d[4 * j + 2] - v.y) * (high * even);
                acc[4 * j + 3] += (float)(d[4 * j + 3] - v.w) * (high * odd);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + stage * 8);
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
