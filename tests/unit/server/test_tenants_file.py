"""The tenants file: what it may say, what is refused and how; keys that are known by their hash only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_server_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from poise.cli.main import run
from poise.core.tenant import Share, Tenant, TenantTable
from poise.errors import ConfigError
from poise.server.api_keys import HashedKeys, is_one_of, new_key, parse_entry
from poise.server.callers import OPERATOR, Caller, Limits
from poise.server.tenants import TenantDirectory, Tenants, line_of, read_tenants

EVERYTHING = """
[tenants.acme]
keys = ["{first}", "{second}"]
weight = 2
kv_quota = 0.5
requests_per_minute = 60
tokens_per_minute = 10_000
max_concurrent_requests = 4
max_input_tokens = 1000
max_output_tokens = 100
service_class = "batch"
min_priority = -5
reserved = {{ sequences = 0.25, blocks = 0.1 }}

[tenants."b.c"]
keys = []

[classes.interactive.reserved]
tokens = 0.5
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    return path


def read(tmp_path: Path, text: str) -> TenantDirectory:
    return read_tenants(write(tmp_path, text))


def test_every_setting_is_understood(tmp_path: Path) -> None:
    (key, first), (other, second) = new_key(), new_key()
    directory = read(tmp_path, EVERYTHING.format(first=first, second=second))
    acme = Caller("acme", Limits(60, 10_000, 4, 1000, 100), "batch", -5)
    assert directory.callers == {"acme": acme, "b.c": Caller("b.c", Limits(), "interactive", 0)}
    assert directory.table.tenants == {
        "acme": Tenant("acme", 2.0, 0.5, Share(0.25, 0.0, 0.1)),
        "b.c": Tenant("b.c"),
    }
    assert directory.table.reserved_by_class == {"interactive": Share(tokens=0.5)}
    assert directory.keys.owner_of(key.encode()) == acme
    assert directory.keys.owner_of(other.encode()) == acme
    assert directory.keys.owner_of(new_key()[0].encode()) is None


ENTRY = "abcdefghij:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "tenants is empty"),
        ("[tenants]", "tenants is empty"),
        ("tenants = 3", "line 1: tenants is not a table"),
        ("[tenants.a", "is not TOML"),
        ("[tenant.a]", "line 1: tenant is not a setting; did you mean tenants?"),
        ("[tenants.A]", "line 1: tenants.A is not a tenant's name"),
        ("[tenants.a]\nwieght = 2", "line 2: tenants.a.wieght is not a setting; did you mean weight?"),
        ("[tenants.a]\nweight = 0", "line 2: tenants.a.weight is 0, expected a number above 0"),
        ("[tenants.a]\nweight = nan", "line 2: tenants.a.weight is nan"),
        ("[tenants.a]\nweight = true", "line 2: tenants.a.weight is True"),
        ("[tenants.a]\n\n# x\nkv_quota = 1.5", "line 4: tenants.a.kv_quota is 1.5"),
        ("[tenants.a]\nkv_quota = '1'", "line 2: tenants.a.kv_quota is '1'"),
        ("[tenants.a]\nrequests_per_minute = 0", "requests_per_minute is 0, expected a whole number from 1"),
        ("[tenants.a]\nmax_output_tokens = 1.5", "max_output_tokens is 1.5"),
        ("[tenants.a]\nmax_output_tokens = true", "max_output_tokens is True"),
        ("[tenants.a]\nservice_class = 'x'", "service_class is 'x', expected interactive or batch"),
        ("[tenants.a]\nkeys = 'x'", "line 2: tenants.a.keys is not a list of strings"),
        ("[tenants.a]\nkeys = ['poise_secret']", "line 2: tenants.a.keys has 'poise_secret'…: expected NAME:HASH"),
        (f"[tenants.a]\nkeys = ['{ENTRY}']\n[tenants.b]\nkeys = ['{ENTRY}']", "line 4: tenants.b.keys has abcdefghij"),
        ("[tenants.a]\nreserved = 0.5", "line 2: tenants.a.reserved is not a table"),
        ("[tenants.a.reserved]\npages = 1", "line 2: tenants.a.reserved.pages is not a setting"),
        ("[tenants.a]\nreserved = {blocks = 2}", "line 2: tenants.a.reserved.blocks is 2"),
        ("[tenants.a]\n[classes.night]", "line 2: classes.night is not a setting"),
        ("[tenants.a]\n[classes.batch]\nshare = 1", "line 3: classes.batch.share is not a setting"),
        (
            "[tenants.a.reserved]\nblocks = 0.7\n[classes.batch.reserved]\nblocks = 0.4",
            "and classes reserve 1.1 of all blocks, at most 1",
        ),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_place_and_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert "tenants.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: No such file"):
        read_tenants(tmp_path / "nothing.toml")
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 0"):
        read_tenants(path)


