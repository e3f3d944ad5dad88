"""Tasks that go on whatever happens in them, and end when they are told to."""

import asyncio

from prometheus_client import CollectorRegistry

from kvtier.daemon.background import Background
from kvtier.daemon.closing import ClosingStack
from kvtier.daemon.stop import Stop
from kvtier.observe.daemon_metrics import BACKGROUND_FAULTS, DAEMON_METRICS
from kvtier.observe.metrics import Metrics


def background() -> Background:
    return Background(Metrics(DAEMON_METRICS, CollectorRegistry()))


def test_a_step_that_fails_is_counted_and_the_next_one_comes() -> None:
    metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
    num_steps, enough = 0, asyncio.Event()

    async def step() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            enough.set()
        raise RuntimeError("a bug")

    async def scenario() -> None:
        tasks = Background(metrics)
        tasks.every(0, "gauges", step)
        async with asyncio.timeout(30):
            await enough.wait()
        await tasks.stop()

    asyncio.run(scenario())
    assert num_steps >= 5
    counted = metrics.registry.get_sample_value(BACKGROUND_FAULTS.name, {"task": "gauges"})
    assert counted == num_steps


def test_steps_that_keep_the_cancellation_to_themselves_end_all_the_same() -> None:
    num_kept = 0

    async def keep() -> None:
        nonlocal num_kept
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            num_kept += 1

    async def scenario() -> None:
        tasks = background()
        for name in ("gauges", "health", "probe"):
            tasks.every(0, name, keep)
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await tasks.stop()

    asyncio.run(scenario())
    assert num_kept == 3


def test_a_cancellation_that_comes_with_the_answer_is_not_lost() -> None:
    """What a call waits for may come in the very turn of the loop in which it is cancelled."""

    async def scenario() -> None:
        answers = [asyncio.get_running_loop().create_future() for _ in range(3)]

        def asks(answer: "asyncio.Future[None]") -> Background:
            async def step() -> None:
                async with asyncio.timeout(60):
                    await answer

            tasks = background()
            tasks.every(3600, "probe", step)
            return tasks

        all_tasks = [asks(answer) for answer in answers]
        await asyncio.sleep(0)
        async with asyncio.timeout(30):
            for answer, tasks in zip(answers, all_tasks, strict=True):
                answer.set_result(None)
                await tasks.stop()

    asyncio.run(scenario())


def test_a_part_that_will_not_be_cancelled_holds_up_no_other() -> None:
    ended: list[str] = []
    release = asyncio.Event()

    async def hang() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                ended.append("told")

    async def scenario() -> None:
        async with asyncio.timeout(30):
            async with ClosingStack(Stop(60, end=lambda _code: None)) as closing:
                closing.add("the first one", lambda: ended.append("first"))
                closing.add("what hangs", hang, most_s=0.01)
                closing.add("the last one", lambda: ended.append("last"))
        assert ended == ["last", "told", "first"]
        release.set()
        await asyncio.sleep(0)

    asyncio.run(scenario())
