"""What the actor remembers of its callers, so that a call that comes twice is done once.

Everything here is in the journal, as notes with the entries of the buffer, and in the checkpoint, so that it is right
again after the actor was killed at any moment.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pystale.batch import TrainBatch
from pystale.state import RolloutState, Status
from pystale.summary import plain_group, unplain_group

__all__ = ["Bookings", "Call", "TakenBatch"]

Name = tuple[str, Any]  # task and group id


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client, which may be sent again until it is answered.

    Attributes
    ----------
    client : str
        Id of the client.
    number : int
        Of the call; every one has its own.
    answered : int
        The client has the answers of all calls before this number.
    """

    client: str
    number: int
    answered: int

    @property
    def token(self) -> str:
        return f"{self.client}-{self.number}"


@dataclass(slots=True)
class TakenBatch:
    """A batch that was taken and may be asked for again, until the trainer has a later one."""

    client: str
    number: int
    trainer: str
    train_step: int
    sizes: dict[str, int]
    groups: dict[str, list[list[RolloutState]]]
    tokens: dict[str, int]

    @property
    def states(self) -> Iterable[RolloutState]:
        return (state for groups in self.groups.values() for group in groups for state in group)


@dataclass(slots=True)
class Bookings:
    """Answers that may be asked for again, batches that are not acknowledged, and groups that are lent.

    Attributes
    ----------
    answers : dict of str to dict
        By client and number of the call: what it was answered.
    batches : list of TakenBatch
        Taken and not acknowledged, in order.
    lent : dict of (task, group id) to str
        Token of the call that a group was handed out by; see :meth:`~pystale.ReplayBuffer.get`.
    """

    answers: dict[str, dict[int, Any]] = field(default_factory=dict)
    batches: list[TakenBatch] = field(default_factory=list)
    lent: dict[Name, str] = field(default_factory=dict)

    # Notes: made with the operation, and played back in the order they were made.

    def note(self, kind: str, call: Call, *more: Any) -> list[Any]:
        return [kind, call.client, call.number, call.answered, *more]

    def play(self, note: Sequence[Any], result: Any) -> None:
        """Do what was done with a note, given what the operation returned."""
        kind, client, number, answered, *more = note
        call = Call(client, number, answered)
        if kind == "put":
            task_name, group_id = more
            self.put(call, (task_name, group_id), result.name)
        elif kind == "get":
            task_name, group_ids = more
            self.lend(call, [(task_name, group_id) for group_id in group_ids])
        elif kind == "done":
            self.settled(call, [(task_name, group_id) for task_name, group_id in more[0]])
        elif kind == "take" and isinstance(result, TrainBatch):
            trainer, train_step, sizes = more
            self.take(call, trainer, train_step, sizes, result)
        elif kind == "back":
            self.lent.pop((more[0], more[1]), None)
        elif kind == "adopt":
            batch = self.batch_of(Call(more[0], more[1], 0))
            if batch is not None:
                self.adopt(call, batch)
        elif kind == "untake":
            self.untake(call)
        elif kind == "acknowledge":
            trainer, train_step = more
            self.acknowledge(trainer, train_step)

    def _answer(self, call: Call, answer: Any) -> None:
        numbers = self.answers.setdefault(call.client, {})
        for number in [number for number in numbers if number < call.answered]:
            del numbers[number]
        numbers[call.number] = answer

    def answered(self, call: Call) -> Any:
        """Answer the call was given before, None where it was not."""
        return self.answers.get(call.client, {}).get(call.number)

    def put(self, call: Call, name: Name, status: str) -> None:
        """A group was put; if it was lent, it is back."""
        self.lent.pop(name, None)
        self._answer(call, [status, name[1]])

    def lend(self, call: Call, names: Sequence[Name]) -> None:
        """Groups were handed out for continuation."""
        for name in names:
            self.lent[name] = call.token
        self._answer(call, [list(name) for name in names])

    def settled(self, call: Call, names: Sequence[Name]) -> None:
        """Groups are not coming back."""
        for name in names:
            self.lent.pop(name, None)
        self._answer(call, "done")

    def take(
        self, call: Call, trainer: str, train_step: int, sizes: Mapping[str, int], batch: TrainBatch
    ) -> TakenBatch:
        """A batch was taken."""
        taken = TakenBatch(
            call.client,
            call.number,
            trainer,
            train_step,
            dict(sizes),
            {task_name: list(batch[task_name]) for task_name in batch},
            dict(batch.trainable_tokens_by_task),
        )
        self.batches.append(taken)
        return taken

    def untake(self, call: Call) -> None:
        """The batch of a call was put back."""
        self.batches = [b for b in self.batches if (b.client, b.number) != (call.client, call.number)]

    def adopt(self, call: Call, batch: TakenBatch) -> None:
        """A batch is now the answer to another call."""
        batch.client, batch.number = call.client, call.number

    def batch_of(self, call: Call) -> TakenBatch | None:
        """The batch a call was answered with before."""
        return next((b for b in self.batches if (b.client, b.number) == (call.client, call.number)), None)

    def batch_of_step(self, client: str, trainer: str, train_step: int) -> TakenBatch | None:
        """The oldest batch for this step that an earlier process of the trainer took."""
        return next(
            (b for b in self.batches if (b.trainer, b.train_step) == (trainer, train_step) and b.client != client), None
        )

    def acknowledge(self, trainer: str, train_step: int) -> list[TakenBatch]:
        """Forget the batches of a trainer up to a step, and return them."""
        done = [b for b in self.batches if b.trainer == trainer and b.train_step <= train_step]
        self.batches = [b for b in self.batches if not (b.trainer == trainer and b.train_step <= train_step)]
        return done

    # The checkpoint

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "answers": [[client, list(map(list, numbers.items()))] for client, numbers in self.answers.items()],
            "lent": [[*name, token] for name, token in self.lent.items()],
            "batches": [
                {
                    "client": b.client,
                    "number": b.number,
                    "trainer": b.trainer,
                    "train_step": b.train_step,
                    "sizes": b.sizes,
                    "groups": {name: [plain_group(group) for group in groups] for name, groups in b.groups.items()},
                    "tokens": b.tokens,
                }
                for b in self.batches
            ],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Bookings":
        """What :meth:`as_dict` gave."""
        bookings = cls()
        for client, numbers in content["answers"]:
            bookings.answers[client] = dict(numbers)
        for task_name, group_id, token in content["lent"]:
            bookings.lent[task_name, group_id] = token
        for saved in content["batches"]:
            groups = {name: [unplain_group(group) for group in groups] for name, groups in saved["groups"].items()}
            bookings.batches.append(TakenBatch(**{**saved, "groups": groups}))
        return bookings


def status_of(answer: Sequence[Any]) -> tuple[Status, Any]:
    """Pool and group id, of the answer to a put."""
    return Status[answer[0]], answer[1]
