// CUDA on a CPU, as much as one cluster of thread blocks needs: a fiber a thread, all in one thread of the host.
//
// A fiber runs until it waits for others (for the lanes of its warp, the threads of its block, the blocks of its cluster); then any
// fiber that can go on does. So this shows what a kernel computes, with few or (`shuffled`) many orders of its threads, and that
// all of them meet at the same barriers; it knows nothing of memory ordering, nor of anything that happens between two barriers.
// What a row finds in shared memory is poison, and what lies around it is guarded.
#pragma once
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline
#define __constant__ static const
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Saves the registers that a call keeps, and the stack pointer to *from; goes on with the stack `to`.
extern "C" void emulated_switch(void** from, void* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden emulated_switch
.globl emulated_switch
.type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace emulated {

constexpr u32 GUARD = 64;            // bytes around each piece of shared memory
constexpr size_t STACK = 501 * 64;   // an odd number of cache lines: the tops of the stacks share no set of the cache

struct Index {
    u32 x, y = 0;
};

struct Fiber {
    void* stack;
    Fiber* next;  // that waits for the same
    Index thread;
    struct Block* block;
    struct Warp* warp;
    int tile = 0, row0 = 0;  // of a matmul (pipeline.h)
};

// Where `size` fibers wait for each other, again and again.
struct Meeting {
    u32 size = 0, arrived = 0, turn = 0;
    const char* what = nullptr;  // they are all here for the same
    Fiber* waiting = nullptr;
};

struct Warp {
    Meeting meeting;
    u64 slots[2][32];  // what the lanes gave; two, as a lane may be at the next meeting while others still read
};

struct Block {
    Meeting meeting;
    u32 sums[2];  // of __syncthreads_count
    Meeting named[16];
    Index block;
    u32 rank;
    Block* cluster;
    char* shared;          // its shared memory, of `static_bytes` and `dynamic_bytes`, each between guards
};

struct Shape {
    u32 cluster, threads, static_bytes, dynamic_bytes;
    bool columns = false;  // the blocks that run together are a column of the grid, not a part of its row
    u32 ranks = 1;         // or a column each of several grids, of devices that wait for one another
    u32 dynamic_at() const { return 2 * GUARD + (static_bytes + 15) / 16 * 16; }
    u32 bytes() const { return dynamic_at() + (dynamic_bytes + 15) / 16 * 16 + GUARD; }
};

inline Shape shape;
inline Index grid;    // its size, for columns
inline Meeting whole;  // of the cluster
inline Fiber* current;
inline std::vector<Fiber*> ready;
inline u32 finished;
inline u64 shuffled;  // state of the generator that picks who goes on; 0: the one that got ready last
inline void* host;    // stack of who launched
inline const char* failure;
inline void (*body)(const void*);
inline const void* argument;

[[noreturn]] inline void fail(const char* why) {
    failure = why;
    void* dead;
    emulated_switch(&dead, host);
    abort();
}

inline void on_signal(int) { fail("an access to memory that is not there, or a division by zero"); }

// Another fiber goes on in place of this one.
inline void rest() {
    Fiber* const mine = current;
    if (ready.empty()) fail("deadlock: threads wait for others that have ended or wait elsewhere");
    if (shuffled) {
        shuffled = shuffled * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(ready[(shuffled >> 33) % ready.size()], ready.back());
    }
    current = ready.back();
    ready.pop_back();
    if (current != mine) emulated_switch(&mine->stack, current->stack);
}

inline void meet(Meeting& at, const char* what) {
    if (!at.arrived) at.what = what;
    if (at.what != what) fail("threads that should meet are at different barriers");
    if (++at.arrived < at.size) {
        current->next = at.waiting;
        at.waiting = current;
        return rest();
    }
    at.arrived = 0;
    ++at.turn;
    for (Fiber* fiber = at.waiting; fiber; fiber = fiber->next) ready.push_back(fiber);
    at.waiting = nullptr;
    if (shuffled) ready.push_back(current), rest();
}

// Others go first, who have what this fiber waits for.
inline void yield() {
    ready.insert(ready.begin(), current);
    rest();
}

// A barrier of some of the block's threads, at which one may leave without waiting.
inline void meet_named(u32 id, u32 size, bool wait) {
    Meeting& at = current->block->named[id];
    if (++at.arrived < size) {
        if (!wait) return;
        current->next = at.waiting;
        at.waiting = current;
        return rest();
    }
    at.arrived = 0;
    for (Fiber* fiber = at.waiting; fiber; fiber = fiber->next) ready.push_back(fiber);
    at.waiting = nullptr;
}

// What all lanes of the warp give, 8 bytes each.
template <typename T>
inline const u64* gather(u32 lanes, const T& mine, const char* what) {
    static_assert(sizeof(T) <= 8);
    if (lanes != 0xFFFFFFFF) fail("a collective of less than a warp");
    Warp& warp = *current->warp;
    u64* const slots = warp.slots[warp.meeting.turn & 1];
    memcpy(&slots[current->thread.x & 31], &mine, sizeof(T));
    meet(warp.meeting, what);
    return slots;
}

template <typename T>
inline T at(const u64* slots, u32 lane) {
    T value;
    memcpy(&value, &slots[lane], sizeof(T));
    return value;
}

template <typename T, typename Combine>
inline T reduce(u32 lanes, T mine, const char* what, Combine combine) {
    const u64* const slots = gather(lanes, mine, what);
    T all = at<T>(slots, 0);
    for (u32 lane = 1; lane < 32; ++lane) all = combine(all, at<T>(slots, lane));
    return all;
}

inline u32 count_block(bool mine, const char* what) {
    Block& block = *current->block;
    u32& sum = block.sums[block.meeting.turn & 1];
    if (!block.meeting.arrived) sum = 0;
    sum += mine;
    meet(block.meeting, what);
    return sum;
}

// ---- shared memory: an address is an offset in the block's, with the rank of the block in its upper byte

inline u32 shared_address(const void* pointer) {
    const i64 offset = static_cast<const char*>(pointer) - current->block->shared;
    if (offset < 0 || offset >= shape.bytes()) fail("an address that is not in shared memory");
    return static_cast<u32>(offset) | current->block->rank << 24;
}

inline u32 of_rank(u32 address, u32 rank) {
    if (rank >= shape.cluster) fail("a rank beyond the cluster");
    return (address & 0xFFFFFF) | rank << 24;
}

inline void* shared_pointer(u32 address, u32 bytes) {
    if ((address & (bytes - 1)) != 0) fail("a misaligned address");
    return current->block->cluster[address >> 24].shared + (address & 0xFFFFFF);
}

// Of the device that the thread runs on.
inline u32 device() { return current->block->rank / grid.y; }

inline void* static_memory() { return current->block->shared + GUARD; }
inline void* dynamic_memory() { return current->block->shared + shape.dynamic_at(); }

// ---- a launch

[[noreturn]] inline void run_fiber() {
    body(argument);
    ++finished;
    if (ready.empty() && finished == shape.cluster * shape.threads) fail(nullptr);
    rest();
    abort();
}

// One cluster, the `row`-th of the grid; says what went wrong, or nullptr. `seed` shuffles the threads, unless it is 0.
inline const char* run_cluster(void (*kernel)(const void*), const void* with, Shape of, u32 row, u64 seed, int poison) {
    static char* stacks = nullptr;
    static size_t there = 0;
    const u32 count = of.cluster * of.threads;
    if (there < count) {
        if (stacks) munmap(stacks, there * STACK);
        stacks = static_cast<char*>(mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stacks == MAP_FAILED) return stacks = nullptr, there = 0, "no memory for stacks";
        there = count;
    }
    grid = {1, of.cluster / of.ranks};
    shape = of, body = kernel, argument = with, shuffled = seed, finished = 0, failure = nullptr;
    whole = Meeting{count};
    std::vector<Block> blocks(of.cluster);
    std::vector<Warp> warps(count / 32);
    std::vector<Fiber> fibers(count);
    std::vector<char> memory(of.bytes() * of.cluster + 128, 0x5A);
    char* const first = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 127);
    ready.clear();
    for (u32 b = 0; b < of.cluster; ++b) {
        char* const shared = first + b * of.bytes();
        const Index place = of.columns ? Index{row, b % grid.y} : Index{row * of.cluster + b};
        blocks[b] = {Meeting{of.threads}, {0, 0}, {}, place, b, blocks.data(), shared};
        memset(shared + GUARD, poison, of.static_bytes);
        memset(shared + of.dynamic_at(), poison, of.dynamic_bytes);
    }
    for (u32 i = count; i--;) {
        warps[i / 32].meeting.size = 32;
        // As emulated_switch leaves a stack: six registers and where to go on; at a function's start it is 8 bytes off from 16.
        void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stacks + (i + 1) * STACK) & ~uintptr_t{15}) - 8;
        memset(top, 0, 64);
        top[6] = reinterpret_cast<void*>(&run_fiber);
        fibers[i] = {top, nullptr, {i % of.threads}, &blocks[i / of.threads], &warps[i / 32]};
        *reinterpret_cast<u64*>(stacks + i * STACK) = 0x5A5A5A5A5A5A5A5A;
        ready.push_back(&fibers[i]);
    }
    static char signal_stack[1 << 16];
    const stack_t aside = {signal_stack, 0, sizeof(signal_stack)};
    stack_t other_stack;
    struct sigaction caught = {}, others[3];
    constexpr int SIGNALS[3] = {SIGSEGV, SIGBUS, SIGFPE};
    caught.sa_handler = on_signal;
    caught.sa_flags = SA_ONSTACK | SA_NODEFER;
    sigaltstack(&aside, &other_stack);
    for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &caught, &others[i]);
    current = ready.back();
    ready.pop_back();
    emulated_switch(&host, current->stack);
    for (int i = 0; i < 3; ++i) sigaction(SIGNALS[i], &others[i], nullptr);
    sigaltstack(&other_stack, nullptr);
    for (u32 i = 0; i < count && !failure; ++i)
        if (*reinterpret_cast<u64*>(stacks + i * STACK) != 0x5A5A5A5A5A5A5A5A) failure = "a stack was too small";
    for (const Block& block : blocks) {
        auto whole_guard = [&](u32 from, u32 to) {
            for (u32 i = from; i < to; ++i)
                if (block.shared[i] != 0x5A && !failure) failure = "a write beyond an array in shared memory";
        };
        whole_guard(0, GUARD);
        whole_guard(GUARD + of.static_bytes, of.dynamic_at());
        whole_guard(of.dynamic_at() + of.dynamic_bytes, of.bytes());
    }
    return failure;
}

}  // namespace emulated

#define threadIdx (emulated::current->thread)
#define blockIdx (emulated::current->block->block)
#define gridDim (emulated::grid)

#include "intrinsics.h"
