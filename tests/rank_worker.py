"Forks the ranks of one run: python rank_worker.py WORLD PORT TASK [ARGUMENT...]. Ends with the largest exit status of a rank."
import os
import sys
import traceback

import torch

import shohin.train as T
from shohin.model import GPT, GPTConfig
from shohin.muon import make_optimizers
from shohin.ranks import RankOptimizers, find_ranks


def muon():
    "Seven matrices of one shape and three of another, five steps: what one process makes, and what the ranks make."
    ranks = find_ranks()
    ranks.meet()
    cfg = GPTConfig.cpu(n_layer=3, d_model=32, n_head=2, n_kv_head=2, head_dim=16, d_ff=96, seq_len=32)
    one, many = GPT(cfg), GPT(cfg)
    spec = dict(weight_decay=.1, trust_clamp=.05)
    a, b = make_optimizers(one, spec), RankOptimizers(many, ranks, **spec)
    for step in range(5):
        rows = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(step))
        for m, o in ((one, a), (many, b)):
            o.zero_grad()
            m.loss(rows).total.backward()
            o.step()
        assert abs(b.norm().item() - a.update_norm) < 1e-5 * a.update_norm and b.clamped_share == a.clamped_share > 0
        for p, q in zip(one.parameters(), many.parameters(), strict=True): torch.testing.assert_close(q, p, atol=1e-5, rtol=0)
    held = sum("momentum_buffer" in b.muon.state[p] for p, _ in b.muon.owners())
    owned = sum(r == ranks.rank for _, r in b.muon.owners())
    assert held == owned and sum(ranks.all(owned)) == len(list(b.muon.owners())), (held, owned)
    b.gather()
    mine, theirs = b.state_tensors()[0], a.state_tensors()[0]
    assert mine.keys() == theirs.keys()
    for k in mine: torch.testing.assert_close(mine[k], theirs[k], atol=1e-5, rtol=0)
    assert len(set(ranks.all(T.tensors_hash(dict(many.named_parameters()), mine)))) == 1, "the ranks differ from each other"


def nan(config, runs, first, last):
    "Rank 1's weights are broken in steps first..last, as by a bad memory cell, and whole again afterwards."
    trainer = T.DistributedTrainer(T.read_config(config), runs)
    T._LIVE.append(trainer)
    trainer.ranks.meet()
    real = trainer.gradients = T.Gradients(trainer.model, trainer.ranks)
    def broken(rows):
        if trainer.ranks.rank != 1 or not int(first) <= trainer.now <= int(last): return real(rows)
        weight = trainer.model.norm.weight
        with torch.no_grad(): kept, weight[0] = weight[0].clone(), torch.nan
        ce = real(rows)
        with torch.no_grad(): weight[0] = kept
        return ce
    trainer.gradients = broken
    result = trainer.run()
    assert len(set(trainer.ranks.all([trainer.now, trainer.skips, result["stopped"]].__repr__()))) == 1
    assert len(set(trainer.ranks.all(T.tensors_hash(dict(trainer.model.named_parameters()))))) == 1, "the ranks ended with different weights"


TASKS = dict(train=lambda *args: T.main(list(args)), muon=muon, nan=nan)

if __name__ == "__main__":
    world, port, task, *args = sys.argv[1:]
    children = []
    for rank in range(int(world)):
        pid = os.fork()
        if not pid:
            os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            try:
                status = TASKS[task](*args) or 0
                find_ranks().leave()
            except BaseException:
                traceback.print_exc()
                status = 70
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
