"""The endpoint of an episode: malformed requests, keys, memory, and the reward that counts once; raw sockets."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl_core.environments.agents import endpoint as endpoints
from pipelinerl_core.environments.agents.endpoint import Endpoint
from pipelinerl_core.environments.agents.http import HEAD_SECONDS, MAX_BODIES, MAX_BODY
from pipelinerl_core.environments.api import Reply

LIMIT_SECONDS = 60
MESSAGES = [{"role": "user", "content": "a"}]
HUGE = b"1" + b"0" * 400


class Asked:
    """The model: counts its turns."""

    def __init__(self):
        self.num_turns = 0

    async def __call__(self, history, tools=()):
        self.num_turns += 1
        return Reply(text="hi", content="hi")


class Served:
    """An endpoint and its model."""

    def __init__(self, endpoint, ask):
        self.endpoint, self.ask = endpoint, ask
        self.port = int(endpoint.url.split(":")[2].partition("/")[0])

    async def connect(self, data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def sent(self, *parts):
        """Everything that the endpoint answers to raw bytes, after the client has closed its side."""
        reader, writer = await self.connect(b"".join(parts))
        writer.write_eof()
        try:
            return await reader.read()
        finally:
            writer.close()

    async def post(self, path, body, *headers, key=None):
        """Status and parsed body."""
        answer = await self.sent(post(path, body, *headers, key=key or self.endpoint.key))
        head, _, text = answer.partition(b"\r\n\r\n")
        return status(head), json.loads(text)


def served(work):
    """The result of `work`, an async function of Served; no exception was left to the event loop."""
    problems = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        ask = Asked()
        async with asyncio.timeout(LIMIT_SECONDS), Endpoint(ask) as endpoint:
            return await work(Served(endpoint, ask))

    result = asyncio.run(main())
    assert problems == []
    return result


async def until(condition):
    while not condition():  # noqa: ASYNC110  (the state of the endpoint has no event)
        await asyncio.sleep(0.01)


def post(path, body, *headers, key):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (
        f"POST /v1{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        + "".join(f"{header}\r\n" for header in headers)
        + f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


def status(head):
    assert head.startswith(b"HTTP/1.1 "), head
    return int(head[9:12])


REWARD = "POST /v1/reward HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
# Raw requests, with {key} for the key -> status.
MALFORMED = {
    "garbage": (b"GARBAGE\r\n\r\n", 400),
    "binary": (bytes(range(256)) * 8, 400),
    "a request of TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "no Host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "an unfinished head": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n", 400),
    "an unfinished body": (REWARD.encode() + b"Content-Length: 40\r\n\r\n{}", 400),
    "two lengths": (REWARD.encode() + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}", 400),
    "a length and chunks": (
        REWARD.encode() + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "a negative length": (REWARD.encode() + b"Content-Length: -1\r\n\r\n", 400),
    "a length of 5000 digits": (REWARD.encode() + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "a length beyond the limit": (REWARD.encode() + b"Content-Length: %d\r\n\r\n" % (MAX_BODY + 1), 413),
    "an unknown encoding": (REWARD.encode() + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "a chunk line without an end": (REWARD.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 200_000, 431),
    "a negative chunk": (REWARD.encode() + b"Transfer-Encoding: chunked\r\n\r\n-3\r\nab\r\n0\r\n\r\n", 400),
    "a long extension of a chunk": (
        REWARD.encode() + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 200_000,
        431,
    ),
    "headers without an end": (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 40_000, 431),
    "a wrong key": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-0\r\n\r\n", 401),
    "a key of other letters": ("GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ÿ\r\n\r\n".encode("latin-1"), 401),
    "no key": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 401),
    "another method": (REWARD.replace("POST", "PATCH").encode() + b"\r\n", 404),
    "a tunnel": (REWARD.replace("POST /v1/reward", "CONNECT x:1").encode() + b"\r\n", 404),
    "a switch of protocols": (REWARD.encode() + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n", 400),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_has_an_answer(name):
    data, expected = MALFORMED[name]

    async def work(client):
        return await client.sent(data.replace(b"{key}", client.endpoint.key.encode()))

    head, _, body = served(work).partition(b"\r\n\r\n")
    assert status(head) == expected
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/reward", b'{"reward": %s}' % HUGE, "the request has a number beyond float for reward"),
        ("/reward", b'{"reward": 1, "components": {"a": %s}}' % HUGE, "has a number beyond float for a"),
        ("/reward", b'{"reward": NaN}', "the request has nan for reward; rewards are finite"),
        ("/reward", b'{"reward": 1e308}', "the request has 1e+308 for reward"),
        ("/reward", b'{"reward": true}', "reward is no number"),
        ("/reward", b'{"reward": %s}' % (b"9" * 5000), "the body is no JSON"),
        ("/reward", {"reward": 1, "components": {"mean": 1}}, "a component named 'mean'"),
        ("/reward", {"reward": 1, "components": [1]}, 'a reward is {"reward": number}'),
        ("/reward", b"[" * 200_000, "the body is no JSON"),
        ("/reward", b"[]", "the body is no JSON object"),
        ("/reward", b"\xff", "the body is no JSON"),
        ("/chat/completions", {"messages": MESSAGES, "stream_options": [1]}, "stream_options is no object"),
        ("/chat/completions", {"messages": MESSAGES, "stream_options": "a"}, "stream_options is no object"),
        ("/chat/completions", {"messages": MESSAGES, "n": []}, "n must be 1"),
        ("/chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice must be auto or none"),
        (
            "/chat/completions",
            {"messages": MESSAGES, "tool_choice": {"type": "function"}},
            "tool_choice must be auto",
        ),
        ("/chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "must be text"),
        ("/chat/completions", {"messages": MESSAGES, "logprobs": True}, "the rows of the run have"),
        ("/chat/completions", {"messages": MESSAGES, "tools": {"a": 1}}, "tools is no list of objects"),
        ("/chat/completions", {"messages": [{**MESSAGES[0], "tool_calls": 5}]}, "tool_calls is no list of objects"),
        ("/chat/completions", {"messages": [{"role": "user", "content": {"a": 1}}]}, "a content is no text"),
        ("/chat/completions", {"messages": [{"role": ["user"]}]}, "a message is no object with a role"),
        ("/chat/completions", b'{"messages": [{"role": "user", "x": 1e999}]}', "messages or tools have nan"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
    ],
)
def test_a_wrong_body_is_refused_with_a_sentence_and_the_episode_goes_on(path, body, says):
    async def work(client):
        refused = await client.post(path, body)
        assert client.ask.num_turns == 0
        assert not client.endpoint.failed.done()
        assert client.endpoint.posted is None
        assert (await client.post("/chat/completions", {"messages": MESSAGES}))[0] == 200
        return refused

    code, answer = served(work)
    assert code == 400
    assert says in answer["error"]["message"]


SNIPPETS = st.sampled_from(
    [
        *(b"GET", b"POST ", b"/v1/reward", b" HTTP/1.1", b"\r\n", b"\n", b"Host: x\r\n", b"Content-Length: ", b"5"),
        *(b"0\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"{}", b'{"reward":1}', b"-1"),
        *(b"\x00", b": ", REWARD.encode(), b"\r\n\r\n"),
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(SNIPPETS | st.binary(max_size=20), min_size=1, max_size=12), min_size=10, max_size=10))
def test_any_bytes_have_answers_or_no_request(requests):
    async def work(client):
        for parts in requests:
            data = b"".join(parts).replace(b"{key}", client.endpoint.key.encode())
            answer = await client.sent(data)
            assert not data or answer.startswith(b"HTTP/1.1 "), data

    served(work)


def test_the_key_is_checked_before_the_body_is_read():
    """The client with the wrong key sends no body and has its answer; a client that waits is told to go on."""

    async def work(client):
        head = post("/reward", b"{}", "Expect: 100-continue", key="sk-0")[:-2]
        reader, writer = await client.connect(head)
        wrong = await reader.readuntil(b"\r\n")
        writer.close()
        head = post("/reward", b'{"reward":1}', "Expect: 100-continue", key=client.endpoint.key)[:-12]
        reader, writer = await client.connect(head)
        right = await reader.readuntil(b"\r\n\r\n")
        writer.write(b'{"reward":1}')
        last = await reader.readuntil(b"\r\n")
        writer.close()
        return wrong[9:12], right[9:12], last[9:12]

    assert served(work) == (b"401", b"100", b"200")


def test_bodies_without_a_key_are_dropped_and_bodies_of_all_connections_are_bounded():
    async def work(client):
        body = bytes(MAX_BODY)
        answers = [await client.sent(post("/reward", body, key="sk-0")) for _ in range(3)]
        assert {status(answer) for answer in answers} == {401}
        assert client.endpoint._room.left == MAX_BODIES
        unfinished = [await client.connect(post("/reward", body, key=client.endpoint.key)[:-1]) for _ in range(2)]
        await until(lambda: client.endpoint._room.left == 2)
        refused = await client.sent(post("/reward", b'{"reward":1}', key=client.endpoint.key))
        assert status(refused) == 503
        assert b"\r\nRetry-After: 1\r\n" in refused
        for _, writer in unfinished:
            writer.close()
        await until(lambda: client.endpoint._room.left == MAX_BODIES)
        return await client.post("/reward", {"reward": 1})

    assert served(work)[0] == 200


def test_connections_are_bounded_and_silent_ones_end(monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr("pipelinerl_core.environments.agents.http.HEAD_SECONDS", 0.5)

    async def work(client):
        silent = [await client.connect() for _ in range(3)]
        await until(lambda: len(client.endpoint._connections) == 3)
        reader, writer = await client.connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")  # an answer that does not wait for it would be lost by a reset
        await writer.drain()
        refused = await reader.read()
        writer.close()
        ended = [await reader.read() for reader, _ in silent]
        for _, writer in silent:
            writer.close()
        await until(lambda: not client.endpoint._connections)
        code, _ = await client.post("/reward", {"reward": 1})
        return status(refused), {status(answer) for answer in ended}, code

    assert HEAD_SECONDS > 1
    assert served(work) == (503, {408}, 200)


def test_requests_at_the_same_time_are_turns_one_after_the_other():
    async def work(server):
        active, most, order = 0, 0, []

        async def ask(history, tools=()):
            nonlocal active, most
            active, most = active + 1, max(most, active + 1)
            await asyncio.sleep(0.05)
            active -= 1
            order.append(history[0]["content"])
            return Reply(text=history[0]["content"], content=history[0]["content"])

        server.endpoint._ask = ask
        sent = []
        for name in "abc":
            body = {"messages": [{"role": "user", "content": name}]}
            sent.append(asyncio.create_task(server.post("/chat/completions", body)))
            await until(lambda: len(server.endpoint._turns) == len(sent))
        repeated = await server.post(
            "/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "x-stainless-retry-count: 1"
        )
        answers = [*await asyncio.gather(*sent), repeated]
        texts = [body["choices"][0]["message"]["content"] for _, body in answers]
        return texts, order, most, len(server.endpoint._turns)

    assert served(work) == (["a", "b", "c", "a"], ["a", "b", "c"], 1, 3)


def test_the_reward_counts_once_and_from_its_own_episode_only():
    async def work(client):
        async with Endpoint(client.ask) as other:
            foreign = await client.post("/reward", {"reward": -1000}, key=other.key)
            first = await client.post("/reward", {"reward": 1})
            second = await client.post("/reward", {"reward": -1000})
            equal = await client.post("/reward", {"reward": 1})
            repeated = await client.post("/reward", {"reward": 1}, "X-Stainless-Retry-Count: 1")
            raw = await client.sent(post("/reward", {"reward": 2}, key=client.endpoint.key))
            assert other.posted is None
        assert client.endpoint.posted == {"reward": 1.0}
        assert b"X-Should-Retry: false" in raw  # else the official clients repeat the request
        return [code for code, _ in (foreign, first, second, equal, repeated)], second[1]["error"]["message"]

    codes, reason = served(work)
    assert codes == [401, 200, 409, 409, 200]
    assert reason == "the episode has its reward already: the first one counts"
