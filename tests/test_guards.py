"""The guards: what each refuses, what it remembers, and that it can always be resumed and never be poisoned."""
import json
import math
import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shohin.guards import (
    GUARDS,
    RULES,
    SETS,
    Breaker,
    Decision,
    LevelShiftGuard,
    make_guards,
    replay,
    skip_line,
    spec_of,
    vote,
)
from shohin.shards import UserError

OURS = ["none", "seed", "seed-loss", "seed-capped", "default"]
number = st.one_of(st.floats(1e-3, 50), st.sampled_from([1.0, 1.1, 2.5, 3.0, 9.0, math.nan, math.inf, -math.inf, 0.0]))
steps = st.lists(st.tuples(number, number), max_size=120)
# many steps from few draws: blocks of one level with a little noise, as a contiguous order makes them
blocks = st.lists(st.tuples(st.floats(0.5, 20), st.floats(0.01, 2), st.integers(1, 60)), min_size=1, max_size=6)


def healthy(n, seed=0, level=1.0, gnorm=0.08, noise=0.05):
    rng = random.Random(seed)
    return [(level * math.exp(rng.gauss(0, noise)), gnorm * math.exp(rng.gauss(0, noise))) for _ in range(n)]


def run(spec, trace):
    guards = make_guards(spec)
    out = []
    for loss, gnorm in trace:
        out.append(vote(guards, loss, gnorm))
        if out[-1].stop: break
    return out


def refused(decisions):
    return [i for i, d in enumerate(decisions) if not d.apply]


# --- the seed's guards ---------------------------------------------------------------------------------------------

def test_seed_guard_freezes_for_ever_when_every_later_loss_is_above_twice_the_ema():
    published = [*healthy(378), (.96, .06), (1.14, 1.01), (1.15, .06), (2.59, .30)]
    after = [(3.1, .3), (2.9, .3), (3.2, .3)] * 200
    decisions = run("seed", published + after)
    boundary = 381
    assert not any(d.apply for d in decisions[boundary:])
    assert len({d.level for d in decisions[boundary:]}) == 1, "the EMA moved while skipping"
    assert decisions[-1].stop == "300 updates skipped in a row" and len(decisions) == boundary + 300
    assert [d.reason for d in decisions[379:382]] == ["gnorm", "ok", "loss"], "6381 is invisible to every guard"


def test_seed_guard_is_let_go_by_a_single_batch_below_twice_the_ema():
    # the freeze needs *every* later batch above the threshold: one at 1.98x, and the EMA follows the new level
    decisions = run("seed-loss", [(1.4, .1)] * 50 + [(3.0, .1)] * 7 + [(2.77, .1)] + [(2.7, .1)] * 60)
    assert refused(decisions[:57]) == list(range(50, 57))
    assert all(d.apply for d in decisions[57:])


def test_capped_guard_applies_every_sixth_bad_update():
    decisions = run("seed-capped", [(1.0, .1)] * 50 + [(30.0, .1)] * 12)
    assert [i for i, d in enumerate(decisions[50:]) if d.apply] == [5, 11]
    assert decisions[55].reason == "cap" and decisions[55].skips == 0


def test_gnorm_is_named_before_nothing_and_after_loss():
    trace = [(1.0, .1)] * 20
    assert run("seed", [*trace, (3.0, 5.0)])[-1].reason == "loss"
    assert run("seed", [*trace, (1.0, 5.0)])[-1].reason == "gnorm"
    assert run("seed", [*trace, (3.0, math.nan)])[-1].reason == "nonfinite"


# --- the default ---------------------------------------------------------------------------------------------------

def test_a_threefold_shift_is_released_on_the_sixteenth_skip():
    decisions = run("default", healthy(200) + healthy(300, seed=1, level=3.0))
    assert refused(decisions) == list(range(200, 215))
    release = decisions[215]
    assert release.reason == "release" and 2.7 < release.to < 3.3
    assert skip_line(215, release, 3.0, .08) == f"[release] step 215 m {release.level:.2f}->{release.to:.2f}"
    assert not decisions[-1].stop


