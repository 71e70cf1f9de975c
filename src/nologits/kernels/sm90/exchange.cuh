// How the ranks of a sharded head reach one another: buffers that each rank's GPU can write to over NVLink.
#pragma once
#include "params.cuh"

constexpr int MOST_RANKS = 32;

// Without `buffers` a collective of the host carries messages: `sent` are this rank's [B, MESSAGE + room], `got` [ranks, B, MESSAGE + room].
struct Links {
    u64* const* buffers;  // of all ranks, as this one addresses them
    u64* sent;
    const u64* got;
    // In a buffer, in words. Whatever is written there more than once has two places, for even and odd calls: a rank that writes to the
    // first again has heard from all others in between, so they have read it.
    //     0                 calls so far; blocks that are done; barriers so far
    //     FLAGS             [ranks]                           at which barrier each rank is
    //     `heads_at`        [2, ranks, rows, 2 MESSAGE]       messages
    //     `lists_at`        [2, ranks, list_rows, room]       and candidates
    //     `made_at`         [made_rows, vocab]                logits of open rows, vocab rounded up to tiles
    i64 heads_at, lists_at, made_at;
    int rank, rows, list_rows;
};

constexpr int CALLS = 0, DONE = 1, BARRIERS = 2, FLAGS = 16;

// What a rank tells of a row, in words of 64 bits.
enum Message { WINNER, MASSES, RAW_MASSES, PEAK, THRESHOLD, BELOW, DOUBT, MESSAGE };

// All ranks are here, and see what all have written before; by one thread of each.
__device__ __forceinline__ void rank_barrier(const Links& links, int ranks) {
    u64* const mine = links.buffers[links.rank];
    const u64 turn = mine[BARRIERS] + 1;
    mine[BARRIERS] = turn;
    __threadfence_system();
    for (int r = 0; r < ranks; ++r) store_system(&links.buffers[r][FLAGS + links.rank], turn);
    for (int r = 0; r < ranks; ++r) wait_system(&mine[FLAGS + r], [=](u64 word) { return word >= turn; });
    __threadfence_system();
}
