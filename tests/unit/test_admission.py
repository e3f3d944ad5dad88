from kvtier.core.admission import Admit, AdmitEverything, Offer, Throttle
from kvtier.core.residency import TierName


def judge(num_blocks: int, queued_bytes: int):
    return AdmitEverything().judge(
        Offer(TierName.SSD, num_blocks, 0, 100, queued_bytes, queued_bytes_max=1000)
    )


def test_all_is_admitted_where_there_is_room():
    assert judge(10, 0) == Admit(10)


def test_as_many_as_there_is_room_for():
    assert judge(10, 750) == Admit(2)


def test_a_full_queue_throttles():
    assert judge(1, 950) == Throttle("queue_full")
    assert judge(1, 1000) == Throttle("queue_full")
