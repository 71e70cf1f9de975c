// What a row asks for: temperature and filters.
#pragma once
#include "share.cuh"

struct Request {
    float temperature;
    i64 top_k;
    double top_p, min_p;
};

template <typename Wide, typename Narrow>
__device__ __forceinline__ Wide of_row(const void* values, bool wide, Wide value, i64 at) {
    if (!values) return value;
    return wide ? static_cast<const Wide*>(values)[at] : static_cast<Wide>(static_cast<const Narrow*>(values)[at]);
}

// Into shared memory; a thread for each number, for they come from memory.
template <typename Params>
__device__ __forceinline__ void read_request(Request& request, const Params& p, int row) {
    if (threadIdx.x == 0) request.temperature = p.temperature ? p.temperature[row * p.stride_temperature] : p.temperature_value;
    if (threadIdx.x == 32) request.top_k = of_row<i64, int>(p.top_k, p.top_k_wide, p.top_k_value, row * p.stride_top_k);
    if (threadIdx.x == 64) request.top_p = of_row<double, float>(p.top_p, p.top_p_wide, p.top_p_value, row * p.stride_top_p);
    if (threadIdx.x == 96) request.min_p = of_row<double, float>(p.min_p, p.min_p_wide, p.min_p_value, row * p.stride_min_p);
}

__device__ __forceinline__ bool possible(const Request& request) {
    auto share = [](double x) { return x >= 0.0 && x <= 1.0; };
    return possible(request.temperature) && request.top_k >= -1 && share(request.top_p) && share(request.min_p);
}

// The smallest key whose share of the peak's probability is at least min_p; by one warp.
__device__ __noinline__ int lowest_likely(const Scale& scale, double min_p, float temperature) {
    auto likely = [&](int key) {
        const float x = value_of(key);
        if (x == scale.peak) return true;
        return exp((static_cast<double>(x) - static_cast<double>(scale.peak)) / static_cast<double>(temperature)) >= min_p;
    };
    const int lane = threadIdx.x & 31, peak = key_of(scale.peak);
    const int guess = key_of(static_cast<float>(scale.peak + temperature * log(min_p)));
    int low = max(guess, key_of(-infinity()) + 17) - 17, high = peak;  // low is not likely, high is
    u32 yes = __ballot_sync(ALL, likely(min(low + lane, peak)));
    if (!(yes & 1) && yes) return min(low + __ffs(yes) - 1, peak);
    low = key_of(-infinity());
    while (high - static_cast<i64>(low) > 1) {
        const i64 stride = (high - static_cast<i64>(low) + 31) / 32;
        const i64 key = low + stride * (lane + 1);
        yes = __ballot_sync(ALL, key >= high || likely(static_cast<int>(key)));
        const int step = __ffs(yes) - 1;
        high = static_cast<int>(min(static_cast<i64>(high), low + stride * (step + 1)));
        low = static_cast<int>(low + stride * step);
    }
    return high;
}

// The same by one thread.
template <typename Params>
__device__ __forceinline__ Request request_of(const Params& p, int row) {
    return {p.temperature ? p.temperature[row * p.stride_temperature] : p.temperature_value,
            of_row<i64, int>(p.top_k, p.top_k_wide, p.top_k_value, row * p.stride_top_k),
            of_row<double, float>(p.top_p, p.top_p_wide, p.top_p_value, row * p.stride_top_p),
            of_row<double, float>(p.min_p, p.min_p_wide, p.min_p_value, row * p.stride_min_p)};
}

// Which filters may drop a token of a row. A greedy row's first token is kept by all of them.
struct Filters {
    bool top_k, top_p, min_p;
    __device__ __forceinline__ Filters(const Request& request, int V)
        : top_k(request.temperature > 0.0f && request.top_k > 0 && request.top_k < V),
          top_p(request.temperature > 0.0f && request.top_p < 1.0),
          min_p(request.temperature > 0.0f && request.min_p > 0.0) {}
    __device__ __forceinline__ bool any() const { return top_k || top_p || min_p; }
    __device__ __forceinline__ bool mass_of_all() const { return top_p && !top_k && !min_p; }  // top_p is a share of all the row's mass
};
