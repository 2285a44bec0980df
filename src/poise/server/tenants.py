"""The tenants file: who has which keys, limits and shares (docs/TENANTS.md), read as a whole and replaced as a whole.

Knows no requests. Invariant: what is in force came from a file without a fault; a file with one changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from poise.config import nearest
from poise.core.tenant import SERVICE_CLASSES, ServiceClass, Share, Tenant, TenantTable
from poise.errors import ConfigError, EngineDeadError
from poise.server.api_keys import HashedKeys, parse_entry
from poise.server.callers import LEAST_URGENT, MOST_URGENT, OPERATOR, Caller, Limits

logger = logging.getLogger("poise.server")

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MAX_FILE_BYTES = 16 * 1024 * 1024
_LIMITS = tuple(field.name for field in fields(Limits))
_SHARES = tuple(field.name for field in fields(Share))
_SETTINGS = (*_LIMITS, "keys", "weight", "kv_quota", "service_class", "min_priority", "reserved")


@dataclass(frozen=True, slots=True)
class TenantDirectory:
    """One tenants file, understood."""

    table: TenantTable
    callers: Mapping[str, Caller]
    keys: HashedKeys[Caller]


class Tenants:
    """The directory in force, and the file that it came from."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming line and key of the first fault."""
        self._path = path
        self.directory = read_tenants(path)

    def caller_of(self, key: bytes) -> Caller | None:
        """Whose key this is; None if nobody's."""
        return self.directory.keys.owner_of(key)

    async def reload(self, tell: Callable[[TenantTable], Awaitable[None]]) -> bool:
        """Reads the file again, has `tell` told of its table, and lets it be in force; True if it is.

        A faulty one, or one that `tell` refuses (ConfigError), changes nothing and is one line in the log.
        """
        try:
            directory = await asyncio.to_thread(read_tenants, self._path)
            await tell(directory.table)
        except (ConfigError, EngineDeadError) as error:
            logger.error("the tenants stay as they were: %s", error)
            return False
        self.directory = directory
        logger.info("%d tenants read from %s", len(directory.callers), self._path)
        return True


