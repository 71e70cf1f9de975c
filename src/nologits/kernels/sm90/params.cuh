// What the kernels of a head's draw are given.
#pragma once
#include "order.cuh"

// What the next sweep over an open row is for (finish.cu).
enum Mode { SETTLED, BY_COUNT, BY_MASS, BY_ID, WEIGHING, COLLECTING, DRAWING };

// A row whose kept set its candidates do not settle.
struct alignas(16) OpenRow {
    int mode;
    int lowest;            // first key that min-p keeps
    Boundary floor;        // what is known to be kept, at most
    int first, last;       // keys between which the boundary lies
    int id_first, id_last; // BY_ID: ids between which the last of its copies lies
    int weighed;           // the boundary is top-p's: measures are masses
    int topping;           // 1: the boundary is that of the likeliest tokens, which are asked for as well; 2: they are listed
    float low, inverse;    // where bins begin, and how many there are to one logit; 0: they are equal in keys
    u64 above;             // measure of what is kept and comes before
    double target;         // the measure that reaches the boundary; 0 while it is not known
};

constexpr int CAPACITY = 4096;  // candidates of a row that there is room for; or words of an open row
constexpr int BINS = 2048;      // of those, a histogram
constexpr int KEPT = BINS;      // kept mass
constexpr int COUNT = BINS + 1; // how many are listed
constexpr int DRAWN = BINS + 2; // winners, two words each
constexpr int LISTED = 1024, LIST = CAPACITY - LISTED;
constexpr int MOST_TOP = 128;

constexpr float LOWEST_LOGIT = -3.4028234e38f;  // as a threshold: every logit above -inf is a candidate

// The mass of what lies below a threshold, in units of the threshold's, may be off by so much, relative: 2^-22 by the exponential,
// 3 2^-24 by what of it is added in fp32; and by so much for each octave that its parts lie below the threshold.
constexpr double REST_ERROR = 4.2e-7, REST_ERROR_BY_OCTAVE = 4.4e-8;

// What exponents of 2 lack: (x - threshold) inverse = x inverse + this.
__device__ __forceinline__ float rest_offset(float threshold, float inverse) { return -(threshold * inverse); }

struct Params {
    // the head and the request
    const void* bias;
    const void* logit_bias;
    const i64* bias_ids;
    const float* bias_values;
    const u32* allowed;
    const float* temperature;
    const i64* seed;
    const i64* position;
    const i64* entropy;
    // between the kernels: winners (logit, token) [B, slots]; masses (reference, sum) [B, mass_tiles]
    float2* winners;
    float2* masses;
    float2* raw_masses;
    // results
    i64* tokens;
    float* logprobs;
    float* raw_logprobs;
    float* log_masses;
    // strides between rows, in elements; everything else lies densely
    i64 stride_logit_bias, stride_bias_ids, stride_bias_values, stride_allowed, stride_temperature, stride_seed, stride_position;
    // sizes; of a shard V is where its ids end, of `vocab` in all (below)
    int B, V, D, tiles, mass_tiles, slots, box_rows, num_biased;
    // scalars
    float temperature_value, scale, softcap;

    // filters: what is asked (i64 and fp64 if `wide`, else i32 and fp32)
    const void* top_k;
    const void* top_p;
    const void* min_p;
    // what goes between the kernels. Orders of logits have their sign turned, so that 0 is none
    //     entries        [B, CAPACITY]     candidates; `gathered` [B] counts them, also those there was no room for
    //     peaks          [B]               order of the row's largest logit
    //     pilot          [B, 2 slots]      and of the pilot's
    //     thresholds     [B]               and of what follows from them
    //     open           [B]               rows that are left to finish.cu
    //     progress       [2]               how many there are; what has arrived at the grid's barrier
    //     open_rows      [1]               how many there have been in all calls
    //     rests          [B, slots]        mass below the slot's threshold
    //     slot_thresholds                  which is the above, or lower where a block would not wait
    //     tops           [B, num_top]      the likeliest tokens
    //     made           [made_rows, V]    logits of a few open rows, V rounded up to tiles
    // and more results: what they are as sampled, and raw
    Entry* entries;
    u32* gathered;
    u32* peaks;
    u32* pilot;
    u32* thresholds;
    OpenRow* open;
    u32* progress;
    u64* open_rows;
    double* rests;
    float* slot_thresholds;
    Entry* tops;
    float* made;
    i64* top_ids;
    float* top_logprobs;
    i64* raw_top_ids;
    float* raw_top_logprobs;
    i64 stride_top_k, stride_top_p, stride_min_p, top_k_value;
    double top_p_value, min_p_value;
    int top_k_wide, top_p_wide, min_p_wide, num_top, made_rows;

    // A shard has the ids from `first` + `skip` to below `first` + V of a vocabulary of `vocab`; `first` is a multiple of 128, the ids
    // of a noise block. All else, where ids lie in memory as well, counts from `first`. Of its candidates `room` are told to the other ranks.
    int first, skip, vocab, room, ranks;
    double* doubts;  // [B, ranks]: how far their rests may be off

    // A screened draw (screen.cu): of each id the scale of its bytes, how far they lie from its weights, and how long those are; of each
    // row what its bytes count for, and what the two lengths count for in the bound.
    const float* id_scales;
    const float* id_errors;
    const float* id_lengths;
    const float4* row_scales;
    // And what goes between its kernels, all 0 at first:
    u64* exact_winners;  // [B]: the best exact score, as an entry
    u32* floors;         // [B]: the best score that is certain, as an order with its sign turned
    u32* told;           // [ceil(B / 16)]: blocks that have told those of their first tile
    u32* rescored;       // [B]: blocks that have done their part of it
    u32* left;           // rows that are left to the kernels that read all weights: their number, then [B] whether it is one
};

#ifndef SHARD
#define SHARD 0  // the head is one of several ranks' shards
#endif

#ifndef LEFT
#define LEFT 0  // only rows that a screen has left are drawn
#endif

__device__ __forceinline__ int first_id(const Params& p) { return SHARD ? p.first : 0; }
__device__ __forceinline__ int vocab_of(const Params& p) { return SHARD ? p.vocab : p.V; }
__device__ __forceinline__ int room_of(const Params& p) { return SHARD ? p.room : CAPACITY; }

// The noise stream of a row; unseeded rows (seed -1) take the call's entropy and their slot.
__device__ __forceinline__ Stream row_stream(const Params& p, int row) {
    i64 seed = p.seed ? p.seed[row * p.stride_seed] : -1;
    i64 position = p.seed && p.position ? p.position[row * p.stride_position] : 0;
    if (seed == -1 && p.entropy) {
        seed = *p.entropy;
        position = row;
    }
    return make_stream(seed, position);
}

__device__ __forceinline__ float row_temperature(const Params& p, int row) {
    return p.temperature ? p.temperature[row * p.stride_temperature] : p.temperature_value;
}
