// What a launcher of `kernel`, one cluster a row, has in common with the others.
extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }

// Says what went wrong, or nullptr.
extern "C" __attribute__((visibility("default"))) const char* launch(const Params* params, int rows, int dynamic_bytes, unsigned long long seed, int poison) {
    const emulated::Shape shape = {CLUSTER, THREADS, (sizeof(Exchange) + 63) / 64 * 64 + sizeof(Workspace), static_cast<u32>(dynamic_bytes)};
    auto call = [](const void* with) { kernel(*static_cast<const Params*>(with)); };
    for (int row = 0; row < rows; ++row)
        if (const char* failure = emulated::run_cluster(call, params, shape, row, seed ? seed + row : 0, poison)) return failure;
    return nullptr;
}
