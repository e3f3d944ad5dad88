"""Many users of a ``vllm serve`` whose daemon dies, hangs and is emptied again and again.

Nobody notices: every answer is that of before, and at the end nothing is held.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from kvtier.testing.child import Child, await_true
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import BLOCK_TOKENS, ON_FIRST, STARTED, prompt, running

pytestmark = STARTED

SEED = 20
NUM_USERS = 8
NUM_BLOWS = 12
NUM_TOKENS = 24


class Users:
    """Each asks one prompt after the other, and hangs up on some of them."""

    def __init__(self, vllm: VllmServer, asked: list[list[int]], wanted: list[list[int]]) -> None:
        self._vllm, self._asked, self._wanted = vllm, asked, wanted
        self._is_over = threading.Event()
        self.num_answers = [0] * NUM_USERS

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Have all of them ask within the context; fails with the first wrong answer."""
        with ThreadPoolExecutor(NUM_USERS) as pool:
            ends: list[Future[None]] = [pool.submit(self._use, each) for each in range(NUM_USERS)]
            try:
                yield
            finally:
                self._is_over.set()
        for end in ends:
            end.result()

    def await_answers(self) -> None:
        """Wait until there are as many more as there are users."""
        until = sum(self.num_answers) + NUM_USERS
        await_true(lambda: self._is_done(until), "they are answered", 120)

    def _is_done(self, until: int) -> bool:
        return sum(self.num_answers) >= until or self._is_over.is_set()

    def _use(self, user: int) -> None:
        choose = random.Random(f"{SEED} {user}")
        try:
            while not self._is_over.is_set():
                which = choose.randrange(len(self._asked))
                if choose.random() < 0.2:
                    with self._vllm.asking(self._asked[which], 200, stream=True) as connection:
                        if choose.random() < 0.5:
                            connection.getresponse().readline()
                else:
                    answer = self._vllm.ask(self._asked[which], NUM_TOKENS)
                    assert answer == self._wanted[which], f"user {user}, prompt {which}"
                    self.num_answers[user] += 1
        finally:
            self._is_over.set()


class Daemons(ExitStack):
    """One after the other; the last one ends with the context."""

    def __init__(self, served: RunningNode) -> None:
        super().__init__()
        self.served = served
        self.start()

    def start(self) -> None:
        """Start the next one."""
        self.last: Child = self.enter_context(self.served.daemon())


@ON_FIRST
def test_a_daemon_that_suffers_below_many_users(vllm: VllmServer, served: RunningNode) -> None:
    print("seed", SEED)
    choose = random.Random(SEED)
    fronts = [prompt(400 + number, number * BLOCK_TOKENS) for number in (1, 2, 4)]
    # More than vLLM has room for by itself.
    asked = [choose.choice(fronts) + prompt(410 + each, 90 * each + 1) for each in range(14)]
    wanted = [vllm.ask(each, NUM_TOKENS) for each in asked]
    loaded, users = vllm.hit_tokens(), Users(vllm, asked, wanted)
    with Daemons(served) as daemons, users.busy():
        for _ in range(NUM_BLOWS):
            strike(choose, vllm, daemons, users)
            users.await_answers()
    assert vllm.hit_tokens() > loaded, "some of it came from a daemon"
    with running(served):
        vllm.forget()
        served.await_idle()


def strike(choose: random.Random, vllm: VllmServer, daemons: Daemons, users: Users) -> None:
    """Do something to the daemon."""
    blow = choose.choice(("kill", "stop", "freeze", "drop", "forget", "forget"))
    if blow == "kill":
        daemons.last.kill()
        daemons.start()
    elif blow == "stop":
        assert daemons.last.stop() == 0
        daemons.start()
    elif blow == "freeze":
        with daemons.last.stopped():
            users.await_answers()
    elif blow == "drop":
        daemons.served.drop_now(choose.choice(("cpu", "ssd", "remote")))
    else:
        vllm.reset(choose.choice(("", "?reset_external=true")))
