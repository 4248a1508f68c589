"""No decision, report or push compiles or loads a loop after a controller's start, whatever the
policies, the replicas and the requests."""

from __future__ import annotations

from tests.compiled_loops import run

# A child for each choice of policies, of a process that has imported everything and called nothing.
_AFTER_START = """
import asyncio, multiprocessing, random
from math import nan
from sluice.controller.actor import Controller
from sluice.controller.config import ControllerConfig
from sluice.controller.discovery import compile_loops
from sluice.protocol.messages import FirstTokenWait, RequestEnding
from sluice.scheduling.request.job import Tier
from sluice.protocol.messages import decode_query, encode
from sluice.scheduling import admission, routing
from sluice.scheduling.latency.model import RooflineLatency
from sluice.scheduling.latency.profile import LatencyProfile
from sluice.scheduling.request.job import RouteQuery
from sluice.scheduling.request.objective import SLO
from sluice.scheduling.request.stages import Stage
from tests.compiled_loops import loaded
from tests.controller.fleet import Clock, decode_row, delta, hello, waiting_row

OBJECTIVES = (
    SLO(), SLO(ttft_s=1), SLO(ttft_s=0.3, tpot_s=0.05, priority=7), SLO(tpot_s=1), SLO(e2e_s=30),
    SLO(ttft_s=1e-6), SLO(e2e_s=5, ttft_s=1, tpot_s=0.1),
    SLO.of_stages((Stage(1), Stage(0.5, 1, prompt_tokens=10))),
    SLO.of_stages((Stage(1.0, tpot_s=0.1), Stage(2.0)), e2e_s=60),
)
ROLES = (("mixed",) * 3, ("mixed",) * 40, ("mixed", "prefill", "decode"),
    ("prefill", "decode", "decode"))
MODEL = LatencyProfile.of("roofline", RooflineLatency(1e-4, 0.0, 0.01, 1e-5, 0.0, 0.02))

def asked(draw, key, names):
    moves = draw.random() < 0.1
    query = RouteQuery(
        key,
        draw.choice(OBJECTIVES),
        draw.choice((0, 1, 100, 2_000, 30_000)),
        draw.choice((0.0, 0.2, 3)),
        draw.choice((frozenset(Tier), frozenset({Tier.GUARANTEED}), frozenset({Tier.BEST_EFFORT}))),
        draw.choice((0, 0, 1, 16, 500)),
        session=draw.choice((0, 5)),
        prefix=draw.choice(((), (1, 2))),
        prefill_key=draw.choice((0, key + 1_000_000)),
        avoid=draw.choice(((), names[:1])),
        tenant=draw.choice((0, 1, 2)),
        weight=draw.choice((1, 2.5)),
        moves_from=names[0] if moves else "",
        brings_kv=moves and draw.random() < 0.5,
        elsewhere=draw.random() < 0.1,
    )
    return decode_query(encode(query))

async def play(config, draw):
    clock = Clock()
    controller = Controller(config, clock)
    roles = draw.choice(ROLES)
    names = tuple(f"{at}-{role}" for at, role in enumerate(roles))
    for name, role in zip(names, roles):
        told = hello(name, [waiting_row(draw.getrandbits(40), 50)], role=role,
                     preempts=draw.random() < 0.3, elastic=len(roles) < 4)
        if draw.random() < 0.3:
            told = told._replace(profile=MODEL)
        told.rows.flags.writeable = False  # as in an actor's call
        epoch = (await controller.hello(told)).epoch
    for turn in range(1, 12):
        clock.advance(draw.choice((0.01, 0.3)))
        for name in draw.sample(names, min(3, len(names))):
            rows = {slot: draw.choice((waiting_row, decode_row))(draw.getrandbits(40), 500, 1)
                    for slot in range(draw.randint(0, 30))}
            for row in rows.values():
                row["best_effort"] = draw.random() < 0.3
                row["ttft_s"], row["tpot_s"] = draw.choice((1, 30)), draw.choice((0.02, 1, nan))
                row["expected_tokens"] = draw.choice((0, 50))
                if not row["tpot_s"] > 0:
                    row["tpot_s"] = float("inf")
            change = delta(name, epoch, turn, rows, now_s=clock() - 1_000)
            reply = controller._read_report(encode(change))
            if reply.resync:
                await controller.hello(hello(name, seq=turn, now_s=clock() - 1_000))
        queries = [asked(draw, turn * 1_000 + at, names) for at in range(draw.choice((1, 3, 16)))]
        await controller.route(queries)
        waits = [FirstTokenWait(query.key, names[0], 0.1, 0.2) for query in queries[:3]]
        endings = [RequestEnding(str(query.key), draw.choice(("ok", "cancelled")), (), 20, 0.1, 0.1,
                   1.0, "", "standard", 1) for query in queries]
        await controller.sync(endings, (), waits)
        await controller.faulted(1, [])
        await controller.demand()
        await controller.figures()
        await controller.detail()

def check(config):
    compile_loops(config)
    before = loaded()
    for seed in range(8):
        asyncio.run(play(config, random.Random(seed)))
    after = loaded()
    assert after == before, {key: n for key, n in after.items() if n != before.get(key)}

configs = [ControllerConfig(policy=name) for name in routing.POLICIES]
configs += [ControllerConfig(admission=name) for name in (*admission.POLICIES, "none")]
configs += [
    ControllerConfig(admission="slos_serve", admission_options={"anchor": "last_token"}),
    ControllerConfig(policy="slos_serve", admission="slos_serve"),
]
assert sum(loaded().values()) == 0
failed = []
for config in configs:
    process = multiprocessing.get_context("fork").Process(target=check, args=(config,))
    process.start()
    process.join()
    failed += [(config.policy, config.admission)] if process.exitcode else []
assert not failed, failed
"""


def test_nothing_is_compiled_after_a_controllers_start() -> None:
    run(_AFTER_START)
