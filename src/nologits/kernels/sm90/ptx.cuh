// Hopper's asynchronous machinery, one function an instruction: mbarriers, bulk tensor copies, wgmma, register budgets.
// Nothing here knows about sampling.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What cuTensorMapEncodeTiled fills in on the host; opaque here.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier that lies at the same address in another block of the cluster.
__device__ __forceinline__ void barrier_arrive_remote(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier), "r"(rank)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra retry;\n"
        "finished:\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// ---- bulk tensor copies

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy_box(u32 target, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(target), "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// The same box to the same address in every block of `ranks`; each block's own barrier counts the bytes.
__device__ __forceinline__ void copy_box_multicast(u32 target, const TensorMap* map, u32 barrier, int column, int row,
                                                   unsigned short ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target), "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(ranks)
        : "memory");
}

// Into the L2 cache: neighbouring bytes; addresses and their number are multiples of 16.
__device__ __forceinline__ void prefetch_bytes(const void* source, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// ---- clusters and dependent launches

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void allow_dependents() {
    asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ void wait_for_primary() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

template <int threads>
__device__ __forceinline__ void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

template <int threads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(threads) : "memory");
}

// Low word of the multiprocessor's counter.
__device__ __forceinline__ u32 clock_cycles() {
    u32 cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles));
    return cycles;
}

// ---- words that blocks tell each other

__device__ __forceinline__ u32 load_relaxed(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u32 load_acquire(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(u32* word, u32 value) {
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// ---- words that ranks tell each other

__device__ __forceinline__ u64 load_system(const u64* word) {
    u64 value;
    asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_system(u64* word, u64 value) {
    asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// The word once it is what is wanted. A rank that does not answer for minutes never will: better an error than a GPU that hangs.
template <typename Wanted>
__device__ __forceinline__ u64 wait_system(const u64* word, Wanted wanted) {
    u64 value = load_system(word);
    if (wanted(value)) return value;
    const u64 start = nanoseconds();
    while (!wanted(value = load_system(word)))
        if (nanoseconds() - start > 300ull * 1000 * 1000 * 1000) __trap();
    return value;
}

// ---- registers

template <int count>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// ---- wgmma

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// A K-major operand of 128-byte rows in the 128-byte swizzle: groups of eight rows lie 1,024 bytes apart.
__device__ __forceinline__ u64 operand(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

#ifndef OPERAND
#define OPERAND "bf16"
#endif
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
#define REGISTERS_0_63                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"                              \
    " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"                   \
    " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"                   \
    " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_64_127                                                                                 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79,"                    \
    " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95,"                   \
    " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111,"       \
    " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d[64, N] (+)= a[64, 16] . b[N, 16]^T for N = 256 or 128; starts from zero unless `accumulate`.
__device__ __forceinline__ void wgmma(float (&d)[128], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." OPERAND "." OPERAND
        " {" REGISTERS_0_63 ", " REGISTERS_64_127 "}, %128, %129, p, 1, 1, 0, 0;\n"
        "}"
        : D64(0), D64(64)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma(float (&d)[64], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." OPERAND "." OPERAND
        " {" REGISTERS_0_63 "}, %64, %65, p, 1, 1, 0, 0;\n"
        "}"
        : D64(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}
