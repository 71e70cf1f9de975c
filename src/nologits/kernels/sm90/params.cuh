// What the kernels of a head's draw are given.
#pragma once
#include "contract.cuh"

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
