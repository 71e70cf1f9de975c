// What the kernels of a head's draw are given.
#pragma once
#include "order.cuh"

// What the next sweep over an open row is for (finish.cu).
enum Mode { SETTLED, BY_COUNT, BY_MASS, BY_ID, WEIGHING, COLLECTING, DRAWING };

// A row whose kept set its candidates do not settle.
struct alignas(16) OpenRow {
    int mode;
    Boundary floor;        // what is known to be kept, at most
    int first, last;       // keys between which the boundary lies
    int id_first, id_last; // BY_ID: ids between which the last of its copies lies
    int weighed;           // the boundary is top-p's: measures are masses
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

constexpr float LOWEST_LOGIT = -3.4028234e38f;  // as a threshold: every logit above -inf is a candidate
// The mass of what lies below a threshold, in units of the threshold's; and the sum of those masses times the octaves by which they are
// less, as a negative number.
struct RowRest {
    double sum;
    float by_octave;
};

// The sum may be off by so much, relative: 2^-22 by the exponential, 7 2^-24 by its additions; and by so much for each octave.
constexpr double REST_ERROR = 6.6e-7, REST_ERROR_BY_OCTAVE = 4.4e-8;

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
    // sizes
    int B, V, D, tiles, mass_tiles, slots, box_rows, num_biased;
    // scalars
    float temperature_value, scale, softcap;

    // filters: what is asked (i64 and fp64 if `wide`, else i32 and fp32)
    const void* top_k;
    const void* top_p;
    const void* min_p;
    // and what goes between the kernels: candidates [B, CAPACITY], how many there are [B]; order of each row's largest logit [B] and
    // of the pilot's [B, 2 slots] and of its threshold [B], with the sign turned so that 0 is none; open rows [B]; their number and what
    // has arrived at the grid's barrier [2]; their number in all calls;
    // the mass below each slot's threshold [B, slots]
    Entry* entries;
    u32* gathered;
    u32* peaks;
    u32* pilot;
    u32* thresholds;
    OpenRow* open;
    u32* progress;
    u64* open_rows;
    double2* rests;
    i64 stride_top_k, stride_top_p, stride_min_p, top_k_value;
    double top_p_value, min_p_value;
    int top_k_wide, top_p_wide, min_p_wide;
};

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
