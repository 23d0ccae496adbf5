// How a matrix is shared among the blocks of one launch, and how partial sums meet: the same bits every time.
//
// A matrix is `tiles` tiles of rows, each `per_tile` units along the inputs. Block b takes the units from boundary(b) to
// boundary(b + 1), an equal share of all of them, so that no block waits for another that got one tile more. A tile that
// several blocks share is finished by whichever of them arrives last: each leaves its sums in a workspace, and the last
// one adds them in the order of the blocks. Who that is varies; the order of the additions does not. A block arrives when
// it has done all its work: waiting for the answer in between would cost a microsecond for each of its tiles.
#pragma once
#include "common.cuh"

struct Work {
    int share;        // steps a block takes, at least one ...
    int extra;        // ... and the first `extra` blocks one more
    int step_units;   // units of a step; a divisor of per_tile or a multiple of it
    int per_tile;
    int rows;         // N
    int in_features;  // K
    int tokens;       // M
    int out_kind;     // Output
    int aligned;      // rows of activations begin at multiples of 16 bytes
};

// The fields of Work as kernel parameters, and Work of them.
#define WORK_PARAMETERS                                                                                              \
    int share, int extra, int step_units, int per_tile, int rows, int in_features, int tokens, int out_kind, int aligned
#define WORK Work{share, extra, step_units, per_tile, rows, in_features, tokens, out_kind, aligned}

struct Sums {
    float* partial;   // [blocks][2][rows of a tile * tokens]
    u32* arrived;     // [tiles], zero between launches
};

DEVICE int boundary(const Work& work, int block) {
    return (block * work.share + min(block, work.extra)) * work.step_units;
}

// The release that a block makes of its sums, and the acquisition of those of others, in one.
DEVICE u32 arrive(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Who adds up: all threads of a block, or one warp.
struct BlockTeam {
    DEVICE static int rank() { return threadIdx.x; }
    DEVICE static int size() { return blockDim.x; }
    DEVICE static void sync() { __syncthreads(); }
};

struct WarpTeam {
    DEVICE static int rank() { return threadIdx.x & 31; }
    DEVICE static int size() { return 32; }
    DEVICE static void sync() { __syncwarp(); }
};

// A team has the sums value(i) of elements i = token * ROWS + row of a tile over its block's units [from, to) of it. It
// finishes them, finish(i, sum), if that is all of the tile, and otherwise leaves them for collect().
template <class Team, class Value, class Finish>
DEVICE void leave(const Work& work, const Sums& sums, int tile, int from, int to, int count, Value value, Finish finish) {
    if (to - from == work.per_tile) {
        for (int i = Team::rank(); i < count; i += Team::size()) finish(i, value(i));
        return;
    }
    float* mine = sums.partial + ((u64)blockIdx.x * 2 + (from == tile * work.per_tile)) * count;
    for (int i = Team::rank(); i < count; i += Team::size()) __stcg(mine + i, value(i));
}

// After leave() of a shared tile: whichever block arrives last finishes it. `flag` is the team's own shared memory.
template <class Team, class Finish>
DEVICE void collect(const Work& work, const Sums& sums, int tile, int count, volatile u32* flag, Finish finish) {
    const int begin = tile * work.per_tile, end = begin + work.per_tile;
    int head = blockIdx.x, tail = head;
    while (boundary(work, head) > begin) --head;
    while (boundary(work, tail + 1) < end) ++tail;
    Team::sync();
    if (Team::rank() == 0) *flag = arrive(sums.arrived + tile);
    Team::sync();
    if (*flag != (u32)(tail - head)) return;
    for (int i = Team::rank(); i < count; i += Team::size()) {
        float sum = 0.f;
        for (int b = head; b <= tail; ++b)
            sum += __ldcg(sums.partial + ((u64)b * 2 + (b == head && boundary(work, b) <= begin)) * count + i);
        finish(i, sum);
    }
    if (Team::rank() == 0) sums.arrived[tile] = 0;
}

// Ranges of warps: a block that needs no common table gives each warp an equal, contiguous share of its units. A warp
// keeps the sums of a tile that it has whole, and leaves those of its first and last tile in shared memory, where the
// warps' sums of a tile are added in order before the block's are settled with other blocks.
struct Shares {
    int first, share, extra;

    DEVICE Shares(int first, int last, int warps)
        : first(first), share((last - first) / warps), extra((last - first) % warps) {}
    DEVICE int begin(int warp) const { return first + warp * share + min(warp, extra); }
};

// After all warps have put their sums: [warp][head, tail][count] in `left`, of tiles that they have not whole.
template <class Finish>
DEVICE void settle_warps(const Work& work, const Sums& sums, int first, int last, const float* left, int count,
                         u32* flags, Finish finish) {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const Shares shares(first, last, warps);
    int head = 0;
    for (int tile = first / work.per_tile + warp; tile * work.per_tile < last; tile += warps) {
        const int top = tile * work.per_tile;
        const int begin = max(first, top), end = min(last, top + work.per_tile);
        while (shares.begin(head + 1) <= begin) ++head;
        if (end - begin == work.per_tile && shares.begin(head) <= begin && shares.begin(head + 1) >= end)
            continue;  // one warp had all of it, and has written it
        const auto done = [&](int i, float sum) { finish(tile, i, sum); };
        leave<WarpTeam>(
            work, sums, tile, begin, end, count,
            [&](int i) {
                float sum = 0.f;
                for (int w = head; w < warps && shares.begin(w) < end; ++w)
                    if (shares.begin(w) < shares.begin(w + 1))  // a warp with work
                        sum += left[(w * 2 + (shares.begin(w) <= top)) * count + i];
                return sum;
            },
            done);
        if (end - begin < work.per_tile) collect<WarpTeam>(work, sums, tile, count, flags + warp, done);
    }
}
