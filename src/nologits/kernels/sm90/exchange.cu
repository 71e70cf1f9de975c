// The shards of a head tell each other what they have of a row, and each rank then knows what one GPU would: a slot a rank in place of a
// slot a block. Rows without filters are done then; choose.cu goes on with the others.
//
// Messages go straight into the other ranks' memory, every 32 bits beside the number of the call, in one store: who reads the number
// has the rest, no barrier comes in between, and a message takes as long as a store does. Candidates of rows with filters are written
// before, and are there when the message is.
//
// Grid: at most a block a multiprocessor, so that all run at once. Each tells of all its rows before it waits for any. Launched while the
// tile kernel still runs; waits for it on the device.
#ifndef FILTER
#define FILTER 0
#define GREEDY 0
#define MASS 0
#define RAW 0
#endif

#include "winners.cuh"
#include "exchange.cuh"

constexpr int THREADS = 128;
constexpr int SPOKEN = FILTER ? MESSAGE : PEAK;  // words of a message that are used

__device__ __forceinline__ u64 pair_of(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }
__device__ __forceinline__ u64 pair_of(float2 pair) { return pair_of(__float_as_uint(pair.x), __float_as_uint(pair.y)); }
__device__ __forceinline__ float2 floats_of(u64 word) { return make_float2(__uint_as_float(static_cast<u32>(word)), __uint_as_float(static_cast<u32>(word >> 32))); }

// A row's mass on this rank, as one reference and one sum; by one warp.
__device__ __forceinline__ float2 mass_of_rank(const float2* masses, int tiles, float inverse) {
    const int lane = threadIdx.x & 31;
    float reference = LOWEST_LOGIT, total = 0.0f;
#pragma unroll 1
    for (int w = 0; w < MASS_THREADS / 32; ++w) reference = fmaxf(reference, reference_of_thread(masses, tiles, 32 * w + lane));
#pragma unroll 1
    for (int w = 0; w < MASS_THREADS / 32; ++w) total += mass_of_thread(masses, tiles, 32 * w + lane, reference, inverse);
    return make_float2(reference, total);
}

// A warp for each part.
__device__ __forceinline__ void compose(const Params& p, int row, u64 (&message)[MESSAGE]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float temperature = row_temperature(p, row);
    if (warp == 0) {
        Candidate best = {NOTHING_ORDER, NO_TOKEN, 0.0f};
#if FILTER
        const bool drawn = !Filters(request_of(p, row), p.vocab).any();
#else
        constexpr bool drawn = true;
#endif
        const Stream stream = row_stream(p, row);
        for (int slot = lane; drawn && slot < p.slots; slot += 32)
            keep_better(best, winner_of(p.winners[static_cast<i64>(row) * p.slots + slot], stream, row_spread(temperature)));
        best = best_of_lanes(best);
        if (lane == 0) message[WINNER] = pair_of(__float_as_uint(best.logit), best.token);
    }
#if MASS
    if (warp == 1) {
        const float2 mass = mass_of_rank(p.masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, row_inverse(temperature));
        if (lane == 0) message[MASSES] = pair_of(mass);
    }
#endif
#if RAW
    if (warp == 2) {
        const float2 mass = mass_of_rank(p.raw_masses + static_cast<i64>(row) * p.mass_tiles, p.mass_tiles, LOG2E);
        if (lane == 0) message[RAW_MASSES] = pair_of(mass);
    }
#endif
#if FILTER
    if (warp == 3) {
        const Below below = below_slots(p, row, temperature);
        if (lane == 0) {
            // The rests of blocks that do not agree are of different things: as if there were no room
            const bool whole = below.agreed || !p.rests;
            message[PEAK] = pair_of(p.peaks[row], whole ? p.gathered[row] : CAPACITY + 1);
            message[THRESHOLD] = __float_as_uint(below.threshold);
            message[BELOW] = __double_as_longlong(below.rest);
            message[DOUBT] = __double_as_longlong(below.doubt);
        }
    }
#endif
    __syncthreads();
}

__device__ __forceinline__ u64* head_of(const Links& links, u64* buffer, u32 call, int ranks, int sender, int row) {
    return buffer + links.heads_at + (static_cast<i64>((call & 1) * ranks + sender) * links.rows + row) * (2 * MESSAGE);
}
__device__ __forceinline__ u64* list_of(const Params& p, const Links& links, u64* buffer, u32 call, int sender, int row) {
    return buffer + links.lists_at + (static_cast<i64>((call & 1) * p.ranks + sender) * links.list_rows + row) * p.room;
}