@given(
    st.lists(st.sampled_from(["[a]", "[a.b]", "[[a]]", "x = 1", "b.x = 2", "a.b = 3", "", "# [a]"]))
)
def test_looking_for_a_line_never_fails(lines: list[str]) -> None:
    for path in ((), ("a",), ("a", "b"), ("a", "b", "x")):
        found = line_of("\n".join(lines), path)
        assert found is None or 1 <= found <= len(lines)


def test_a_faulty_file_changes_nothing_and_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, entry = new_key()
    path = write(tmp_path, f"[tenants.a]\nkeys = ['{entry}']")
    tenants = Tenants(path)
    before = tenants.directory
    engine = FakeEngine()
    path.write_text("[tenants.a]\nwieght = 1")
    assert not asyncio.run(tenants.reload(engine.set_tenants))
    assert not engine.tenants.tenants
    assert tenants.directory is before
    [record] = caplog.records
    assert "line 2: tenants.a.wieght" in record.getMessage()
    assert tenants.caller_of(key.encode()) is not None
    path.write_text("[tenants.b]")
    assert asyncio.run(tenants.reload(engine.set_tenants))
    assert list(engine.tenants.tenants) == ["b"]
    assert tenants.caller_of(key.encode()) is None
    assert list(tenants.directory.callers) == ["b"]

    async def refuse(table: TenantTable) -> None:
        raise ConfigError("the engine can't do that")

    assert not asyncio.run(tenants.reload(refuse))
    assert "the engine can't do that" in caplog.text


def test_a_new_key_is_shown_once_with_the_line_to_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name in ("acme", "b.c"):
        assert run(["key", "new", name]) == 0
        printed = capsys.readouterr().out
        key = printed.splitlines()[0].rpartition(" ")[2]
        directory = read(tmp_path, printed)  # as it is, a comment and a table
        caller = directory.keys.owner_of(key.encode())
        assert caller is not None
        assert caller.tenant == name
        assert key not in "\n".join(printed.splitlines()[1:])
        found[key] = name
    assert len(found) == 2


def test_a_key_for_the_operator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "new", "--operator"]) == 0
    printed = capsys.readouterr().out
    directory = read(tmp_path, f"{printed}[tenants.a]\n")
    assert directory.keys.owner_of(printed.splitlines()[0].rpartition(" ")[2].encode()) == OPERATOR
    assert list(directory.callers) == ["a"]
    for arguments in ([], ["a", "--operator"]):
        assert run(["key", "new", *arguments]) == 2
    assert "give a TENANT or --operator" in capsys.readouterr().err


def test_a_key_for_a_name_that_no_file_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["key", "new", "Acme Inc"]) == 2
    assert "'Acme Inc' is not a tenant's name" in capsys.readouterr().err


def changed(key: bytes) -> list[bytes]:
    """Keys that are almost that one."""
    return [
        b"", key[:-1], key + b"A", key.upper(), b" " + key, key.replace(b"poise", b"other", 1),
        key[:-1] + (b"A" if key[-1:] != b"A" else b"B"), key + b"\0", key * 1000,
        key.replace(key[6:16], key[6:16][::-1], 1), b"poise__", key + b"\n",
    ]  # fmt: skip


def test_only_the_key_itself_opens() -> None:
    keys = {}
    for owner in range(5):
        key, entry = new_key()
        name, digest = parse_entry(entry)
        keys[key.encode()] = (name, digest, owner)
    known = HashedKeys({name: (digest, owner) for name, digest, owner in keys.values()})
    for key, (_, _, owner) in keys.items():
        assert known.owner_of(key) == owner
        assert {known.owner_of(other) for other in changed(key) if other != key} == {None}
        assert not any(is_one_of(other, [key]) for other in changed(key) if other != key)
        assert is_one_of(key, [b"x", key])
    assert HashedKeys({}).owner_of(b"") is None
