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
// Every reduction has a fixed order: lanes by shuffles, warps and splits by number. Each kernel lets the next one start at
// once and waits for the one before: what is hidden is the time of a launch.

#include "common.cuh"

#ifdef TRAPETUM_BF16
#define BF16 true
#else
#define BF16 false
#endif
typedef u16 act;
DEVICE float widen(act x) { return to_float<BF16>(x); }
DEVICE act narrow(float x) { return BF16 ? float_to_bfloat(x) : float_to_half(x); }

#define NORM_RUN 16        // numbers of the residual stream that a thread keeps
#define IN_FLIGHT 4        // positions that a lane loads before it uses the first: one latency, not four
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
    let_next_start();
    wait_for_inputs();
    const act* row = table + (size_t)ids[blockIdx.x] * hidden;
    for (int i = threadIdx.x; i < hidden; i += blockDim.x)
        h[(size_t)blockIdx.x * hidden + i] = widen(row[i]) * factor;
}

// x *= factor; any grid and block.
extern "C" __global__ void scale(float* x, int count, float factor) {
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] *= factor;
}

// h[m] += delta[m] (where there is one); x[m] = h[m] / rms(h[m]) * weight. Grid (M), 1024 threads;
// hidden <= 1024 * NORM_RUN.
// With `delta_weight` the delta is normalised by itself first (norms after a block, as Gemma has them); without `weight`
// x is h[m] as it is.
extern "C" __global__ void __launch_bounds__(1024) add_norm(float* h, const float* delta, const float* delta_weight,
                                                            const float* weight, act* x, int hidden, float eps) {
    let_next_start();
    wait_for_inputs();
    __shared__ float shared[32];
    float* row = h + (size_t)blockIdx.x * hidden;
    act* out = x + (size_t)blockIdx.x * hidden;
    if (delta) delta += (size_t)blockIdx.x * hidden;
    float v[NORM_RUN], squares = 0.0f, scale = 1.0f;
    if (delta && delta_weight) {
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) squares += delta[i] * delta[i];
        scale = 1.0f / sqrtf(block_sum(squares, shared) / hidden + eps);
        squares = 0.0f;
    }
    // Every load before the first store: h and delta could be one array for all that the compiler knows.
#pragma unroll
    for (int j = 0; j < NORM_RUN; ++j) {
        int i = threadIdx.x + j * blockDim.x;
        v[j] = i < hidden ? row[i] : 0.0f;
    }
    if (delta) {
#pragma unroll
        for (int j = 0; j < NORM_RUN; ++j) {
            int i = threadIdx.x + j * blockDim.x;
            if (i < hidden) v[j] += delta_weight ? delta[i] * scale * delta_weight[i] : delta[i];
        }
#pragma unroll
        for (int j = 0; j < NORM_RUN; ++j) {
            int i = threadIdx.x + j * blockDim.x;
            if (i < hidden) row[i] = v[j];
        }
    }
#pragma unroll
    for (int j = 0; j < NORM_RUN; ++j) squares += v[j] * v[j];
    float rms = weight ? 1.0f / sqrtf(block_sum(squares, shared) / hidden + eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < NORM_RUN; ++j) {
        int i = threadIdx.x + j * blockDim.x;
        if (i < hidden) out[i] = narrow(weight ? v[j] * rms * weight[i] : v[j]);
    }
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
    let_next_start();
    wait_for_inputs();
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

