// CUDA's built-in functions and types, those that the kernels use. Only device.h includes this.
#pragma once

struct uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// ---- threads together

inline void __syncthreads() { emulated::meet(emulated::current->block->meeting, "__syncthreads"); }
inline int __syncthreads_count(int mine) { return static_cast<int>(emulated::count_block(mine != 0, "__syncthreads_count")); }
inline int __syncthreads_or(int mine) { return emulated::count_block(mine != 0, "__syncthreads_or") != 0; }

template <typename T>
inline T __shfl_xor_sync(u32 lanes, T mine, int mask) {
    return emulated::at<T>(emulated::gather(lanes, mine, "__shfl_xor_sync"), (threadIdx.x & 31) ^ mask);
}

template <typename T>
inline T __shfl_sync(u32 lanes, T mine, int lane) {
    return emulated::at<T>(emulated::gather(lanes, mine, "__shfl_sync"), lane & 31);
}

template <typename T>
inline T __shfl_up_sync(u32 lanes, T mine, u32 by) {
    const u64* const slots = emulated::gather(lanes, mine, "__shfl_up_sync");
    const u32 lane = threadIdx.x & 31;
    return lane >= by ? emulated::at<T>(slots, lane - by) : mine;
}

inline u32 __reduce_add_sync(u32 lanes, u32 mine) {
    return emulated::reduce(lanes, mine, "__reduce_add_sync", [](u32 a, u32 b) { return a + b; });
}
inline int __reduce_min_sync(u32 lanes, int mine) {
    return emulated::reduce(lanes, mine, "__reduce_min_sync", [](int a, int b) { return a < b ? a : b; });
}
inline int __reduce_max_sync(u32 lanes, int mine) {
    return emulated::reduce(lanes, mine, "__reduce_max_sync", [](int a, int b) { return a > b ? a : b; });
}

inline u32 __reduce_min_sync(u32 lanes, u32 mine) {
    return emulated::reduce(lanes, mine, "__reduce_min_sync", [](u32 a, u32 b) { return a < b ? a : b; });
}
inline u32 __reduce_max_sync(u32 lanes, u32 mine) {
    return emulated::reduce(lanes, mine, "__reduce_max_sync", [](u32 a, u32 b) { return a > b ? a : b; });
}
inline u32 __reduce_or_sync(u32 lanes, u32 mine) {
    return emulated::reduce(lanes, mine, "__reduce_or_sync", [](u32 a, u32 b) { return a | b; });
}

inline u32 __ballot_sync(u32 lanes, bool mine) {
    const u64* const slots = emulated::gather(lanes, mine, "__ballot_sync");
    u32 yes = 0;
    for (u32 lane = 0; lane < 32; ++lane) yes |= static_cast<u32>(emulated::at<bool>(slots, lane)) << lane;
    return yes;
}
inline void __syncwarp() { emulated::gather(0xFFFFFFFF, 0, "__syncwarp"); }
inline int __all_sync(u32 lanes, bool mine) { return __ballot_sync(lanes, mine) == 0xFFFFFFFF; }
inline int __any_sync(u32 lanes, bool mine) { return __ballot_sync(lanes, mine) != 0; }

