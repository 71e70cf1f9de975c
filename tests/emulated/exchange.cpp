// Launches the exchange of a sharded head's ranks on the CPU, one block each, all together.
#include "ptx.h"

#include "exchange.cu"

struct Rank {
    const Params *params, *all;
    const Links* links;
};

extern "C" __attribute__((visibility("default"))) int params_bytes() { return sizeof(Params); }
extern "C" __attribute__((visibility("default"))) int links_bytes() { return sizeof(Links); }

// Says what went wrong, or nullptr.
extern "C" __attribute__((visibility("default"))) const char* launch(const Rank* of, int ranks, unsigned long long seed, int poison) {
    const emulated::Shape shape = {static_cast<u32>(ranks), THREADS, sizeof(u64) * (MESSAGE + MOST_RANKS * MESSAGE), 0, true, static_cast<u32>(ranks)};
    auto kernel = [](const void* with) {
        const Rank& mine = static_cast<const Rank*>(with)[emulated::device()];
        exchange_rows(*mine.params, *mine.all, *mine.links);
    };
    return emulated::run_cluster(kernel, of, shape, 0, seed, poison);
}
