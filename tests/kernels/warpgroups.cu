// y = a b^T with warpgroup products, in slices of k that alternate between two buffers: while the products of a slice
// are on their way, the next slice is staged in the other buffer.
//
//     stage 0  fence barrier  issue 0 | barrier  stage 1  fence barrier  issue 1  wait: 0 has been read | barrier ...
//
// A slice is 16 numbers of each row in four planes of 16 bytes; a row is 16 bytes in each plane.
#include "device/async_copy.cuh"
#include "device/math.cuh"
#include "device/platform.cuh"
#include "device/wgmma.cuh"

constexpr int GROUPS = 2;
constexpr int M = 64 * GROUPS;
constexpr int N = 32;
constexpr int PLANES = 4;
constexpr int SLICE = 4 * PLANES;

struct Plane {
    float a[M][4];
    float b[N][4];
};

struct Shared {
    Plane slice[2][PLANES];
};

struct Arguments {
    const float* a;  // [M][slices][SLICE]
    const float* b;  // [N][slices][SLICE]
    float* y;        // [M][N]
    int32_t slices;
};

extern "C" __global__ void __launch_bounds__(128 * GROUPS) warpgroups(const Arguments arguments) {
    using namespace jitconv;
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    const int thread = static_cast<int>(threadIdx.x);
    const int group = thread / 128;
    const uint64_t descriptor = matrix_descriptor(sizeof(Plane), 128);
    float d[N / 2];
    for (int slice = 0; slice < arguments.slices; ++slice) {
        Plane* const planes = shared.slice[slice % 2];
        for (int i = thread; i < M * SLICE; i += 128 * GROUPS) {
            const int row = i / SLICE, k = i % SLICE;
            planes[k / 4].a[row][k % 4] = arguments.a[(row * arguments.slices + slice) * SLICE + k];
        }
        for (int i = thread; i < N * SLICE; i += 128 * GROUPS) {
            const int row = i / SLICE, k = i % SLICE;
            planes[k / 4].b[row][k % 4] = arguments.b[(row * arguments.slices + slice) * SLICE + k];
        }
        fence_proxy_async();
        __syncthreads();
        wgmma_fence();
        for (int pair = 0; pair < PLANES / 2; ++pair) {
            wgmma<Math::TF32, N>(d, descriptor_at(descriptor, shared_address(planes[2 * pair].a[64 * group])),
                                 descriptor_at(descriptor, shared_address(planes[2 * pair].b)),
                                 slice > 0 || pair > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        __syncthreads();
    }
    wgmma_wait_group<0>();
    const int row = 64 * group + thread % 128 / 32 * 16 + thread % 32 / 4;
    for (int i = 0; i < N / 2; ++i) {
        arguments.y[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + 2 * (thread % 4) + i % 2] = d[i];
    }
}