def test_a_lone_outlier_costs_one_skip_each_time():
    trace = healthy(1000, noise=.1)
    for i in range(50, 1000, 97): trace[i] = (2.5 + i / 500, .08)
    assert refused(run("default", trace)) == list(range(50, 1000, 97))


@pytest.mark.parametrize("new", [2.3, 3.0, 5.0])
@pytest.mark.parametrize("pattern", ["AB", "AAB", "ABB", "AABB", "AAAB", "AAAABBBB", "AAAAAAAB"])
def test_domains_alternating_by_batch_are_released_and_no_run_is_stopped(pattern, new):
    # the new domain never gets easier: the hardest case. Where the blend's mean falls below half of it, the level is
    # refused and released again, each time after the 200 steps for which it stays accepted.
    after = [healthy(1, seed=i, level=new if pattern[i % len(pattern)] == "B" else 1.0)[0] for i in range(2000)]
    decisions = run("default", healthy(200) + after)
    dropped = len(refused(decisions)) / (2000 * pattern.count("B") / len(pattern))
    assert len(decisions) == 2200 and not decisions[-1].stop
    assert dropped < (.02 if pattern.count("B") * 2 >= len(pattern) else .45), dropped


def test_values_that_do_not_agree_are_no_level():
    rng = random.Random(0)
    wild = [(2.2 * math.exp(abs(rng.gauss(0, 1.5))), .1) for _ in range(400)]
    decisions = run("default", healthy(100) + wild)
    assert not any(d.reason == "release" for d in decisions)
    assert decisions[-1].stop == "300 of the last 400 updates skipped" and len(decisions) == 400


def test_a_nan_streak_trips_the_breaker_and_touches_nothing():
    guards = make_guards("default")
    for loss, gnorm in healthy(100): vote(guards, loss, gnorm)
    before = guards[1].state_dict()
    for i in range(300): d = vote(guards, math.nan, .1 if i % 2 else math.inf)
    assert d.stop == "300 of the last 400 updates skipped" and d.reason == "nonfinite" and d.skips == 300
    after = guards[1].state_dict()
    assert {k: v for k, v in after.items() if k != "step"} == {k: v for k, v in before.items() if k != "step"}


def test_a_second_shift_within_200_steps_trips_and_a_later_one_does_not():
    for gap, stops in ((100, True), (300, False)):
        trace = healthy(100) + healthy(gap, seed=1, level=3.0) + healthy(100, seed=2, level=9.0)
        stop = run("default", trace)[-1].stop
        assert stop.startswith("second level shift of the loss within 200 steps") == stops, (gap, stop)


def test_300_skips_in_the_last_400_trip_the_default_breaker_even_when_not_in_a_row():
    trace = healthy(100)
    for i in range(500): trace.append((1.0, .08) if i % 5 == 0 else (1.0, math.nan))  # 80 % refused
    decisions = run("default", trace)
    assert decisions[-1].stop == "300 of the last 400 updates skipped"
    assert not any(d.stop for d in run("seed", trace)), "the seed's breaker needs 300 in a row"


def test_another_guards_refusal_postpones_a_release():
    g = LevelShiftGuard()
    for _ in range(50): g.update(1.0, .1, True)
    for _ in range(15): g.update(3.0, .1, False)
    assert g.decide(3.0, .1).reason == "release"
    g.update(3.0, .1, False)   # the gradient guard said no
    assert g.ema == pytest.approx(1.0) and g.decide(3.0, .1).reason == "release" and len(g.refused) == 16


def drive(guard, *parts):
    """Feed (loss, repeats) pairs to one guard alone; the decisions."""
    return [vote([guard], loss, .1) for loss, n in parts for _ in range(n)]


