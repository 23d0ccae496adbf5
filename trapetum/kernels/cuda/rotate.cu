// The Hadamard rotation of activations: H (s * x), or s * (H x) for rows of a rotated embedding, in float32.
#include "common.cuh"

// One block of threads transforms `block` inputs (a power of two, 2 to 4096) of one token; signs are bytes of +1 or -1.
// A radix-2 step over shared memory at a time: the whole is read and written once.
template <class Load, class Store>
DEVICE void rotate(Load load, Store write, const signed char* signs, int block, int after) {
    extern __shared__ float v[];
    const u64 base = (u64)blockIdx.y * gridDim.x * block + (u64)blockIdx.x * block;
    const signed char* sign = signs + (u64)blockIdx.x * block;
    let_next_start();
    wait_for_inputs();
    for (int i = threadIdx.x; i < block; i += blockDim.x) v[i] = load(base + i) * (after ? 1.f : (float)sign[i]);
    for (int step = 1; step < block; step *= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < block / 2; i += blockDim.x) {
            const int low = (i / step) * 2 * step + i % step;
            const float a = v[low], b = v[low + step];
            v[low] = a + b;
            v[low + step] = a - b;
        }
    }
    __syncthreads();
    const float scale = 1.f / sqrtf((float)block);
    for (int i = threadIdx.x; i < block; i += blockDim.x)
        write(base + i, v[i] * scale * (after ? (float)sign[i] : 1.f));
}

// kind of `x`: Output; y may be x.
extern "C" __global__ void hadamard(const void* x, void* y, const signed char* signs, int block, int after, int from_kind,
                                    int to_kind) {
    rotate(
        [&](u64 i) {
            return from_kind == OUT_FLOAT32    ? ((const float*)x)[i]
                   : from_kind == OUT_BFLOAT16 ? bfloat_to_float(((const u16*)x)[i])
                                               : half_to_float(((const u16*)x)[i]);
        },
        [&](u64 i, float value) { store(y, to_kind, i, value); }, signs, block, after);
}
