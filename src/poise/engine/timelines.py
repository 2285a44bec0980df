"""The event logs of the requests that run and of the last that ended, by their callers' ids.

Knows no scheduler. Invariant: nothing here names a request of another tenant; a fixed number of requests is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poise.core.request import Request
from poise.core.timeline import Timeline
from poise.engine.client import EngineRequest

NUM_KEPT = 1000
ANOTHER = "another request"


@dataclass(frozen=True, slots=True)
class _Kept:
    """One request: the timelines of its choices, and their ids in the scheduler."""

    request_id: str
    tenant: str
    choices: Sequence[tuple[int, Timeline]]


class KeptTimelines:
    """The last `num_kept` requests taken, finished or not, and any older one that still runs.

    Ids are the callers' and may repeat: the latest one counts.
    """

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._num_kept = num_kept
        self._by_name: OrderedDict[str, _Kept] = OrderedDict()
        self._by_choice: dict[int, _Kept] = {}

    def keep(self, request: EngineRequest, choices: Sequence[Request]) -> None:
        """From now on the events of `choices` can be asked for."""
        name = request.request_id
        kept = _Kept(name, request.owner.tenant, [(c.request_id, c.timeline) for c in choices])
        if name in self._by_name:
            self._drop(self._by_name[name])
        self._by_name[name] = kept
        self._by_choice.update((choice_id, kept) for choice_id, _ in kept.choices)
        if len(self._by_name) > self._num_kept:
            self._drop_oldest_finished()

    def _drop_oldest_finished(self) -> None:
        """Those that run at the front are moved behind, a few at a time."""
        for kept in tuple(self._by_name.values())[:8]:
            if all(_is_finished(timeline) for _, timeline in kept.choices):
                self._drop(kept)
                return
            self._by_name.move_to_end(kept.request_id)

    def _drop(self, kept: _Kept) -> None:
        del self._by_name[kept.request_id]
        for choice_id, _ in kept.choices:
            del self._by_choice[choice_id]

    def events(self, request_id: str) -> list[dict[str, Any]]:
        """All events of a request in order of time; empty for an id that is not (or no longer) known.

        Each has `time` (engine clock), `seconds` since arrival, `kind`, `choice` and the fields of its kind. `by` of a
        preemption is the caller's id of the request that got the room, if it is of the same tenant.
        """
        kept = self._by_name.get(request_id)
        if kept is None:
            return []
        found = [
            {"time": event.time, "kind": event.kind, "choice": index, **event.fields}
            for index, (_, timeline) in enumerate(kept.choices)
            for event in timeline.events
        ]
        found.sort(key=lambda event: event["time"])
        arrival = found[0]["time"]
        for event in found:
            event["seconds"] = event["time"] - arrival
            if "by" in event:
                event["by"] = self._name_of(event["by"], kept.tenant)
        return found

    def _name_of(self, choice_id: int, tenant: str) -> str:
        kept = self._by_choice.get(choice_id)
        return kept.request_id if kept is not None and kept.tenant == tenant else ANOTHER


def _is_finished(timeline: Timeline) -> bool:
    last = timeline.last
    return last is not None and last.kind == "finished"