def test_nothing_is_refused_before_sixteen_applied_updates():
    assert not refused(drive(LevelShiftGuard(), (1.0, 1), (99.0, 15)))
    assert refused(drive(LevelShiftGuard(), (1.0, 16), (2.1, 1))) == [16]


@pytest.mark.parametrize("gap, released", [(112, True), (113, False)])
def test_refusals_count_for_128_decisions(gap, released):
    # 1 refusal, `gap` healthy losses, 15 more: with gap 112 the first is the oldest of 128 decisions
    last = drive(LevelShiftGuard(), (1.0, 50), (3.0, 1), (1.0, gap), (3.0, 15))[-1]
    assert last.reason == ("release" if released else "loss")


@pytest.mark.parametrize("gap, trips", [(184, True), (185, False)])
def test_a_second_release_trips_up_to_200_steps_later(gap, trips):
    guard = LevelShiftGuard()
    decisions = drive(guard, (1.0, 50), (3.0, 16), (3.0, gap), (9.0, 16))
    assert [d.reason for d in decisions].count("release") == 2
    assert bool(guard.tripped) == trips == bool(decisions[-1].stop)


def test_a_released_level_is_accepted_for_200_steps():
    guard = LevelShiftGuard()
    drive(guard, (1.0, 50), (5.0, 16), (1.0, 198))
    assert guard.ema < 1.2 and guard.decide(6.2, .1).apply and not guard.decide(6.3, .1).apply
    drive(guard, (1.0, 1))
    assert guard.decide(6.2, .1).apply, "step 200 after the release"
    drive(guard, (1.0, 1))
    assert not guard.decide(6.2, .1).apply


def test_the_breakers_window_is_exact():
    for gap, trips in ((1, True), (2, False)):
        b = Breaker(limit=3, window=4)
        for applied in [False] + [True] * gap + [False, False]: b.update(1.0, .1, applied)
        assert bool(b.tripped) == trips


def test_the_gradient_norm_can_shift_level_too():
    trace = [(1.0, .05)] * 100 + [(1.0, .9)] * 100
    decisions = run("default", trace)
    assert refused(decisions) == list(range(100, 115)) and decisions[115].reason == "release:gnorm"
    assert all(not d.apply for d in run("seed", trace)[100:]), "the seed's gradient guard freezes as its loss guard does"


# --- properties of every set ---------------------------------------------------------------------------------------

def finite(state):
    if isinstance(state, float): return math.isfinite(state)
    if isinstance(state, list): return all(map(finite, state))
    if isinstance(state, dict): return all(map(finite, state.values()))
    return True


