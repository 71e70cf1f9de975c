"""A head whose rows lie on several processes: each draws from its own, one exchange makes the draw from all.

Every id has the noise that it has anywhere (``docs/noise.md``), so the best score of all shards is, token for token, the draw
of one process (pathwise merge). The group merge needs less of a shard: a token, and its log-mass, by which it wins or loses
under fresh noise (:mod:`nologits.groups`); that is exact in distribution. Under filters the shards exchange their best few
hundred tokens and their masses, among which the kept set is settled as in :mod:`nologits.candidates`; rows that are not certain
have their logits gathered. All ranks do the same arithmetic on the same numbers, so all return the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import candidates, filtered, likelihood, tops
from .groups import group_noise
from .head import HeadSpec
from .params import RowParams, SamplingParams
from .selection import NO_WORD, needs_mass, value_of
from .sources import HiddenSource, LogitsSource
from .streaming import RunningDraw, RunningMass, draw_kept, vocabulary_chunks
from .types import Candidates, MergeRule, Samples, TopTokens


class Shard(NamedTuple):
    """What a process holds of a head.

    Attributes:
        head: its rows, without padding.
        group: the processes that hold the others.
        start: id of its first row.
        vocab_size: V of the whole head.
        merge: how the shards' draws become one.
    """

    head: HeadSpec
    group: Any
    start: int
    vocab_size: int
    merge: MergeRule = "pathwise"


def sample(
    shard: Shard,
    hidden: Tensor,
    rows: RowParams,
    num_samples: int,
    processed: bool,
    raw: bool,
    impl: str = "torch",
    num_top: int = 0,
) -> Samples:
    """Draws ``[B, S]`` tokens, the same on every rank; arguments and results as :func:`nologits.reference.sample`.

    ``rows`` is the request for the whole vocabulary. Unseeded rows take rank 0's entropy. ``impl`` is ``"hopper"`` or
    ``"torch"``, which also computes what the kernels do not. The ``num_top`` likeliest tokens come with the draw where they
    come from the same pass, else not at all.

    Raises:
        ValueError: filters under the group merge.
    """
    if rows.filtered and shard.merge == "group":
        raise ValueError('merge must be "pathwise" for a head drawn from with top_k, top_p or min_p, got "group"')
    if rows.entropy is not None:
        entropy = rows.entropy.clone()
        _run(shard.group, lambda: dist.broadcast(entropy, group=shard.group, group_src=0))
        rows = rows._replace(entropy=entropy)
    source = HiddenSource(hidden, shard.head)
    if impl == "hopper" and (drawn := _linked(shard, source, rows, num_samples, processed, raw, num_top)) is not None:
        return drawn
    rows = rows.with_keys(len(hidden), hidden.device)
    draw = _filtered if rows.filtered else _unfiltered
    return draw(shard, source, rows, num_samples, processed, raw)


def _linked(
    shard: Shard, source: HiddenSource, rows: RowParams, num_samples: int, processed: bool, raw: bool, num_top: int
) -> Samples | None:
    """The draw by the Hopper kernels, where they make it."""
    from . import linked  # loads CUDA's compiler
    from .kernels.categorical_sm90 import Extent
    from .transport import transport_for

    if shard.merge != "pathwise" or linked.obstacle(source.hidden, rows, num_samples, raw):
        return None
    transport = transport_for(shard.group, source.device, shard.vocab_size)
    if transport is None:
        return None
    extent = Extent(shard.start, source.vocab, shard.vocab_size, dist.get_world_size(shard.group))
    # Raw lists have tokens that a mask hides, which are no candidates; and lists of rows that are left open are not made
    num_top = num_top if transport.peer_buffers() and not (raw and rows.allowed is not None) else 0
    keyed = rows if transport.peer_buffers() else rows.with_keys(source.batch, source.device)

    whole = _whole_rows(shard, source)

    def settle(start: int, stop: int) -> Samples:
        return filtered.sample(whole(start, stop), keyed.block(start, stop), 1, processed, raw, draw_kept)

    return linked.sample(source, extent, transport, keyed, processed, raw, num_top, settle)


def check_agreement(shard: Shard, hidden: Tensor, request: tuple[object, ...]) -> None:
    """One small exchange that finds ranks which differ, instead of a hang or a wrong token.

    Raises:
        ValueError: on every rank, naming what differs and where; or that the shards do not make up the vocabulary.
    """
    mine = {"rank": dist.get_rank(shard.group), "rows": len(hidden), "D": hidden.shape[1], "dtype": str(hidden.dtype)}
    mine |= {
        "vocab_size": shard.vocab_size,
        "merge": shard.merge,
        "request": request,
        "ids": (shard.start, shard.start + shard.head.vocab_size),
    }
    told: list[Any] = [None] * dist.get_world_size(shard.group)
    _run(shard.group, lambda: dist.all_gather_object(told, mine, group=shard.group))
    for name in ("rows", "D", "dtype", "vocab_size", "merge", "request"):
        for other in told[1:]:
            if other[name] != told[0][name]:
                got = f"{told[0][name]} on rank 0 and {other[name]} on rank {other['rank']}"
                raise ValueError(f"every rank must draw with the same {name}, got {got}")
    reached = 0
    for start, stop in sorted(entry["ids"] for entry in told):
        if start != reached:
            raise ValueError(
                f"the shards must make up the ids 0 to {shard.vocab_size - 1}, got a shard from {start} on after {reached} ids"
            )
        reached = stop
    if reached != shard.vocab_size:
        raise ValueError(f"the shards must make up the ids 0 to {shard.vocab_size - 1}, got ids up to {reached - 1}")


def _unfiltered(shard: Shard, source: HiddenSource, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    batch, device, grouped = source.batch, source.device, shard.merge == "group"
    mine = RunningDraw(batch, device, rows, num_samples, processed or grouped, raw)
    for start, stop in vocabulary_chunks(source):
        mine.update(source.chunk(start, stop), shard.start + start)
    sent = {"tokens": mine.tokens, "mass": _packed(mine.mass)}
    sent |= {} if grouped else {"best": mine.best}
    sent |= {"picked": mine.picked} if processed else {}
    sent |= {"picked_raw": mine.picked_raw, "raw_mass": _packed(mine.raw_mass)} if raw else {}
    told = _gather_together(shard.group, sent)

    if grouped:
        log_mass = torch.stack([_with(mine.mass, part).log_total() for part in told["mass"]])
        params = SamplingParams(rows.temperature, seed=rows.seed, position=rows.position)
        noise = group_noise(params, batch, device, 0, num_samples * len(log_mass)).view(batch, num_samples, -1)
        score = log_mass[:, :, None] + noise.permute(2, 0, 1)
    else:
        score = told["best"]
    tokens = told["tokens"].long()
    winner = torch.where(score == score.amax(0), tokens, shard.vocab_size).argmin(0, keepdim=True)  # of equals the smaller id

    def of_winner(name: str) -> Tensor:
        return told[name].gather(0, winner)[0].float()

    mass = _total(mine.mass, told["mass"])
    return Samples(
        tokens.gather(0, winner)[0],
        mass.logprob(of_winner("picked")) if processed else None,
        _total(mine.raw_mass, told["raw_mass"]).logprob(of_winner("picked_raw")) if raw else None,
        mass.log_total() if processed else None,
    ).invalidate(mass.invalid(rows))


def _filtered(shard: Shard, source: HiddenSource, rows: RowParams, num_samples: int, processed: bool, raw: bool) -> Samples:
    best = _collect(shard, source, rows, candidates.width_for(rows), processed or needs_mass(rows), raw)
    return candidates.settle_draws(best, rows, shard.vocab_size, num_samples, processed, _whole_rows(shard, source), draw_kept)


def top_tokens(shard: Shard, hidden: Tensor, rows: RowParams, count: int) -> TopTokens:
    """The most likely tokens of each row, the same on every rank; as :func:`nologits.tops.top_tokens`."""
    source = HiddenSource(hidden, shard.head)
    if not rows.filtered:
        best = _collect(shard, source, rows, count, True, False)
        return tops.finish(best.words, best.mass.logprob(value_of(best.words)), best.mass.invalid(rows), rows, count)
    best = _collect(shard, source, rows, tops.width_for(rows, count), needs_mass(rows), False)
    return tops.settle(best, rows, shard.vocab_size, count, _whole_rows(shard, source))


def score(shard: Shard, hidden: Tensor, rows: RowParams, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """How likely given tokens are, the same on every rank; as :func:`nologits.likelihood.score`.

    Two exchanges: the rank that has a token tells its logit, then all tell how many of theirs are at least as large.
    """
    source = HiddenSource(hidden, shard.head)
    mine = (tokens >= shard.start) & (tokens < shard.start + source.vocab)
    at_mine = likelihood.logits_at(source, rows, torch.where(mine, tokens, shard.start), shard.start)
    # Only the rank that has the token adds to the sum.
    picked = torch.stack(_gather(shard.group, at_mine.masked_fill(~mine[:, None], 0.0))).sum(0)
    mass, others = likelihood.count_others(source, rows, tokens, picked, shard.start)
    told = _gather_together(shard.group, {"mass": _packed(mass), "others": others[:, None]})
    count = 1 + told["others"].sum(0).squeeze(1).long()
    return _total(mass, told["mass"]).logprob(picked).squeeze(1), count


def select(shard: Shard, hidden: Tensor, rows: RowParams, width: int) -> Candidates:
    """The kept set of each row, the same on every rank; as :func:`nologits.filtered.select`."""
    source = HiddenSource(hidden, shard.head)
    best = _collect(shard, source, rows, candidates.width_for(rows), needs_mass(rows), False)
    return candidates.settle_sets(best, rows, shard.vocab_size, width, _whole_rows(shard, source))


def _collect(shard: Shard, source: HiddenSource, rows: RowParams, width: int, masses: bool, raw: bool) -> candidates.Best:
    """The best tokens and the masses of all shards."""
    width = min(shard.vocab_size, width)
    best = candidates.collect(source, rows, min(source.vocab, width), masses, raw, shard.start)
    missing = (0, width - best.words.shape[1])
    words = torch.cat(_gather(shard.group, torch.nn.functional.pad(best.words, missing, value=NO_WORD)), dim=1)
    raw_mass = best.head[1] if best.head else RunningMass(source.batch, source.device, 1.0, False)
    head = torch.cat(_gather(shard.group, torch.nn.functional.pad(best.head[0], missing)), dim=1) if best.head else None
    told = _gather_together(shard.group, {"mass": _packed(best.mass), "raw_mass": _packed(raw_mass)})
    mass, raw_mass = _total(best.mass, told["mass"]), _total(raw_mass, told["raw_mass"])
    words, place = words.topk(width, dim=-1)
    return candidates.Best(words, mass, None if head is None else (head.gather(1, place), raw_mass))


def _whole_rows(shard: Shard, source: HiddenSource) -> Callable[[int, int], LogitsSource]:
    """Gathers the logits of rows from one on to before another, where they are asked for; every rank has to ask."""
    return lambda start, stop: LogitsSource(_gather_logits(shard, source.rows(start, stop)))


def _gather_logits(shard: Shard, source: HiddenSource) -> Tensor:
    """The head's own logits of all ids, fp32 ``[B, V]``."""
    sizes = torch.tensor([[shard.start, source.vocab]], device=source.device)
    places = [tuple(place[0].tolist()) for place in _gather(shard.group, sizes)]
    widest = max(width for _, width in places)
    mine = torch.nn.functional.pad(source.chunk(0, source.vocab), (0, widest - source.vocab))
    parts = [part[:, :width] for part, (_, width) in zip(_gather(shard.group, mine), places, strict=True)]
    order = sorted(range(len(places)), key=lambda index: places[index])
    return torch.cat([parts[index] for index in order], dim=1)


