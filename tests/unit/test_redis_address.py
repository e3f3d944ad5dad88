"""The URL of the remote tier: what is understood, what is refused, and what is never repeated."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import StartError
from kvtier.tiers.redis.address import Form, RedisAddress, ServerAddress
from kvtier.tiers.redis.tier import RedisOptions, RedisTier


@pytest.mark.parametrize(
    ("url", "form", "places", "shown"),
    [
        ("redis://h", Form.SINGLE, (ServerAddress("h", 6379),), "h:6379"),
        ("redis://h/", Form.SINGLE, (ServerAddress("h", 6379),), "h:6379"),
        (
            "rediss://:pw@10.0.0.1:7000",
            Form.SINGLE,
            (ServerAddress("10.0.0.1", 7000),),
            "10.0.0.1:7000",
        ),
        ("redis://u:pw@[::1]:7000/3", Form.SINGLE, (ServerAddress("::1", 7000),), "[::1]:7000"),
        ("unix:///run/r.sock", Form.SINGLE, (ServerAddress("/run/r.sock"),), "/run/r.sock"),
        (
            "unix://u:pw@/run/r.sock?db=3",
            Form.SINGLE,
            (ServerAddress("/run/r.sock"),),
            "/run/r.sock",
        ),
        (
            "redis+sentinel://u:pw@a,b:1/kv/3",
            Form.SENTINEL,
            (ServerAddress("a", 26379), ServerAddress("b", 1)),
            "a:26379,b:1/kv",
        ),
        (
            "rediss+cluster://u:pw@a,[::2]:7",
            Form.CLUSTER,
            (ServerAddress("a", 6379), ServerAddress("::2", 7)),
            "a:6379,[::2]:7",
        ),
        ("redis+cluster://a/0", Form.CLUSTER, (ServerAddress("a", 6379),), "a:6379"),
    ],
)
def test_forms(url: str, form: Form, places: tuple[ServerAddress, ...], shown: str) -> None:
    address = RedisAddress.parse(url)
    assert (address.form, address.places, str(address)) == (form, places, shown)
    assert address.has_tls == url.startswith("rediss")
    assert address.database == (3 if "3" in url.rpartition(":")[2] and "pw" in url else 0)
    assert address.service == ("kv" if form is Form.SENTINEL else "")
    assert (address.password == "pw") == ("pw@" in url)
    assert "pw" not in repr(address)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "not a URL of a Redis server"),
        ("localhost:6379", "not a URL"),
        ("http://u:secret@h", "not a URL"),
        ("redis+unix://u:secret@h", "not a URL"),
        ("redis://u:secret@", "no host and port"),
        ("redis://u:secret@h:x", "no host and port"),
        ("redis://u:secret@h:70000", "no host and port"),
        ("redis://u:secret@a,b", "more than one server"),
        ("redis://u:secret@h/kv", "no database number"),
        ("redis://u:secret@h/1/2", "no database number"),
        ("redis://u:secret@h/-1", "no database number"),
        ("redis://u:secret@h/²", "no database number"),
        ("redis://u:secret@h/0?socket_timeout=0", "no database number"),
        ("redis://u:secret@h?db=2", "no host and port"),
        ("redis://u:secret@h/#1", "no database number"),
        ("redis://secret@h", "a user without a password"),
        ("redis://secret:@h", "a user without a password"),
        ("unix://u:secret@", "no path of a socket"),
        ("unix://run/r.sock", "no path of a socket"),
        ("unix:///run/r.sock?db=x", "no database number"),
        ("redis+sentinel://u:secret@a,b", "no service"),
        ("redis+sentinel://u:secret@a,b/kv/x", "no database number"),
        ("redis+cluster://u:secret@a,b/2", "database 0 only"),
        ("redis+cluster://u:secret@a,,b", "no host and port"),
    ],
)
def test_refused_in_one_line_that_names_the_key_and_no_secret(url: str, problem: str) -> None:
    with pytest.raises(StartError) as raised:
        RedisTier(url)
    assert raised.value.field == "remote.url"
    assert problem in raised.value.problem
    assert raised.value.remedy
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.slow
@given(st.text(min_size=1).filter(lambda text: "%" not in text))
def test_any_password_may_stand_there_as_it_is(password: str) -> None:
    address = RedisAddress.parse(f"redis://user:{password}@host:1/2")
    assert (address.username, address.password) == ("user", password)
    assert address.places == (ServerAddress("host", 1),)


@given(st.text(min_size=1), st.text(min_size=1))
def test_any_login_may_stand_there_encoded(username: str, password: str) -> None:
    try:
        login = f"{quote(username, safe='')}:{quote(password, safe='')}"
    except UnicodeEncodeError:  # half of a surrogate pair is in no file and no environment
        return
    address = RedisAddress.parse(f"rediss+cluster://{login}@host:1")
    assert (address.username, address.password) == (username, password)


def test_a_prefix_that_would_choose_the_slot_is_refused() -> None:
    with pytest.raises(StartError) as raised:
        RedisOptions(key_prefix="kv{1}:")
    assert raised.value.field == "remote.key_prefix"
