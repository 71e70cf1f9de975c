"""Ranks of a sharded head as threads of one process."""

import threading

import torch


class Ranks:
    """What the threads of all ranks share: they meet at :meth:`together`, where the last one acts for all."""

    def __init__(self, count):
        self.count, self.barrier, self.given = count, threading.Barrier(count), {}
        self.here = threading.local()

    def together(self, mine, act):
        self.given[self.here.rank] = mine
        if self.barrier.wait() == 0:
            self.result = act([self.given[rank] for rank in range(self.count)])
        self.barrier.wait()
        return self.result

    def run(self, of_rank):
        """What ``of_rank(rank)`` returns in each thread; or raises what the first raised that went wrong."""
        results, failures = [None] * self.count, []

        def thread(rank):
            self.here.rank = rank
            try:
                results[rank] = of_rank(rank)
            except BaseException as failure:
                failures.append(failure)
                self.barrier.abort()

        threads = [threading.Thread(target=thread, args=(rank,)) for rank in range(self.count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
            raise failure
        return results


class Transport:
    """A rank's, over memory that all reach (``peers``) or by gathering."""

    def __init__(self, ranks, rank, buffers, addresses):
        self.ranks, self.rank, self.buffers, self.addresses = ranks, rank, buffers, addresses
        self.traffic = None

    def peer_buffers(self):
        return self.addresses.data_ptr() if self.buffers else 0

    def own_buffer(self):
        return self.buffers[self.rank].data_ptr() if self.buffers else 0

    def gather(self, sent):
        return self.ranks.together(sent, torch.stack)
