// What lies between the matrix products of a decode step: embedding of dense tables, norms, rotary embedding and
// cache, attention, gate, choice of the next token. Everything reads positions and ids from device memory, so that a
// captured graph can be replayed without a word from the host.
//
// Layouts (row-major): residual h float [M][hidden]; activations x act [M][width]; products y float [M][rows];
// cache act [sequences][kv_heads][capacity][D] for keys and values. M rows are M sequences, each at its own position;
// or, with `sequence`, any mix: row m belongs to sequence[m] at position[m].
//
// Bound: all of it moves activations, a few hundred KB a layer against the tens of MB of weights; what counts is the
// number of launches and the latency of each. Attention reads the cache once, 16 bytes a lane, split over positions.
// Every reduction has a fixed order: lanes by shuffles, warps and splits by number.

#include "common.cuh"

#ifdef TRAPETUM_BF16
#define BF16 true
#else
#define BF16 false
#endif
typedef u16 act;
DEVICE float widen(act x) { return to_float<BF16>(x); }
DEVICE act narrow(float x) { return BF16 ? float_to_bfloat(x) : float_to_half(x); }

#define GROUP_TILE 4         // query heads that share a pass over the values
#define INFINITE __int_as_float(0x7f800000)  // no <math.h> here
#define CHUNK 128           // positions of one attention split
#define ATTENTION_THREADS 128

DEVICE float warp_sum(float v) {
    for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
}

DEVICE float warp_max(float v) {
    for (int offset = 16; offset; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
    return v;
}

// Sum over the block, the same in every thread; `shared` holds 32 floats.
__device__ float block_sum(float v, float* shared) {
    v = warp_sum(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < (int)(blockDim.x >> 5); ++warp) total += shared[warp];
    return total;
}

// h[m] = table[ids[m]] * factor; grid (M), any block.
extern "C" __global__ void embed_dense(const act* table, const int* ids, float* h, int hidden, float factor) {
    const act* row = table + (size_t)ids[blockIdx.x] * hidden;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)
        h[(size_t)blockIdx.x * hidden + i] = widen(row[i]) * factor;
}

// x *= factor; any grid and block.
extern "C" __global__ void scale(float* x, int count, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] *= factor;
}

// h[m] += delta[m] (where there is one); x[m] = h[m] / rms(h[m]) * weight. Grid (M), block a multiple of 32 <= 1024.
// With `delta_weight` the delta is normalised by itself first (norms after a block, as Gemma has them); without `weight`
// x is h[m] as it is.
extern "C" __global__ void add_norm(float* h, const float* delta, const float* delta_weight, const float* weight,
                                    act* x, int hidden, float eps) {
    __shared__ float shared[32];
    float* row = h + (size_t)blockIdx.x * hidden;
    float scale = 1.0f;
    if (delta) {
        delta += (size_t)blockIdx.x * hidden;
        if (delta_weight) {
            float squares = 0.0f;
            for (int i = threadIdx.x; i < hidden; i += blockDim.x) squares += delta[i] * delta[i];
            scale = 1.0f / sqrtf(block_sum(squares, shared) / hidden + eps);
        }
    }
    float squares = 0.0f;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
        float v = row[i];
        if (delta) {
            v += delta_weight ? delta[i] * scale * delta_weight[i] : delta[i];
            row[i] = v;
        }
        squares += v * v;
    }
    float rms = weight ? 1.0f / sqrtf(block_sum(squares, shared) / hidden + eps) : 1.0f;
    act* out = x + (size_t)blockIdx.x * hidden;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)  // each thread reads what it wrote itself
        out[i] = narrow(weight ? row[i] * rms * weight[i] : row[i]);
}

