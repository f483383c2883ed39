"Times that the README quotes: pytest tests/bench_order.py -m benchmark, alone on an idle machine."
from types import SimpleNamespace

import pytest

from shohin.audit import audit
from shohin.order import ContiguousOrder, InterleavedOrder, RoundRobinOrder, switch

pytestmark = pytest.mark.benchmark
DOMAINS = ("code_python", "math", "web")
SHARDS = tuple(SimpleNamespace(path=f"{d}/shard_{i:05d}.u16.zst", domain=d, tokens=200_000_000) for d in DOMAINS for i in range(63))
CORPUS = SimpleNamespace(shards=SHARDS, domains=DOMAINS, hash="bench")
WEIGHTS = {"code_python": .5, "math": .3, "web": .2}


def orders(batch):
    ours = InterleavedOrder(CORPUS, batch, 2048, weights=WEIGHTS)
    bug = ContiguousOrder(CORPUS, batch, 2048, restarts=(0, 2000, 4000))
    return {"contiguous": bug, "roundrobin": RoundRobinOrder(CORPUS, batch, 2048), "interleaved": ours, "switched": switch(bug, 6000, ours)}


@pytest.mark.parametrize("kind", ["contiguous", "roundrobin", "interleaved", "switched"])
def test_seek_to_step_1e9(benchmark, kind):
    order = orders(256)[kind]
    benchmark(order.spans, 10**9)
    assert benchmark.stats["median"] < .010


@pytest.mark.parametrize("kind", ["contiguous", "roundrobin", "interleaved", "switched"])
def test_audit_of_100_000_steps(benchmark, kind):
    order = orders(64)[kind]
    result = benchmark.pedantic(audit, (order, 100_000), rounds=3)
    assert result.verdict == ("safe" if kind in ("roundrobin", "interleaved") else "dangerous")
    assert benchmark.stats["min"] < 4


def test_domain_counts_of_100_000_steps(benchmark):
    order = orders(256)["interleaved"]
    benchmark(order.domain_counts, 0, 100_000)
    assert benchmark.stats["median"] < 1