// Attention of one new token of each sequence: norm and rotary embedding of the queries, the same and the cache for the
// new key and value, scores, and the sum of all splits, in one launch. A split is CHUNK positions of one key/value head
// for all of its query heads; the block that finishes last adds the splits of its head, in order.
//
// Grid (splits, kv_heads, M), ATTENTION_THREADS threads. yq, yk, yv, norms and rotary embedding as in rotate_append.
// partial: float [M][heads][splits][D + 2] (sums of values, largest score, sum of exponentials); arrived: int
// [M][kv_heads], zero before and after. out: act [M][heads][D]. `sinks` (float [heads], or null) is one more score
// without a value. D is a multiple of 8, at most 256; `lanes` is the power of two >= D / 8: lanes that share a position.
// Dynamic shared memory, in floats: group * D (queries) + group * CHUNK (scores) + ATTENTION_THREADS * 8 (sums) +
// rotated (sines and cosines).
extern "C" __global__ void attend_step(const float* yq, const float* yk, const float* yv, int q_stride, int k_stride,
                                       int v_stride, act* keys, act* values, const float* q_weight,
                                       const float* k_weight, const float* inverse_frequencies, const int* position,
                                       float* partial, int* arrived, act* out, const float* sinks, int kv_heads,
                                       int group, int D, int lanes, int capacity, int rotated, int window,
                                       float rotary_scale, float eps, float scale, float cap) {
    let_next_start();
    wait_for_inputs();
    extern __shared__ float memory[];
    __shared__ int earlier;
    int split = blockIdx.x, kv = blockIdx.y, m = blockIdx.z, splits = gridDim.x, heads = kv_heads * group;
    int last = position[m];  // inclusive
    int first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
    int low = split * CHUNK, high = min(low + CHUNK, last + 1);
    if (low < first) low = first;
    if (low >= high) return;
    float* records = partial + (((size_t)m * heads + kv * group) * splits + split) * (D + 2);
    size_t stride = (size_t)splits * (D + 2), line = ((size_t)m * kv_heads + kv) * capacity;
    float* queries = memory;
    float* scores = queries + group * D;
    float* sums = scores + group * CHUNK;
    float* cosines = sums + ATTENTION_THREADS * 8;
    int half = rotated >> 1;
    float* sines = cosines + half;
    int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
    bool newest = high == last + 1;  // this block has the new key and value
    for (int i = thread; i < half; i += ATTENTION_THREADS) {
        float sine, cosine;
        sincosf((float)last * inverse_frequencies[i], &sine, &cosine);
        sines[i] = sine * rotary_scale;
        cosines[i] = cosine * rotary_scale;
    }
    for (int g = warp; g < group + newest; g += ATTENTION_THREADS / 32) {  // head `group` is the new key
        const float* from = g < group ? yq + (size_t)m * q_stride + (kv * group + g) * D : yk + (size_t)m * k_stride + kv * D;
        const float* weight = g < group ? q_weight : k_weight;
        float* to = g < group ? queries + g * D : sums;
        float squares = 0.0f;
        for (int d = lane; d < D; d += 32) squares += from[d] * from[d];
        float rms = weight ? 1.0f / sqrtf(warp_sum(squares) / D + eps) : 1.0f;
        for (int d = lane; d < D; d += 32) to[d] = weight ? from[d] * rms * weight[d] : from[d];
    }
    __syncthreads();
    for (int i = thread; i < (group + newest) * half; i += ATTENTION_THREADS) {
        int g = i / half, d = i % half;
        float* one = g < group ? queries + g * D : sums;
        float a = one[d], b = one[d + half];
        one[d] = a * cosines[d] - b * sines[d];
        one[d + half] = b * cosines[d] + a * sines[d];
    }
    __syncthreads();
    if (newest)
        for (int d = thread; d < D; d += ATTENTION_THREADS) {
            keys[(line + last) * D + d] = narrow(sums[d]);
            values[(line + last) * D + d] = narrow(yv[(size_t)m * v_stride + kv * D + d]);
        }
    for (int i = thread; i < group * D; i += ATTENTION_THREADS) queries[i] *= scale;
    __syncthreads();

    int rows = ATTENTION_THREADS / lanes;  // positions at once
    int part = thread % lanes, row = thread / lanes;
    bool inside = part * 8 < D;
    int count = high - low;
    for (int at = row; at - row < count; at += rows * IN_FLIGHT) {
        uint4 raw[IN_FLIGHT];
#pragma unroll
        for (int f = 0; f < IN_FLIGHT; ++f) {
            int p = at + f * rows;
            raw[f] = make_uint4(0, 0, 0, 0);
            if (p < count && inside) raw[f] = *reinterpret_cast<const uint4*>(keys + (line + low + p) * D + part * 8);
        }
        for (int g = 0; g < group; ++g) {
            const float* one = queries + (inside ? g * D + part * 8 : 0);
            float dot[IN_FLIGHT];
#pragma unroll
            for (int f = 0; f < IN_FLIGHT; ++f) {
                const act* eight = reinterpret_cast<const act*>(&raw[f]);
                dot[f] = 0.0f;
#pragma unroll
                for (int e = 0; e < 8; ++e) dot[f] += one[e] * widen(eight[e]);
            }
            for (int offset = lanes >> 1; offset; offset >>= 1)
#pragma unroll
                for (int f = 0; f < IN_FLIGHT; ++f) dot[f] += __shfl_xor_sync(0xffffffffu, dot[f], offset);
            if (part == 0)
#pragma unroll
                for (int f = 0; f < IN_FLIGHT; ++f) {
                    int p = at + f * rows;
                    if (p < count) scores[g * CHUNK + p] = cap > 0.0f ? cap * tanhf(dot[f] / cap) : dot[f];
                }
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
        for (int at = row; at < count && inside; at += rows * IN_FLIGHT) {
            uint4 raw[IN_FLIGHT];
#pragma unroll
            for (int f = 0; f < IN_FLIGHT; ++f) {
                int p = at + f * rows;
                raw[f] = make_uint4(0, 0, 0, 0);
                if (p < count) raw[f] = *reinterpret_cast<const uint4*>(values + (line + low + p) * D + part * 8);
            }
#pragma unroll
            for (int f = 0; f < IN_FLIGHT; ++f) {
                const act* eight = reinterpret_cast<const act*>(&raw[f]);
                int p = at + f * rows;
#pragma unroll
                for (int g = 0; g < GROUP_TILE; ++g) {
                    float weight = base + g < group && p < count ? scores[(base + g) * CHUNK + p] : 0.0f;
#pragma unroll
                    for (int e = 0; e < 8; ++e) total[g][e] += weight * widen(eight[e]);
                }
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
    __threadfence();
    __syncthreads();
    int before = first / CHUNK, behind = last / CHUNK + 1;
    if (thread == 0) earlier = atomicAdd(arrived + m * kv_heads + kv, 1);
    __syncthreads();
    if (earlier != behind - before - 1) return;
    __threadfence();
    const float* all = partial + ((size_t)m * heads + kv * group) * stride;
    for (int i = thread; i < group * D; i += ATTENTION_THREADS) {
        int g = i / D, d = i % D;
        const float* one = all + g * stride;
        float largest = sinks ? sinks[kv * group + g] : -INFINITE;
        for (int s = before; s < behind; ++s) largest = fmaxf(largest, __ldcg(one + (size_t)s * (D + 2) + D));
        float sum = sinks ? expf(sinks[kv * group + g] - largest) : 0.0f, value = 0.0f;
        for (int s = before; s < behind; ++s) {
            const float* record = one + (size_t)s * (D + 2);
            float weight = expf(__ldcg(record + D) - largest);
            sum += weight * __ldcg(record + D + 1);
            value += weight * __ldcg(record + d);
        }
        out[((size_t)m * heads + kv * group + g) * D + d] = narrow(value / sum);
    }
    if (thread == 0) arrived[m * kv_heads + kv] = 0;
}

// x = activation(gate) * up; float rows `gate_stride` and `up_stride` apart. Grid (ceil(width / block), M).
// kind 0: SiLU, 1: GELU by tanh, 2: GELU.
extern "C" __global__ void gate_up(const float* gate, const float* up, int gate_stride, int up_stride, act* x,
                                   int width, int kind) {
    let_next_start();
    wait_for_inputs();
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
    let_next_start();
    wait_for_inputs();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width) y[(size_t)blockIdx.y * width + i] += bias[i];
}

// Logits beyond a soft cap: y = cap tanh(y / cap).
extern "C" __global__ void soft_cap(float* y, int width, float cap) {
    let_next_start();
    wait_for_inputs();
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
    let_next_start();
    wait_for_inputs();
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