// Rotary embedding (pairs d, d + rotated/2 of the first `rotated` numbers of a head) of queries and keys, after a norm
// of each head where weights are given; keys and values go to the cache at `position[m]`. yq, yk, yv are float, a row of
// heads * D numbers each, rows `*_stride` apart: parts of one product, or three. Grid (heads + 2 kv_heads, M), block: D
// rounded up to whole warps; D floats of dynamic shared memory.
extern "C" __global__ void rotate_append(const float* yq, const float* yk, const float* yv, int q_stride, int k_stride,
                                         int v_stride, act* q, act* keys, act* values, const float* q_weight,
                                         const float* k_weight, const float* inverse_frequencies,
                                         const int* position, const int* sequence, int heads, int kv_heads, int D,
                                         int capacity, int rotated, float rotary_scale, float eps) {
    extern __shared__ float head[];
    __shared__ float shared[32];
    int slot = blockIdx.x, m = blockIdx.y, d = threadIdx.x;
    int where = position[m], owner = sequence ? sequence[m] : m;
    bool inside = d < D;
    float v = 0.0f;
    if (inside)
        v = slot < heads ? yq[(size_t)m * q_stride + slot * D + d]
            : slot < heads + kv_heads ? yk[(size_t)m * k_stride + (slot - heads) * D + d]
                                      : yv[(size_t)m * v_stride + (slot - heads - kv_heads) * D + d];
    size_t line = (size_t)capacity * D;
    if (slot >= heads + kv_heads) {
        int h = slot - heads - kv_heads;
        if (inside) values[((size_t)owner * kv_heads + h) * line + (size_t)where * D + d] = narrow(v);
        return;
    }
    const float* weight = slot < heads ? q_weight : k_weight;
    if (weight) {
        float rms = 1.0f / sqrtf(block_sum(v * v, shared) / D + eps);
        if (inside) v = v * rms * weight[d];
    }
    if (inside) head[d] = v;
    __syncthreads();
    int half = rotated >> 1;
    if (d < rotated) {
        int pair = d < half ? d : d - half;
        float sine, cosine;
        sincosf((float)where * inverse_frequencies[pair], &sine, &cosine);
        sine *= rotary_scale;
        cosine *= rotary_scale;
        v = d < half ? v * cosine - head[d + half] * sine : v * cosine + head[d - half] * sine;
    }
    if (!inside) return;
    if (slot < heads)
        q[((size_t)m * heads + slot) * D + d] = narrow(v);
    else
        keys[((size_t)owner * kv_heads + slot - heads) * line + (size_t)where * D + d] = narrow(v);
}