@pytest.mark.parametrize("spec", OURS)
@given(trace=steps, flags=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_no_non_finite_value_ever_enters_a_state_even_if_the_trainer_claims_it_was_applied(spec, trace, flags):
    guards = make_guards(spec)
    for loss, gnorm in trace:
        applied = flags.random() < .7
        for g in guards: g.update(loss, gnorm, applied)
        assert all(finite(g.state_dict()) for g in guards)


@pytest.mark.parametrize("spec", OURS)
@given(trace=steps)
@settings(max_examples=40, deadline=None)
def test_deciding_is_pure_and_a_refused_update_is_never_non_finite_applied(spec, trace):
    guards = make_guards(spec)
    for loss, gnorm in trace:
        before = json.dumps([g.state_dict() for g in guards])
        assert [g.decide(loss, gnorm) for g in guards] == [g.decide(loss, gnorm) for g in guards]
        assert json.dumps([g.state_dict() for g in guards]) == before
        d = vote(guards, loss, gnorm)
        assert not d.apply or (math.isfinite(loss) and math.isfinite(gnorm))
        assert d.apply == (d.skips == 0)


@pytest.mark.parametrize("spec", OURS)
@given(blocks=blocks, cut=st.integers(0, 200), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_run_resumed_from_a_saved_state_decides_as_one_never_stopped(spec, blocks, cut, seed):
    trace = [x for level, gnorm, n in blocks for x in healthy(n, seed, level, gnorm)]
    guards = make_guards(spec)
    for loss, gnorm in trace[:cut]: vote(guards, loss, gnorm)
    saved = json.loads(json.dumps([g.state_dict() for g in guards]))   # through JSON, as a checkpoint has it
    resumed = make_guards(spec_of(guards))
    for g, state in zip(resumed, saved, strict=True): g.load_state_dict(state)
    for loss, gnorm in trace[cut:]:
        assert vote(guards, loss, gnorm) == vote(resumed, loss, gnorm)
    assert [g.state_dict() for g in guards] == [g.state_dict() for g in resumed]


@given(blocks=blocks, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_releases_are_bounded_and_each_is_paid_for_with_fifteen_refusals(blocks, seed):
    decisions = run("default", [x for level, gnorm, n in blocks for x in healthy(n, seed, level, gnorm)])
    for signal in ("release", "release:gnorm"):
        at = [i for i, d in enumerate(decisions) if d.reason == signal]
        assert all(b - a > 200 for a, b in pairwise(at[:-1])), "a second one within 200 ends the run"
        for i in at: assert sum(not d.apply for d in decisions[max(0, i - 127):i]) >= 15
    last = decisions[-1]
    assert not any(d.stop for d in decisions[:-1]) and (last.stop or len(decisions) == sum(n for *_, n in blocks))


def test_saved_state_is_not_shared_with_the_guard():
    g = LevelShiftGuard()
    for _ in range(40): g.update(1.0, .1, True)
    saved = g.state_dict()
    g.update(5.0, .1, False)
    assert saved["refused"] == [] and g.refused == [5.0]


# --- building sets -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("spec", [*SETS, *GUARDS])
def test_specifications_are_canonical_json(spec):
    full = spec_of(make_guards(spec, safe=False))
    assert spec_of(make_guards(json.loads(json.dumps(full)), safe=False)) == full
    assert all("guard" in s for s in full)


def test_every_set_for_training_begins_non_finite_and_has_a_breaker():
    for spec in [*SETS, *GUARDS, [], [{"guard": "loss-ratio", "ratio": 3.0}]]:
        names = [g.name for g in make_guards(spec)]
        assert names[0] == "nonfinite" and names.count("breaker") == 1


@pytest.mark.parametrize("spec, message", [
    ("sed", "unknown guard 'sed'"), ([{"ratio": 2}], "unknown guard None"),
    ([{"guard": "loss-ratio", "ration": 2}], "no setting 'ration'"), ({"guard": "loss-ratio", "ema": 2}, "no setting 'ema'"),
])
def test_a_wrong_specification_is_one_clear_line(spec, message):
    with pytest.raises(UserError, match=message) as error: make_guards(spec)
    assert "\n" not in str(error.value)


def test_a_state_of_other_guards_is_refused():
    with pytest.raises(UserError, match="resume with the guards that the run was started with"):
        make_guards("seed")[1].load_state_dict(LevelShiftGuard().state_dict())


def test_lines_are_the_seeds():
    assert skip_line(6380, Decision(False, "gnorm", .48, .06, skips=1), 1.14, .97) == \
        "[skip:gnorm] step 6380 loss 1.14 gnorm 0.97 (ema gnorm 0.06) skips=1"
    assert skip_line(6382, Decision(False, "loss", 2.2, 1.1, skips=1), 2.59, .3) == \
        "[skip:loss] step 6382 loss 2.59 gnorm 0.30 (ema loss 1.10) skips=1"
    assert skip_line(5, Decision(False, "nonfinite", skips=2), math.nan, .3) == \
        "[skip:nonfinite] step 5 loss nan gnorm 0.30 skips=2"
    assert skip_line(5, Decision(True, "ok", 2.2, 1.1), 1.0, .3) == ""


# --- the rules of other trainers, against their own arithmetic ------------------------------------------------------

def trace_with_spikes(n=700, seed=0):
    rng = np.random.default_rng(seed)
    losses, gnorms = 2 * np.exp(rng.normal(0, .03, n)), .1 * np.exp(rng.normal(0, .15, n))
    losses[[150, 151, 300, 420]] += [3, 2, .4, 9]
    gnorms[[200, 300, 500]] *= [30, 4, 2]
    losses[600:] *= 1.8
    return losses, gnorms


@pytest.mark.parametrize("name, ddof, floor, first", [("olmo", 1, 0, 63), ("levanter", 0, 1e-6, 64)])
def test_the_windowed_rules_are_their_formula_over_the_whole_trace(name, ddof, floor, first):
    losses, gnorms = trace_with_spikes()
    r = replay(name, losses, gnorms)
    for i in range(len(losses)):
        if i < first:
            assert r.applied[i] and np.isnan(r.threshold[i])
            continue
        past = slice(max(0, i - 128), i)
        limits = [x[past].mean() + 6 * max(x[past].std(ddof=ddof), floor) for x in (losses, gnorms)]
        assert r.applied[i] == (losses[i] <= limits[0] and gnorms[i] <= limits[1])
        assert r.threshold[i] == pytest.approx(limits[1 if r.reason[i] == "gnorm" else 0], rel=1e-9)
    assert {150, 200, 420} <= set(r.refused.tolist()) and r.frozen is None


@pytest.mark.parametrize("name", ["olmo", "levanter"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_non_finite_value_blocks_a_windowed_rule_for_128_steps(name, bad):
    losses, gnorms = trace_with_spikes()
    losses[300:] = 2.0 + .01 * np.sin(np.arange(400))
    gnorms[300:] = .1 + .001 * np.sin(np.arange(400))
    losses[350] = bad
    refused = replay(name, losses, gnorms).refused
    assert [i for i in refused if i > 340] == list(range(350 + (bad < 0), 350 + 129))


def test_levanter_has_a_floor_where_olmo_refuses_the_last_digit():
    losses = [2.0] * 100 + [2.0 + 1e-9]
    assert not replay("olmo", losses, [.125] * 101).applied[-1]
    assert replay("levanter", losses, [.125] * 101).applied[-1]


def test_llmc_is_its_formula_and_is_silent_until_the_window_is_full():
    losses, gnorms = trace_with_spikes()
    r = replay({"guard": "llmc", "sl": 3.0, "sg": 6.0}, losses, gnorms)
    for i in range(len(losses)):
        if i < 128:
            assert r.applied[i]
            continue
        zs = [(x[i] - x[i - 127:i + 1].mean()) / x[i - 127:i + 1].std() for x in (losses, gnorms)]
        assert r.applied[i] == (zs[0] <= 3 and zs[1] <= 6), (i, zs)
    assert 200 in r.refused and 420 in r.refused
    assert len(replay({"guard": "llmc", "sl": 0, "sg": 0}, losses, gnorms).refused) == 0


def test_one_nan_silences_llmc_for_ever():
    losses, gnorms = trace_with_spikes()
    assert 420 in replay("llmc", losses, gnorms).refused
    losses[140] = math.nan
    assert 420 not in replay("llmc", losses, gnorms).refused


def test_megatron_compares_with_the_first_hundred_finite_losses():
    losses = np.r_[np.nan, np.linspace(11, 2, 99), 4.0, np.full(50, 2.0), 109.9, 110.0, np.nan, np.inf, -110.0]
    assert replay("megatron", losses).refused.tolist() == [len(losses) - 4, len(losses) - 1]


def test_kill_loss_spike_needs_five_in_a_row_and_never_skips():
    losses = np.r_[np.full(100, 1.0), np.full(4, 2.5), 1.0, np.full(5, 2.5), np.full(100, 1.0)]
    r = replay("kill-loss-spike", losses)
    assert r.applied.all() and len(r.applied) == 110 and r.stop.startswith("5 losses in a row")
    slow = replay("kill-loss-spike", np.r_[np.full(100, 1.0), np.linspace(1, 1.9, 300)])
    assert slow.stop == "half of the last 100 losses above 1.00" and len(slow.applied) == 200


def test_zclip_is_its_recurrence():
    _, gnorms = trace_with_spikes()
    r = replay("zclip", np.ones(700), gnorms)
    mean, var = gnorms[:25].mean(), gnorms[:25].var()
    for i in range(25, 700):
        std = var ** .5
        z = (gnorms[i] - mean) / (std + 1e-6)
        clip = mean + 2.5 ** 2 * std / z if z > 2.5 else None
        assert (r.reason[i] == "clip") == (clip is not None) and r.applied[i]
        value = clip or gnorms[i]
        mean = .97 * mean + .03 * value
        var = .97 * var + .03 * (value - mean) ** 2
    assert {200, 300} <= set(r.fired.tolist()) and len(r.refused) == 0


@pytest.mark.parametrize("name", ["olmo", "levanter", "llmc", "megatron", "kill-loss-spike", "zclip"])
def test_other_rules_resume_from_json_at_every_point(name):
    losses, gnorms = (x[:300].tolist() for x in trace_with_spikes())
    whole, guards = replay(name, losses, gnorms), make_guards(name, safe=False)
    for i, (loss, gnorm) in enumerate(zip(losses, gnorms, strict=True)):
        fresh = make_guards(name, safe=False)
        fresh[0].load_state_dict(json.loads(json.dumps(guards[0].state_dict())))
        guards = fresh
        assert vote(guards, loss, gnorm).reason == whole.reason[i]


@given(trace=steps)
@settings(max_examples=60, deadline=None)
def test_any_rule_takes_any_trace(trace):
    losses, gnorms = [x for x, _ in trace], [x for _, x in trace]
    for spec in RULES.values():
        r = replay(spec, losses, gnorms)
        assert len(r.applied) == len(r.reason) == len(r.threshold) <= len(trace)
        start, length = r.longest
        assert length == 0 or not r.applied[start:start + length].any()


# --- replay --------------------------------------------------------------------------------------------------------

def test_replay_is_the_live_run():
    losses, gnorms = trace_with_spikes()
    guards = make_guards("default")
    live = [vote(guards, x, g) for x, g in zip(losses.tolist(), gnorms.tolist(), strict=True)]
    r = replay("default", losses, gnorms)
    assert [d.apply for d in live] == r.applied.tolist() and [d.reason for d in live] == r.reason


def test_frozen_means_to_the_end():
    up = replay("loss-ratio", [1.0] * 50 + [3.0] * 300)
    assert up.frozen == 50 and up.longest == (50, 300) and up.stop == ""
    assert replay("loss-ratio", [1.0] * 50 + [3.0] * 300 + [1.0]).frozen is None
    assert replay("loss-ratio", [1.0] * 50 + [3.0] * 199).frozen is None
    assert replay("seed-loss", [1.0] * 50 + [3.0] * 900).frozen == 50
    assert replay("default", [1.0] * 50 + [3.0] * 900).frozen is None
    assert replay("none", []).frozen is None and replay("none", []).longest == (0, 0)


def test_without_gradient_norms_only_the_loss_speaks():
    losses, _ = trace_with_spikes()
    for spec in RULES.values():
        assert "gnorm" not in replay(spec, losses).reason and "clip" not in replay(spec, losses).reason
    assert 420 in replay("olmo", losses).refused


@pytest.mark.slow
def test_a_million_steps_take_seconds():
    rng = np.random.default_rng(0)
    losses, gnorms = 2 * np.exp(rng.normal(0, .03, 10**6)), .1 * np.exp(rng.normal(0, .2, 10**6))
    for spec in ("seed", "default", "olmo"):
        start = time.process_time()
        replay(spec, losses, gnorms)
        assert time.process_time() - start < 30, spec
