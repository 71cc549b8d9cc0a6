// D = A B^T for bf16 A [64, 64] and B [64, 64] by one warp group: tensor copies into swizzled shared memory, an mbarrier, wgmma.
// SWIZZLE is 0, 32, 64 or 128 bytes; rows of a box are as wide. With B_BY_COLUMNS, B is [K, N] and wgmma transposes it.
struct __align__(64) Map { unsigned char bytes[128]; };
__device__ __forceinline__ void load_box(void* to, const Map* map, int x, int y, void* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(shared_address(to)), "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ unsigned long long descriptor(const void* at, unsigned leading, unsigned stride) {
    const unsigned long long mode = SWIZZLE == 128 ? 1 : SWIZZLE == 64 ? 2 : SWIZZLE == 32 ? 3 : 0;
    return (unsigned long long)((shared_address(at) & 0x3ffff) >> 4) | (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32 | mode << 62;
}
extern "C" __global__ void __launch_bounds__(128) warp_group_product(const __grid_constant__ Map map_a, const __grid_constant__ Map map_b, float* __restrict__ d) {
    const int ROW = SWIZZLE ? SWIZZLE : 16, COLUMNS = ROW / 2, PANEL = 64 * ROW; // a panel has 64 rows of ROW bytes
    __shared__ __align__(1024) unsigned char a[64 * 128], b[64 * 128];
    __shared__ __align__(8) unsigned long long barrier;
    unsigned at = shared_address(&barrier);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(2 * 64 * 128) : "memory");
        for (int p = 0; p < 64 / COLUMNS; p++) { load_box(a + p * PANEL, &map_a, p * COLUMNS, 0, &barrier); load_box(b + p * PANEL, &map_b, p * COLUMNS, 0, &barrier); }
    }
#ifndef PLANT_NO_WAIT
    asm volatile("{ .reg .pred done; WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; @done bra DONE; bra WAIT; DONE: }" :: "r"(at) : "memory");
#endif
    float acc[32];
    for (int i = 0; i < 32; i++) acc[i] = 0.0f;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 64; k += 16) {
        // Rows along K: chunks of 8 columns lie PANEL apart without a swizzle, groups of 8 rows lie 8 ROW apart.
        unsigned long long da = descriptor(a + k / COLUMNS * PANEL + k % COLUMNS * 2, PANEL, 8 * ROW);
#ifdef B_BY_COLUMNS
        // Rows along N: 16 rows of k are two groups of 8; panels are chunks of N.
        unsigned long long db = SWIZZLE ? descriptor(b + k * ROW, PANEL, 8 * ROW) : descriptor(b + k * ROW, 8 * ROW, PANEL);
#else
        unsigned long long db = descriptor(b + k / COLUMNS * PANEL + k % COLUMNS * 2, PANEL, 8 * ROW);
#endif
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, %35; }"
            : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]), "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]),
              "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]), "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]),
              "+f"(acc[22]), "+f"(acc[23]), "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31])
            : "l"(da), "l"(db), "r"(k),
#ifdef B_BY_COLUMNS
            "n"(1)
#else
            "n"(0)
#endif
        );
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#ifndef PLANT_NO_GROUP_WAIT
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 32; i++) d[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = acc[i];
}
