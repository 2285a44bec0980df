"""Usage by tenant: each sees his own, the operator all, and nobody else any."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from fake_server_engine import FakeEngine, fake_app, http_client
from prometheus_client.parser import text_string_to_metric_families
from test_http_tenants import Town

from poise.server.api_keys import new_key
from poise.server.tenants import Tenants
from poise.server.usage import OTHER, UsageLedger


def operator_town(tmp_path: Path) -> Town:
    town = Town(tmp_path / "tenants.toml")
    town.write(acme="", bolt="")
    key, entry = new_key()
    town.keys["*"] = key
    text = town.path.read_text()
    town.path.write_text(f"{text}[operator]\nkeys = ['{entry}']\n")
    return town


def test_each_sees_his_own_usage_and_the_operator_sees_all(tmp_path: Path) -> None:
    town = operator_town(tmp_path)

    async def scenario() -> None:
        app = fake_app(FakeEngine(), tenants=Tenants(town.path), profiling=True)
        async with http_client(app) as http:

            async def get(path: str, name: str) -> httpx.Response:
                return await http.get(path, headers=town.headers(name))

            for name, bodies in (
                ("acme", [{"prompt": ["abc", "de"], "max_tokens": 3}, {"prompt": ""}]),
                ("bolt", [{"prompt": "hello", "max_tokens": 4, "n": 2, "stream": True}]),
            ):
                for body in bodies:
                    await http.post("/v1/completions", json=body, headers=town.headers(name))
            assert (await get("/v1/usage", "acme")).json() == {
                "tenant": "acme", "requests": 1, "refused": 1, "input_tokens": 5, "cached_tokens": 6,
                "output_tokens": 6, "object": "usage",
            }  # fmt: skip
            assert (await get("/v1/usage", "bolt")).json()["output_tokens"] == 8
            metrics = (await get("/metrics", "*")).text
            seen = {
                (sample.name, sample.labels["tenant"]): sample.value
                for family in text_string_to_metric_families(metrics)
                for sample in family.samples
                if "tenant" in sample.labels
            }
            assert seen["poise_tenant_output_tokens_total", "acme"] == 6
            assert seen["poise_tenant_input_tokens_total", "bolt"] == 5
            assert seen["poise_tenant_refused_total", "acme"] == 1
            for headers in ({}, town.headers("acme"), {"authorization": "Bearer wrong"}):
                response = await http.get("/metrics", headers=headers)
                assert response.status_code == 200
                assert "acme" not in response.text

    asyncio.run(scenario())


def test_what_is_the_operators_is_not_the_tenants_and_the_other_way_round(tmp_path: Path) -> None:
    town = operator_town(tmp_path)

    async def scenario() -> None:
        engine = FakeEngine()
        app = fake_app(engine, tenants=Tenants(town.path), profiling=True)
        async with http_client(app) as http:
            body = {"prompt": "a"}
            refused = await http.post("/v1/completions", json=body, headers=town.headers("*"))
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "operator_key"
            assert not engine.requests
            for path in ("/start_profile", "/stop_profile"):
                refused = await http.post(path, headers=town.headers("acme"))
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "not_an_operator"
                assert (await http.post(path)).status_code == 401
                assert (await http.post(path, headers=town.headers("*"))).status_code == 200
            for name in ("*", "acme"):
                assert (await http.get("/version", headers=town.headers(name))).status_code == 200

    asyncio.run(scenario())


def test_labels_are_bounded_and_add_up() -> None:
    ledger = UsageLedger(max_named=2)
    for number in range(7):
        for _ in range(number + 1):
            ledger.refused(f"t{number}")
    refused = next(family for family in ledger.collect() if family.name == "poise_tenant_refused")
    values = {sample.labels["tenant"]: sample.value for sample in refused.samples}
    assert values == {"t0": 1, "t1": 2, OTHER: 25}