inline u32 atomicAdd(u32* at, u32 value) { return std::exchange(*at, *at + value); }
inline u32 atomicMax(u32* at, u32 value) { return std::exchange(*at, value > *at ? value : *at); }
inline u32 atomicOr(u32* at, u32 value) { return std::exchange(*at, *at | value); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __trap() {}  // said of an alignment that is not emulated
inline u64 atomicAdd(u64* at, u64 value) { return std::exchange(*at, *at + value); }
inline u64 atomicMax(u64* at, u64 value) { return std::exchange(*at, value > *at ? value : *at); }
inline int atomicMin(int* at, int value) { return std::exchange(*at, value < *at ? value : *at); }
inline int atomicMax(int* at, int value) { return std::exchange(*at, value > *at ? value : *at); }

template <typename T>
inline T __ldcg(const T* source) {
    if (reinterpret_cast<uintptr_t>(source) % sizeof(T)) emulated::fail("a misaligned load");
    return *source;
}

template <typename T>
inline void __stcs(T* target, const T& value) {
    if (reinterpret_cast<uintptr_t>(target) % sizeof(T)) emulated::fail("a misaligned store");
    *target = value;
}

// ---- numbers

// Mixed types go the way of C's arithmetic conversions.
template <typename A, typename B>
inline auto min(A a, B b) -> decltype(a + b) {
    typedef decltype(a + b) T;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
inline auto max(A a, B b) -> decltype(a + b) {
    typedef decltype(a + b) T;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

namespace emulated {
template <typename To, typename From>
inline To cast_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
}  // namespace emulated

inline int __float_as_int(float x) { return emulated::cast_bits<int>(x); }
inline float __int_as_float(int x) { return emulated::cast_bits<float>(x); }
inline u32 __float_as_uint(float x) { return emulated::cast_bits<u32>(x); }
inline float __uint_as_float(u32 x) { return emulated::cast_bits<float>(x); }
inline i64 __double_as_longlong(double x) { return emulated::cast_bits<i64>(x); }
inline double __longlong_as_double(i64 x) { return emulated::cast_bits<double>(x); }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
inline double __hiloint2double(int high, int low) {
    return emulated::cast_bits<double>(static_cast<u64>(static_cast<u32>(high)) << 32 | static_cast<u32>(low));
}

inline int __clz(int x) { return x ? __builtin_clz(static_cast<u32>(x)) : 32; }
inline int __clzll(u64 x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline u32 __byte_perm(u32 x, u32 y, u32 selectors) {
    const u64 bytes = static_cast<u64>(y) << 32 | x;
    u32 made = 0;
    for (int i = 0; i < 4; ++i) made |= static_cast<u32>(bytes >> 8 * (selectors >> 4 * i & 7) & 0xFF) << 8 * i;
    return made;
}
inline int __viaddmin_s32_relu(int a, int b, int c) { return max(min(a + b, c), 0); }

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(u32 x) { return static_cast<float>(x); }
inline float __uint2float_rz(u32 x) {
    const int dropped = max(0, 32 - 24 - __clz(static_cast<int>(x)));
    return static_cast<float>(x >> dropped << dropped);
}
inline u64 __double2ull_rn(double x) { return x > 0.0 ? static_cast<u64>(nearbyint(x)) : 0; }
inline u64 __double2ull_ru(double x) { return x > 0.0 ? static_cast<u64>(ceil(x)) : 0; }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) {
    const volatile float first = a, second = b;  // not to be joined with a product
    return first + second;
}
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }

// ---- what the kernels write in assembly

namespace emulated {

// As far off as the instruction may be, by a hash of its argument: at most 2^-22.
inline float off(float x) {
    const u32 hash = static_cast<u32>(__float_as_int(x)) * 2654435761u;
    return (static_cast<int>(hash) * 0x1p-31f) * 0x1p-22f;
}
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
inline float exp2_approx(float x) { return flushed(static_cast<float>(exp2(static_cast<double>(flushed(x))) * (1.0 + off(x)))); }
inline float log2_approx(float x) {
    const double y = log2(static_cast<double>(flushed(x)));
    return static_cast<float>(x > 0.5f && x < 2.0f ? y + off(x) : y * (1.0 + off(x)));
}

inline float from_half(unsigned short bits) {
    const u32 exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
    const float size = exponent == 0    ? mantissa * 0x1p-24f
                       : exponent == 31 ? __uint_as_float(0x7F800000u | mantissa << 13)
                                        : __uint_as_float((exponent + 112) << 23 | mantissa << 13);
    return bits & 0x8000 ? -size : size;
}
inline unsigned short to_half(float x) {
    const float size = fabsf(x);
    const unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    if (x != x) return 0x7FFF;
    if (size >= 65520.0f) return sign | 0x7C00;
    if (size < 0x1p-14f) return sign | static_cast<unsigned short>(nearbyintf(size * 0x1p24f));
    const u32 bits = static_cast<u32>(__float_as_int(size)) - (112u << 23);
    return sign | static_cast<unsigned short>((bits + 0xFFF + (bits >> 13 & 1)) >> 13);
}
inline unsigned short to_bfloat(float x) {
    const u32 bits = static_cast<u32>(__float_as_int(x));
    return x != x ? 0x7FFF : static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace emulated
