from kvtier.engine.request import EngineRequest
from kvtier.testing.engine_service import FakeEngineService, ScriptedAnswer, check_engine_service


def test_the_fake_engine_keeps_the_contract_of_the_real_one():
    def script(request: EngineRequest) -> ScriptedAnswer:
        pause_after = 2 if request.max_tokens == 1000 else None
        return ScriptedAnswer(tuple(range(request.max_tokens)), pause_after=pause_after)

    with FakeEngineService(script) as engine:
        check_engine_service(engine, lambda name, length: EngineRequest(name, (1, 2, 3), length))
        assert engine.aborted == ["aborted"]