// One split of attention: CHUNK positions of one key/value head for all of its query heads.
// Grid (splits, kv_heads, M), ATTENTION_THREADS threads. Writes, for each query head, the largest score, the sum of
// exponentials and the weighted sum of values of its split: partial float [M][heads][splits][D + 2].
// D is a multiple of 8, at most 512; `lanes` is the power of two >= D / 8: lanes that share a position.
// Dynamic shared memory: group * D (queries) + group * CHUNK (scores) + ATTENTION_THREADS * 8 (sums), in floats.
extern "C" __global__ void attend_split(const act* q, const act* keys, const act* values, const int* position,
                                        const int* sequence, float* partial, int kv_heads, int group, int D, int lanes, int capacity,
                                        int window, float scale, float cap) {
    extern __shared__ float memory[];
    int split = blockIdx.x, kv = blockIdx.y, m = blockIdx.z, splits = gridDim.x, heads = kv_heads * group;
    int last = position[m];  // inclusive
    int first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
    int low = split * CHUNK, high = min(low + CHUNK, last + 1);
    if (low < first) low = first;
    float* records = partial + (((size_t)m * heads + kv * group) * splits + split) * (D + 2);
    size_t stride = (size_t)splits * (D + 2);
    if (low >= high) return;  // combine() does not read such a split
    float* queries = memory;
    float* scores = queries + group * D;
    float* sums = scores + group * CHUNK;
    int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    for (int i = thread; i < group * D; i += ATTENTION_THREADS)
        queries[i] = widen(q[((size_t)m * heads + kv * group) * D + i]) * scale;
    __syncthreads();

    int rows = ATTENTION_THREADS / lanes;  // positions at once
    int part = thread % lanes, row = thread / lanes;
    bool inside = part * 8 < D;
    size_t line = ((size_t)(sequence ? sequence[m] : m) * kv_heads + kv) * capacity;
    int count = high - low;
    for (int at = 0; at < count; at += rows) {
        int p = at + row;
        bool there = p < count;
        float k[8];
        if (there && inside) {
            uint4 raw = *reinterpret_cast<const uint4*>(keys + (line + low + p) * D + part * 8);
            const act* eight = reinterpret_cast<const act*>(&raw);
            for (int e = 0; e < 8; ++e) k[e] = widen(eight[e]);
        } else {
            for (int e = 0; e < 8; ++e) k[e] = 0.0f;
        }
        for (int g = 0; g < group; ++g) {
            const float* one = queries + (inside ? g * D + part * 8 : 0);
            float dot = 0.0f;
            for (int e = 0; e < 8; ++e) dot += one[e] * k[e];
            for (int offset = min(lanes, 32) >> 1; offset; offset >>= 1)
                dot += __shfl_xor_sync(0xffffffffu, dot, offset);
            if (lanes > 32) {  // heads wider than 256: two or more warps share a position
                sums[thread] = dot;
                __syncthreads();
                if (part == 0) {
                    dot = 0.0f;
                    for (int w = 0; w < lanes; w += 32) dot += sums[thread + w];
                }
                __syncthreads();
            }
            if (part == 0 && there) scores[g * CHUNK + p] = cap > 0.0f ? cap * tanhf(dot / cap) : dot;
        }
    }
    __syncthreads();
    for (int g = warp; g < group; g += ATTENTION_THREADS / 32) {
        float largest = -INFINITE;
        for (int p = lane; p < count; p += 32) largest = fmaxf(largest, scores[g * CHUNK + p]);
        largest = warp_max(largest);
        float sum = 0.0f;
        for (int p = lane; p < count; p += 32) {
            float e = expf(scores[g * CHUNK + p] - largest);
            scores[g * CHUNK + p] = e;
            sum += e;
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            records[g * stride + D] = largest;
            records[g * stride + D + 1] = sum;
        }
    }
    __syncthreads();
    for (int base = 0; base < group; base += GROUP_TILE) {  // 8 numbers of GROUP_TILE heads: 32 registers
        float total[GROUP_TILE][8];
#pragma unroll
        for (int g = 0; g < GROUP_TILE; ++g)
#pragma unroll
            for (int e = 0; e < 8; ++e) total[g][e] = 0.0f;
        for (int p = row; p < count && inside; p += rows) {
            uint4 raw = *reinterpret_cast<const uint4*>(values + (line + low + p) * D + part * 8);
            const act* eight = reinterpret_cast<const act*>(&raw);
#pragma unroll
            for (int g = 0; g < GROUP_TILE; ++g) {
                float weight = base + g < group ? scores[(base + g) * CHUNK + p] : 0.0f;
#pragma unroll
                for (int e = 0; e < 8; ++e) total[g][e] += weight * widen(eight[e]);
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP_TILE; ++g) {
            if (base + g >= group) break;
            __syncthreads();
#pragma unroll
            for (int e = 0; e < 8; ++e) sums[thread * 8 + e] = total[g][e];
            __syncthreads();
            for (int d = thread; d < D; d += ATTENTION_THREADS) {
                float all = 0.0f;
                for (int r = 0; r < rows; ++r) all += sums[(r * lanes + (d >> 3)) * 8 + (d & 7)];
                records[(base + g) * stride + d] = all;
            }
        }
    }
}

// Splits together, in order. Grid (heads, M), block D. `sinks` (float [heads], or null) is one more score without a
// value.
extern "C" __global__ void attend_combine(const float* partial, const int* position, act* out, const float* sinks,
                                          int splits, int D, int window) {
    int head = blockIdx.x, m = blockIdx.y, heads = gridDim.x, d = threadIdx.x;
    int last = position[m];
    int first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
    int low = first / CHUNK, high = last / CHUNK + 1;
    const float* records = partial + ((size_t)m * heads + head) * splits * (D + 2);
    float largest = sinks ? sinks[head] : -INFINITE;
    for (int s = low; s < high; ++s) largest = fmaxf(largest, records[(size_t)s * (D + 2) + D]);
    float sum = sinks ? expf(sinks[head] - largest) : 0.0f, value = 0.0f;
    for (int s = low; s < high; ++s) {
        const float* one = records + (size_t)s * (D + 2);
        float weight = expf(one[D] - largest);
        sum += weight * one[D + 1];
        value += weight * one[d];
    }
    out[((size_t)m * heads + head) * D + d] = narrow(value / sum);
}

// x = activation(gate) * up; float rows `gate_stride` and `up_stride` apart. Grid (ceil(width / block), M).
// kind 0: SiLU, 1: GELU by tanh, 2: GELU.
extern "C" __global__ void gate_up(const float* gate, const float* up, int gate_stride, int up_stride, act* x,
                                   int width, int kind) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    float g = gate[(size_t)blockIdx.y * gate_stride + i], u = up[(size_t)blockIdx.y * up_stride + i];
    float gated = kind == 2   ? 0.5f * g * (1.0f + erff(g * 0.7071067811865476f))
                  : kind == 1 ? 0.5f * g * (1.0f + tanhf(0.7978845608028654f * (g + 0.044715f * g * g * g)))
                              : g / (1.0f + expf(-g));
    x[(size_t)blockIdx.y * width + i] = narrow(gated * u);
}