// Tells all ranks, this one as well, of a row.
__device__ __forceinline__ void tell_row(const Params& p, const Links& links, u32 call, int row, const u64 (&message)[MESSAGE]) {
    const i64 pitch = MESSAGE + (FILTER ? p.room : 0);
    [[maybe_unused]] const int count = FILTER ? min(static_cast<u32>(message[PEAK] >> 32), static_cast<u32>(p.room)) : 0;
    [[maybe_unused]] const Entry* const entries = p.entries + static_cast<i64>(row) * CAPACITY;
    if (!links.buffers) {
        for (int i = threadIdx.x; i < SPOKEN; i += THREADS) links.sent[row * pitch + i] = message[i];
        for (int i = threadIdx.x; i < count; i += THREADS) links.sent[row * pitch + MESSAGE + i] = __ldcg(&entries[i]);
        return;
    }
#if FILTER
    for (int r = 0; r < p.ranks; ++r) {
        u64* const list = list_of(p, links, links.buffers[r], call, links.rank, row);
        for (int i = threadIdx.x; i < count; i += THREADS) list[i] = __ldcg(&entries[i]);
    }
    __threadfence_system();
    __syncthreads();
#endif
    for (int i = threadIdx.x; i < 2 * SPOKEN * p.ranks; i += THREADS) {
        const int r = i / (2 * SPOKEN), half = i - r * (2 * SPOKEN);
        const u32 part = static_cast<u32>(message[half >> 1] >> (half & 1 ? 32 : 0));
        store_system(&head_of(links, links.buffers[r], call, p.ranks, links.rank, row)[half], pair_of(part, call));
    }
}

// What all ranks have told of a row.
__device__ __forceinline__ void hear_row(const Params& p, const Links& links, u32 call, int row, u64 (&told)[MOST_RANKS][MESSAGE]) {
    if (!links.buffers) {
        const i64 pitch = MESSAGE + (FILTER ? p.room : 0);
        for (int i = threadIdx.x; i < SPOKEN * p.ranks; i += THREADS) {
            const int r = i / SPOKEN, word = i - r * SPOKEN;
            told[r][word] = links.got[(static_cast<i64>(r) * p.B + row) * pitch + word];
        }
    } else {
        u32* const words = reinterpret_cast<u32*>(told);
        u64* const mine = links.buffers[links.rank];
        for (int i = threadIdx.x; i < 2 * SPOKEN * p.ranks; i += THREADS) {
            const int r = i / (2 * SPOKEN), half = i - r * (2 * SPOKEN);
            words[2 * MESSAGE * r + half] = static_cast<u32>(wait_system(&head_of(links, mine, call, p.ranks, r, row)[half], [=](u64 word) { return word >> 32 == call; }));
        }
#if FILTER
        __threadfence_system();
#endif
    }
    __syncthreads();
}

// Writes it where the next kernel looks for a row's slots; `all` are its arguments.
__device__ __forceinline__ void write_slots(const Params& p, const Params& all, const Links& links, u32 call, int row, const u64 (&told)[MOST_RANKS][MESSAGE]) {
    const int r = threadIdx.x;
    const i64 slot = static_cast<i64>(row) * p.ranks + r;
    if (r < p.ranks) {
        all.winners[slot] = floats_of(told[r][WINNER]);
#if MASS
        all.masses[slot] = floats_of(told[r][MASSES]);
#endif
#if RAW
        all.raw_masses[slot] = floats_of(told[r][RAW_MASSES]);
#endif
#if FILTER
        all.slot_thresholds[slot] = __uint_as_float(static_cast<u32>(told[r][THRESHOLD]));
        if (all.rests) {
            all.rests[slot] = __longlong_as_double(told[r][BELOW]);
            all.doubts[slot] = __longlong_as_double(told[r][DOUBT]);
        }
#endif
    }
#if FILTER
    u32 peak = 0, total = 0;
    bool room = true;
    for (int other = 0; other < p.ranks; ++other) {
        const u32 count = static_cast<u32>(told[other][PEAK] >> 32);
        peak = max(peak, static_cast<u32>(told[other][PEAK]));
        room &= count <= static_cast<u32>(p.room);
        if (!room) break;
        const u64* const list = links.buffers ? list_of(p, links, links.buffers[links.rank], call, other, row)
                                              : links.got + (static_cast<i64>(other) * p.B + row) * (MESSAGE + p.room) + MESSAGE;
        for (u32 i = threadIdx.x; i < count; i += THREADS) all.entries[static_cast<i64>(row) * CAPACITY + total + i] = __ldcg(&list[i]);
        total += count;
    }
    for (int other = 0; other < p.ranks; ++other) peak = max(peak, static_cast<u32>(told[other][PEAK]));
    if (r == 0) all.peaks[row] = peak, all.gathered[row] = room ? total : CAPACITY + 1;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) exchange_rows(const __grid_constant__ Params p, const __grid_constant__ Params all, const __grid_constant__ Links links) {
    __shared__ u64 message[MESSAGE];
    __shared__ u64 told[MOST_RANKS][MESSAGE];
    allow_dependents();
    wait_for_primary();
    u64* const mine = links.buffers ? links.buffers[links.rank] : nullptr;
    const u32 call = mine ? static_cast<u32>(load_system(&mine[CALLS])) + 1 : 0;

    for (int row = blockIdx.x; row < p.B && !links.got; row += gridDim.x) {
        compose(p, row, message);
        tell_row(p, links, call, row, message);
        __syncthreads();
    }
    for (int row = blockIdx.x; row < p.B && !links.sent; row += gridDim.x) {
        hear_row(p, links, call, row, told);
        write_slots(p, all, links, call, row, told);
        __syncthreads();
#if !FILTER
        if (threadIdx.x < 32) write_drawn(all, row, row_temperature(p, row), possible(row_temperature(p, row)));
#endif
    }

    // The last block to be done counts the call: all have read its number
    if (mine && threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&mine[DONE], 1ull) == gridDim.x - 1) {
            mine[DONE] = 0;
            mine[CALLS] = call;
        }
    }
}