def read_tenants(path: Path) -> TenantDirectory:
    """Raises ConfigError naming line and key of the first fault."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tenants {path}: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--tenants {path}: larger than {MAX_FILE_BYTES:,} bytes")
    try:
        text = data.decode("utf-8")
        content = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"--tenants {path} is not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--tenants {path} is not TOML: {error}") from None
    try:
        return _directory(_Table(content, ()))
    except _FaultError as fault:
        line = line_of(text, fault.path)
        place = f"{path}, line {line}" if line else str(path)
        raise ConfigError(f"{place}: {'.'.join(fault.path)} {fault}") from None


class _FaultError(Exception):
    """What is wrong with the setting at `path`."""

    def __init__(self, path: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


class _Table:
    """A table of the file; each getter checks what it hands out."""

    def __init__(self, values: Mapping[str, Any], path: tuple[str, ...]) -> None:
        self._values = values
        self._path = path

    def fault(self, key: str, message: str) -> _FaultError:
        return _FaultError((*self._path, key), message)

    def only(self, known: tuple[str, ...]) -> None:
        for key in self._values:
            if key not in known:
                raise self.fault(key, f"is not a setting{nearest(key, known, '')}")

    def names(self) -> list[str]:
        return list(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def table(self, key: str) -> _Table:
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self.fault(key, "is not a table")
        return _Table(value, (*self._path, key))

    def integer(self, key: str, low: int, high: int, default: int | None) -> int | None:
        if key not in self._values:
            return default
        value = self._values[key]
        if type(value) is not int or not low <= value <= high:
            raise self.fault(key, f"is {value!r}, expected a whole number from {low:,} to {high:,}")
        return int(value)

    def number(self, key: str, default: float, low: float, high: float, low_is_in: bool) -> float:
        value = self._values.get(key, default)
        within = type(value) in (int, float) and low <= value <= high and math.isfinite(value)
        if not within or (value == low and not low_is_in):
            bound = f"from {low:g}" if low_is_in else f"above {low:g}"
            raise self.fault(key, f"is {value!r}, expected a number {bound} to {high:g}")
        return float(value)

    def strings(self, key: str) -> list[str]:
        value = self._values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fault(key, "is not a list of strings")
        return cast("list[str]", value)

    def word(self, key: str, known: tuple[str, ...], default: str) -> str:
        value = self._values.get(key, default)
        if value not in known:
            raise self.fault(key, f"is {value!r}, expected {' or '.join(known)}")
        return cast("str", value)


def _directory(file: _Table) -> TenantDirectory:
    file.only(("tenants", "classes", "operator"))
    tenants, callers = {}, {}
    keys: dict[bytes, tuple[bytes, Caller]] = {}
    operator = file.table("operator")
    operator.only(("keys",))
    _add_keys(keys, operator, OPERATOR)
    tables = file.table("tenants")
    for name in tables.names():
        if NAME.fullmatch(name) is None:
            raise tables.fault(
                name, "is not a tenant's name: up to 64 of a-z 0-9 . _ -, a letter or digit first"
            )
        table = tables.table(name)
        table.only(_SETTINGS)
        tenants[name], caller = _tenant(name, table), _caller(name, table)
        callers[name] = caller
        _add_keys(keys, table, caller)
    if not tenants:
        raise _FaultError(("tenants",), "is empty: add one with poise key new TENANT")
    classes = _classes(file.table("classes"))
    _check_sums(file, tenants, classes)
    return TenantDirectory(TenantTable(tenants, classes), callers, HashedKeys(keys))


def _add_keys(keys: dict[bytes, tuple[bytes, Caller]], table: _Table, caller: Caller) -> None:
    for entry in table.strings("keys"):
        try:
            name, digest = parse_entry(entry)
        except ValueError as error:
            raise table.fault("keys", f"has {entry[:16]!r}…: {error}") from None
        if name in keys:
            raise table.fault("keys", f"has {name.decode()}, which is in the file already")
        keys[name] = (digest, caller)


def _tenant(name: str, table: _Table) -> Tenant:
    return Tenant(
        name,
        weight=table.number("weight", 1.0, 0.0, 1e6, low_is_in=False),
        kv_quota=table.number("kv_quota", 1.0, 0.0, 1.0, low_is_in=False),
        reserved=_share(table.table("reserved")) if "reserved" in table else None,
    )


def _caller(name: str, table: _Table) -> Caller:
    limits = Limits(**{key: table.integer(key, 1, 2**31 - 1, None) for key in _LIMITS})
    service_class = cast(
        "ServiceClass", table.word("service_class", SERVICE_CLASSES, SERVICE_CLASSES[0])
    )
    min_priority = table.integer("min_priority", MOST_URGENT, LEAST_URGENT, 0)
    assert min_priority is not None, "it has a default"
    return Caller(name, limits, service_class, min_priority)


def _share(table: _Table) -> Share:
    table.only(_SHARES)
    return Share(**{key: table.number(key, 0.0, 0.0, 1.0, low_is_in=True) for key in _SHARES})


def _classes(table: _Table) -> dict[ServiceClass, Share]:
    table.only(SERVICE_CLASSES)
    shares: dict[ServiceClass, Share] = {}
    for name in SERVICE_CLASSES:
        if name in table:
            settings = table.table(name)
            settings.only(("reserved",))
            shares[name] = _share(settings.table("reserved"))
    return shares


def _check_sums(
    file: _Table, tenants: Mapping[str, Tenant], classes: Mapping[ServiceClass, Share]
) -> None:
    """What is guaranteed to all together must exist."""
    reserved = [tenant.reserved for tenant in tenants.values() if tenant.reserved is not None]
    of: Callable[[Share, str], float] = getattr
    for key in _SHARES:
        total = sum(of(share, key) for share in (*reserved, *classes.values()))
        if total > 1.0 + 1e-9:
            raise file.fault("tenants", f"and classes reserve {total:g} of all {key}, at most 1")


def line_of(text: str, path: tuple[str, ...]) -> int | None:
    """The line (from 1) in which a TOML file sets the key at `path`, or opens that table; None where it can't be told."""
    header: tuple[str, ...] = ()
    opened = None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            header = _keys(stripped.partition("]")[0].lstrip("["))
            if header[: len(path)] == path and opened is None:
                opened = number
        elif "=" in stripped and not stripped.startswith("#"):
            key = (*header, *_keys(stripped.partition("=")[0]))
            if key == path or (key[: len(path)] == path and opened is None):
                return number
            if path[: len(key)] == key:  # an inline table
                return number
    return opened


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