// y[m] += bias; grid (ceil(width / block), M).
extern "C" __global__ void add_bias(float* y, const float* bias, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width) y[(size_t)blockIdx.y * width + i] += bias[i];
}

// Logits beyond a soft cap: y = cap tanh(y / cap).
extern "C" __global__ void soft_cap(float* y, int width, float cap) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width) {
        float* one = y + (size_t)blockIdx.y * width + i;
        *one = cap * tanhf(*one / cap);
    }
}

struct Best {
    float value;
    int index;
};

DEVICE Best better(Best a, Best b) {  // the first of equals
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

__device__ Best block_best(Best mine, Best* shared) {
    for (int offset = 16; offset; offset >>= 1) {
        Best other{__shfl_xor_sync(0xffffffffu, mine.value, offset), __shfl_xor_sync(0xffffffffu, mine.index, offset)};
        mine = better(mine, other);
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = mine;
    __syncthreads();
    for (int warp = 0; warp < (int)(blockDim.x >> 5); ++warp) mine = better(mine, shared[warp]);
    return mine;
}

__device__ double block_sum_double(double v, double* shared) {
    for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
    __syncthreads();
    double total = 0.0;
    for (int warp = 0; warp < (int)(blockDim.x >> 5); ++warp) total += shared[warp];
    return total;
}

// The next token of each sequence, and the bookkeeping of a step: ids[m] <- token, history[m][step[m]] <- token,
// position[m] += 1, step[m] += 1. Grid (M), 1024 threads.
//
// temperature 0: the largest logit, the first of equals. Otherwise softmax(logits / temperature); top_k and top_p keep
// the tokens above a threshold that bisection over the order of float32 bit patterns finds exactly (32 passes); equals of the last kept one stay under top_k, as on the CPU; under top_p equals are kept
// in the order of their ids. The token is where the running sum of kept probabilities, in the order of ids, passes
// uniform[m][step[m]] times their total.
extern "C" __global__ void choose(const float* logits, int stride, int vocab, float temperature, int top_k,
                                  float top_p, const double* uniform, int steps, int* ids, int* history,
                                  int* position, int* step) {
    __shared__ Best shared_best[32];
    __shared__ double shared[32];
    __shared__ double prefix[1024];
    int m = blockIdx.x, thread = threadIdx.x, threads = blockDim.x;
    const float* row = logits + (size_t)m * stride;
    Best best{-INFINITE, 0x7fffffff};
    for (int i = thread; i < vocab; i += threads) best = better(best, Best{row[i], i});
    best = block_best(best, shared_best);
    int token = best.index;
    if (temperature > 0.0f) {
        double inverse = 1.0 / (double)temperature;
        float least = -INFINITE;  // logits below it are dropped
        if (top_k > 0 && top_k < vocab) {
            long long from = -2147483648LL, to = 2147483647LL;
            while (from < to) {  // the largest key with at least top_k logits at or above it
                long long middle = from + (to - from + 1) / 2;
                double count = 0.0;
                for (int i = thread; i < vocab; i += threads) {
                    int bits = __float_as_int(row[i]);
                    int key = bits >= 0 ? bits : (int)(0x80000000u - (unsigned)bits);
                    if ((long long)key >= middle) count += 1.0;
                }
                count = block_sum_double(count, shared);
                if (count >= (double)top_k) from = middle; else to = middle - 1;
            }
            int key = (int)from;
            least = __int_as_float(key >= 0 ? key : (int)(0x80000000u - (unsigned)key));
        }
        double total = 0.0;
        for (int i = thread; i < vocab; i += threads)
            if (row[i] >= least) total += exp(((double)row[i] - (double)best.value) * inverse);
        total = block_sum_double(total, shared);
        int ties = vocab;  // of the logits equal to `least`, how many are kept
        if (top_p < 1.0f) {
            // the largest key such that the mass strictly above it has not reached top_p ... kept: above, and enough equals
            long long from = -2147483648LL, to = 2147483647LL;
            double limit = (double)top_p * total;
            while (from < to) {  // the smallest key with mass(key' > key) < limit
                long long middle = from + (to - from) / 2;
                double mass = 0.0;
                for (int i = thread; i < vocab; i += threads) {
                    int bits = __float_as_int(row[i]);
                    int key = bits >= 0 ? bits : (int)(0x80000000u - (unsigned)bits);
                    if ((long long)key > middle && row[i] >= least)
                        mass += exp(((double)row[i] - (double)best.value) * inverse);
                }
                mass = block_sum_double(mass, shared);
                if (mass < limit) to = middle; else from = middle + 1;
            }
            int key = (int)from;
            float edge = __int_as_float(key >= 0 ? key : (int)(0x80000000u - (unsigned)key));
            double above = 0.0, equals = 0.0;
            for (int i = thread; i < vocab; i += threads) {
                if (row[i] > edge && row[i] >= least) above += exp(((double)row[i] - (double)best.value) * inverse);
                if (row[i] == edge) equals += 1.0;
            }
            above = block_sum_double(above, shared);
            equals = block_sum_double(equals, shared);
            double each = exp(((double)edge - (double)best.value) * inverse);
            if (edge >= least && equals > 0.0) {
                double wanted = ceil((limit - above) / each);
                ties = (int)fmin(fmax(wanted, 1.0), equals);
            }
            least = fmaxf(least, edge);
        }
        // running sums: each thread takes a run of consecutive ids
        int run = (vocab + threads - 1) / threads, begin = min(thread * run, vocab), end = min(begin + run, vocab);
        int before = 0;  // equals of `least` in earlier runs: counted through shared memory
        int own = 0;
        for (int i = begin; i < end; ++i) own += row[i] == least;
        __syncthreads();
        prefix[thread] = (double)own;
        __syncthreads();
        for (int t = 0; t < thread; ++t) before += (int)prefix[t];
        __syncthreads();
        double mass = 0.0;
        int seen = before;
        for (int i = begin; i < end; ++i) {
            bool keep = row[i] > least || (row[i] == least && seen++ < ties);
            if (keep) mass += exp(((double)row[i] - (double)best.value) * inverse);
        }
        prefix[thread] = mass;
        __syncthreads();
        double earlier = 0.0, kept = 0.0;
        for (int t = 0; t < threads; ++t) {
            if (t < thread) earlier += prefix[t];
            kept += prefix[t];
        }
        double target = uniform[(size_t)m * steps + step[m]] * kept;
        Best found{-INFINITE, 0x7fffffff}, fallback{-INFINITE, -1};  // smallest id that passes; largest id kept
        double sum = earlier;
        seen = before;
        for (int i = begin; i < end; ++i) {
            bool keep = row[i] > least || (row[i] == least && seen++ < ties);
            if (!keep) continue;
            sum += exp(((double)row[i] - (double)best.value) * inverse);
            fallback.index = i;
            if (sum > target && found.index == 0x7fffffff) found = Best{0.0f, i};
        }
        found = block_best(found, shared_best);
        fallback.value = (float)fallback.index;
        fallback = block_best(fallback, shared_best);
        token = found.index != 0x7fffffff ? found.index : fallback.index;
    }
    __syncthreads();
    if (thread == 0) {
        history[(size_t)m * steps + step[m]] = token;
        ids[m] = token;
        position[m] += 1;
        step[m] += 1;
    }
}
