"""Explores every order in which processes can make their calls to an object store and to a hub.

A process is a function of its `Calls`. It runs again and again: recorded calls return what they returned before, the
first new call ends the run. So a process is its history, and a state of the world can be visited from anywhere. Equal
states are visited once. A process may die before each call that its scenario names.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, NamedTuple

from pipelinerl_core.errors import Fenced, MissingObject, PipelineRLError
from pipelinerl_core.storage.exclusive import create_exclusively


class Pause(BaseException):
    """The first call without a recorded result."""


class HubGone(PipelineRLError):
    """The hub that took the request has died."""


class Call(NamedTuple):
    name: str
    arguments: tuple


class Failed(NamedTuple):
    """A call that raised."""

    error: type[Exception]


class Calls:
    """What a process can call; `counted` is what it was told of the commits that count."""

    def __init__(self, number, history, *, is_conditional):
        self._number, self._history, self._is_conditional = number, history, is_conditional
        self._index = 0
        self.pending: Call | None = None
        self.counted: set[tuple[int, str]] = set()
        self.epoch: int | None = None
        """The epoch that the process has taken."""
        self.url = "model://"

    def call(self, name, *arguments):
        if self._index == len(self._history):
            self.pending = Call(name, arguments)
            raise Pause
        result = self._history[self._index]
        self._index += 1
        if isinstance(result, Failed):
            raise result.error(name, *arguments)
        return result

    # ---- an object store -------------------------------------------------------------------------------------

    def put(self, key, data, *, create_only=False):
        if create_only and not self._is_conditional:
            create_exclusively(self, key, data)
        else:
            self.call("create" if create_only else "put", key, bytes(data))

    def get(self, key):
        return self.call("get", key)

    def exists(self, key):
        return self.call("exists", key)

    def list(self, prefix):
        return list(self.call("list", f"{prefix.rstrip('/')}/"))

    def delete(self, keys):
        for key in keys:
            self.call("delete", key)

    def name(self):
        """A name that no other writer takes."""
        return f"{self._number}-{self._index}"

    # ---- what the hub's handlers use -------------------------------------------------------------------------

    def hub(self):
        """The hub that answers now; the process waits while there is none."""
        return Ledger(self, self.call("hub"))


class Ledger:
    """The ledger of one hub, and the state that its handlers share, one call a step."""

    def __init__(self, calls, boot):
        self._calls, self.boot = calls, boot
        self.changed, self.ledger, self.tokens = Condition(), self, {}

    def check_trainer(self, epoch):
        self._calls.call("check", self.boot, epoch)

    def adopt_trainer_epoch(self, epoch):
        pass

    def register_trainer(self, epoch, step, refs, quarantined, fates):
        self._calls.call("register", self.boot, epoch)

    @property
    def committed_step(self):
        return self._calls.call("step", self.boot)

    def committed(self, step, fates, manifest):
        return self._calls.call("commit", self.boot, step, manifest.epoch)

    def announce(self, manifest):
        pass

    def check_groups(self, group_ids):
        pass

    def drop_unneeded_rows(self):
        pass

    def request_sync(self):
        pass


class History:
    """The results of the calls of one process. Equal histories are one object, so that states compare fast."""

    __slots__ = ("_next", "results")

    def __init__(self, results=()):
        self.results, self._next = results, {}

    def then(self, result):
        if result not in self._next:
            self._next[result] = History((*self.results, result))
        return self._next[result]


class Objects(dict[str, bytes]):
    """The objects of a store, key -> data; equal contents are one object."""

    _all: "dict[frozenset[tuple[str, bytes]], Objects]" = {}  # noqa: RUF012 - of all worlds
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    @classmethod
    def of(cls, items):
        return cls._all.setdefault(frozenset(items.items()), cls(items))


class State(NamedTuple):
    """The world between two calls."""

    objects: Objects
    histories: tuple[History, ...]
    alive: tuple[bool, ...]
    boot: int = 0
    """Number of the hub; even: none answers."""
    epoch: int = -1
    """Trainer epoch that the hub serves."""
    commits: tuple[tuple[int, int], ...] = ()
    """(step, epoch) of every commit that a hub was told."""
    step: int = -1
    """Newest step of the hub."""
    counted: frozenset[tuple[int, str]] = frozenset()
    """(step, key) of each commit that counted for some reader at some time."""


class Outcome(NamedTuple):
    """What a process does next."""

    pending: Call | None
    error: Exception | None
    counted: frozenset[tuple[int, str]]
    epoch: int | None


@dataclass
class World:
    """`states` visits every state that the processes can reach; `judge` is called with each."""

    processes: list[Callable[[Calls], None]]
    is_conditional: bool = True
    mortal: frozenset[int] = frozenset()
    """Processes that may die at any time."""
    is_final: Callable[[str, bytes], bool] = lambda key, data: False
    """Whether an object never changes again, so that its reading needs no step of its own."""
    patch: Callable[[Calls], None] = lambda calls: None
    _known: dict[tuple[int, History], Outcome] = field(default_factory=dict)

    def outcome(self, number, history):
        key = (number, history)
        if key not in self._known:
            calls, error = Calls(number, history.results, is_conditional=self.is_conditional), None
            self.patch(calls)
            try:
                self.processes[number](calls)
            except Pause:
                pass
            except Exception as failure:  # noqa: BLE001 - the test judges it
                error = failure
            pending = calls.pending
            self._known[key] = Outcome(pending, error, frozenset(calls.counted), calls.epoch)
        return self._known[key]

    def states(self, first: State, see: Callable[[State], frozenset[tuple[int, str]]]) -> Iterator[State]:
        """Every reachable state, depth first; `see`: what counts for a reader that reads everything at once."""
        seen, todo = set(), [first]
        while todo:
            state = self._settle(todo.pop(), see)
            if state in seen:
                continue
            seen.add(state)
            yield state
            for number in range(len(self.processes)):
                todo.extend(self._after(state, number))

    def ends(self, state):
        """Whether no process can do anything more."""
        return not any(list(self._after(state, number)) for number in range(len(self.processes)))

    def outcomes(self, state):
        return [self.outcome(number, history) for number, history in enumerate(state.histories)]

    def _settle(self, state, see):
        told = frozenset().union(*(outcome.counted for outcome in self.outcomes(state)))
        return state._replace(counted=state.counted | told | see(state))

    def _after(self, state, number):
        if not state.alive[number]:
            return
        call = self.outcome(number, state.histories[number]).pending
        if call is None:
            return
        if number in self.mortal:
            yield state._replace(alive=_put(state.alive, number, False))
        applied = _apply(state, call)
        if applied is None:
            return
        result, after = applied
        history = after.histories[number].then(result)
        while (data := self._read_at_once(after, self.outcome(number, history).pending)) is not None:
            history = history.then(data)
        yield after._replace(histories=_put(after.histories, number, history))

    def _read_at_once(self, state, call):
        """The result of a call that needs no step of its own: an object that never changes again is read."""
        data = state.objects.get(call.arguments[0]) if call is not None and call.name == "get" else None
        return data if data is not None and self.is_final(call.arguments[0], data) else None


def _put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _apply(state: State, call: Call) -> tuple[Any, State] | None:
    """(result, state after the call); None while the call has to wait."""
    objects, name, arguments = state.objects, call.name, call.arguments
    if name in ("put", "create"):
        key, data = arguments
        if name == "create" and key in objects:
            return Failed(FileExistsError), state
        return None, state._replace(objects=Objects.of({**objects, key: data}))
    if name == "get":
        return objects.get(arguments[0], Failed(MissingObject)), state
    if name == "exists":
        return arguments[0] in objects, state
    if name == "list":
        return tuple(key for key in sorted(objects) if key.startswith(arguments[0])), state
    if name == "delete":
        kept = {key: data for key, data in objects.items() if key != arguments[0]}
        return None, state._replace(objects=Objects.of(kept))
    return _apply_to_hub(state, name, arguments)


def _apply_to_hub(state: State, name: str, arguments: tuple[Any, ...]) -> tuple[Any, State] | None:
    if name == "hub":
        return (state.boot, state) if state.boot % 2 else None
    if name == "kill hub":
        return None, state._replace(boot=state.boot + 1)
    if name == "start hub":
        step, epoch = arguments
        return None, _told(state._replace(boot=state.boot + 1, epoch=-1, step=step), step, epoch)
    boot, *more = arguments
    if boot != state.boot:
        return Failed(HubGone), state
    if name == "step":
        return state.step, state
    if name in ("check", "register"):
        if more[0] < state.epoch:
            return Failed(Fenced), state
        return None, state._replace(epoch=more[0]) if name == "register" else state
    assert name == "commit"
    step, epoch = more
    if step <= state.step:
        return False, state
    assert step == state.step + 1, "a commit is missing"
    return True, _told(state._replace(step=step), step, epoch)


def _told(state, step, epoch):
    return state._replace(commits=tuple(sorted({*state.commits, (step, epoch)})))
