"""Which requests a tenant has running, and had lately, by every name that he knows them by.

Knows names and states, nothing of what was asked. Invariant: a request is found by its own tenant only, and the number
of finished ones that are kept is fixed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from poise.errors import InvalidRequestError
from poise.server.http_errors import shown

NUM_FINISHED_KEPT = 1000


@dataclass(slots=True, eq=False)
class BookedRequest:
    """`request_id` is the answer's id; `names` are all that it may be asked for by; `engine_ids`, one per prompt."""

    tenant: str
    request_id: str
    names: Sequence[str]
    engine_ids: Sequence[str]
    running: bool = True


class RequestNotFoundError(InvalidRequestError):
    """No such request, or another tenant's: the two look alike."""

    status = 404


class RequestBook:
    """Requests by tenant and name. A client's own X-Request-Id may name several."""

    def __init__(self, num_finished_kept: int = NUM_FINISHED_KEPT) -> None:
        self._num_finished_kept = num_finished_kept
        self._by_name: dict[tuple[str, str], list[BookedRequest]] = {}
        self._finished: OrderedDict[BookedRequest, None] = OrderedDict()

    @contextmanager
    def running(
        self, tenant: str, request_id: str, client_id: str | None, engine_ids: Sequence[str]
    ) -> Iterator[BookedRequest]:
        """Keeps a request findable while it runs, and for a while after that."""
        bare = request_id.partition("-")[2]  # what X-Request-Id says where the client gave none
        names = {request_id, bare} | ({client_id} if client_id is not None else set())
        request = BookedRequest(tenant, request_id, tuple(names), engine_ids)
        for name in request.names:
            self._by_name.setdefault((tenant, name), []).append(request)
        try:
            yield request
        finally:
            request.running = False
            self._finished[request] = None
            if len(self._finished) > self._num_finished_kept:
                self._drop(self._finished.popitem(last=False)[0])

    def find(self, tenant: str, name: str) -> list[BookedRequest]:
        """The tenant's requests of that name, oldest first. Raises RequestNotFoundError if there is none."""
        found = self._by_name.get((tenant, name))
        if not found:
            raise RequestNotFoundError(
                f"There is no request {shown(name)} of yours, running or lately finished.",
                "id",
                "request_not_found",
            )
        return list(found)

    def _drop(self, request: BookedRequest) -> None:
        for name in request.names:
            requests = self._by_name[request.tenant, name]
            requests.remove(request)
            if not requests:
                del self._by_name[request.tenant, name]