def _packed(mass: RunningMass) -> Tensor:
    """fp64 ``[B, 2]``."""
    return torch.stack((mass.peak.double(), mass.total), dim=1)


def _with(like: RunningMass, packed: Tensor) -> RunningMass:
    """What another rank packed, of the same request."""
    mass = copy.copy(like)
    mass.peak, mass.total = packed[:, 0].float(), packed[:, 1]
    return mass


def _total(like: RunningMass, packed: Tensor) -> RunningMass:
    """The mass of all ranks, ``[ranks, B, 2]``, added in their order."""
    total = _with(like, packed[0])
    for part in packed[1:]:
        total.join(_with(like, part))
    return total


def _gather_together(group: Any, sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every rank has, ``[ranks, B, width]`` for each ``[B, width]``, in one exchange.

    In fp64, which holds fp32 numbers and ids exactly.
    """
    everyone = torch.stack(_gather(group, torch.cat([part.double() for part in sent.values()], dim=1)))
    return dict(zip(sent, everyone.split([part.shape[1] for part in sent.values()], dim=2), strict=True))


def _gather(group: Any, mine: Tensor) -> list[Tensor]:
    """What every rank has, in the order of ranks."""
    mine = mine.contiguous()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    _run(group, lambda: dist.all_gather(everyone, mine, group=group))
    return everyone


def _run(group: Any, collective: Any) -> None:
    try:
        collective()
    except (RuntimeError, dist.DistError) as error:
        name = getattr(group, "group_name", "default") if group is not None else "default"
        raise RuntimeError(f"the exchange of a sharded draw over the process group {name!r} failed: {error}") from error
